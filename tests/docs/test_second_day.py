"""A reader pastes one page after the other into one folder, and all of them again."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from .pages import SHELL, blocks_of
from .test_examples import ELSEWHERE, follow

# the first ones begin at the beginning, and are pasted by this test alone
PAGES = (*ELSEWHERE, "docs/qc.md", "docs/predictions.md", "docs/heatmaps.md")
# a comment of the page names what else the run must have had
CONDITION = "only if the run had"


def paste(page: str, home: Path) -> None:
    """Follows every block of a page, as `test_examples` does."""
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        if block.language in SHELL:
            for command in block.commands():
                if CONDITION not in command:
                    follow(block, command)
        elif block.language == "python" and block.mark_of(block.text) is None:
            exec(compile("\n" * block.line + block.text, page, "exec"), names)
    trained = home / "results" / "experiments" / "grade" / "model.safetensors"
    shutil.copy(trained, home / "model.safetensors")


@pytest.mark.check
@pytest.mark.timeout(1800)
def test_pages_work_in_one_folder_one_after_the_other_and_again(at_page: Path) -> None:
    # a reader who has slides and tables, and nothing else
    shutil.rmtree(at_page / "results")
    (at_page / "model.safetensors").unlink()
    for page in (*PAGES, *PAGES):
        paste(page, at_page)
    grids = {path.parent.name for path in (at_page / "results").glob("*/tiles")}
    plain, checked = "256px_0.5mpp", "256px_0.5mpp_qc-auto"
    assert grids == {plain, checked, f"{checked}_remove_dust_folds"}
