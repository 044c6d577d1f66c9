"""Every command line and every Python block of the documentation works as pasted.

The commands of a page are executed in order, in a folder with small data under the names that all
pages use. A comment before a block marks what is only parsed, and why (`tests/docs/pages.py`).
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.shell import thinsection

from .names import problems_of_command
from .pages import SHELL, Block, arguments_of, blocks_of, output_of, page_paths

# pages that begin at the beginning: they find slides and tables, but no results
FROM_SLIDES = ("docs/index.md", "docs/slides_to_labels.md")
# the README, which begins there too, is pasted by `test_second_day`, before other pages and again
ELSEWHERE = ("README.md",)
PAGES = [
    page
    for page in page_paths()
    if page not in ELSEWHERE
    and any(b.language in (*SHELL, "python") for b in blocks_of(page))
]


@pytest.mark.check
@pytest.mark.timeout(900)  # the first page waits for the small data, too
@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_as_pasted(page: str, at_page: Path) -> None:
    if page in FROM_SLIDES:
        shutil.rmtree(at_page / "results")
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        if block.language in SHELL:
            for command in block.commands():
                follow(block, command)
        elif block.language == "python" and block.mark_of(block.text) is None:
            code = compile("\n" * block.line + block.text, page, "exec")
            exec(code, names)


def follow(block: Block, command: str) -> None:
    """Executes a command of ours; others, and those that are marked, are only parsed."""
    assert problems_of_command(command) == []
    mark = block.mark_of(command)
    if not command.startswith("thinsection ") or (mark and mark.exit_code is None):
        return
    arguments = list(_globbed(arguments_of(command)[1:]))
    ended = thinsection(*arguments, COLUMNS="100")
    wanted = mark.exit_code if mark else 0
    place = f"{block.page}:{block.line}: {command}"
    assert ended.returncode == wanted, f"{place}\n{ended.stdout}\n{ended.stderr}"
    output = output_of(command)
    if output is not None:
        Path(output).write_text(ended.stdout)


def _globbed(arguments: list[str]) -> Iterator[str]:
    """Arguments as a shell passes them."""
    for argument in arguments:
        yield from (
            sorted(map(str, Path().glob(argument))) if "*" in argument else [argument]
        )


def test_a_mark_is_about_code_that_is_there() -> None:
    for page in page_paths():
        for block in blocks_of(page):
            assert all(mark.text in block.text for mark in block.marks), (
                page,
                block.line,
            )


def test_our_command_lines_are_blocks_of_bash() -> None:
    for page in page_paths():
        for block in blocks_of(page):
            lines = block.text.splitlines()
            is_ours = any(line.startswith("thinsection ") for line in lines)
            is_grammar = "TOOL" in block.text
            assert not is_ours or is_grammar or block.language in SHELL, (
                page,
                block.line,
            )
