"""A slide made of arrays: exact pixels without a file, for tests."""

from collections.abc import Sequence

import numpy as np

from thinsection.errors import SlideReadError
from thinsection.slide.base import Slide
from thinsection.types import Level, Mpp, RgbArray, Size


class ArraySlide(Slide):
    """A slide whose levels are arrays.

    Args:
        levels: uint8 (H, W, 3), finest first.
        slide_mpp: (x, y) µm/px, or None.
        name: its `slide_path`.
        broken_below_lv: rows of a level from which reading fails, as of a truncated file.
        segment: announced storage tile of every level.
    """

    reader = "array"

    def __init__(
        self,
        levels: Sequence[RgbArray],
        *,
        slide_mpp: Mpp | None = (0.5, 0.5),
        name: str = "array.svs",
        broken_below_lv: int | None = None,
        segment: Size | None = None,
    ) -> None:
        self._arrays = tuple(levels)
        self._broken_below_lv = broken_below_lv
        height, width = levels[0].shape[:2]
        sizes = [(pixels.shape[1], pixels.shape[0]) for pixels in levels]
        described = [
            Level(index=i, size=(w, h), downsample=(width / w + height / h) / 2, segment=segment)
            for i, (w, h) in enumerate(sizes)
        ]
        super().__init__(name, described, slide_mpp=slide_mpp)

    @property
    def closed(self) -> bool:
        """Whether somebody closed it."""
        return self._closed

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        (x, y), (height, width) = origin_lv, out.shape[:2]
        if self._broken_below_lv is not None and y + height > self._broken_below_lv:
            raise SlideReadError(f"region must be readable, got rows to {y + height}")
        out[:] = self._arrays[level][y : y + height, x : x + width]


def position_pixels(size: Size) -> RgbArray:
    """An image (H, W, 3) whose value is a function of (x, y): every misplaced px shows."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    return np.stack([x % 251, y % 241, (x // 16 * 7 + y // 16 * 13) % 256], axis=2).astype(np.uint8)
