"""Slides: the protocol, its readers, and the pure geometry of reading them."""

from thinsection.slide.protocol import Slide

__all__ = ["Slide"]
