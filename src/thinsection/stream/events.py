"""What the stream takes and what it yields."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.slide import Slide
from thinsection.tiles import TileTable, TileTransform
from thinsection.types import CoordsL0, RgbArray


@dataclass(frozen=True, kw_only=True)
class SlideTiles:
    """An opened slide and the tiles to read from it.

    Attributes:
        key: whatever the caller knows the slide by; comes back with every event.
        slide: opened; None where no tile of it is to be read.
        table: its tiles; may be empty. None with no slide.
        transform: changes the tiles that filters keep, in the decode workers; None leaves them.
        owned: whether the stream closes the slide when it is done with it.
    """

    key: Any
    slide: Slide | None
    table: TileTable | None
    transform: TileTransform | None = None
    owned: bool = True

    @property
    def num_tiles(self) -> int:
        """Tiles to read."""
        return 0 if self.table is None else len(self.table)

    def close(self) -> None:
        """Closes the slide where it is the stream's."""
        if self.owned and self.slide is not None:
            self.slide.close()


@dataclass(frozen=True, kw_only=True)
class PrepareFailed:
    """What `prepare` returns in place of `SlideTiles` for a slide that cannot be read."""

    key: Any
    stage: str
    error: Exception


@dataclass(frozen=True, kw_only=True)
class SlideStarted:
    """The first event of a slide that could be opened."""

    key: Any
    num_tiles: int


@dataclass(kw_only=True)
class TileBatch:
    """Decoded tiles of one slide, in table order.

    Attributes:
        key: of its slide.
        indices: int64 (b,), the tiles' places in the table.
        coords_l0: int64 (b, 2).
        tiles: uint8 (b, tile_px, tile_px, 3), a view of a buffer that `release` gives back.
    """

    key: Any
    indices: npt.NDArray[np.int64]
    coords_l0: CoordsL0
    tiles: RgbArray
    _release: Callable[[], None] = field(repr=False)
    _released: bool = field(default=False, repr=False)

    def __len__(self) -> int:
        return len(self.indices)

    def release(self) -> None:
        """Gives the buffer back, once; `tiles` must not be used afterwards."""
        if not self._released:
            self._released = True
            self._release()


@dataclass(frozen=True, kw_only=True)
class SlideFinished:
    """Every batch of the slide was yielded."""

    key: Any


@dataclass(frozen=True, kw_only=True)
class SlideFailed:
    """The slide could not be prepared or decoded; no further event of it follows."""

    key: Any
    stage: str
    error: Exception


StreamEvent = SlideStarted | TileBatch | SlideFinished | SlideFailed
