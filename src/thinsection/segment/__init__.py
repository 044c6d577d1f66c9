"""Networks that label the pixels of slides: declared, loaded, and run."""

from typing import TYPE_CHECKING

from thinsection.registry import lazy_names, listed_names

if TYPE_CHECKING:
    from thinsection.segment.segmenter import Segmenter as Segmenter
    from thinsection.segment.segmenter import load_segmenter as load_segmenter
    from thinsection.segment.slide_map import Segmentation as Segmentation
    from thinsection.segment.slide_map import segment as segment
    from thinsection.segment.spec import SEGMENTERS as SEGMENTERS

# these names are imported on first use, because most runs segment nothing
_NAMES_OF = {
    "segmenter": "Segmenter load_segmenter",
    "slide_map": "Segmentation segment",
    "spec": "SEGMENTERS",
}
__all__ = [*listed_names(_NAMES_OF)]  # noqa: PLE0604
__getattr__ = lazy_names(__name__, _NAMES_OF)
