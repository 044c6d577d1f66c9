"""What readers share: clipping at the slide's border, thumbnails, context management."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.slide.geometry import lv_from_l0
from thinsection.slide.resize import fitted_size, read_resized
from thinsection.slide.sources import closed_error
from thinsection.types import Level, Mpp, PointL0, RgbArray, Size

WHITE = 255


class BaseSlide(ABC):
    """A `Slide` whose reader only fills regions that lie inside a level."""

    reader: str = ""

    def __init__(
        self,
        slide_path: str,
        levels: Sequence[Level],
        *,
        slide_mpp: Mpp | None,
        objective_power: float | None = None,
        vendor: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self.slide_path = slide_path
        self.levels = tuple(levels)
        self.size: Size = self.levels[0].size
        self.slide_mpp = slide_mpp
        self.objective_power = objective_power
        self.vendor = vendor
        self.properties: Mapping[str, str] = dict(properties or {})
        self.choice = ""  # why 'auto' took this reader
        self._closed = False

    @property
    def associated_names(self) -> tuple[str, ...]:
        """Names of associated images; none by default."""
        return ()

    @abstractmethod
    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        """Fills `out` (h, w, 3), perhaps strided, with px that all lie inside the level."""

    def read_region(
        self, origin_l0: PointL0, level: int, size: Size, *, out: RgbArray | None = None
    ) -> RgbArray:
        """See `Slide.read_region`."""
        if self._closed:
            raise closed_error(self.slide_path)
        if not 0 <= level < len(self.levels):
            raise InvalidInputError(
                f"level must be in [0, {len(self.levels) - 1}], got {level} in {self.slide_path!r}"
            )
        width, height = size
        if width < 1 or height < 1:
            raise InvalidInputError(f"size must be >= (1, 1), got {size}")
        region = np.empty((height, width, 3), dtype=np.uint8) if out is None else out
        if region.shape != (height, width, 3) or region.dtype != np.uint8:
            raise InvalidInputError(
                f"out must be uint8 of shape {(height, width, 3)}, got {region.dtype} "
                f"{region.shape}"
            )
        down = self.levels[level].downsample
        x, y = lv_from_l0(origin_l0[0], down), lv_from_l0(origin_l0[1], down)
        level_width, level_height = self.levels[level].size
        x0, y0 = max(x, 0), max(y, 0)
        x1, y1 = min(x + width, level_width), min(y + height, level_height)
        if (x0, y0, x1, y1) != (x, y, x + width, y + height):
            region[:] = WHITE
        if x1 > x0 and y1 > y0:
            self._fill((x0, y0), level, region[y0 - y : y1 - y, x0 - x : x1 - x])
        return region

    def thumbnail(self, max_size: Size) -> RgbArray:
        """See `Slide.thumbnail`."""
        return read_resized(self, fitted_size(self.size, max_size))

    def associated_image(self, name: str) -> RgbArray:
        """See `Slide.associated_image`."""
        known = ", ".join(self.associated_names) or "none"
        raise InvalidInputError(
            f"associated image must be one of: {known}; got {name!r} in {self.slide_path!r}"
        )

    def close(self) -> None:
        """Lets go of the file. Reads that threads have begun end well, later ones raise."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
