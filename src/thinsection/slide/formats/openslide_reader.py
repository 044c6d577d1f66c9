"""Reader by OpenSlide: every format that it knows, and the reference for the others' pixels."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import openslide
from PIL import Image

from thinsection.errors import ImageError, SlideOpenError
from thinsection.files.sources import closed_error
from thinsection.slide.base import WHITE, Slide, on_white
from thinsection.slide.formats.tiff_inventory import page_size
from thinsection.slide.formats.tiff_layout import (
    TiffLayout,
    library_layout,
    unchecked_levels,
)
from thinsection.slide.geometry import l0_from_lv, positive_number
from thinsection.slide.level_check import (
    LevelCandidate,
    Verdicts,
    cache_levels,
    cached_levels,
    judge_levels,
    slide_stamps,
)
from thinsection.slide.pictures import (
    Picture,
    PictureLevel,
    choose_picture,
    picture_notes,
    role_of_name,
)
from thinsection.slide.readers import LEFT_TO_TIFF, UNKNOWN_FORMAT
from thinsection.types import MIB, Level, Mpp, RgbArray

CACHE_BYTES = 64 * MIB  # bytes of decoded segments that OpenSlide keeps for a slide
_GENERIC_TIFF = "generic-tiff"


@dataclass(frozen=True, kw_only=True)
class _OpenSlideLevel:
    """A level of ours, and OpenSlide's index and downsample of it."""

    level: Level
    index: int
    downsample: float


class OpenSlideSlide(Slide):
    """A slide opened by OpenSlide. Thread-safe, as OpenSlide is.

    A decoding error makes an OpenSlide handle unusable for ever; the next read opens a new one.
    Memory: `CACHE_BYTES` of decoded segments, and 4 bytes per px of a region while it is read.
    """

    reader = "openslide"

    def __init__(
        self,
        path: str,
        *,
        slide_mpp: Mpp | None = None,
        image: str | None = None,
    ) -> None:
        stamps = slide_stamps(path)
        verdicts = cached_levels(stamps)
        layout = library_layout(path, image=image, verdicts=verdicts)
        handle = _open_handle(path)
        self._path = path
        self._handle: openslide.OpenSlide | None = handle
        self._lock = threading.Lock()
        self._origin_l0 = (0, 0)  # origin of the shown area on OpenSlide's canvas
        self.associated_names = tuple(sorted(handle.associated_images))
        properties = handle.properties
        mpp_x = positive_number(properties.get(openslide.PROPERTY_NAME_MPP_X))
        mpp_y = positive_number(properties.get(openslide.PROPERTY_NAME_MPP_Y))
        own_mpp = (mpp_x, mpp_y) if mpp_x and mpp_y else None
        power = properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER)
        vendor = properties.get(openslide.PROPERTY_NAME_VENDOR)
        levels = []
        sizes = zip(handle.level_dimensions, handle.level_downsamples)
        for index, (size, ratio) in enumerate(sizes):
            downsample = max(1.0, ratio)
            level = Level(index=index, size=size, downsample=downsample)
            levels.append(
                _OpenSlideLevel(level=level, index=index, downsample=downsample)
            )
        if layout is not None:
            width, height = levels[0].level.size
            if (width, height) != layout.picture.size:
                raise SlideOpenError(
                    f"{LEFT_TO_TIFF}: OpenSlide shows a picture of {width} x {height} px, the "
                    f"slide is image {layout.picture}"
                )
            if layout.pages[0].index > 0 and vendor == _GENERIC_TIFF:
                # OpenSlide states the resolution of the first page
                own_mpp = layout.picture.mpp
        super().__init__(
            path,
            [level.level for level in levels],
            slide_mpp=slide_mpp or own_mpp,
            objective_power=positive_number(power),
            vendor=vendor,
            properties=properties,
        )
        self.mpp_source = f"OpenSlide's reading of {vendor}"
        self._use_levels(levels)
        if layout is None:
            self._show_picture(levels, image)
            return
        candidates = unchecked_levels(layout.pages, verdicts)
        if candidates:
            verdicts |= self._judge(levels, candidates)
            cache_levels(stamps, verdicts)
            layout = library_layout(path, image=image, verdicts=verdicts)
            assert layout is not None
        self._use_layout(levels, layout)

    def _use_levels(self, levels: Sequence[_OpenSlideLevel]) -> None:
        self._levels = list(levels)
        self.levels = tuple(level.level for level in levels)
        self.size = self.levels[0].size

    def _judge(
        self, levels: Sequence[_OpenSlideLevel], candidates: Sequence[LevelCandidate]
    ) -> Verdicts:
        """Returns the verdicts on the candidates that OpenSlide has too; sizes are compared."""
        level_by_size = {level.level.size: level for level in reversed(levels[1:])}
        shown = [levels[0]]
        reachable = []
        for candidate in candidates:
            own = level_by_size.get(candidate.level.size)
            if own is None:
                continue
            level = replace(candidate.level, index=len(shown))
            shown.append(replace(own, level=level))
            reachable.append(replace(candidate, level=level))
        self._use_levels(shown)
        return judge_levels(self, reachable) if reachable else {}

    def _use_layout(
        self, levels: Sequence[_OpenSlideLevel], layout: TiffLayout
    ) -> None:
        """Keeps the levels that our inventory has too, where and as large as it has them."""
        placed_by_size = dict(zip(map(page_size, layout.pages), layout.levels))
        kept: list[_OpenSlideLevel] = []
        dropped = []
        for own in levels:
            size = own.level.size
            placed = placed_by_size.pop(size, None)
            if placed is None:
                dropped.append(f"{size[0]} x {size[1]} px")
                continue
            level = replace(own.level, index=len(kept))
            if placed.size != size:
                level = replace(level, size=placed.size, downsample=placed.downsample)
            kept.append(replace(own, level=level))
        self._use_levels(kept)
        self.pictures = layout.pictures
        self.picture = layout.picture
        self.notes = layout.notes
        if dropped:
            note = (
                f"OpenSlide's level of {', '.join(dropped)} is left out: it is no level of the "
                "slide"
            )
            self.notes = (*self.notes, note)

    def _show_picture(
        self, levels: Sequence[_OpenSlideLevel], image: str | None
    ) -> None:
        """Shows one of several scanned areas, or all of them at their places on the glass.

        Raises:
            ImageError: a label, macro or thumbnail is asked for.
        """
        pictures, origins = self._find_pictures()
        areas = pictures[1 : len(origins) + 1]
        picture = choose_picture(pictures, image, slide_path=self._path)
        self.pictures = tuple(pictures)
        self.picture = picture
        if picture.role != "slide":
            raise ImageError(
                f"image must be the slide or one of its areas, got {image!r} in "
                f"{Path(self._path).name!r}; read it by `slide.associated_image`"
            )
        if picture in areas:
            self._origin_l0 = origins[areas.index(picture)]
            of_area = []
            for own in levels:
                size = (
                    max(1, round(picture.size[0] / own.downsample)),
                    max(1, round(picture.size[1] / own.downsample)),
                )
                of_area.append(replace(own, level=replace(own.level, size=size)))
            self._use_levels(of_area)
            self.size = picture.size
            self.notes = picture_notes(pictures, picture, image)
        elif areas:
            places = [
                f"{area.size[0]} x {area.size[1]} px at {origin}"
                for area, origin in zip(areas, origins)
            ]
            self.notes = (
                f"{len(areas)} scanned areas are shown at their places on the glass: "
                f"{', '.join(places)}; --image 'area 1' shows the first alone",
            )

    def _find_pictures(self) -> tuple[list[Picture], list[tuple[int, int]]]:
        """Returns the slide, its scanned areas if it has several, and its associated images.

        Returns the origins of the areas on OpenSlide's canvas, too.
        """
        stated_levels = tuple(
            PictureLevel(size=level.size, downsample=level.downsample)
            for level in self.levels
        )
        pictures = [
            Picture(
                number=1,
                role="slide",
                rule="by OpenSlide",
                size=self.size,
                mpp=self.slide_mpp,
                levels=stated_levels,
            )
        ]
        origins: list[
            tuple[int, int]
        ] = []  # origins of the areas on OpenSlide's canvas
        while f"openslide.region[{len(origins)}].width" in self.properties:
            region = f"openslide.region[{len(origins)}]"
            x, y, width, height = self._numbers(region, "x", "y", "width", "height")
            origins.append((x, y))
            pictures.append(
                Picture(
                    number=len(pictures) + 1,
                    name=f"area {len(origins)}",
                    role="slide",
                    rule="a scanned area of the glass, by OpenSlide",
                    size=(width, height),
                    mpp=self.slide_mpp,
                )
            )
        if len(origins) == 1:
            pictures.pop()  # it is the slide
            origins.pop()
        for name in self.associated_names:
            prefix = f"openslide.associated.{name}"
            width, height = self._numbers(prefix, "width", "height")
            pictures.append(
                Picture(
                    number=len(pictures) + 1,
                    name=name,
                    role=role_of_name(name) or "other",
                    rule="by OpenSlide",
                    size=(width, height),
                )
            )
        return pictures, origins

    def _numbers(self, prefix: str, *names: str) -> list[int]:
        """Returns numbers among the properties; 0 for one that is missing."""
        return [int(self.properties.get(f"{prefix}.{name}") or 0) for name in names]

    def icc_profile(self) -> bytes | None:
        """See `Slide.icc_profile`."""
        with _open_handle(self._path) as handle:
            profile = handle.color_profile
            return None if profile is None else profile.tobytes()

    def _associated(self, name: str) -> RgbArray:
        try:
            # damage here must not spoil the handle that reads regions
            with _open_handle(self._path) as handle:
                return np.ascontiguousarray(_rgb(handle.associated_images[name]))
        except openslide.OpenSlideError as error:
            raise self._unreadable(
                f"associated image {name!r} must be readable, got {error}"
            ) from None

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        handle = self._handle
        if handle is None:
            raise closed_error(self.slide_path)
        own = self._levels[level]
        level = own.index
        origin_l0 = (
            self._origin_l0[0] + l0_from_lv(origin_lv[0], own.downsample),
            self._origin_l0[1] + l0_from_lv(origin_lv[1], own.downsample),
        )
        size = (out.shape[1], out.shape[0])
        try:
            out[:] = _rgb(handle.read_region(origin_l0, level, size))
            return
        except openslide.OpenSlideError:
            with self._lock:
                # otherwise another thread has replaced the handle, or the slide was closed
                if self._handle is handle:
                    self._handle = _open_handle(self._path)
        # The error of the handle may come from another thread's region. A new handle that no other
        # thread uses shows whether this region can be read.
        try:
            out[:] = _rgb(_open_handle(self._path).read_region(origin_l0, level, size))
        except (openslide.OpenSlideError, SlideOpenError) as error:
            raise self._unreadable(
                f"region must be readable, got {error} at {origin_l0}, level {level}, {size} px",
                "; the file is damaged or truncated",
            ) from None

    def close(self) -> None:
        """Closes the file when no thread reads from it any more."""
        super().close()
        with self._lock:
            # not handle.close(), which would free it while other threads read
            self._handle = None


def premultiply_again(pixels: np.ndarray) -> np.ndarray:
    """RGBA whose colours are multiplied by alpha, from colours that openslide-python divided.

    openslide-python divides OpenSlide's colours by alpha and rounds down. Each rounded value comes
    from only one whole number, which this function restores.
    """
    if pixels[..., 3].min() == WHITE:
        return pixels
    found = pixels.copy()
    colour = pixels[..., :3].astype(np.uint16)
    colour *= pixels[..., 3:]
    colour += WHITE - 1  # so that the division rounds up
    colour //= WHITE
    found[..., :3] = colour
    return found


def _rgb(image: Image.Image) -> RgbArray:
    """Returns OpenSlide's pixels on white."""
    return on_white(premultiply_again(np.asarray(image)), premultiplied=True)


def _open_handle(path: str) -> openslide.OpenSlide:
    try:
        handle = openslide.OpenSlide(path)
        handle.set_cache(openslide.OpenSlideCache(CACHE_BYTES))
    except openslide.OpenSlideUnsupportedFormatError:
        raise SlideOpenError(f"{UNKNOWN_FORMAT}: {path!r}") from None
    except (openslide.OpenSlideError, OSError) as error:
        raise SlideOpenError(f"openslide: {error}") from None
    return handle
