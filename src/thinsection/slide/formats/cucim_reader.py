"""The cuCIM reader: TIFF slides decoded by cuCIM, on the CPU or on a GPU."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from cucim.clara import CuImage

from thinsection.errors import SlideOpenError
from thinsection.files.sources import closed_error
from thinsection.slide.base import Slide
from thinsection.slide.formats.tiff_layout import library_objection, read_layout
from thinsection.types import Mpp, RgbArray


class CucimSlide(Slide):
    """A TIFF slide whose pixels cuCIM decodes. Thread-safe, as cuCIM is.

    Metadata and level geometry come from our own TIFF layout, so that every reader says the same.
    The device is 'cpu', or 'cuda' for nvJPEG; pixels come back to the host either way. Memory: one
    region, in cuCIM, beside the caller's.
    """

    reader = "cucim"

    def __init__(
        self, path: str, *, slide_mpp: Mpp | None = None, device: str = "cpu"
    ) -> None:
        layout = read_layout(path, slide_mpp)
        if objection := library_objection(path, alpha_too=True):
            raise SlideOpenError(f"cucim: left to reader 'tiff': {objection}")
        try:
            with _native_stderr_silenced():
                self._image: Any = CuImage(path)
            sizes = [
                tuple(size) for size in self._image.resolutions["level_dimensions"]
            ]
            self._downsamples = tuple(
                map(float, self._image.resolutions["level_downsamples"])
            )
        except (RuntimeError, ValueError) as error:
            raise SlideOpenError(f"cucim: {str(error).splitlines()[0]}") from None
        if sizes != (ours := [level.size for level in layout.levels]):
            raise SlideOpenError(f"cucim: sees levels {sizes}, not {ours}")
        self._device = device
        super().__init__(path, layout.levels, **layout.facts)
        self.associated_names = tuple(sorted(self._image.associated_images))

    def _associated(self, name: str) -> RgbArray:
        return np.ascontiguousarray(
            np.asarray(self._image.associated_image(name))[..., :3]
        )

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        down = self._downsamples[level]
        origin_l0 = (_l0_within(origin_lv[0], down), _l0_within(origin_lv[1], down))
        size, image, device = (out.shape[1], out.shape[0]), self._image, self._device
        if image is None:
            raise closed_error(self.slide_path)
        try:
            region = image.read_region(
                location=origin_l0, size=size, level=level, device=device
            )
            if (
                device != "cpu"
            ):  # a CUDA region speaks CuPy's protocol, a host region NumPy's
                import cupy

                region = cupy.asnumpy(cupy.asarray(region))
        except (RuntimeError, ValueError) as error:
            what = f"region must be readable, got {error} at {origin_l0}, level {level}"
            raise self._unreadable(what) from None
        out[:] = np.asarray(region)[..., :3]

    def close(self) -> None:
        """Lets go of the file; reads that other threads have begun end well."""
        super().close()
        self._image = (
            None  # not CuImage.close(), which pulls the file from under other threads
        )


def _l0_within(value_lv: int, downsample: float) -> int:
    """A level-0 px well within a px of the level: cuCIM divides and rounds down."""
    if downsample >= 2:
        return math.floor((value_lv + 0.5) * downsample)
    return math.ceil(value_lv * downsample)


@contextlib.contextmanager
def _native_stderr_silenced() -> Iterator[None]:
    """cuCIM's library prints to file descriptor 2 what it also raises."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
