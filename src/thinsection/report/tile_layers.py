"""Layer of any values per tile: numbers with a colour map, or categories with a colour each."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from PIL import ImageColor

from thinsection.arrays import as_numpy
from thinsection.errors import InvalidInputError
from thinsection.report.layers import Classes, TileLayer, Values
from thinsection.report.values import (
    Limits,
    Numbers,
    ValueKind,
    kind_of_numbers,
    natural_key,
)
from thinsection.tiles.categories import NONE, Categories, complete_colors
from thinsection.types import CoordsL0, Size, is_missing_value

# a value per tile: numbers, words, or a Categorical of pandas
TileValues = Sequence[Any] | npt.NDArray[Any]
# colour of a category: a name such as 'red', '#d55e00', or red, green and blue from 0 to 255
ClassColor = str | Sequence[int]
ClassColors = Mapping[str, ClassColor]


def tile_layer(
    coords_l0: CoordsL0,
    size_l0: Size,
    values: TileValues,
    *,
    label: str = "",
    kind: ValueKind | None = None,
    limits: Limits | None = None,
    colors: ClassColors | None = None,
) -> TileLayer:
    """Layer of values (N,), a tile each: numbers, or categories if they are words.

    Args:
        coords_l0: int64 (N, 2), corners of the tiles.
        size_l0: edges of every tile in level-0 pixels.
        values: numbers of NumPy or torch, bool, words, or a pandas Categorical or Series, in the
            tiles' order, whatever the index of a Series. NaN and None stand for no value.
        label: text in the legend.
        kind: of numbers, how they are coloured; None decides by their signs.
        limits: of numbers, the values of the first and last colour; None takes those of the values.
        colors: of categories, a colour by name; other categories take the colours of classes. A
            pandas Categorical may have classes that no tile has.

    Raises:
        InvalidInputError: another number of values than of tiles; settings of the other sort.
    """
    plain = as_numpy(values)
    if plain.shape != (len(coords_l0),):
        raise InvalidInputError(
            f"values must be of shape ({len(coords_l0)},), got {plain.shape}"
        )
    numbers = None if _named(values) is not None else _numbers(plain)
    if numbers is None:
        if kind is not None or limits is not None:
            raise InvalidInputError(
                "kind and limits must be left out for categories, got values in words"
            )
        codes, categories = _classes(values, plain, colors or {})
        return Classes(coords_l0, size_l0, codes, categories, label)
    if colors is not None:
        raise InvalidInputError(
            "colors must be left out for numbers, got values without words; pass words, or a "
            "pandas Categorical, for categories"
        )
    if kind is not None and kind not in get_args(ValueKind):
        raise InvalidInputError(
            f"kind must be one of {', '.join(get_args(ValueKind))}, got {kind!r}"
        )
    if limits is not None and not -np.inf < limits[0] < limits[1] < np.inf:
        raise InvalidInputError(
            f"limits must be two numbers, the lower first, got {limits}"
        )
    usual_kind: ValueKind = (
        "amount" if plain.dtype == bool else kind_of_numbers(numbers)
    )
    return Values(coords_l0, size_l0, numbers, label, kind or usual_kind, limits)


def _named(values: Any) -> Sequence[object] | None:
    """Categories of a pandas Categorical or a Series of one, in their order; else None."""
    if hasattr(values, "cat"):
        values = values.cat
    names = getattr(values, "categories", None)
    return None if names is None else [*names]


def _numbers(plain: npt.NDArray[Any]) -> Numbers | None:
    """Values as float64 with NaN for missing ones; None if they are words."""
    if plain.dtype.kind in "biuf":
        return plain.astype(np.float64)
    if plain.dtype.kind != "O":
        return None
    listed = [np.nan if is_missing_value(value) else value for value in plain.tolist()]
    if any(isinstance(value, str) for value in listed):
        return None
    try:
        return np.array(listed, dtype=np.float64)
    except (TypeError, ValueError):
        return None


def _classes(
    values: Any, plain: npt.NDArray[Any], colors: ClassColors
) -> tuple[npt.NDArray[np.int64], Categories]:
    """Codes and categories; words are sorted, with their numbers in order."""
    words = ["" if is_missing_value(value) else str(value) for value in plain.tolist()]
    named = _named(values)
    if named is None:
        names = sorted({*words} - {""}, key=natural_key)
    else:
        names = [str(name) for name in named]
    places = {name: place for place, name in enumerate(names)}
    codes = np.array([places.get(word, NONE) for word in words], dtype=np.int64)
    chosen = {str(name): hex_color(color) for name, color in colors.items()}
    # one palette serves several slides, and a slide may lack a class
    return codes, Categories(names=tuple(names), colors=complete_colors(names, chosen))


def hex_color(color: ClassColor) -> str:
    """A colour as '#RRGGBB'. Raises InvalidInputError: it is no colour."""
    rule = "a colour must be a name, '#rrggbb', or three numbers from 0 to 255"
    if isinstance(color, str):
        try:
            red, green, blue = ImageColor.getrgb(color)[:3]
        except ValueError:
            raise InvalidInputError(f"{rule}, got {color!r}") from None
    else:
        channels = [*color]
        whole = all(
            isinstance(value, int | np.integer) and 0 <= value <= 255
            for value in channels
        )
        if len(channels) != 3 or not whole:
            raise InvalidInputError(f"{rule}, got {color!r}")
        red, green, blue = (int(value) for value in channels)
    return f"#{red:02X}{green:02X}{blue:02X}"
