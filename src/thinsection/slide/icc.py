"""Colours as the file's ICC profile means them, in sRGB."""

import io
from functools import partial

import numpy as np
from PIL import Image, ImageCms

from thinsection.errors import SlideOpenError
from thinsection.slide.base import Slide
from thinsection.types import RgbArray


def apply_icc_profile(slide: Slide) -> None:
    """Makes the slide convert pixels by its ICC profile, if it has one, to sRGB.

    Memory: one region more while it is read.
    """
    profile_bytes = slide.icc_profile()
    if profile_bytes is None:
        note = f"no ICC profile found by reader {slide.reader!r}: colours are as they are stored"
        slide.notes = (*slide.notes, note)
        return
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(profile_bytes))
        name = ImageCms.getProfileDescription(profile).strip()
        transform = ImageCms.buildTransform(
            profile,
            ImageCms.createProfile("sRGB"),
            "RGB",
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
        )
    except (ImageCms.PyCMSError, OSError) as error:
        raise SlideOpenError(
            f"icc profile must be a readable profile for RGB, got {error} in "
            f"{slide.slide_path!r}; omit --icc"
        ) from None
    slide.recolor = partial(_convert, transform)
    slide.rendering = f"ICC profile {name!r} to sRGB, relative colorimetric"


def _convert(transform: ImageCms.ImageCmsTransform, pixels: RgbArray) -> None:
    image = Image.fromarray(np.ascontiguousarray(pixels))
    ImageCms.applyTransform(image, transform, inPlace=True)
    pixels[:] = np.asarray(image)
