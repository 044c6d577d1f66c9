"""The page of short scripts shows files that run, and its counts are those of the code."""

import ast
import re

from .pages import ROOT, blocks_of, text_of

PAGE = "docs/scripts.md"


def statements(code: str) -> int:
    """Statements of code, nested ones too, without imports and docstrings."""
    count = 0
    for node in ast.walk(ast.parse(code)):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        count += isinstance(node, ast.stmt) and not is_import
    return count


def lines_of_workflow(code: str) -> int:
    """Lines of a Nextflow file without includes and comments."""
    lines = [line.strip() for line in code.splitlines()]
    return sum(bool(line) and not line.startswith(("include", "//")) for line in lines)


def test_a_statement_is_counted_once() -> None:
    assert statements("import a\nfor b in c:\n    d = 1\n    if d:\n        e()") == 4


def test_the_counts_are_those_of_the_code() -> None:
    rows = re.findall(
        r"^\| \[`(\w+\.py)`\]\(#\S+\) \| (\d+) \| (\d+) \|$", text_of(PAGE), re.M
    )
    codes = [block.text for block in blocks_of(PAGE) if block.language == "python"]
    pairs = list(zip(codes[::2], codes[1::2]))
    assert len(rows) == len(pairs) == 9
    for (name, ours, theirs), (our_code, their_code) in zip(rows, pairs, strict=True):
        script = (ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8")
        assert our_code.strip() in script
        counts = (statements(our_code), statements(their_code))
        assert (int(ours), int(theirs)) == counts, name


def test_the_lines_of_the_workflow_are_counted() -> None:
    (row,) = re.findall(
        r"^\| \[`nextflow.nf`\].* \| (\d+) \| (\d+) \|$", text_of(PAGE), re.M
    )
    ours, theirs = (
        block.text for block in blocks_of(PAGE) if block.language == "groovy"
    )
    assert ours.strip() in (ROOT / "docs/how-to/nextflow.nf").read_text()
    assert tuple(map(int, row)) == (lines_of_workflow(ours), lines_of_workflow(theirs))


def test_every_script_of_the_folder_is_on_a_page() -> None:
    pages = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")
    )
    for script in (ROOT / "docs" / "how-to").glob("*.*"):
        assert f"how-to/{script.name}" in pages, script.name
