"""The OpenSlide reader: every format that it knows, and the reference for the others' pixels."""

import threading
from typing import Any

import numpy as np
import openslide
from PIL import Image

from thinsection.errors import SlideOpenError
from thinsection.files.sources import closed_error
from thinsection.slide.base import Slide
from thinsection.slide.formats.alpha import on_white, premultiply_again
from thinsection.slide.formats.tiff_layout import library_objection
from thinsection.slide.geometry import corner_l0, positive_number
from thinsection.slide.readers import LEFT, UNKNOWN
from thinsection.types import MIB, Level, Mpp, RgbArray

CACHE_BYTES = 64 * MIB  # of decoded segments, per slide
_NUMBERS = tuple(f"openslide.{name}" for name in ("mpp-x", "mpp-y", "objective-power"))


class OpenSlideSlide(Slide):
    """A slide opened by OpenSlide. Thread-safe, as OpenSlide is.

    A decoding error makes an OpenSlide handle unusable for ever; the next read opens a new one.
    Memory: `CACHE_BYTES` of decoded segments, and 4 bytes per px of a region while it is read.
    """

    reader = "openslide"

    def __init__(self, path: str, *, slide_mpp: Mpp | None = None) -> None:
        if objection := library_objection(path):
            raise SlideOpenError(f"{LEFT}: {objection}")
        self._path, self._lock = path, threading.Lock()
        self._handle: openslide.OpenSlide | None = (handle := _open(path))
        self.associated_names, found = (
            tuple(sorted(handle.associated_images)),
            handle.properties,
        )
        pyramid = enumerate(zip(handle.level_dimensions, handle.level_downsamples))
        levels = [
            Level(index=i, size=size, downsample=max(1.0, d))
            for i, (size, d) in pyramid
        ]
        x, y, power = (positive_number(found.get(name)) for name in _NUMBERS)
        mpp, vendor = (
            (x, y) if x and y else None,
            found.get(openslide.PROPERTY_NAME_VENDOR),
        )
        facts: dict[str, Any] = {
            "objective_power": power,
            "vendor": vendor,
            "properties": found,
        }
        super().__init__(path, levels, slide_mpp=slide_mpp or mpp, **facts)

    def icc_profile(self) -> bytes | None:
        """As of the base class."""
        with _open(self._path) as own:
            return None if own.color_profile is None else own.color_profile.tobytes()

    def _associated(self, name: str) -> RgbArray:
        try:
            with _open(self._path) as own:  # damage here must not spoil the other
                return np.ascontiguousarray(_rgb(own.associated_images[name]))
        except openslide.OpenSlideError as error:
            what = f"associated image {name!r} must be readable, got {error}"
            raise self._unreadable(what) from None

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        if (handle := self._handle) is None:
            raise closed_error(self.slide_path)
        origin_l0 = corner_l0(self.levels[level], *origin_lv)
        region = (origin_l0, level, (out.shape[1], out.shape[0]))
        try:
            out[:] = _rgb(handle.read_region(*region))
            return
        except openslide.OpenSlideError:
            with self._lock:
                if (
                    self._handle is handle
                ):  # else another thread has replaced it, or it was closed
                    self._handle = _open(self._path)
        # The handle may be in error because of another thread's region: a handle of its own, not
        # shared with anybody, says whether this one can be read.
        try:
            out[:] = _rgb(_open(self._path).read_region(*region))
        except (openslide.OpenSlideError, SlideOpenError) as error:
            what = "region must be readable, got {} at {}, level {}, {} px".format(
                error, *region
            )
            raise self._unreadable(what, "; the file is damaged or truncated") from None

    def close(self) -> None:
        """Lets go of the file; the last thread that reads from it closes it."""
        super().close()
        with self._lock:
            self._handle = (
                None  # not handle.close(), which frees it under other threads
            )


def _rgb(image: Image.Image) -> RgbArray:
    """What OpenSlide gives, on white."""
    return on_white(premultiply_again(np.asarray(image)), premultiplied=True)


def _open(path: str) -> openslide.OpenSlide:
    try:
        handle = openslide.OpenSlide(path)
        handle.set_cache(openslide.OpenSlideCache(CACHE_BYTES))
    except openslide.OpenSlideUnsupportedFormatError:
        raise SlideOpenError(f"{UNKNOWN}: {path!r}") from None
    except (openslide.OpenSlideError, OSError) as error:
        raise SlideOpenError(f"openslide: {error}") from None
    return handle
