"""`Slide`: the interface of every reader, in the vocabulary of OpenSlide, and its shared code."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Real
from pathlib import Path
from typing import Protocol

import numpy as np

from thinsection.errors import (
    CopyError,
    InvalidInputError,
    SlideOpenError,
    SlideReadError,
    ThinsectionError,
    naming_part,
)
from thinsection.files.pages import NOTEBOOK_EDGE_PX, notebook_html
from thinsection.files.sources import FsspecSource, closed_error
from thinsection.slide.geometry import MAX_PX, MAX_SIDE_PX, ReadPlan, lv_from_l0
from thinsection.slide.opening import Statements
from thinsection.slide.pictures import Picture
from thinsection.slide.resize import PlannedTiles, TilePictures, read_resized
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

WHITE = 255  # also the value of an opaque alpha
GRAY = "gray: one channel, shown as red, green and blue"  # a note


def on_white(pixels: np.ndarray, *, premultiplied: bool = False) -> np.ndarray:
    """Blends gray or RGB with a white background, uint8 (H, W, 1 or 3), rounded to nearest.

    Transparent pixels become white; every reader applies this rule. Colours are stored either
    straight (as if opaque) or premultiplied by their alpha. A TIFF states it: ExtraSamples is 2 for
    straight and 1 for premultiplied alpha. PNG stores straight colours. OpenSlide returns
    premultiplied colours.

    Args:
        pixels: uint8 (H, W, 1 to 4); the last of 2 or 4 samples is alpha.
        premultiplied: True if colours were multiplied by alpha when they were stored.

    Memory: 2 bytes for each colour of a pixel, if any pixel is transparent.
    """
    num_colours = 3 if pixels.shape[2] >= 3 else 1
    colour = pixels[..., :num_colours]
    alpha = pixels[..., num_colours:]
    if alpha.size == 0 or alpha.min() == WHITE:
        return colour
    # 16 bits hold the largest product, 255 * 255 + 128
    blended = colour.astype(np.uint16)
    if not premultiplied:
        blended *= alpha
        # divides the product of two bytes by 255, rounded to the nearest whole number
        blended += 128
        blended += blended >> 8
        blended >>= 8
    blended += (WHITE - alpha).astype(np.uint16)
    np.minimum(blended, WHITE, out=blended)  # a premultiplied colour may exceed alpha
    return np.asarray(blended.astype(np.uint8))


def keep_colours(pixels: RgbArray) -> None:
    """Leaves pixels as they were read; the default of `Slide.recolor`."""


# attributes that a copy takes over: the user or `open_slide` may have set them
_COPIED = (
    "choice", "mpp_source", "notes", "objective_power", "picture", "pictures", "rendering",
    "slide_mpp",
)  # fmt: skip


class Reopen(Protocol):
    """Function that opens a slide again, in this or in another process."""

    def __call__(self, levels: tuple[Level, ...], statements: Statements) -> Slide: ...


class Slide(Closing):
    """An opened slide. Thread-safe: any number of threads may read at once.

    A copy or a pickle of it opens the same file again, in whichever process it arrives; close it
    like any slide. It raises SlideOpenError if another file lies at the path by then.

    A subclass (a reader) calls this constructor with the metadata of the file. It implements
    `_fill`, which reads regions inside a level, and `_associated`, which reads the associated
    images. A reader of another package also has the attributes of `thinsection.registry.Entry`.

    Attributes:
        reader: name of the reader: 'openslide', 'tiff', 'image'.
        slide_path: path or URL from which the slide was opened.
        slide_name: name of the file without its suffix, and of the image if one was chosen, as in
            the id that a run gives the slide.
        levels: pyramid levels, finest first; `levels[0].downsample == 1.0`.
        size: (width, height) of level 0, px.
        slide_mpp: (x, y) µm per level-0 px, or None if the file does not state it. The
            constructor also takes one number for both axes.
        mpp_source: source of `slide_mpp`, in words; '' if there is none, or if it is not known.
        objective_power: nominal magnification of the objective, or None.
        vendor: scanner family by OpenSlide's name, or None.
        properties: metadata of the file, as strings.
        associated_names: names of the associated images ('label', 'macro', 'thumbnail').
        choice: reason why 'auto' chose this reader.
        notes: sentences on data that were interpreted otherwise than the file states.
        pictures: inventory of the file; empty if the reader makes no inventory.
        picture: the picture of the inventory that is shown; None without an inventory.
        rendering: the conversion to RGB that the user asked for, in words; '' if there is none.
        recolor: function that changes pixels in place after they were read.
        source: counter of the bytes that were fetched for a slide by URL; None for a local file.
        held_bytes: memory of the whole decoded image, from the first read on; 0 if the reader
            decodes parts of the image.
        on_close: resources that are closed with the slide.
        checked: True if our own parser found the sizes in the file sound, so that it is safe to
            open it with a C library.
        orientation: TIFF's number for the turn that makes the pixels upright; 1 if they are
            upright, as in every slide that `open_slide` returns.
        reopen: function that opens the same slide again; None if it was not opened by
            `open_slide`.
    """

    reader: str = ""
    held_bytes: int = 0
    checked: bool = False
    associated_names: tuple[str, ...] = ()
    reopen: Reopen | None = None

    def __init__(
        self,
        slide_path: str,
        levels: Sequence[Level],
        *,
        slide_mpp: Mpp | float | None,
        objective_power: float | None = None,
        vendor: str | None = None,
        properties: Mapping[str, str] | None = None,
        orientation: int = 1,
    ) -> None:
        _check_sizes(levels, slide_path)
        self.slide_path = slide_path
        self.slide_name = Path(slide_path).stem
        self.levels = tuple(levels)
        self.size: Size = self.levels[0].size
        self.slide_mpp = mpp_xy(slide_mpp, slide_path)
        self.objective_power = objective_power
        self.vendor = vendor
        self.properties: Mapping[str, str] = dict(properties or {})
        self.orientation = orientation
        self.choice = ""
        self.mpp_source = ""
        self.rendering = ""
        self.notes: tuple[str, ...] = ()
        self.pictures: tuple[Picture, ...] = ()
        self.picture: Picture | None = None
        self.recolor: Callable[[RgbArray], None] = keep_colours
        # `recolor` that opening the slide again sets
        self._reopened_recolor: Callable[[RgbArray], None] = keep_colours
        self.source: FsspecSource | None = None
        self.on_close = ExitStack()
        self._closed = False

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles the slide as the way to open it again; no pixels are copied.

        Raises:
            CopyError: the slide is closed, or was not opened by `open_slide`.
        """
        self._check_copied()
        assert self.reopen is not None
        statements: dict[str, object] = {name: getattr(self, name) for name in _COPIED}
        if self.recolor is not self._reopened_recolor:
            statements["recolor"] = self.recolor
        stored = self.stored
        if stored.recolor is not stored._reopened_recolor and stored is not self:
            raise CopyError(
                f"recolor must be set on the upright slide, got one on slide.stored of {self!r}; "
                "set slide.recolor"
            )
        return self.reopen, (self.levels, statements)

    def _check_copied(self) -> None:
        """Raises CopyError: a copy of the slide could not open it again."""
        if self._closed:
            raise CopyError(
                f"slide must be open to be copied or pickled, got {self!r}; open it again"
            )
        if self.reopen is None:
            raise CopyError(
                f"slide must come from open_slide to be copied or pickled, got {self!r}; open it "
                "by thinsection.open_slide(path)"
            )

    def can_reopen(self, reopen: Reopen) -> None:
        """Notes how the slide is opened again; `open_slide` calls this last.

        Examples:
            >>> copy = pickle.loads(pickle.dumps(slide))
            >>> copy.size == slide.size
            True
        """
        self.reopen = reopen
        self._reopened_recolor = self.recolor

    def __repr__(self) -> str:
        name = Path(self.slide_path).name
        return f"{type(self).__name__}({name!r}: {', '.join(self._description())})"

    def _repr_html_(self) -> str:
        """Returns the description with a thumbnail, which is read now if the slide is open."""
        picture = None
        if not self._closed:
            picture = self.thumbnail((NOTEBOOK_EDGE_PX, NOTEBOOK_EDGE_PX))
        return notebook_html(picture, Path(self.slide_path).name, self._description())

    def _description(self) -> list[str]:
        """Returns size, number of levels, resolution and reader, in words."""
        width, height = self.size
        num_levels = len(self.levels)
        words = [
            f"{width} x {height} px",
            "1 level" if num_levels == 1 else f"{num_levels} levels",
            format_mpp(self.slide_mpp),
            f"reader {self.reader!r}",
        ]
        if self._closed:
            words.append("closed")
        return words

    # methods that a reader implements

    @abstractmethod
    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        """Fills `out` (h, w, 3), perhaps strided, with pixels that all lie inside the level."""

    def _fill_all(
        self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray
    ) -> None:
        """Fills `out` (B, h, w, 3) with regions that all lie inside the level."""
        for origin, region in zip(origins_lv, out):
            self._fill(origin, level, region)

    def _associated(self, name: str) -> RgbArray:
        """Returns an image of `associated_names`; for readers that have associated images."""
        raise NotImplementedError

    # methods that some readers implement

    @property
    def stored(self) -> Slide:
        """The slide as its file stores it: this slide, unless it was turned to be upright.

        Examples:
            >>> slide.stored is slide
            True
        """
        return self

    @property
    def reduced(self) -> tuple[Level, ...]:
        """Levels at 1/2, 1/4 and 1/8 of stored levels, which cost less to decode than those.

        They are read like any level; their indices continue those of `levels`. Each of their pixels
        is about the mean of the pixels that it covers.

        Examples:
            >>> slide.reduced[0].index == len(slide.levels)
            True
        """
        return ()

    @property
    def _derived_levels(self) -> tuple[Level, ...]:
        """All levels that are computed from `levels`; their indices continue those of `levels`."""
        return self.reduced

    def coarse(self, level: int, factor: int) -> Level | None:
        """Returns a level at 1 / factor (2, 4 or 8) of a level; None if it is not cheaper to read.

        It is read like any level. Each of its pixels is about the mean of factor x factor px. A
        remainder at the right and lower border that fills no whole pixel is left out.

        Examples:
            >>> slide.coarse(0, 4).size
            (325, 250)
        """
        return None

    def expect(self, coords_l0: CoordsL0, plan: ReadPlan) -> None:
        """Announces the tiles that will be read.

        The reader then keeps decoded segments that several tiles share until the last of these
        tiles is read.

        Examples:
            >>> slide.expect(tiles.coords_l0, tiles.plan)
        """

    def stored_jpeg(self, level: int, column: int, row: int) -> bytes | None:
        """Returns a stored segment of a level as a complete JPEG file; None if that is impossible.

        The JPEG shows the whole segment, with its padding beyond the border of the image. Memory:
        twice the bytes of the segment.

        Examples:
            >>> jpeg = slide.stored_jpeg(0, 0, 0)
            >>> jpeg is None or jpeg[:2] == b"\\xff\\xd8"
            True
        """
        return None

    def icc_profile(self) -> bytes | None:
        """Returns the colour profile of the file; None if the reader finds none.

        Examples:
            >>> slide.icc_profile() is None
            True
        """
        return None

    # reading

    def read_region(
        self,
        origin_l0: tuple[int, int],
        level: int,
        size: Size,
        *,
        out: RgbArray | None = None,
    ) -> RgbArray:
        """Reads pixels of one level as uint8 (size[1], size[0], 3), RGB.

        Transparent pixels and pixels outside the slide are white (255). Pixel (0, 0) of the region
        is pixel round(origin_l0 / downsample) of the level.

        Args:
            origin_l0: (x, y) of the top-left corner in level-0 px; may lie outside the slide.
            level: pyramid level to read from.
            size: (width, height) in px of that level, each >= 1.
            out: C-contiguous uint8 array of that shape; it is filled and returned.

        Memory: the region plus the compressed and decoded segments that it touches.

        Raises:
            SlideReadError: a segment cannot be decoded.
            InvalidInputError: the slide has no such level, or the size is empty.

        Examples:
            >>> slide.read_region((200, 100), 0, (64, 32)).shape
            (32, 64, 3)
        """
        source = self._open_level(level)
        region = _array_to_fill(size, out)
        width, height = size
        x = lv_from_l0(origin_l0[0], source.downsample)
        y = lv_from_l0(origin_l0[1], source.downsample)
        # the part that lies inside the level
        left = max(x, 0)
        top = max(y, 0)
        right = min(x + width, source.size[0])
        bottom = min(y + height, source.size[1])
        if (left, top, right, bottom) != (x, y, x + width, y + height):
            region[:] = WHITE
        if right > left and bottom > top:
            inside = region[top - y : bottom - y, left - x : right - x]
            with self._reading(f"region at {origin_l0} of level {level}"):
                self._fill((left, top), level, inside)
                self.recolor(inside)
        return region

    def read_regions(self, origins_l0: CoordsL0, level: int, *, out: TileArray) -> None:
        """Fills `out` with several regions of the same size, each as `read_region` returns it.

        Args:
            origins_l0: int64 (B, 2), top-left corners of the regions in level-0 px.
            level: pyramid level to read from.
            out: C-contiguous uint8 (B, height, width, 3); it gives the size of the regions.

        Memory: that of one region, and up to 1 MiB of compressed segments.

        Examples:
            >>> out = np.empty((2, 64, 64, 3), dtype=np.uint8)
            >>> slide.read_regions(tiles.coords_l0[:2], 0, out=out)
            >>> np.array_equal(out[0], slide.read_region(tuple(tiles.coords_l0[0]), 0, (64, 64)))
            True
        """
        source = self._open_level(level)
        count = len(origins_l0)
        fits = out.ndim == 4 and out.shape[::3] == (count, 3) and out.dtype == np.uint8
        if not fits or 0 in out.shape[1:3]:
            raise InvalidInputError(
                f"out must be uint8 of shape ({count}, height, width, 3), "
                f"got {out.dtype} {out.shape}"
            )
        size: Size = (out.shape[2], out.shape[1])
        # for a few regions, Python's numbers are faster than arrays
        origins = origins_l0.tolist()
        down = source.downsample
        corners = [(lv_from_l0(x, down), lv_from_l0(y, down)) for x, y in origins]
        last_x = source.size[0] - size[0]
        last_y = source.size[1] - size[1]
        if all(0 <= x <= last_x and 0 <= y <= last_y for x, y in corners):
            with self._reading(f"regions of level {level}"):
                self._fill_all(corners, level, out)
                for region in out:
                    self.recolor(region)
            return
        for (x, y), region in zip(origins, out):
            self.read_region((x, y), level, size, out=region)

    def thumbnail(self, max_size: Size) -> RgbArray:
        """Reads the whole slide, reduced to fit into max_size with its aspect, uint8 (H, W, 3).

        Memory: O(thumbnail + one strip of the level that is read), also when levels are missing.

        Examples:
            >>> slide.thumbnail((130, 130)).shape
            (100, 130, 3)
        """
        width, height = self.size
        factor = min(1.0, max_size[0] / width, max_size[1] / height)
        size_th = (max(1, round(width * factor)), max(1, round(height * factor)))
        return read_resized(self, size_th)

    def tiles(self, tiles: PlannedTiles) -> TilePictures:
        """The pictures of tiles: `slide.tiles(tiles)[3]` is uint8 (tile_px, tile_px, 3).

        Args:
            tiles: result of `tile_grid`, or of `results.tiles` of this slide.

        Raises:
            InvalidInputError: `tiles` do not state how they are read, or are of another slide.

        Examples:
            >>> slide.tiles(tiles)[3].shape
            (128, 128, 3)
        """
        return TilePictures(self, tiles)

    def associated_image(self, name: str) -> RgbArray:
        """Reads an associated image, uint8 (H, W, 3); `name` is one of `associated_names`.

        Examples:
            >>> {name: slide.associated_image(name).shape for name in slide.associated_names}
            {}
        """
        if name not in self.associated_names:
            names = ", ".join(self.associated_names) or "none"
            raise InvalidInputError(
                f"associated image must be one of: {names}; got {name!r} in {self.slide_path!r}"
            )
        with self._reading(f"associated image {name!r}"):
            return self._associated(name)

    def _open_level(self, level: int) -> Level:
        """Returns the level (stored or derived) with an index; refuses if the slide is closed."""
        if self._closed:
            raise closed_error(self.slide_path)
        num_levels = len(self.levels)
        if 0 <= level < num_levels:
            return self.levels[level]
        if level >= num_levels:
            derived = self._derived_levels
            if level - num_levels < len(derived):
                return derived[level - num_levels]
        raise InvalidInputError(
            f"level must be in [0, {num_levels - 1}], got {level} in {self.slide_path!r}"
        )

    @contextmanager
    def _reading(self, subject: str) -> Iterator[None]:
        """Turns every error of a decoder into SlideReadError: the boundary of every reader."""
        with naming_part("reader", self.reader, self):
            try:
                yield
            except (ThinsectionError, MemoryError):
                raise
            except Exception as error:
                raise self._unreadable(
                    f"{subject} must be readable, got {error!r}"
                ) from error

    def _unreadable(self, problem: str, remedy: str = "") -> SlideReadError:
        """Returns the error for pixels that cannot be decoded."""
        return SlideReadError(f"{problem} in {Path(self.slide_path).name!r}{remedy}")

    def drop_decoded(self) -> None:
        """Frees decoded pixels that the reader keeps for later reads; by default there are none.

        Examples:
            >>> slide.drop_decoded()
        """

    @contextmanager
    def keeping_decoded(self, levels: Collection[int], folder: Path) -> Iterator[None]:
        """Keeps segments that are slow to decode, so that they are decoded once.

        What is decoded of these levels within the context lies in a temporary file in the folder,
        until the slide is closed: at most 4 GiB and a quarter of what is free there. Later reads
        take it from there. By default, and for codecs that are not slow, nothing is kept.

        Memory: 8 bytes for each segment of these levels.

        Raises OSError: the folder does not exist or is not writable.

        Examples:
            >>> from pathlib import Path
            >>> with slide.keeping_decoded([0], Path("results")):
            ...     quality = ts.run_qc(slide)
        """
        yield

    def close(self) -> None:
        """Closes the file. Reads that threads have begun are completed; later reads raise.

        Examples:
            >>> opened = ts.open_slide("a.svs")
            >>> opened.close()
        """
        if not self._closed:
            self._closed = True
            self.on_close.close()


def check_slide(slide: object) -> None:
    """Raises InvalidInputError: the object is no opened slide, but for example a path."""
    # a reader of another package need not be a subclass of `Slide`
    if not hasattr(slide, "read_region"):
        raise InvalidInputError(
            f"slide must be an opened slide, got {slide!r}; pass thinsection.open_slide(path)"
        )


def _array_to_fill(size: Size, out: RgbArray | None) -> RgbArray:
    """Returns the array for a region: `out` after a check of its form, or a new array."""
    if min(size) < 1:
        raise InvalidInputError(f"size must be >= (1, 1), got {size}")
    shape = (size[1], size[0], 3)
    if out is None:
        return np.empty(shape, dtype=np.uint8)
    if out.shape != shape or out.dtype != np.uint8:
        raise InvalidInputError(
            f"out must be uint8 of shape {shape}, got {out.dtype} {out.shape}"
        )
    return out


def mpp_xy(slide_mpp: Mpp | float | None, slide_path: str) -> Mpp | None:
    """(x, y) µm/px of what a reader or a user passes: one number or two, or None."""
    if slide_mpp is None:
        return None
    numbers: tuple[object, ...] = (slide_mpp, slide_mpp)
    if isinstance(slide_mpp, Sequence | np.ndarray):
        numbers = tuple(slide_mpp)
    reals = [float(one) for one in numbers if isinstance(one, Real)]
    if len(numbers) != 2 or len(reals) != 2:
        raise InvalidInputError(
            f"slide_mpp must be one number, two numbers (x, y) or None, got {slide_mpp!r} in "
            f"{Path(slide_path).name!r}; pass (0.5, 0.5) for 0.5 µm/px"
        )
    x, y = reals
    return x, y


def _check_sizes(levels: Sequence[Level], slide_path: str) -> None:
    """Refuses sizes that no slide has; a damaged file would ask for endless memory and time."""
    for level in levels:
        width, height = level.size
        if max(width, height) <= MAX_SIDE_PX and width * height <= MAX_PX:
            continue
        raise SlideOpenError(
            f"level must have <= {MAX_SIDE_PX} px a side and <= {MAX_PX} pixels, got {width} x "
            f"{height} in {Path(slide_path).name!r}; the file is damaged"
        )
