"""Networks that label the pixels of slides: declared, loaded, and run."""

from thinsection.segment.segmenter import Segmenter, load_segmenter
from thinsection.segment.slide_map import Segmentation, segment
from thinsection.segment.spec import SEGMENTERS

__all__ = ["SEGMENTERS", "Segmentation", "Segmenter", "load_segmenter", "segment"]
