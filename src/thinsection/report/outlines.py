"""Outlines of a slide's results: files of GeoJSON, or made from the masks that are stored."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thinsection.errors import StoreError, rewording
from thinsection.qc.tissue import TISSUE_COLOR, Color
from thinsection.report.picture import read_mask
from thinsection.report.qc_store import (
    MASK_KEPT,
    MASK_USE,
    QC_FILE,
    damage_named,
    read_qc,
)
from thinsection.store.geojson import Feature, mask_features
from thinsection.store.ledger import SlideLedger
from thinsection.types import Document, MaskArray, MaskFrame

# class of the tissue that quality control leaves
_USABLE = "Usable tissue"


@dataclass(frozen=True, kw_only=True)
class MaskOutline:
    """Outline of a stored mask, which is not empty; it is made when it is asked for."""

    name: str  # of the annotation and its class
    color: Color
    frame: MaskFrame
    read: Callable[[], MaskArray]  # reads the mask, bool (H, W)

    def features(self) -> list[Feature]:
        """The annotation, in level-0 pixels.

        Memory:
            The mask, and the corners of its outline.
        """
        return mask_features([(self.name, self.read(), self.color)], self.frame)


def outline_files(ledger: SlideLedger, address: str) -> list[Path]:
    """Files with outlines that a stage left; folders of older versions have one of each mask."""
    paths = [ledger.out / name for name in ledger.stages[address].files]
    return [path for path in paths if path.suffix == ".geojson" and path.is_file()]


def outlines_of_masks(ledger: SlideLedger, address: str) -> list[MaskOutline]:
    """Outlines of the masks of a stage: the tissue, or what each check marked; none if it has none.

    Memory:
        The tissue mask. Masks of checks are read when their outline is made.

    Raises:
        StoreError: a file is damaged.
    """
    outlines: list[MaskOutline] = []
    for name in ledger.stages[address].files:
        path = ledger.out / name
        is_tissue = path.name.startswith("tissue") and path.suffix == ".png"
        if is_tissue and path.is_file():
            outlines += _tissue_outlines(path, ledger.stages[address].facts)
        if path.name == QC_FILE and path.is_file():
            outlines += _qc_outlines(path.parent)
    return outlines


def features_of_masks(ledger: SlideLedger, address: str) -> list[Feature]:
    """Annotations of all masks of a stage, in level-0 pixels."""
    features: list[Feature] = []
    for outline in outlines_of_masks(ledger, address):
        features += outline.features()
    return features


def _tissue_outlines(path: Path, facts: Document) -> list[MaskOutline]:
    """Outline of a tissue mask, if it is not empty."""
    # Pillow raises SyntaxError for a damaged PNG
    damages = (OSError, SyntaxError, KeyError, ValueError)
    with rewording("mask must be readable", path, *damages, error=StoreError):
        mask = read_mask(path)
        width, height = facts["size_l0"]
    if not mask.any():
        return []
    frame = MaskFrame(
        size_th=(mask.shape[1], mask.shape[0]), size_l0=(int(width), int(height))
    )
    outline = MaskOutline(
        name="Tissue", color=TISSUE_COLOR, frame=frame, read=lambda: mask
    )
    return [outline]


def _qc_outlines(folder: Path) -> list[MaskOutline]:
    """Outline of the usable tissue, then of each check that marked something."""
    stored = read_qc(folder)
    checks = [name for name in stored.names if name not in (MASK_USE, MASK_KEPT)]
    outlines = []
    for name in (MASK_USE, *checks):
        if stored.is_empty(name):
            continue
        with damage_named(folder):
            red, green, blue = stored.document["colors"][name]
        outline = MaskOutline(
            name=_USABLE if name == MASK_USE else name,
            color=(int(red), int(green), int(blue)),
            frame=stored.frame,
            read=partial(stored.mask, name),
        )
        outlines.append(outline)
    return outlines
