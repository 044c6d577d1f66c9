"""Identity of a slide's pixels, from which the keys of all its stages are derived."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from thinsection.slide.cohort import SlideEntry
from thinsection.store.ledger import stage_key
from thinsection.types import Document


@dataclass(frozen=True, kw_only=True)
class Source:
    """Identity of a slide's pixels, and hashes of its annotation files."""

    key: str
    # hash of the annotation of each setting: 'tissue', 'roi'
    annotation_hashes: Mapping[str, str] = field(default_factory=dict)


def source_key(
    content: str,
    entry: SlideEntry,
    annotation_hashes: Mapping[str, str] | None = None,
) -> Source:
    """Identity of a slide's pixels: its file, and the image, resolution and channels set for it."""
    chosen: Document = {}
    if entry.look is not None:
        chosen["look"] = asdict(entry.look)
    if entry.image is not None:
        chosen["image"] = entry.image
    key = stage_key(slide=content, mpp=entry.slide_mpp, **chosen)
    return Source(key=key, annotation_hashes=annotation_hashes or {})
