"""Aliases, frozen value objects and one mixin that every room shares.

Shapes: N tiles, D channels of an embedding, H and W rows and columns of an array.
Frames: `_l0` level-0 px, `_lv` px of a pyramid level, `_tl` px of a tile, `_th` thumbnail px.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Size = tuple[int, int]  # (width, height), px
PointL0 = tuple[int, int]  # (x, y) in level-0 px
Mpp = tuple[float, float]  # (x, y), µm/px

RgbArray = npt.NDArray[np.uint8]  # (H, W, 3), sRGB
TileArray = npt.NDArray[np.uint8]  # (B, H, W, 3), sRGB
MaskArray = npt.NDArray[np.bool_]  # (H, W), True = inside
CoordsL0 = npt.NDArray[np.int64]  # (N, 2): x, y of top-left corners, level-0 px
CoordsLv = npt.NDArray[np.int64]  # (N, 2): the same on a level, px of that level

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Closing(ABC):
    """Mixin: what has `close` is closed at the end of its `with`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    """Where a mask or thumbnail lies on its slide: it covers the whole of level 0."""

    size_th: Size  # of the mask
    size_l0: Size  # of the slide's level 0

    @property
    def downsample_xy(self) -> tuple[float, float]:
        """Level-0 px per mask px, along x and along y."""
        return (self.size_l0[0] / self.size_th[0], self.size_l0[1] / self.size_th[1])
