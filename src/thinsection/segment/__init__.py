"""Networks that name what each px of a slide is: declared, loaded, and run over whole slides."""

from thinsection.segment.segmenter import SEGMENTERS, Segmenter, load_segmenter
from thinsection.segment.slide_map import Segmentation, segment

__all__ = ["SEGMENTERS", "Segmentation", "Segmenter", "load_segmenter", "segment"]
