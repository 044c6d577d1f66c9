"""Aliases, frozen value objects, one mixin and sizes as text, which every room shares.

Shapes: N tiles, D channels of an embedding, H and W rows and columns of an array.
Frames: `_l0` level-0 px, `_lv` px of a pyramid level, `_tl` px of a tile, `_th` thumbnail px.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from thinsection.errors import ConfigError, CopyError

if TYPE_CHECKING:  # Python 3.10 has no Self
    from typing import Self

Size = tuple[int, int]  # (width, height), px
PointL0 = tuple[int, int]  # (x, y) in level-0 px
Mpp = tuple[float, float]  # (x, y), µm/px

RgbArray = npt.NDArray[np.uint8]  # (H, W, 3), sRGB
TileArray = npt.NDArray[np.uint8]  # (B, H, W, 3), sRGB
MaskArray = npt.NDArray[np.bool_]  # (H, W), True = inside
CoordsL0 = npt.NDArray[np.int64]  # (N, 2): x, y of top-left corners, level-0 px
CoordsLv = npt.NDArray[np.int64]  # (N, 2): the same on a level, px of that level
Floats = npt.NDArray[np.float64]  # of any shape
Reals = npt.NDArray[np.floating]  # of any shape and precision

# value of a JSON or TOML text, before it is checked: None, a bool, a number, a text, or a list or
# table of such values
Json: TypeAlias = Any
Document: TypeAlias = dict[str, Json]
# named values that JSON and TOML hold
PlainValues: TypeAlias = Mapping[str, object]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def is_missing_value(value: object) -> bool:
    """True for None, NaN, and pandas.NA and NaT: what tables of Python hold where nothing is."""
    if value is None:
        return True
    try:
        return bool(value != value)  # noqa: PLR0124 - true of NaN and NaT only
    except (TypeError, ValueError, RuntimeError):
        # pandas.NA; an array or a tensor of several values is a value
        return type(value).__name__ == "NAType"


def ignore_message(text: str) -> None:
    """Ignores a message; for a caller who passes no listener."""


class Closing(ABC):
    """Mixin: an object with `close` is closed at the end of its `with`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Uncopied:
    """Mixin: an object that owns an open file, a thread or a lock refuses copies and pickles.

    A copy would share what the original closes, or close it while the original still uses it.
    """

    # what to pass to another process in place of the object
    copy_remedy = "make another one where it is needed"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            f"{type(self).__name__} must stay in the process that made it, got a copy or a pickle "
            f"of it; {self.copy_remedy}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a pyramid.

    `segment` is the size of the pieces (TIFF tiles) in which the file stores this level and which
    the reader decodes straight into place; None where it does not work by them.
    """

    index: int  # 0 is the finest
    size: Size  # px of this level
    downsample: float  # level-0 px per px of this level, the mean over both axes, >= 1
    segment: Size | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFrame:
    """Frame of a mask or thumbnail on its slide: it covers the whole of level 0."""

    size_th: Size  # size of the mask or thumbnail, in its own px
    size_l0: Size  # of the slide's level 0

    @property
    def downsample_xy(self) -> tuple[float, float]:
        """Level-0 px per mask px, along x and along y."""
        return (self.size_l0[0] / self.size_th[0], self.size_l0[1] / self.size_th[1])


def parse_bytes(text: str | int, *, name: str = "size") -> int:
    """Bytes from '2GiB', '512 MB', '1.5g' or a plain number; ConfigError: no size, or not > 0."""
    match = _PATTERN.fullmatch(str(text))
    unit = match.group(2).lower() if match else "?"
    if match is None or unit not in _UNITS or float(match.group(1)) <= 0:
        raise ConfigError(
            f"{name} must be a size such as '2GiB' or '800MB', got {text!r}"
        )
    return int(float(match.group(1)) * _UNITS[unit])


def format_bytes(num_bytes: float) -> str:
    """'1.5 GiB': the size in the largest binary unit that keeps it >= 1."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def rounded(value: float, rows: int, sign: str = "") -> str:
    """Text of a score with as many decimals as so many rows can carry.

    `sign` '+' puts a sign before positive scores.
    """
    decimals = 2 if rows < 200 else 3 if rows < 10_000 else 4
    return f"{value:{sign}.{decimals}f}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: '1 slide', '2 slides'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(names: Iterable[str], *, most: int = 80) -> str:
    """Names with commas, in at most so many characters: 'a, b and 3 more'; 'none' without any."""
    left = list(names)
    text = ", ".join(left) or "none"
    shown = list(left)
    while len(text) > most and shown:
        shown.pop()
        rest = len(left) - len(shown)
        text = f"{', '.join(shown)} and {rest} more" if shown else counted(rest, "name")
    return text


def format_mpp(mpp: Mpp | None) -> str:
    """'0.25 µm/px', '0.25 x 0.5 µm/px' for px that are not square, 'no resolution' for None."""
    if mpp is None:
        return "no resolution"
    return " x ".join(dict.fromkeys(f"{value:.4g}" for value in mpp)) + " µm/px"
