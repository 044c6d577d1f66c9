"""Columns of the caller: values per tile of any type, checked for their shape, type and order.

`column_files.py` stores them as `GRID/column_NAME/ID.h5`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.arrays import as_numpy
from thinsection.errors import InvalidInputError
from thinsection.report.tile_layers import hex_color
from thinsection.report.values import natural_key
from thinsection.store.outcome import COLUMN_FACT
from thinsection.store.tiles_h5 import TilesFile
from thinsection.tiles.categories import NONE, Categories, complete_colors
from thinsection.tiles.filters import MEASURES
from thinsection.tiles.table import Column
from thinsection.types import CoordsL0, Document, counted, is_missing_value

# array, list, tensor, pandas Series or Categorical: anything that NumPy can read
Values = Any
# colours by name of the category, or in the order of the categories
Colors = Mapping[str, Any] | Sequence[Any]

MAX_CATEGORIES = 1000
_MAX_NAME_BYTES = 120
_MAX_WORD = 200  # largest number of characters of a category
_FORBIDDEN = set("/\\:")
# names that exports and datasets give to other things
RESERVED = frozenset(
    (
        *("slide_id", "patient_id", "label", "split", "x", "y", "x_l0", "y_l0", "row"),
        *("image", "coords_l0", "shard", "position", "geometry", "region", "tile"),
        *MEASURES,
    )
)


@dataclass(frozen=True, kw_only=True)
class OwnColumn:
    """Checked values of one slide's tiles, in the order of its tile table."""

    name: str
    values: Column  # (N,): numbers, bool, or codes of `categories`
    categories: Categories | None = None

    def key(self, coords_l0: CoordsL0) -> str:
        """Hash of the tiles and their values, with names and colours of categories."""
        named = None
        if self.categories is not None:
            named = [self.categories.names, self.categories.colors]
        description = [self.name, self.values.dtype.str, len(self.values), named]
        digest = hashlib.sha256(json.dumps(description).encode())
        digest.update(np.ascontiguousarray(coords_l0).data)
        digest.update(np.ascontiguousarray(self.values).data)
        return f"column-{digest.hexdigest()[:24]}"

    def facts(self) -> Document:
        """Facts for the ledger: categories, and values per slide for tables of slides.

        Numbers give `NAME_mean`, over the tiles with a value. Bool gives `NAME_share`, the share of
        tiles that are True. Categories give `NAME_share_CATEGORY`, their share of all tiles.
        """
        described: Document = {"name": self.name, "dtype": str(self.values.dtype)}
        facts: Document = {COLUMN_FACT: described}
        num_tiles = len(self.values)
        if self.categories is not None:
            described["categories"] = list(self.categories.names)
            described["colors"] = list(self.categories.colors)
            for code, word in enumerate(self.categories.names):
                count = int((self.values == code).sum())
                facts[f"{self.name}_share_{word}"] = count / max(1, num_tiles)
        elif self.values.dtype.kind == "b":
            facts[f"{self.name}_share"] = int(self.values.sum()) / max(1, num_tiles)
        else:
            numbers = self.values.astype(np.float64)
            numbers = numbers[np.isfinite(numbers)]
            facts[f"{self.name}_mean"] = float(numbers.mean()) if len(numbers) else None
        return facts


def check_name(name: str, taken: Iterable[str] = ()) -> None:
    """Raises InvalidInputError: it cannot be the name of a column.

    Args:
        name: the name; it becomes a part of a folder's name.
        taken: names of columns in other tables of the grid.
    """
    rule = "name must be a word of at most 120 bytes without '/', '\\' and ':'"
    if not isinstance(name, str):
        raise InvalidInputError(f"{rule}, got {name!r}")
    is_plain = name == name.strip() and name.isprintable() and not name.startswith(".")
    is_short = 0 < len(name.encode(errors="replace")) <= _MAX_NAME_BYTES
    if not is_plain or not is_short or _FORBIDDEN & set(name):
        raise InvalidInputError(
            f"{rule}, not beginning with '.' or a space, got {name!r}; choose another name, "
            "such as 'leiden_0.5'"
        )
    if name in RESERVED:
        raise InvalidInputError(
            f"name must not be one of {', '.join(sorted(RESERVED - set(MEASURES)))} or a "
            f"measure, got {name!r}; rename the column"
        )
    for other in taken:
        if other.casefold() == name.casefold():
            raise InvalidInputError(
                f"name must not be that of another column in more than capitals, got {name!r} "
                f"beside {other!r} of this grid; rename the column"
            )


def own_column(
    name: str,
    values: Values,
    *,
    categories: Sequence[str] | None = None,
    colors: Colors | None = None,
    used_colors: Mapping[str, str] | None = None,
) -> OwnColumn:
    """Checked column of any values: numbers, bool, words, a pandas Categorical, or codes.

    None, NaN and '' mean no category; NaN means no number.

    Args:
        name: name of the column.
        values: (N,).
        categories: names whose places `values` holds, with -1 for none; or the order of the words.
        colors: colours of categories, '#rrggbb' or (red, green, blue) from 0 to 255.
        used_colors: colours that other slides have for these names.

    Raises InvalidInputError: another shape or type, an infinite number, too many categories.
    """
    names, array = _names_and_array(name, values, categories)
    if names is None:
        if colors is not None:
            raise InvalidInputError(
                f"colors must go with categories, got numbers in {name!r}; pass words, a pandas "
                "Categorical, or categories=[...]"
            )
        return OwnColumn(name=name, values=_numbers(name, array))
    chosen = dict(used_colors or {}) | _checked_colors(name, names, colors)
    named = Categories(names=tuple(names), colors=complete_colors(names, chosen))
    return OwnColumn(name=name, values=array.astype(np.int16), categories=named)


def _names_and_array(
    name: str, values: Values, categories: Sequence[str] | None
) -> tuple[list[str] | None, npt.NDArray[Any]]:
    """Names of categories with codes (N,), or None with numbers (N,)."""
    values = getattr(values, "cat", values)  # a pandas Series of categories
    if hasattr(values, "categories") and hasattr(values, "codes"):
        if categories is not None:
            raise InvalidInputError(
                f"categories must be left out for a pandas Categorical, got both for {name!r}"
            )
        names = _checked_names(name, [str(word) for word in values.categories])
        return names, np.asarray(values.codes)
    try:
        array = _plain_array(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"values of {name!r} must be an array of one value for each tile, got "
            f"{type(values).__name__}: {error}"
        ) from error
    if array.ndim != 1:
        raise InvalidInputError(
            f"values of {name!r} must be one for each tile, of shape (N,), got shape "
            f"{array.shape}; write each of several values as a column of its own"
        )
    if array.dtype.kind in "OUT":
        words = _words(name, array)
        if categories is None:
            names = sorted({word for word in words if word}, key=natural_key)
        else:
            names = [str(word) for word in categories]
        places = {word: place for place, word in enumerate(_checked_names(name, names))}
        unknown = next((w for w in words if w and w not in places), None)
        if unknown is not None:
            raise InvalidInputError(
                f"values of {name!r} must be among the categories, got {unknown!r}; add it to "
                "categories=[...]"
            )
        codes = [places[word] if word else NONE for word in words]
        return names, np.array(codes, dtype=np.int64)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise InvalidInputError(
            f"values of {name!r} must be numbers, bool or words, got {array.dtype}; convert "
            "them first, such as by .astype(float)"
        )
    if categories is None:
        return None, array
    names = _checked_names(name, [str(word) for word in categories])
    if array.dtype.kind not in "iu":
        raise InvalidInputError(
            f"values of {name!r} must be whole numbers where categories are given, got "
            f"{array.dtype}; pass the index of each tile's category, and -1 for none"
        )
    if len(array) and (array.min() < NONE or array.max() >= len(names)):
        raise InvalidInputError(
            f"values of {name!r} must be from -1 to {len(names) - 1}, the indices of its "
            f"categories, got {array.min()} to {array.max()}"
        )
    return names, array


def _plain_array(values: Values) -> npt.NDArray[Any]:
    """Values as a NumPy array; those that pandas calls missing are NaN, or None among words."""
    dtype = getattr(values, "dtype", None)
    is_of_pandas = hasattr(values, "isna") and not isinstance(dtype, np.dtype)
    if is_of_pandas and getattr(dtype, "kind", "O") in "biuf":
        if values.isna().any():
            return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan))
        return np.asarray(values.to_numpy(dtype=getattr(dtype, "numpy_dtype", None)))
    if is_of_pandas:
        return np.asarray(values.to_numpy(dtype=object, na_value=None))
    if isinstance(values, list | tuple) and any(isinstance(v, str) for v in values):
        # NumPy would make words of numbers, and of NaN
        return np.array(values, dtype=object)
    return as_numpy(values)


def _words(name: str, array: npt.NDArray[Any]) -> list[str]:
    """Words of the tiles; '' where there is none."""
    words = []
    for value in array.tolist():
        if is_missing_value(value):
            words.append("")
        elif isinstance(value, str):
            words.append(value)
        else:
            raise InvalidInputError(
                f"values of {name!r} must be all numbers or all words, got {value!r} of type "
                f"{type(value).__name__} among objects; convert them first, such as by "
                ".astype(float) or .astype(str)"
            )
    return words


def _checked_names(name: str, names: list[str]) -> list[str]:
    """Names of categories. Raises InvalidInputError: too many, too long, empty or repeated."""
    if len(names) > MAX_CATEGORIES:
        raise InvalidInputError(
            f"categories of {name!r} must be at most {MAX_CATEGORIES}, got {len(names)}; "
            "store numbers in their place"
        )
    for word in names:
        is_word = bool(word.strip()) and len(word) <= _MAX_WORD and word.isprintable()
        if not is_word or names.count(word) > 1:
            raise InvalidInputError(
                f"categories of {name!r} must be different words of at most {_MAX_WORD} "
                f"characters, got {word!r}"
            )
    return names


def _checked_colors(
    name: str, names: Sequence[str], colors: Colors | None
) -> dict[str, str]:
    """Given colours as '#rrggbb', by name of the category."""
    if colors is None:
        return {}
    if not isinstance(colors, Mapping):
        if isinstance(colors, str) or len(colors) != len(names):
            raise InvalidInputError(
                f"colors of {name!r} must be one for each of its {len(names)} categories, or "
                f"a dict by name, got {colors!r}"
            )
        colors = dict(zip(names, colors))
    unknown = [word for word in map(str, colors) if word not in names]
    if unknown:
        raise InvalidInputError(
            f"colors of {name!r} must be of its categories {', '.join(names)}, got a colour "
            f"of {unknown[0]!r}"
        )
    return {str(word): hex_color(color) for word, color in colors.items()}


def _numbers(name: str, array: npt.NDArray[Any]) -> Column:
    """Numbers or bool (N,). Raises InvalidInputError: one is infinite."""
    rows = np.flatnonzero(np.isinf(array))
    if len(rows):
        raise InvalidInputError(
            f"values of {name!r} must be finite, or NaN for a tile without a value, got "
            f"{array[rows[0]]} in row {rows[0]}"
        )
    return np.ascontiguousarray(array)


def rows_in_order(
    name: str, coords_l0: npt.ArrayLike, tiles: TilesFile, slide_id: str
) -> npt.NDArray[np.int64]:
    """Row of `coords_l0` for each tile of the table, int64 (N,).

    Raises InvalidInputError: the corners are not exactly those of the tiles.
    """
    corners = np.asarray(coords_l0)
    if corners.ndim != 2 or corners.shape[1] != 2:
        raise InvalidInputError(
            f"coords_l0 of {name!r} must be of shape (N, 2), got {corners.shape}"
        )
    row_of = {(x, y): row for row, (x, y) in enumerate(corners.tolist())}
    rows = [row_of.get((x, y), -1) for x, y in tiles.coords_l0.tolist()]
    if len(row_of) != len(corners) or len(corners) != len(rows) or -1 in rows:
        raise InvalidInputError(
            f"coords_l0 of {name!r} must be the corners of the "
            f"{counted(len(rows), 'tile')} of {slide_id!r}, each once, got "
            f"{counted(len(corners), 'row')}, {len(rows) - rows.count(-1)} of them of tiles; "
            'pass the grid of these tiles: grid="..."'
        )
    return np.array(rows, dtype=np.int64)


def check_length(column: OwnColumn, num_tiles: int, slide_id: str) -> None:
    """Raises InvalidInputError: the slide has another number of tiles."""
    if len(column.values) != num_tiles:
        raise InvalidInputError(
            f"values of {column.name!r} must be one for each of the "
            f"{counted(num_tiles, 'tile')} of {slide_id!r}, in the order of "
            f"results.tiles({slide_id!r}), got {len(column.values)}; pass the grid of these "
            'tiles, grid="...", or their corners, coords_l0=...'
        )
