"""Pages name only what exists: options, commands, settings, names of Python, files, links."""

import re
import tomllib

import pytest

from thinsection import __version__

from . import truth
from .names import problems_in
from .pages import ROOT, page_paths, text_of

NEWS = "CHANGELOG.md"
# a fragment of a release to come: its issue or a word, and its kind
_FRAGMENT = re.compile(r"(\d+|\+[a-z][\w-]*)\.([a-z]+)(\.\d+)?\.md")
# these name what is gone, too; the others name what is there now
_OF_WHAT_IS_GONE = ("breaking", "removed")
_CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
_KINDS = {kind["directory"] for kind in _CONFIG["type"]}


def kind_of(name: str) -> str | None:
    """Kind of a fragment by the name of its file; None if the name is not valid."""
    match = _FRAGMENT.fullmatch(name)
    return match[2] if match and match[2] in _KINDS else None


@pytest.mark.parametrize("page", page_paths())
def test_a_page_names_only_what_exists(page: str) -> None:
    assert problems_in(text_of(page), page) == []


@pytest.mark.parametrize("page", [NEWS, f"docs/changes/{__version__}.md"])
def test_the_news_name_only_what_exists(page: str) -> None:
    parts = text_of(page).split("\n## ")
    kept = [part for part in parts if not part.lower().startswith(_OF_WHAT_IS_GONE)]
    assert problems_in("\n".join(kept), page) == []


def test_each_file_of_changes_is_a_line_of_the_next_version() -> None:
    for path in (ROOT / "changes").iterdir():
        if path.name in _CONFIG["ignore"]:
            continue
        kind = kind_of(path.name)
        assert kind is not None, f"{path.name} must be ISSUE.KIND.md of {_KINDS}"
        text = path.read_text(encoding="utf-8")
        assert text.strip().endswith("."), f"{path.name} has no sentence"
        if kind not in _OF_WHAT_IS_GONE:
            assert problems_in(text, f"changes/{path.name}") == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("49.added.md", "added"),
        ("+faster-pages.changed.md", "changed"),
        ("49.fixed.2.md", "fixed"),
        ("49.knead.md", None),
        ("faster.added.md", None),
        ("49.added.txt", None),
        ("added.md", None),
    ],
)
def test_a_wrong_name_of_a_fragment_is_noticed(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Pass `--lukewarm`.", "no option --lukewarm"),
        ("Pass `run --lukewarm 3`.", "no option --lukewarm of run"),
        ("Pass `train --tile-px 3`.", "no option --tile-px of train"),
        ("Use `thinsection knead`.", "no command 'knead'"),
        ("Use `cache knead`.", "cache has no command 'knead'"),
        ("```bash\nthinsection ls results --lukewarm\n```", "--lukewarm"),
        ("```bash\nthinsection knead results\n```", "no command ['knead']"),
        ("```bash\nmake coffee\n```", "no target coffee"),
        ("```bash\npip install 'thinsection[coffee]'\n```", "coffee"),
        ("```toml\n[tiles]\noverlpa = 3\n```", "no setting overlpa"),
        ("Set `tiles.overlpa`.", "tiles.overlpa"),
        ("Call `ts.knead`.", "no name ts.knead"),
        ("```python\nts.knead()\n```", "no name ts.knead"),
        ("```python\nfrom thinsection.slide import knead\n```", "slide.knead"),
        ("Import `thinsection.kneading`.", "no name thinsection.kneading"),
        ("Call `knead_slides(path)`.", "no name knead_slides()"),
        ("See `tiles/kneading.py`.", "no file tiles/kneading.py"),
        ("See `tiles/grid.py: knead`.", "tiles/grid.py has no knead"),
        ("It writes `kneaded.csv`.", "kneaded.csv"),
        ("See [it](kneading.md).", "link to kneading.md"),
    ],
)
def test_a_planted_name_is_noticed(text: str, problem: str) -> None:
    found = problems_in(text, "docs/concepts.md")
    assert any(problem in sentence for sentence in found), found


def test_names_of_other_programs_are_not_ours() -> None:
    ours = frozenset(name for name in truth.all_options() if name.startswith("--"))
    assert truth.foreign("options") & ours - {"--task", "--source"} == set()
