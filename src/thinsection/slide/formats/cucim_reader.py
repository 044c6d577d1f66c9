"""Reader by cuCIM: TIFF slides decoded by cuCIM, on the CPU or on a GPU."""

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
from cucim.clara import CuImage

from thinsection.errors import SlideOpenError
from thinsection.files.sources import FileSource, closed_error
from thinsection.slide.base import Slide
from thinsection.slide.formats.tiff_layout import library_view
from thinsection.slide.formats.tiff_reader import checked_layout
from thinsection.types import Mpp, RgbArray


class CucimSlide(Slide):
    """A TIFF slide whose pixels cuCIM decodes. Thread-safe, as cuCIM is.

    Metadata and level geometry come from our own TIFF layout, so that every reader says the same.
    The device is 'cpu', or 'cuda' for nvJPEG; pixels come back to the host either way. Memory: one
    region, in cuCIM, beside the caller's.
    """

    reader = "cucim"

    def __init__(
        self,
        path: str,
        *,
        slide_mpp: Mpp | None = None,
        image: str | None = None,
        device: str = "cpu",
    ) -> None:
        with closing(FileSource(path)) as source:
            layout = checked_layout(path, slide_mpp, source, image=image)
        objection = library_view(path, image=image, alpha_too=True).objection
        if objection:
            raise SlideOpenError(f"cucim: left to reader 'tiff': {objection}")
        try:
            with _native_stderr_silenced():
                cu_image = CuImage(path)
            sizes = [tuple(size) for size in cu_image.resolutions["level_dimensions"]]
            downsamples = tuple(map(float, cu_image.resolutions["level_downsamples"]))
        except (RuntimeError, ValueError) as error:
            raise SlideOpenError(f"cucim: {str(error).splitlines()[0]}") from None
        layout_sizes = [level.size for level in layout.levels]
        if sizes != layout_sizes:
            raise SlideOpenError(f"cucim: reads the levels {sizes}, not {layout_sizes}")
        self._image: CuImage | None = cu_image
        self._downsamples = downsamples
        self._device = device
        super().__init__(
            path,
            layout.levels,
            slide_mpp=layout.metadata.slide_mpp,
            objective_power=layout.metadata.objective_power,
            vendor=layout.metadata.vendor,
            properties=layout.metadata.properties,
            orientation=layout.metadata.orientation,
        )
        self.associated_names = tuple(sorted(cu_image.associated_images))
        self.notes = layout.notes
        self.pictures = layout.pictures
        self.picture = layout.picture

    def _associated(self, name: str) -> RgbArray:
        if self._image is None:
            raise closed_error(self.slide_path)
        image = np.asarray(self._image.associated_image(name))
        return np.ascontiguousarray(image[..., :3])

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        image = self._image  # kept alive here while `close` runs elsewhere
        if image is None:
            raise closed_error(self.slide_path)
        downsample = self._downsamples[level]
        x, y = origin_lv
        origin_l0 = (_l0_within(x, downsample), _l0_within(y, downsample))
        try:
            region = image.read_region(
                location=origin_l0,
                size=(out.shape[1], out.shape[0]),
                level=level,
                device=self._device,
            )
            # a CUDA region speaks CuPy's protocol, a host region NumPy's
            if self._device != "cpu":
                import cupy

                region = cupy.asnumpy(cupy.asarray(region))
        except (RuntimeError, ValueError) as error:
            raise self._unreadable(
                f"region must be readable, got {error} at {origin_l0}, level {level}"
            ) from None
        out[:] = np.asarray(region)[..., :3]

    def close(self) -> None:
        """Lets go of the file; reads that other threads have begun end well."""
        super().close()
        # not CuImage.close(), which pulls the file from under other threads
        self._image = None


def _l0_within(value_lv: int, downsample: float) -> int:
    """Returns a level-0 px well within a px of the level: cuCIM divides and rounds down."""
    if downsample >= 2:
        return math.floor((value_lv + 0.5) * downsample)
    return math.ceil(value_lv * downsample)


@contextlib.contextmanager
def _native_stderr_silenced() -> Iterator[None]:
    """Silences file descriptor 2, to which cuCIM's library prints what it also raises."""
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
