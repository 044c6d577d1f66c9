"""Every name that warns is in the one list, works until the version there, and goes in it."""

import ast
import warnings
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

import thinsection
from thinsection.deprecations import DEPRECATIONS, Deprecation, warn_deprecated

SOURCE = Path(thinsection.__file__).parent
HERE = SOURCE / "deprecations.py"


def warned_elsewhere(text: str) -> list[int]:
    """Lines of code that name a class of warnings for what is deprecated."""
    categories = {"DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"}
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in categories:
            found.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in (*categories, "deprecated"):
            found.append(node.lineno)
    return found


def overdue(listed: tuple[Deprecation, ...], version: str) -> list[str]:
    """Names that should be gone in a version."""
    return [one.name for one in listed if Version(one.removed) <= Version(version)]


def test_no_file_but_the_list_warns_of_a_deprecation() -> None:
    planted = "import warnings\nwarnings.warn('x', DeprecationWarning)\n"
    assert warned_elsewhere(planted) == [2]
    assert warned_elsewhere(HERE.read_text())
    elsewhere = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if path != HERE and (lines := warned_elsewhere(path.read_text()))
    }
    assert elsewhere == {}


def test_none_is_overdue_and_each_lasts_a_minor_version() -> None:
    assert overdue(DEPRECATIONS, thinsection.__version__) == []
    assert len(overdue(DEPRECATIONS, "0.3.0")) == sum(
        one.removed == "0.3.0" for one in DEPRECATIONS
    )
    for one in DEPRECATIONS:
        since = Version(one.since)
        removed = Version(one.removed)
        assert (removed.major, removed.minor) > (since.major, since.minor), one.name
        assert since <= Version(thinsection.__version__), one.name


def test_names_are_listed_once_and_what_replaces_them_warns_no_more() -> None:
    names = [one.name for one in DEPRECATIONS]
    assert len(set(names)) == len(names) > 20
    assert not {one.instead for one in DEPRECATIONS} & set(names)


# a function, which tests/jobs/test_execute.py calls
ENDED = "thinsection.jobs.backend.Ended"


@pytest.mark.parametrize(
    "one", [one for one in DEPRECATIONS if one.name != ENDED], ids=lambda one: one.name
)
def test_a_former_name_works_and_says_what_to_use_and_until_when(
    one: Deprecation,
) -> None:
    module, _, name = one.name.rpartition(".")
    home, _, name_there = one.instead.rpartition(".")
    with pytest.warns(DeprecationWarning) as caught:
        value = getattr(import_module(module), name)
    (warning,) = caught
    assert str(warning.message) == one.words
    assert warning.filename == __file__
    for words in (one.since, one.removed, one.instead):
        assert words in one.words
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value is getattr(import_module(home), name_there)


def test_the_page_on_upgrading_lists_each_name_with_its_versions() -> None:
    page = (SOURCE.parents[1] / "docs" / "upgrading.md").read_text()
    table = page.partition("## Names that go\n")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    listed = [[cell.replace("`", "") for cell in row] for row in rows]
    assert listed == [
        [one.name, one.instead, one.since, one.removed] for one in DEPRECATIONS
    ]


def test_a_name_that_is_not_listed_cannot_warn() -> None:
    with pytest.raises(KeyError):
        warn_deprecated("thinsection.no_such_name")
