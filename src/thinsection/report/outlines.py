"""Outlines of a slide's results: files of GeoJSON, or made from the mask that is stored."""

from pathlib import Path

from thinsection.errors import StoreError, rewording
from thinsection.qc.tissue import TISSUE_COLOR
from thinsection.report.picture import read_mask
from thinsection.store.geojson import Feature, mask_features
from thinsection.store.ledger import SlideLedger
from thinsection.types import MaskFrame


def outline_files(ledger: SlideLedger, address: str) -> list[Path]:
    """Files with outlines that a stage left; folders of older versions have one of the tissue."""
    paths = [ledger.out / name for name in ledger.stages[address].files]
    return [path for path in paths if path.suffix == ".geojson" and path.is_file()]


def outlines_of_mask(ledger: SlideLedger, address: str) -> list[Feature]:
    """Annotations in level-0 pixels, made from the tissue mask of a stage; none if it has none.

    Memory:
        One mask, and the corners of its outlines.

    Raises:
        StoreError: the mask is damaged.
    """
    record = ledger.stages[address]
    features: list[Feature] = []
    for name in record.files:
        path = ledger.out / name
        is_tissue = path.name.startswith("tissue") and path.suffix == ".png"
        if not is_tissue or not path.is_file():
            continue
        # Pillow raises SyntaxError for a damaged PNG
        damages = (OSError, SyntaxError, KeyError, ValueError)
        with rewording("mask must be readable", path, *damages, error=StoreError):
            mask = read_mask(path)
            width, height = record.facts["size_l0"]
        frame = MaskFrame(
            size_th=(mask.shape[1], mask.shape[0]), size_l0=(int(width), int(height))
        )
        features += mask_features([("Tissue", mask, TISSUE_COLOR)], frame)
    return features
