"""What a slide's folder stores to draw on: its picture, its masks and their outlines."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.errors import StoreError, rewording
from thinsection.qc.tissue import TISSUE_COLOR, Color
from thinsection.report.picture import OVERLAYS, PICTURE, Picture, slide_picture
from thinsection.report.qc_files import (
    MASK_KEPT,
    MASK_USE,
    QC_FILE,
    damage_named,
    read_qc,
)
from thinsection.slide.open import open_slide
from thinsection.store.claims import check_slide_exists, slide_place
from thinsection.store.geojson import Feature, mask_features
from thinsection.store.ledger import SlideLedger
from thinsection.types import Document, MaskArray, MaskFrame

# class of the tissue that quality control leaves
_USABLE = "Usable tissue"


def picture_files(folder: Path) -> tuple[Path, ...]:
    """Picture in a slide's folder, and the file with its mask; empty if there is no picture.

    `read_tissue` reads the mask. Folders of older versions have only a thumbnail.
    """
    names = file_names(folder)
    for kind in (PICTURE, "thumbnail"):
        files = _pictures_of(folder, names, kind)
        for name in names:
            if not files and name.startswith("qc_"):
                files = _pictures_of(folder / name, file_names(folder / name), kind)
        if files:
            return files
    return ()


def file_names(folder: Path) -> list[str]:
    """Names in a folder, in order; none if there is no such folder."""
    try:
        return sorted(entry.name for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _pictures_of(folder: Path, names: Sequence[str], kind: str) -> tuple[Path, ...]:
    """First picture of a kind among the names in a folder, and the first mask that exists."""
    for name in names:
        if not (name.startswith(kind) and name.endswith(".jpg")):
            continue
        tissue = name.removesuffix(".jpg").replace(kind, "tissue")
        for mask in (
            f"{tissue}.png",
            QC_FILE,
            f"{MASK_KEPT}.png",
            f"{MASK_USE}.png",
        ):
            if mask in names:
                return folder / name, folder / mask
        return (folder / name,)
    return ()


def overlay_file(folder: Path) -> Path | None:
    """Picture of a slide's folder that shows what each check marked; None if there is none."""
    for name in OVERLAYS:
        path = folder / name
        if path.is_file():
            return path
    return None


def thumbnail_file(folder: Path) -> Path | None:
    """Smallest picture of the whole slide in its folder, from any stage; or None."""
    for pattern in ("thumbnail*.jpg", f"{PICTURE}*.jpg", f"qc_*/{PICTURE}*.jpg"):
        paths = sorted(folder.glob(pattern))
        if paths:
            return paths[0]
    return None


def open_picture(ledger: SlideLedger) -> Picture:
    """Picture of a slide of a results folder, to draw on; made from the slide if none is stored.

    Raises:
        StoreError: the stored picture is damaged, or there is neither a picture nor a slide.
        SlideOpenError: the slide cannot be opened.
    """
    slide = ledger.slide
    files = picture_files(ledger.path.parent)
    if not files or not slide.get("width"):
        return _picture_of_file(ledger)
    readable = rewording(
        "picture must be readable", files[0], OSError, error=StoreError
    )
    with readable, Image.open(files[0]) as file:
        rgb = np.array(file.convert("RGB"))
    slide_mpp = (slide["mpp_x"], slide["mpp_y"]) if slide.get("mpp_x") else None
    return Picture(
        rgb=rgb, size_l0=(slide["width"], slide["height"]), slide_mpp=slide_mpp
    )


def _picture_of_file(ledger: SlideLedger) -> Picture:
    """Picture from the slide's file, for results that another tool made."""
    facts = ledger.slide
    if not facts.get("slide_path"):
        raise StoreError(
            f"picture of {ledger.slide_id!r} must exist, got none; run `thinsection run` first, or "
            "import with --slides"
        )
    path = slide_place(ledger)
    check_slide_exists(path, ledger.slide_id)
    mpp = (facts["mpp_x"], facts["mpp_y"]) if facts.get("mpp_x") else None
    with open_slide(path, slide_mpp=mpp) as slide:
        return Picture(
            rgb=slide_picture(slide), size_l0=slide.size, slide_mpp=slide.slide_mpp
        )


def read_tissue(path: Path) -> MaskArray:
    """Reads the mask on which tiles are laid, bool (H, W), from a file of `picture_files`."""
    if path.name != QC_FILE:
        return read_mask(path)
    stored = read_qc(path.parent)
    return stored.mask(MASK_KEPT if MASK_KEPT in stored.names else MASK_USE)


def read_mask(path: Path) -> MaskArray:
    """Reads a mask from a picture, bool (H, W)."""
    with Image.open(path) as file:
        return np.asarray(file.convert("L")) > 0


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
