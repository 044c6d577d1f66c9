"""Blocks of code from anywhere, pasted in any order into one folder, run or say what they need.

A reader who searches finds one block, not the page from its top. So blocks are drawn from all
pages (the seed is fixed) and pasted one after the other, as they stand, by a reader who has run the
README's commands. A block may use a name or a file that a block above it on its page makes: then
those blocks are pasted first, as the reader would. A block that cannot run here must say in the
text beside it what it needs; a comment that only the tests see does not count.
"""

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from .data import run as run_command
from .pages import SHELL, Block, Mark, blocks_of, page_paths, prose_of, text_of
from .test_examples import follow

NUM_BLOCKS = 25
SEED = 51
# what a mark says -> words of which the text beside the block must have one
SAYS = {
    "token": r"token|access|permission|gated",
    "Slurm": r"Slurm",
    "cluster": r"cluster|Slurm",
    "GPU": r"GPU",
    "network": r"URL|network|https?://|s3://",
    "weights": r"weights|publisher|encoder with a text tower",
    "browser": r"browser",
    "installs": r"install",
    "TRIDENT": r"TRIDENT",
    "OpenFold3": r"OpenFold3",
    "LazySlide": r"LazySlide",
    "CLAM": r"CLAM",
    "STAMP": r"STAMP",
    "HistoQC": r"HistoQC",
    "Mussel": r"Mussel",
    "TIAToolbox": r"TIAToolbox",
    "slide2vec": r"slide2vec",
    "examples/plugin": r"examples/plugin",
    "data set": r"data set|BRACS|PanNuke",
    "PanNuke": r"PanNuke",
    "minutes": r"minutes",
    "cache": r"cache",
    "test_how_to": r"test runs|runs as it stands|how-to|script",
    "hospitals": r"hospital|cent",
    "probes": r"probe|encoder",
    "container": r"container|Docker|Apptainer|docker|apptainer",
}


def blocks() -> list[Block]:
    """Blocks of a shell and of Python on all pages, in order."""
    found = [block for page in page_paths() for block in blocks_of(page)]
    return [block for block in found if block.language in (*SHELL, "python")]


def section_of(block: Block) -> str:
    """What a reader sees: the top of the page, the text of the block's section, and the block."""
    lines = prose_of(text_of(block.page)).splitlines()  # code is blank, lines stay
    headings = [n for n, line in enumerate(lines) if re.match(r"#{1,3} ", line)]
    start = max([n for n in headings if n < block.line], default=0)
    end = min([n for n in headings if n >= block.line], default=len(lines))
    return "\n".join([*lines[:20], *lines[start:end], block.text])


def says_what_it_needs(mark: Mark, seen: str) -> bool:
    """Tells if the text that a reader sees names what a mark names."""
    wanted = [words for key, words in SAYS.items() if key in mark.reason]
    if not wanted:
        # a file of the reader's own, a column, a network: the words of the reason themselves
        wanted = [re.escape(mark.reason.split()[-1])]
    return any(re.search(words, seen) for words in wanted)


@pytest.mark.parametrize(
    "block", [b for b in blocks() if b.marks], ids=lambda b: f"{b.page}:{b.line}"
)
def test_a_block_that_cannot_run_here_says_what_it_needs(block: Block) -> None:
    seen = section_of(block)
    for mark in block.marks:
        if mark.exit_code is None:
            assert says_what_it_needs(mark, seen), mark


def test_a_need_that_only_the_comment_has_is_noticed() -> None:
    mark = Mark("", "needs a Slurm cluster")
    assert not says_what_it_needs(mark, "Run it.\nthinsection run slides/")
    assert says_what_it_needs(mark, "On Slurm, run it.")
    unknown = Mark("", "needs clinical.tsv")
    assert not says_what_it_needs(unknown, "Run it.")
    assert says_what_it_needs(unknown, "thinsection labels clinical.tsv")


def draw() -> list[Block]:
    """The blocks that are pasted, in their order."""
    return random.Random(SEED).sample(blocks(), NUM_BLOCKS)


def test_the_blocks_are_drawn_from_many_pages_and_both_languages() -> None:
    drawn = draw()
    assert len({block.page for block in drawn}) >= 10
    assert {block.language for block in drawn} == {"bash", "python"}
    assert len(set(drawn)) == NUM_BLOCKS and drawn == draw()


def reasons_of(block: Block) -> str:
    """What a block says that it needs; '' if it runs here."""
    if block.language in SHELL:
        reasons = {mark.reason for mark in block.marks if mark.exit_code is None}
        return "; ".join(sorted(reasons))
    mark = block.mark_of(block.text)
    return mark.reason if mark else ""


def run(block: Block, names: dict[str, Any]) -> None:
    """Runs the commands or the code of a block that are not marked."""
    if block.language in SHELL:
        for command in block.commands():
            follow(block, command)
    elif not reasons_of(block):
        exec(compile(block.text, block.page, "exec"), names)


def paste(block: Block) -> str:
    """Runs a block as a reader does; returns 'alone', 'after the blocks above' or its need.

    A name or file that the block lacks is that of a block above it on the page.
    """
    try:
        run(block, {})
    except (NameError, FileNotFoundError, AssertionError):
        names: dict[str, Any] = {}
        for other in blocks_of(block.page):
            if other.line <= block.line and other.language in (*SHELL, "python"):
                run(other, names)
        return reasons_of(block) or "after the blocks above"
    return reasons_of(block) or "alone"


@pytest.mark.check
@pytest.mark.timeout(1800)
def test_25_random_blocks_run_in_one_folder_one_after_the_other(at_page: Path) -> None:
    # the model of the README's command; that of the small data has fewer epochs
    grade = "results/experiments/grade"
    shutil.rmtree(at_page / grade)
    command = ("train", "results", "--labels", "labels.csv", "--target", "grade")
    run_command(*command, "--out", grade)
    outcome = {f"{block.page}:{block.line}": paste(block) for block in draw()}
    alone = [place for place, how in outcome.items() if how == "alone"]
    after = [place for place, how in outcome.items() if how == "after the blocks above"]
    assert len(outcome) == NUM_BLOCKS
    assert len(alone) >= NUM_BLOCKS // 3 and len(after) <= NUM_BLOCKS // 3, outcome
