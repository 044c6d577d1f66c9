"""The navigation of the site has every page once, below the question that it answers."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

SECTIONS = (
    "Start",
    "Slides",
    "Quality",
    "Encoders",
    "Models and validation",
    "Clusters and containers",
    "Python",
    "Files",
    "Explanations",
    "Developers",
)
# pages that docs/hooks.py writes
_GENERATED = {
    f"reference/{name}.md" for name in ("commands", "settings", "python", "surface")
}


class _Loader(yaml.SafeLoader):  # type: ignore[name-defined, misc]
    """Reads mkdocs.yml, whose tags name functions of Python, as plain text."""


_Loader.add_multi_constructor("tag:", lambda loader, suffix, node: suffix)


def navigation() -> list[Any]:
    """The `nav` of mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return list(yaml.load(text, Loader=_Loader)["nav"])


def pages_below(entry: Any) -> list[str]:
    """Files of an entry of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for value in below for page in pages_below(value)]


def pages_of_the_site() -> set[str]:
    """Files of docs/ that become pages."""
    docs = ROOT / "docs"
    found = [*docs.rglob("*.md"), *docs.rglob("*.md.j2"), *docs.glob("tutorials/*.py")]
    names = {path.relative_to(docs).as_posix().removesuffix(".j2") for path in found}
    return names | _GENERATED


def test_every_page_stands_in_the_navigation_once() -> None:
    listed = pages_below(navigation())
    assert sorted(listed) == sorted(pages_of_the_site())


def test_the_sections_are_questions() -> None:
    names = [name for section in navigation() for name in section]
    assert tuple(names) == SECTIONS


def test_an_old_address_leads_to_a_heading(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    hooks = import_module("docs.hooks")

    hooks.on_post_build({"site_dir": str(tmp_path)})
    assert len(hooks.MOVED) >= 2
    for old, new in hooks.MOVED.items():
        assert old.replace(".html", ".md") not in pages_of_the_site()
        page, _, anchor = new.partition("#")
        text = (ROOT / "docs" / page.replace(".html", ".md")).read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in [heading.lower().replace(" ", "-") for heading in headings]
        assert f"url={new}" in (tmp_path / old).read_text()


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("frames.md", "Explanations"),
        ("neighbors.md", "Explanations"),
        ("conformance.md", "Developers"),
        ("maintaining.md", "Developers"),
        ("decisions/index.md", "Developers"),
    ],
)
def test_what_few_need_is_out_of_the_way(page: str, section: str) -> None:
    below = {
        name: pages_below(s) for entry in navigation() for name, s in entry.items()
    }
    assert page in below[section]


def test_the_start_page_links_to_every_section() -> None:
    """A reader finds one page of each section from the table of the start page."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {Path(name).name for name in re.findall(r"\]\(([\w/.-]+)", text)}
    for entry in navigation():
        for name, below in entry.items():
            pages = {Path(page).name for page in pages_below(below)}
            assert pages & linked, name
