"""Reader by OpenSlide: every format that it knows, and the reference for the others' pixels."""

import threading

import numpy as np
import openslide
from PIL import Image

from thinsection.errors import SlideOpenError
from thinsection.files.sources import closed_error
from thinsection.slide.base import Slide
from thinsection.slide.formats.alpha import on_white, premultiply_again
from thinsection.slide.formats.tiff_layout import library_objection
from thinsection.slide.geometry import corner_l0, positive_number
from thinsection.slide.readers import LEFT_TO_TIFF, UNKNOWN_FORMAT
from thinsection.types import MIB, Level, Mpp, RgbArray

CACHE_BYTES = 64 * MIB  # of decoded segments, per slide


class OpenSlideSlide(Slide):
    """A slide opened by OpenSlide. Thread-safe, as OpenSlide is.

    A decoding error makes an OpenSlide handle unusable for ever; the next read opens a new one.
    Memory: `CACHE_BYTES` of decoded segments, and 4 bytes per px of a region while it is read.
    """

    reader = "openslide"

    def __init__(self, path: str, *, slide_mpp: Mpp | None = None) -> None:
        objection = library_objection(path)
        if objection:
            raise SlideOpenError(f"{LEFT_TO_TIFF}: {objection}")
        handle = _open_handle(path)
        self._path = path
        self._handle: openslide.OpenSlide | None = handle
        self._lock = threading.Lock()
        self.associated_names = tuple(sorted(handle.associated_images))
        levels = []
        sizes = zip(handle.level_dimensions, handle.level_downsamples)
        for index, (size, downsample) in enumerate(sizes):
            level = Level(index=index, size=size, downsample=max(1.0, downsample))
            levels.append(level)
        properties = handle.properties
        mpp_x = positive_number(properties.get(openslide.PROPERTY_NAME_MPP_X))
        mpp_y = positive_number(properties.get(openslide.PROPERTY_NAME_MPP_Y))
        own_mpp = (mpp_x, mpp_y) if mpp_x and mpp_y else None
        power = properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER)
        super().__init__(
            path,
            levels,
            slide_mpp=slide_mpp or own_mpp,
            objective_power=positive_number(power),
            vendor=properties.get(openslide.PROPERTY_NAME_VENDOR),
            properties=properties,
        )

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
        x, y = origin_lv
        origin_l0 = corner_l0(self.levels[level], x, y)
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
