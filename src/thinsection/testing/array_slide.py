"""A slide made of arrays: exact pixels without a file, for tests."""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from thinsection.errors import SlideReadError
from thinsection.slide.geometry import lv_from_l0
from thinsection.types import Closing, CoordsL0, Level, Mpp, PointL0, RgbArray, Size, TileArray


class ArraySlide(Closing):
    """A `Slide` whose levels are arrays.

    Args:
        levels: uint8 (H, W, 3), finest first.
        slide_mpp: (x, y) µm/px, or None.
        name: its `slide_path`.
        broken_below_lv: rows of a level from which reading fails, as of a truncated file.
        segment: announced storage tile of every level.
    """

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
        self.closed = False
        self.slide_path, self.reader, self.slide_mpp = name, "array", slide_mpp
        height, width = levels[0].shape[:2]
        self.size: Size = (width, height)
        self.levels = tuple(
            Level(
                index=i,
                size=(a.shape[1], a.shape[0]),
                downsample=(width / a.shape[1] + height / a.shape[0]) / 2,
                segment=segment,
            )
            for i, a in enumerate(levels)
        )
        self.objective_power: float | None = None
        self.vendor: str | None = None
        self.properties: Mapping[str, str] = {}
        self.associated_names: tuple[str, ...] = ()

    def read_region(
        self, origin_l0: PointL0, level: int, size: Size, *, out: RgbArray | None = None
    ) -> RgbArray:
        """See `Slide.read_region`."""
        array, down = self._arrays[level], self.levels[level].downsample
        x, y = lv_from_l0(origin_l0[0], down), lv_from_l0(origin_l0[1], down)
        if self._broken_below_lv is not None and y + size[1] > self._broken_below_lv:
            raise SlideReadError(f"region must be readable, got rows to {y + size[1]}")
        region = out if out is not None else np.empty((size[1], size[0], 3), dtype=np.uint8)
        region[:] = 255
        x0, y0 = max(0, x), max(0, y)
        cut = array[y0 : max(y0, y + size[1]), x0 : max(x0, x + size[0])]
        region[y0 - y : y0 - y + cut.shape[0], x0 - x : x0 - x + cut.shape[1]] = cut
        return region

    def read_regions(self, origins_l0: CoordsL0, level: int, *, out: TileArray) -> None:
        """See `Slide.read_regions`."""
        for (x, y), region in zip(origins_l0.tolist(), out):
            self.read_region((x, y), level, (out.shape[2], out.shape[1]), out=region)

    def thumbnail(self, max_size: Size) -> RgbArray:
        """See `Slide.thumbnail`."""
        image = Image.fromarray(self._arrays[0])
        image.thumbnail(max_size, Image.Resampling.LANCZOS)
        return np.asarray(image)

    def associated_image(self, name: str) -> RgbArray:
        """See `Slide.associated_image`; there are none."""
        raise KeyError(name)

    def close(self) -> None:
        """Notes that it was closed."""
        self.closed = True


def position_pixels(size: Size) -> RgbArray:
    """An image (H, W, 3) whose value is a function of (x, y): every misplaced px shows."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    return np.stack([x % 251, y % 241, (x // 16 * 7 + y // 16 * 13) % 256], axis=2).astype(np.uint8)
