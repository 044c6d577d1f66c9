"""Reader by OpenSlide: every format that it knows, and the reference for the others' pixels."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
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
    LibraryView,
    TiffContents,
    library_view,
)
from thinsection.slide.geometry import l0_from_lv, positive_number
from thinsection.slide.level_check import (
    LevelClaim,
    judge_levels,
    keep_levels,
    known_levels,
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
from thinsection.types import MIB, Level, Mpp, RgbArray, Size

CACHE_BYTES = 64 * MIB  # of decoded segments, per slide
_GENERIC_TIFF = "generic-tiff"


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
        verdicts = known_levels(stamps)
        view = library_view(path, image=image, verdicts=verdicts)
        if view.objection:
            raise SlideOpenError(f"{LEFT_TO_TIFF}: {view.objection}")
        handle = _open_handle(path)
        self._path = path
        self._handle: openslide.OpenSlide | None = handle
        self._lock = threading.Lock()
        self._all_levels = _levels_by_openslide(handle)
        self._levels = self._all_levels
        self._origin_l0 = (0, 0)  # of the shown area on OpenSlide's canvas
        self.associated_names = tuple(sorted(handle.associated_images))
        properties = handle.properties
        mpp_x = positive_number(properties.get(openslide.PROPERTY_NAME_MPP_X))
        mpp_y = positive_number(properties.get(openslide.PROPERTY_NAME_MPP_Y))
        own_mpp = (mpp_x, mpp_y) if mpp_x and mpp_y else None
        power = properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER)
        vendor = properties.get(openslide.PROPERTY_NAME_VENDOR)
        contents = view.contents
        if contents is not None:
            self._require_same_picture(contents)
            if contents.shown.base.index > 0 and vendor == _GENERIC_TIFF:
                own_mpp = contents.picture.mpp  # OpenSlide reads that of the first page
        super().__init__(
            path,
            [level.level for level in self._levels],
            slide_mpp=slide_mpp or own_mpp,
            objective_power=positive_number(power),
            vendor=vendor,
            properties=properties,
        )
        self.mpp_source = f"OpenSlide's reading of {vendor}"
        if contents is None:
            areas = _areas(properties)
            self.pictures = _pictures_by_openslide(self, areas)
            picture = choose_picture(self.pictures, image, slide_path=path)
            self._show_picture(picture, areas, image)
            return
        if view.claims:
            levels, claims = _levels_of_claims(self._levels, view.claims)
            self._use_levels(levels)
            verdicts |= judge_levels(self, claims) if claims else {}
            keep_levels(stamps, verdicts)
            view = library_view(path, image=image, verdicts=verdicts)
        self._use_inventory(view)

    def _show_picture(
        self, picture: Picture, areas: Sequence[_Area], image: str | None
    ) -> None:
        """Shows one of several areas, or all of them at their places on the glass.

        Raises:
            ImageError: a label, macro or thumbnail is asked for.
        """
        self.picture = picture
        number = picture.number - 1
        if picture.role != "slide":
            raise ImageError(
                f"image must be the slide or one of its areas, got {image!r} in "
                f"{Path(self._path).name!r}; read it by `slide.associated_image`"
            )
        if number == 0:
            self.notes = _area_notes(areas)
            return
        area = areas[number - 1]
        self._origin_l0 = area.origin_l0
        levels = []
        for own in self._all_levels:
            size = (
                max(1, round(area.size[0] / own.downsample)),
                max(1, round(area.size[1] / own.downsample)),
            )
            levels.append(replace(own, level=replace(own.level, size=size)))
        self._use_levels(levels)
        self.size = area.size
        self.notes = picture_notes(self.pictures, picture, image)

    def _require_same_picture(self, contents: TiffContents) -> None:
        """Refuses a file of which OpenSlide shows another picture."""
        own_size = self._levels[0].level.size
        if own_size != contents.picture.size:
            self._handle = None
            raise SlideOpenError(
                f"{LEFT_TO_TIFF}: OpenSlide shows a picture of {own_size[0]} x {own_size[1]} px, "
                f"the slide is image {contents.picture}"
            )

    def _use_inventory(self, view: LibraryView) -> None:
        """Keeps the levels that our inventory has too, where and as large as it has them."""
        assert view.contents is not None
        kept: list[_OpenSlideLevel] = []
        by_page = {
            page_size(page): placed
            for page, placed in zip(view.contents.shown.pages, view.levels)
        }
        dropped = []
        for own in self._all_levels:
            placed = by_page.pop(own.level.size, None)
            if placed is None:
                dropped.append(own.level.size)
                continue
            level = replace(own.level, index=len(kept))
            if placed.size != own.level.size:
                level = replace(level, size=placed.size, downsample=placed.downsample)
            kept.append(replace(own, level=level))
        self._use_levels(kept)
        self.size = self.levels[0].size
        self.pictures = view.contents.pictures
        self.picture = view.contents.picture
        self.notes = view.notes
        if dropped:
            sizes = ", ".join(f"{width} x {height} px" for width, height in dropped)
            note = (
                f"OpenSlide's level of {sizes} is left out: it is no level of the slide"
            )
            self.notes = (*self.notes, note)

    def _use_levels(self, levels: Sequence[_OpenSlideLevel]) -> None:
        self._levels = list(levels)
        self.levels = tuple(level.level for level in levels)

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
                # else another thread has replaced it, or it was closed
                if self._handle is handle:
                    self._handle = _open_handle(self._path)
        # The handle may be in error because of another thread's region: a handle of its own, not
        # shared with anybody, says whether this one can be read.
        try:
            out[:] = _rgb(_open_handle(self._path).read_region(origin_l0, level, size))
        except (openslide.OpenSlideError, SlideOpenError) as error:
            raise self._unreadable(
                f"region must be readable, got {error} at {origin_l0}, level {level}, {size} px",
                "; the file is damaged or truncated",
            ) from None

    def close(self) -> None:
        """Lets go of the file; the last thread that reads from it closes it."""
        super().close()
        with self._lock:
            # not handle.close(), which frees it under other threads
            self._handle = None


@dataclass(frozen=True, kw_only=True)
class _OpenSlideLevel:
    """A level of ours, and OpenSlide's index and downsample of it."""

    level: Level
    index: int
    downsample: float


def _levels_by_openslide(handle: openslide.OpenSlide) -> list[_OpenSlideLevel]:
    """Returns the levels as OpenSlide has them."""
    levels = []
    sizes = zip(handle.level_dimensions, handle.level_downsamples)
    for index, (size, ratio) in enumerate(sizes):
        downsample = max(1.0, ratio)
        level = Level(index=index, size=size, downsample=downsample)
        levels.append(_OpenSlideLevel(level=level, index=index, downsample=downsample))
    return levels


@dataclass(frozen=True, kw_only=True)
class _Area:
    """One of several scanned areas of a glass, on OpenSlide's canvas."""

    origin_l0: tuple[int, int]
    size: Size


def _areas(properties: Mapping[str, str]) -> list[_Area]:
    """Returns the scanned areas of a glass; none where there is only one."""
    areas: list[_Area] = []
    while f"openslide.region[{len(areas)}].width" in properties:
        region = f"openslide.region[{len(areas)}]"
        x, y, width, height = (
            int(properties.get(f"{region}.{side}") or 0)
            for side in ("x", "y", "width", "height")
        )
        areas.append(_Area(origin_l0=(x, y), size=(width, height)))
    return areas if len(areas) > 1 else []


def _area_notes(areas: Sequence[_Area]) -> tuple[str, ...]:
    """Returns what is said of several areas of one glass, which OpenSlide shows together."""
    if not areas:
        return ()
    places = [
        f"{area.size[0]} x {area.size[1]} px at {area.origin_l0}" for area in areas
    ]
    return (
        f"{len(areas)} scanned areas are shown at their places on the glass: "
        f"{', '.join(places)}; --image 'area 1' shows the first alone",
    )


def _pictures_by_openslide(slide: Slide, areas: Sequence[_Area]) -> tuple[Picture, ...]:
    """Returns the slide, its areas and its associated images, as OpenSlide names them."""
    levels = tuple(
        PictureLevel(size=level.size, downsample=level.downsample)
        for level in slide.levels
    )
    pictures = [
        Picture(
            number=1,
            role="slide",
            rule="by OpenSlide",
            size=slide.size,
            mpp=slide.slide_mpp,
            levels=levels,
        )
    ]
    for number, area in enumerate(areas, 1):
        pictures.append(
            Picture(
                number=len(pictures) + 1,
                name=f"area {number}",
                role="slide",
                rule="a scanned area of the glass, by OpenSlide",
                size=area.size,
                mpp=slide.slide_mpp,
            )
        )
    for name in slide.associated_names:
        sides = [
            int(slide.properties.get(f"openslide.associated.{name}.{side}") or 0)
            for side in ("width", "height")
        ]
        pictures.append(
            Picture(
                number=len(pictures) + 1,
                name=name,
                role=role_of_name(name) or "other",
                rule="by OpenSlide",
                size=(sides[0], sides[1]),
            )
        )
    return tuple(pictures)


def _levels_of_claims(
    levels: Sequence[_OpenSlideLevel], claims: Sequence[LevelClaim]
) -> tuple[list[_OpenSlideLevel], list[LevelClaim]]:
    """Returns level 0 and OpenSlide's levels of the sizes that are claimed, and these claims."""
    by_size = {level.level.size: level for level in reversed(levels[1:])}
    shown = [levels[0]]
    reachable = []
    for claim in claims:
        own = by_size.get(claim.level.size)
        if own is None:
            continue
        level = replace(claim.level, index=len(shown))
        shown.append(replace(own, level=level))
        reachable.append(replace(claim, level=level))
    return shown, reachable


def premultiply_again(pixels: np.ndarray) -> np.ndarray:
    """RGBA whose colours are multiplied by alpha, from colours that openslide-python divided.

    It divides OpenSlide's colours by alpha and rounds down; for each rounded value there is one
    whole number that it came from.
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
