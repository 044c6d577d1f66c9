"""Tables of figures in the pages, where they come from, and the figures of the benchmarks' JSON."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from .pages import ROOT, text_of

RESULTS = ROOT / "benchmarks" / "results"
# how a page says that nobody can repeat a figure with one command of the repository
BY_HAND = re.compile(
    r"[Mm]easured\sby\shand\son\s\d{4}-\d\d-\d\d(\swith\s`|;\sthe\scommand\sis\snot\srecorded)"
)
# JSON of an earlier measurement, which the repository has at that commit
_EARLIER = re.compile(r"`\w+\.json` of commit `[0-9a-f]{7}`")
_NUMBER = re.compile(
    r"^[<≤~]?\s*([+-]?\d[\d,]*\.?\d*|[+-]?\.\d+)(e[+-]?\d+)?(?:\s*(%|\S+))?$"
)
_TABLE_RULE = re.compile(r"^\|[\s:|-]+\|$")
# unit in the head of a column, or in the cell -> factors from the units of a JSON
_SCALES = {
    "MB": (1e-6, 1e-3),
    "MiB": (1 / 1024**2, 1024.0),
    "GB": (1e-9, 1e-3),
    "GiB": (1 / 1024, 1 / 1024**3),
    "%": (100.0,),
    "ms": (1e3,),
}
_TESTS = re.compile(r"`(tests/[\w/]+\.py)`")


@dataclass(frozen=True)
class Figure:
    """A number as a page prints it."""

    text: str
    value: float
    step: float  # of its last digit
    scales: tuple[float, ...] = (1.0,)

    def fits(self, value: float) -> bool:
        """Tells if a value, in some unit, is printed like this."""
        room = 0.51 * self.step
        return any(
            abs(abs(value) * scale - abs(self.value)) <= room for scale in self.scales
        )


def figure_of(cell: str, head: str = "") -> Figure | None:
    """The number in a cell of a table, None if it is no number; `head` is that of its column."""
    match = _NUMBER.match(cell.strip().strip("*"))
    if not match:
        return None
    digits = match[1].replace(",", "").lstrip("+")
    decimals = len(digits.partition(".")[2])
    factor = float(f"1{match[2]}") if match[2] else 1.0
    step = 10.0**-decimals
    if (
        not decimals
        and not match[2]
        and len(digits.strip("0")) < 3
        and digits.endswith("00")
    ):
        step = 10.0 ** (len(digits) - len(digits.rstrip("0")))  # a rounded number
    words = re.findall(r"\w+|%", f"{head} {match[3] or ''}")
    scales = [scale for word in words for scale in _SCALES.get(word, ())]
    return Figure(cell.strip(), float(digits) * factor, step * factor, (1.0, *scales))


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        before: text between the table and the heading or table before it.
        around: all text of its section.
    """

    page: str
    line: int
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    before: str
    around: str

    def figures(self) -> list[Figure]:
        """Numbers of all columns but the first, which names the row, and those of goals."""
        left_out = re.compile("goal|source|commit|rate$|seeds|by hand")
        columns = [
            number
            for number, name in enumerate(self.header)
            if number > 0 and not left_out.search(name)
        ]
        found = [
            figure_of(row[number], f"{row[0]} {self.header[0]} {self.header[number]}")
            for row in self.rows
            for number in columns
            if number < len(row) and not _has_other_source(row)
        ]
        return [figure for figure in found if figure]

    def json_names(self) -> list[str]:
        """JSON files of benchmarks that the text names, the nearest text first."""
        cells = " ".join([*self.header, *(" ".join(row) for row in self.rows)])
        return _json_names(self.before + cells) or _json_names(self.around)

    def is_by_hand(self) -> bool:
        """Tells if the text before says when and how somebody measured it."""
        return BY_HAND.search(self.before) is not None

    def is_earlier(self) -> bool:
        """Tells if the figures are those of an earlier commit's JSON."""
        return _EARLIER.search(self.before) is not None

    def tests(self) -> list[str]:
        """Tests that the text names as the source."""
        return _TESTS.findall(
            " ".join([self.around, *(" ".join(row) for row in self.rows)])
        )


def _has_other_source(row: tuple[str, ...]) -> bool:
    return row[-1] in ("by hand", "the same") or "another machine" in row[-1]


def _json_names(text: str) -> list[str]:
    named = re.findall(r"`(?:benchmarks/results/)?(\w+?)(?:\.json)?`", text)
    return sorted({name for name in named if (RESULTS / f"{name}.json").is_file()})


def tables_of(page: str) -> list[Table]:
    """Tables of a page, in order."""
    return list(_tables_in(text_of(page), page))


def _tables_in(text: str, page: str) -> Iterator[Table]:
    lines = text.splitlines()
    section_start = 0
    text_start = 0
    number = 0
    while number < len(lines):
        if lines[number].startswith("#"):
            section_start = number
            text_start = number + 1
        if not lines[number].startswith("| "):
            number += 1
            continue
        start = number
        while number < len(lines) and lines[number].startswith("|"):
            number += 1
        end = number
        while end < len(lines) and not lines[end].startswith(("#", "|")):
            end += 1
        around = " ".join(
            line
            for line in [*lines[section_start:start], *lines[number:end]]
            if line[:1] != "|"
        )
        rows = [
            _cells_of(line)
            for line in lines[start:number]
            if not _TABLE_RULE.match(line)
        ]
        before = "\n".join(lines[text_start:start])
        text_start = number
        yield Table(page, start + 1, rows[0], tuple(rows[1:]), before, around)


def _cells_of(line: str) -> tuple[str, ...]:
    plain = re.sub(r"<!--.*?-->", "", line).strip().strip("|")
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", plain))


@cache
def values_in(name: str) -> tuple[float, ...]:
    """All numbers in a JSON of the benchmarks."""
    return tuple(
        _numbers(json.loads((RESULTS / f"{name}.json").read_text())["results"])
    )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)


def is_recorded(figure: Figure, names: list[str]) -> bool:
    """Tells if one of the JSON files has the figure."""
    return any(figure.fits(value) for name in names for value in values_in(name))
