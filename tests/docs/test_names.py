"""Pages name only what exists: options, commands, settings, names of Python, files, links."""

import pytest

from . import truth
from .names import problems_in
from .pages import page_paths, text_of

NEWS = "CHANGELOG.md"
# parts of the change log that name what is gone, too; the others name what is there now
_BEFORE = ("Read this first", "Changed earlier", "Removed earlier")


@pytest.mark.parametrize("page", page_paths())
def test_a_page_names_only_what_exists(page: str) -> None:
    assert problems_in(text_of(page), page) == []


def test_the_news_name_only_what_exists() -> None:
    parts = text_of(NEWS).split("\n### ")[1:]
    assert {part.splitlines()[0] for part in parts} > set(_BEFORE)
    for part in parts:
        if part.splitlines()[0] not in _BEFORE:
            assert problems_in(part, NEWS) == []


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
