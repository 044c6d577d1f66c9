"""What readers share: clipping at the slide's border, thumbnails, context management."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.slide.geometry import lv_from_l0
from thinsection.slide.resize import fitted_size, read_resized
from thinsection.slide.sources import closed_error
from thinsection.types import Closing, CoordsL0, Level, Mpp, PointL0, RgbArray, Size, TileArray

WHITE = 255


class BaseSlide(Closing):
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

    def _fill_all(self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray) -> None:
        """Fills `out` (B, h, w, 3) with regions that all lie inside the level."""
        for origin, region in zip(origins_lv, out):
            self._fill(origin, level, region)

    def read_region(
        self, origin_l0: PointL0, level: int, size: Size, *, out: RgbArray | None = None
    ) -> RgbArray:
        """See `Slide.read_region`."""
        self._check(level)
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

    def read_regions(self, origins_l0: CoordsL0, level: int, *, out: TileArray) -> None:
        """See `Slide.read_regions`."""
        self._check(level)
        count, size = len(origins_l0), out.shape[2:0:-1]
        if out.ndim != 4 or out.shape[::3] != (count, 3) or 0 in size or out.dtype != np.uint8:
            raise InvalidInputError(
                f"out must be uint8 of shape ({count}, height, width, 3), "
                f"got {out.dtype} {out.shape}"
            )
        down, (width, height) = self.levels[level].downsample, self.levels[level].size
        # few regions at a time: Python's numbers are quicker here than arrays of them
        origins = origins_l0.tolist()
        corners = [(lv_from_l0(x, down), lv_from_l0(y, down)) for x, y in origins]
        x_last, y_last = width - size[0], height - size[1]
        if all(0 <= x <= x_last and 0 <= y <= y_last for x, y in corners):
            self._fill_all(corners, level, out)
            return
        for (x, y), region in zip(origins, out):
            self.read_region((x, y), level, size, out=region)

    def _check(self, level: int) -> None:
        """Refuses a closed slide and a level that is not there."""
        if self._closed:
            raise closed_error(self.slide_path)
        if not 0 <= level < len(self.levels):
            raise InvalidInputError(
                f"level must be in [0, {len(self.levels) - 1}], got {level} in {self.slide_path!r}"
            )

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
