"""Slides around another one: the same px, or px in the colours of the file's own profile."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageCms

from thinsection.errors import SlideOpenError
from thinsection.slide.base import Slide
from thinsection.slide.geometry import ReadPlan
from thinsection.types import CoordsL0, Level, RgbArray, TileArray


class WrappedSlide(Slide):
    """Another slide, whose px are changed or lie elsewhere; closes it."""

    def __init__(self, slide: Slide, slide_path: str) -> None:
        facts = ("slide_mpp", "objective_power", "vendor", "properties")
        super().__init__(slide_path, slide.levels, **{f: getattr(slide, f) for f in facts})
        self._slide, self.associated_names = slide, slide.associated_names
        for name in ("reader", "choice", "notes", "rendering", "source", "checked", "held_bytes"):
            setattr(self, name, getattr(slide, name))

    def icc_profile(self) -> bytes | None:
        """Of the other one."""
        return self._slide.icc_profile()

    def _associated(self, name: str) -> RgbArray:
        return self._slide.associated_image(name)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        self._slide._fill(origin_lv, level, out)

    def _fill_all(self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray) -> None:
        self._slide._fill_all(origins_lv, level, out)

    @property
    def reduced(self) -> tuple[Level, ...]:
        """Of the other one."""
        return self._slide.reduced

    def expect(self, coords_l0: CoordsL0, plan: ReadPlan) -> None:
        """Passes it on."""
        self._slide.expect(coords_l0, plan)

    def close(self) -> None:
        """Closes both."""
        super().close()
        self._slide.close()


class IccSlide(WrappedSlide):
    """A slide whose px are converted from its ICC profile to sRGB, by LittleCMS. Thread-safe.

    Memory: one region more while it is read.

    Raises:
        SlideOpenError: the profile cannot be read, or is not of RGB.
    """

    def __init__(self, slide: Slide, profile: bytes) -> None:
        super().__init__(slide, slide.slide_path)
        try:
            own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            name = ImageCms.getProfileDescription(own).strip()
            intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
            srgb = ImageCms.createProfile("sRGB")
            self._convert = ImageCms.buildTransform(own, srgb, "RGB", "RGB", intent)
        except (ImageCms.PyCMSError, OSError) as error:
            what = f"icc profile must be of RGB and readable, got {error} in {slide.slide_path!r}"
            raise SlideOpenError(f"{what}; leave --icc out") from None
        self.rendering = f"ICC profile {name!r} to sRGB, relative colorimetric"

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        self._slide._fill(origin_lv, level, out)
        image = Image.fromarray(np.ascontiguousarray(out))
        ImageCms.applyTransform(image, self._convert, inPlace=True)
        out[:] = np.asarray(image)

    def _fill_all(self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray) -> None:
        for origin, region in zip(origins_lv, out):
            self._fill(origin, level, region)


def with_profile(slide: Slide) -> Slide:
    """The slide in sRGB; as it is, with a note, where it has no profile."""
    if (profile := slide.icc_profile()) is not None:
        return IccSlide(slide, profile)
    missing = f"no ICC profile found by reader {slide.reader!r}: colours are as they are stored"
    slide.notes = (*slide.notes, missing)
    return slide
