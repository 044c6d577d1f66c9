"""`Slide`: what every reader offers, in the vocabulary of OpenSlide, and what readers share."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from thinsection.errors import (
    InvalidInputError,
    SlideOpenError,
    SlideReadError,
    ThinsectionError,
    require,
)
from thinsection.files.pages import NOTEBOOK_EDGE_PX, notebook_html
from thinsection.files.sources import FsspecSource, closed_error
from thinsection.slide.geometry import MAX_PX, MAX_SIDE_PX, ReadPlan, lv_from_l0
from thinsection.slide.resize import read_resized
from thinsection.types import (
    Closing,
    CoordsL0,
    Level,
    Mpp,
    RgbArray,
    Size,
    TileArray,
    format_mpp,
)

WHITE = 255
GRAY = "gray: one channel, shown as red, green and blue"  # a note


class Slide(Closing):
    """An opened slide. Thread-safe: any number of threads may read at once.

    A reader calls this constructor with what it found in the file, fills regions that lie inside a
    level (`_fill`) and reads the associated images that it names (`_associated`); one of another
    package also has what `thinsection.registry.Entry` has.

    Attributes:
        reader: name of the reader that holds it: 'openslide', 'tiff', 'cucim', 'image'.
        slide_path: the path or URL it was opened from.
        levels: finest first; `levels[0].downsample == 1.0`.
        size: (width, height) of level 0, px.
        slide_mpp: (x, y) µm per level-0 px, or None where the file does not say.
        objective_power: nominal magnification of the objective, or None.
        vendor: the scanner family as OpenSlide names it, or None.
        properties: the file's own metadata, as strings.
        associated_names: of associated images ('label', 'macro', 'thumbnail').
        choice: why 'auto' took this reader.
        notes: sentences on what was taken otherwise than the file says it.
        rendering: how px were made RGB where a person asked for it; '' as they are stored.
        recolor: changes px that were read, in place.
        source: counts what was fetched of a slide by URL; None of a local file.
        held_bytes: what a whole decoded image takes from the first read on; 0 where it is read in
            parts.
        on_close: what is closed with it.
        checked: whether a C library may see the file, because our own parser found its sizes sound.
        orientation: TIFF's number for how the px must be turned to be upright; 1 for those that
            are, as of every slide that `open_slide` gives.
    """

    reader: str = ""
    held_bytes: int = 0
    checked: bool = False
    associated_names: tuple[str, ...] = ()

    def __init__(
        self,
        slide_path: str,
        levels: Sequence[Level],
        *,
        slide_mpp: Mpp | None,
        objective_power: float | None = None,
        vendor: str | None = None,
        properties: Mapping[str, str] | None = None,
        orientation: int = 1,
    ) -> None:
        _check_sizes(levels, slide_path)
        self.slide_path, self.levels = slide_path, tuple(levels)
        self.size: Size = self.levels[0].size
        self.slide_mpp, self.objective_power, self.vendor = (
            slide_mpp,
            objective_power,
            vendor,
        )
        self.properties: Mapping[str, str] = dict(properties or {})
        self.source: FsspecSource | None = None
        self.recolor: Callable[[RgbArray], None] = lambda pixels: None
        self.on_close = ExitStack()
        self.orientation = orientation
        self.choice, self.rendering, self._closed = "", "", False
        self.notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({Path(self.slide_path).name!r}: {', '.join(self._facts())})"

    def _repr_html_(self) -> str:
        """The same with a thumbnail, which is made now; a closed slide has none."""
        picture = (
            None
            if self._closed
            else self.thumbnail((NOTEBOOK_EDGE_PX, NOTEBOOK_EDGE_PX))
        )
        return notebook_html(picture, Path(self.slide_path).name, self._facts())

    def _facts(self) -> list[str]:
        levels = f"{len(self.levels)} level{'s' * (len(self.levels) > 1)}"
        size, mpp = f"{self.size[0]} x {self.size[1]} px", format_mpp(self.slide_mpp)
        return [
            size,
            levels,
            mpp,
            f"reader {self.reader!r}",
            *["closed"] * self._closed,
        ]

    @abstractmethod
    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        """Fills `out` (h, w, 3), perhaps strided, with px that all lie inside the level."""

    def _fill_all(
        self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray
    ) -> None:
        """Fills `out` (B, h, w, 3) with regions that all lie inside the level."""
        for origin, region in zip(origins_lv, out):
            self._fill(origin, level, region)

    @property
    def stored(self) -> "Slide":
        """The slide in the frame of its file: itself, unless it was turned to be upright."""
        return self

    @property
    def reduced(self) -> tuple[Level, ...]:
        """Levels at 1/2, 1/4 and 1/8 that cost less than the whole ones to decode, read as these.

        Their indices go on where those of `levels` end. Their px are about means of the level's.
        """
        return ()

    @property
    def _further(self) -> tuple[Level, ...]:
        return self.reduced  # and what else is made of `levels`; their indices go on

    def expect(self, coords_l0: CoordsL0, plan: ReadPlan) -> None:
        """Hears of tiles that will be read, so that what they share is kept for just so long."""

    def _associated(self, name: str) -> RgbArray:
        """The image of one of `associated_names`, for readers that find any."""
        raise NotImplementedError

    def stored_jpeg(self, level: int, column: int, row: int) -> bytes | None:
        """A segment of a level as the file stores it, as a JPEG of its own; None if it is none.

        It shows a whole segment, beyond the image's border too. Memory: its bytes, twice.
        """
        return None

    def coarse(self, level: int, factor: int) -> Level | None:
        """A level at 1 / factor (2, 4 or 8), read as any, where that is cheaper; else None.

        Its px are about the means of factor x factor px; a rest at the right and lower border, less
        than one of its px, is left out.
        """
        return None

    def read_region(
        self,
        origin_l0: tuple[int, int],
        level: int,
        size: Size,
        *,
        out: RgbArray | None = None,
    ) -> RgbArray:
        """Pixels of one level as uint8 (size[1], size[0], 3), RGB.

        Px outside the slide, and transparent ones, are white (255). Px (0, 0) of the region is px
        round(origin_l0 / downsample) of the level.

        Args:
            origin_l0: (x, y) of the top-left corner in level-0 px; may lie outside the slide.
            level: pyramid level to read from.
            size: (width, height) in px of that level, each >= 1.
            out: C-contiguous uint8 array of that shape to decode into; it is what is returned.

        Memory: the region plus the compressed and decoded segments that it touches.

        Raises:
            SlideReadError: a segment cannot be decoded.
            InvalidInputError: no such level, or an empty size.
        """
        found, (width, height), shape = self._check(level), size, (size[1], size[0], 3)
        require(min(size) >= 1, "size must be >= (1, 1)", f"{size}")
        region = np.empty(shape, dtype=np.uint8) if out is None else out
        fits = region.shape == shape and region.dtype == np.uint8
        require(
            fits,
            f"out must be uint8 of shape {shape}",
            f"{region.dtype} {region.shape}",
        )
        down, (level_width, level_height) = found.downsample, found.size
        x, y = lv_from_l0(origin_l0[0], down), lv_from_l0(origin_l0[1], down)
        x0, y0 = max(x, 0), max(y, 0)
        x1, y1 = min(x + width, level_width), min(y + height, level_height)
        if (x0, y0, x1, y1) != (x, y, x + width, y + height):
            region[:] = WHITE
        if x1 > x0 and y1 > y0:
            inside = region[y0 - y : y1 - y, x0 - x : x1 - x]
            with self._reading(f"region at {origin_l0} of level {level}"):
                self._fill((x0, y0), level, inside)
                self.recolor(inside)
        return region

    def read_regions(self, origins_l0: CoordsL0, level: int, *, out: TileArray) -> None:
        """Fills `out` with several regions of one size, each as `read_region` gives it.

        Args:
            origins_l0, level: int64 (B, 2), their top-left corners in level-0 px; where to read.
            out: C-contiguous uint8 (B, height, width, 3); the size is read off it.

        Memory: as of one region, and up to 1 MiB of compressed segments.
        """
        found = self._check(level)
        count, size = len(origins_l0), out.shape[2:0:-1]
        fits = out.ndim == 4 and out.shape[::3] == (count, 3) and out.dtype == np.uint8
        rule = f"out must be uint8 of shape ({count}, height, width, 3)"
        require(fits and 0 not in size, rule, f"{out.dtype} {out.shape}")
        down, (width, height) = found.downsample, found.size
        # few regions at a time: Python's numbers are quicker here than arrays of them
        origins = origins_l0.tolist()
        corners = [(lv_from_l0(x, down), lv_from_l0(y, down)) for x, y in origins]
        x_last, y_last = width - size[0], height - size[1]
        if all(0 <= x <= x_last and 0 <= y <= y_last for x, y in corners):
            with self._reading(f"regions of level {level}"):
                self._fill_all(corners, level, out)
                for region in out:
                    self.recolor(region)
            return
        for (x, y), region in zip(origins, out):
            self.read_region((x, y), level, size, out=region)

    def _check(self, level: int) -> Level:
        """The level of an index, also one made of others; refuses others, and a closed slide."""
        if self._closed:
            raise closed_error(self.slide_path)
        if 0 <= level < len(self.levels):
            return self.levels[level]
        if level >= len(self.levels) and level - len(self.levels) < len(self._further):
            return self._further[level - len(self.levels)]
        rule = f"level must be in [0, {len(self.levels) - 1}]"
        raise InvalidInputError(f"{rule}, got {level} in {self.slide_path!r}")

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """The boundary of every reader: whatever a decoder raises becomes SlideReadError."""
        try:
            yield
        except (ThinsectionError, MemoryError):
            raise
        except Exception as error:
            raise self._unreadable(f"{what} must be readable, got {error!r}") from error

    def _unreadable(self, what: str, remedy: str = "") -> SlideReadError:
        """The error to raise for what cannot be decoded."""
        return SlideReadError(f"{what} in {Path(self.slide_path).name!r}{remedy}")

    def icc_profile(self) -> bytes | None:
        """The colour profile of the file; None where it has none, or the reader sees none."""
        return None

    def thumbnail(self, max_size: Size) -> RgbArray:
        """The whole slide, aspect kept, fitted into max_size, uint8 (H, W, 3).

        Memory: O(thumbnail + one strip of the level that is read), also when levels are missing.
        """
        factor = min(1.0, *np.divide(max_size, self.size))
        width, height = (max(1, round(px * factor)) for px in self.size)
        return read_resized(self, (width, height))

    def associated_image(self, name: str) -> RgbArray:
        """One of `associated_names`, uint8 (H, W, 3)."""
        if name in self.associated_names:
            with self._reading(f"associated image {name!r}"):
                return self._associated(name)
        known = f"{', '.join(self.associated_names) or 'none'}; got {name!r}"
        raise InvalidInputError(
            f"associated image must be one of: {known} in {self.slide_path!r}"
        )

    def close(self) -> None:
        """Lets go of the file. Reads that threads have begun end well, later ones raise."""
        if not self._closed:
            self._closed = True
            self.on_close.close()


def _check_sizes(levels: Sequence[Level], slide_path: str) -> None:
    """Refuses sizes that no slide has: memory and time follow from what a file declares."""
    for level in levels:
        width, height = level.size
        if max(width, height) <= MAX_SIDE_PX and width * height <= MAX_PX:
            continue
        rule = f"level must have <= {MAX_SIDE_PX} px a side and <= {MAX_PX} px"
        name = Path(slide_path).name
        raise SlideOpenError(
            f"{rule}, got {width} x {height} in {name!r}; the file is damaged"
        )
