"""Columns of tables on pages: their words, kinds, units, and the colours of their numbers.

Data files have the identifiers of columns; pages show the words of `columns.toml`.

There is one colour map for each kind. Its table has some colours of matplotlib's map of the same
name, and colours between them are mixed. `RdBu_r` is ColorBrewer's RdBu, reversed (Apache-2.0,
Cynthia Brewer, Mark Harrower and The Pennsylvania State University). `cividis` is by Nuñez,
Anderton and Renslow, PLOS ONE 13 (2018); matplotlib has it under CC0. Readers with deuteranopia can
tell their colours apart, see tests/report/test_values.py; those of classes are in
`tiles/categories.py`.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from thinsection.config import read_toml
from thinsection.types import Document

Numbers = npt.NDArray[np.floating]
Limits = tuple[float, float]  # values of the first and of the last colour
# signed: evidence for (> 0) or against (< 0). amount: from 0, which means none. measure: any range
ValueKind = Literal["signed", "amount", "measure"]

COLORMAP_OF_KIND: dict[ValueKind, str] = {
    "signed": "RdBu_r",
    "amount": "cividis",
    "measure": "cividis",
}
COLORMAPS = {
    "cividis": "00224e 1a386f 434e6c 61656f 7d7c78 9b9476 bcae6c dec958 fee838",
    "RdBu_r": (
        "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f"
    ),
}
# largest opacity over the slide; amounts may cover all of it, and the tissue must stay visible
OPACITY_OF_KIND: dict[ValueKind, float] = {
    "signed": 0.85,
    "amount": 0.6,
    "measure": 0.5,
}
_SCORE = "score_"


def is_score(column: str) -> bool:
    """True for a model's score, also if the name of a table stands before it."""
    return column.rpartition(":")[2].startswith(_SCORE)


# columns of numbers that begin at 0: attention, and those of cells
_AMOUNTS = ("attention", "count", "per_mm2")
_AMOUNTS_OF_CLASS = ("count_", "per_mm2_", "share_")


def value_kind(column: str) -> ValueKind:
    """Kind of a column of a per-tile table."""
    name = column.rpartition(":")[2]
    if is_score(column):
        return "signed"
    is_amount = name in _AMOUNTS or name.startswith(_AMOUNTS_OF_CLASS)
    is_amount = is_amount or column_words(name).endswith("fraction")
    return "amount" if is_amount else "measure"


def kind_of_numbers(values: Numbers) -> ValueKind:
    """Kind of numbers (N,) that have no name: 'signed' if there are both signs."""
    finite = values[np.isfinite(values)]
    has_both_signs = bool((finite < 0).any() and (finite > 0).any())
    return "signed" if has_both_signs else "measure"


def value_words(column: str) -> str:
    """Column in words with its unit: 'score for high', 'attention, 1 = mean of the slide'."""
    name = column.rpartition(":")[2]
    if is_score(column):
        return f"score for {name.removeprefix(_SCORE)}"
    if name == "attention":
        return "attention, 1 = mean of the slide"
    return column_words(name)


def shown_values(column: str, values: Numbers) -> Numbers:
    """Values (N,) as people see them: attention in multiples of the slide's mean, 1 / N."""
    if values.dtype.kind == "b":
        return values.astype(np.float64)  # 1 is true
    is_attention = column.rpartition(":")[2] == "attention"
    return values * len(values) if is_attention else values


def limits_up_to(kind: ValueKind, high: float, lowest: float) -> Limits:
    """Limits of a kind from the value of the last colour and the lowest value."""
    if kind == "signed":
        return -high, high
    return (min(0.0, lowest), high) if kind == "amount" else (lowest, high)


def map_colors(colormap: str) -> tuple[str, ...]:
    """The steps of a colour map from the first to the last, as '#rrggbb'."""
    return tuple(f"#{color}" for color in COLORMAPS[colormap].split())


def colorize(shares: Numbers, colormap: str) -> npt.NDArray[np.uint8]:
    """Colours, uint8 (..., 3), for numbers in [0, 1]; values outside get an end's colour."""
    steps = [list(bytes.fromhex(color)) for color in COLORMAPS[colormap].split()]
    positions = np.linspace(0, 1, len(steps))
    channels = [
        np.interp(np.linspace(0, 1, 256), positions, channel)
        for channel in np.array(steps).T
    ]
    table = np.stack(channels, axis=1).round().astype(np.uint8)
    indices = (np.clip(shares, 0, 1) * 255).astype(np.uint8)
    return np.asarray(table[indices])


def opacities(shares: Numbers, kind: ValueKind) -> Numbers:
    """Opacities in [0, 1] of numbers in [0, 1]: they grow with |value|, but for measures."""
    inside = np.clip(shares, 0, 1)
    strength = np.ones_like(inside)
    if kind == "signed":
        strength = np.abs(2 * inside - 1)
    elif kind == "amount":
        strength = inside
    return np.asarray(OPACITY_OF_KIND[kind] * strength)


@cache
def columns_table() -> Document:
    """Words of columns, and their groups; the file says what each table is."""
    return read_toml(Path(__file__).with_name("columns.toml"))


def group_of(column: str) -> str:
    """Group of a column."""
    for group, prefixes in columns_table()["groups"].items():
        if column.startswith(tuple(prefixes)):
            return str(group)
    return "other"


def column_order(columns: Sequence[str]) -> list[str]:
    """Columns by group, the most informative first; within a prefix the order stays."""
    prefixes = [*chain.from_iterable(columns_table()["groups"].values())]

    def rank(column: str) -> list[bool]:
        return [not column.startswith(prefix) for prefix in prefixes]

    return sorted(columns, key=rank)


def natural_key(text: str) -> list[tuple[bool, int, str]]:
    """Sort key by which 's2' comes before 's10'."""
    key = []
    for part in re.split(r"(\d+)", text.lower()):
        is_number = part.isdigit()
        key.append((is_number, int(part) if is_number else 0, part))
    return key


def column_words(column: str) -> str:
    """Returns the head of a column for a page, such as 'folds: fraction'."""
    tables = columns_table()
    if column in tables["exact"]:
        return str(tables["exact"][column])
    if column.startswith("qc_"):
        check = column.removeprefix("qc_")
        words = tables["checks"].get(check)
        words = words or column_words(check).removesuffix(", fraction")
        return f"{words}, fraction"
    deviation = re.fullmatch(r"(.+)_std(_YUV)?", column)
    if deviation and not column.startswith("px_"):
        measure = deviation[1] + (deviation[2] or "")
        return f"{column_words(measure)}, standard deviation"
    for prefix, words in (("background_", "background"), ("final_", "tissue")):
        if column.startswith(prefix):
            inner = column.removeprefix(prefix)
            is_texture = inner in tables["texture"]
            return f"{words}: {'texture ' * is_texture}{column_words(inner)}"
    for suffix, words in tables["statistics"].items():
        if column.endswith(f"_{suffix}"):
            stem = column.removesuffix(f"_{suffix}")
            return f"{tables['stems'].get(stem, _spaced(stem))}: {words}"
    for pattern, words in tables["patterns"]:
        match = re.fullmatch(pattern, column)
        if match:
            return match.expand(words)
    return _spaced(column)


def _spaced(column: str) -> str:
    """The identifier with spaces in place of underscores, split before capital letters."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column)
    return words.replace("_", " ")
