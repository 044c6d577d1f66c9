"""Slides: the class, its readers, and the pure geometry of reading them."""

from thinsection.slide.base import Slide, check_slide
from thinsection.slide.open import open_slide
from thinsection.slide.pictures import Picture, PictureLevel
from thinsection.slide.readers import ReaderStatus, available_readers
from thinsection.slide.resize import read_resized

__all__ = [
    "Picture",
    "PictureLevel",
    "ReaderStatus",
    "Slide",
    "available_readers",
    "check_slide",
    "open_slide",
    "read_resized",
]
