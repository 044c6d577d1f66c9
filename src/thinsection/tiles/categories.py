"""Categories of a per-tile column: names such as 'tumour' or '3', each with a colour.

The column holds the place of each tile's name, and -1 for a tile without one. So it stays a column
of numbers, and every reader that knows no categories still reads it.
"""

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.types import shortened

NONE = -1  # code of a tile without a category
# Okabe and Ito's colours, which colour-blind readers can tell apart; classes use them in this order
CLASS_COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#555555",
)
# step between the hues of further colours: the golden section spreads any number of them
_HUE_STEP = 0.618033988749895


@dataclass(frozen=True, kw_only=True, repr=False)
class Categories:
    """Names and colours of a column whose values are places in `names`; -1 is no category."""

    names: tuple[str, ...]
    colors: tuple[str, ...]  # '#rrggbb', one for each name

    def __repr__(self) -> str:
        return f"Categories({len(self.names)}: {shortened(self.names)})"

    def labels(self, codes: npt.NDArray[np.integer]) -> npt.NDArray[np.str_]:
        """Name of each tile (N,); '' for a tile without one."""
        names = np.array([*self.names, ""], dtype=np.str_)
        return np.asarray(names[codes])  # -1 is the last one

    @property
    def color_by_name(self) -> dict[str, str]:
        """Colours by name."""
        return dict(zip(self.names, self.colors))

    def rgb(self, code: int) -> tuple[int, int, int]:
        """Red, green and blue of a category, 0 to 255."""
        red, green, blue = bytes.fromhex(self.colors[code].removeprefix("#"))
        return red, green, blue


def class_color(number: int) -> str:
    """Colour of a class by its number: Okabe and Ito's eight, then further hues."""
    if number < len(CLASS_COLORS):
        return CLASS_COLORS[number]
    hue = number * _HUE_STEP % 1.0
    value = 0.9 if number % 2 else 0.6
    channels = colorsys.hsv_to_rgb(hue, 0.7, value)
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in channels)


def complete_colors(names: Sequence[str], chosen: Mapping[str, str]) -> tuple[str, ...]:
    """Colour of each name: the chosen one, or the next class colour that no other name has.

    Args:
        names: names of the categories.
        chosen: colours by name. Those of other names are in use, too.
    """
    used = {color.upper() for color in chosen.values()}
    colors = []
    number = 0
    for name in names:
        if name in chosen:
            colors.append(chosen[name])
            continue
        while class_color(number).upper() in used:
            number += 1
        colors.append(class_color(number))
        number += 1
    return tuple(colors)


def joined_categories(parts: Sequence[Categories]) -> Categories:
    """Categories of several slides as one: names in order of appearance, their first colours."""
    color_by_name: dict[str, str] = {}
    for part in parts:
        color_by_name = part.color_by_name | color_by_name
    names = dict.fromkeys(name for part in parts for name in part.names)
    return Categories(
        names=tuple(names), colors=tuple(color_by_name[name] for name in names)
    )


def recoded(
    codes: npt.NDArray[np.integer], before: Categories, after: Categories
) -> npt.NDArray[np.integer]:
    """Codes (N,) of the same names in other categories; a name that these lack becomes -1."""
    places = {name: place for place, name in enumerate(after.names)}
    table = np.array([*(places.get(name, NONE) for name in before.names), NONE])
    return np.asarray(table[codes])
