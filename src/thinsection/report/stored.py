"""Stored files of a slide for drawings: its picture, its masks and their outlines.

Quality control is one file, `qc.zip`, with the values and the masks:

    qc.zip
      qc.json       scores, warnings, pipeline, colours; the number of pixels of each mask
      mask_use.tif  tissue that passed every check
      CHECK.tif     area that a check marked
      CHECK_unjudged.tif  tissue that a check could not judge
      edits.geojson         corrections of a person, with who drew them and when
      edited_mask_use.tif   tissue that passed every check, with these corrections

The masks have one bit per pixel, in TIFF with CCITT compression, which ImageJ and QuPath open; an
empty mask has no file. Folders of older versions have `qc.json` and a PNG for each mask. This file
reads them; `qc_files.py` writes them, and turns stored files into results of quality control.
"""

import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import parse_json, read_json
from thinsection.qc.checks.check import UNJUDGED
from thinsection.qc.edits import EDIT_COLORS, QcEdit, edit_feature, edit_of_feature
from thinsection.qc.tissue import TISSUE_COLOR, UNJUDGED_COLOR, Color
from thinsection.report.picture import OVERLAYS, PICTURE, Picture, slide_picture
from thinsection.slide.open import open_slide
from thinsection.store.geojson import Feature, mask_features
from thinsection.store.ledger import SlideLedger
from thinsection.store.slide_ids import check_slide_exists, slide_place
from thinsection.types import Document, MaskArray, MaskFrame

# ends the class of the tissue that a check did not judge, after the check's name
NOT_JUDGED = " not judged"
# class of the tissue that quality control leaves
_USABLE = "Usable tissue"
QC_FORMAT = "thinsection-qc/3"
QC_FILE = "qc.zip"
MASK_USE = "mask_use"
MASK_KEPT = "mask_kept"
EDITS = "edits.geojson"
# the same two with the corrections of a person
EDITED_USE = "edited_mask_use"
EDITED_KEPT = "edited_mask_kept"
TISSUE_MASKS = (MASK_USE, MASK_KEPT, EDITED_USE, EDITED_KEPT)
# format and file of older versions, which stored each mask as a PNG in the same folder
_OLD_FORMAT = "thinsection-qc/2"
QC_JSON = "qc.json"
# largest size of the values in bytes; they take some 20 kB
_MOST_JSON_BYTES = 64 << 20
_REMEDY = "run quality control again"
_DAMAGES = (
    OSError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,  # Pillow raises it for a damaged picture
    zipfile.BadZipFile,
    zlib.error,
)


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
            "import with slides=..."
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
    for name in (EDITED_KEPT, MASK_KEPT):
        if name in stored.names:
            return stored.mask(name)
    return stored.mask(stored.tissue_name)


def read_mask(path: Path) -> MaskArray:
    """Reads a mask from a picture, bool (H, W)."""
    with Image.open(path) as file:
        return np.asarray(file.convert("L")) > 0


@dataclass(frozen=True, kw_only=True)
class StoredQc:
    """Stored quality control of a slide; a mask is read when it is asked for."""

    folder: Path
    document: Document
    # False for folders of older versions
    is_packed: bool

    @property
    def frame(self) -> MaskFrame:
        """Place of the masks on the slide."""
        with damage_named(self.folder):
            width, height = self.document["size_th"]
            width_l0, height_l0 = self.document["size_l0"]
            return MaskFrame(
                size_th=(int(width), int(height)),
                size_l0=(int(width_l0), int(height_l0)),
            )

    @property
    def unjudged_names(self) -> list[str]:
        """Checks with a mask of what they could not judge; results of older versions have none."""
        with damage_named(self.folder):
            return list(self.document.get("unjudged", {}))

    @property
    def names(self) -> list[str]:
        """Names of all masks: those of the checks and of the tissue."""
        with damage_named(self.folder):
            return list(self.document["masks"])

    @property
    def tissue_name(self) -> str:
        """Name of the mask of usable tissue, with the corrections of a person if there are any."""
        return EDITED_USE if EDITED_USE in self.names else MASK_USE

    @property
    def edits(self) -> tuple[QcEdit, ...]:
        """Corrections of a person.

        Raises:
            StoreError: they are damaged.
        """
        if not self.is_packed or not self.document.get("edits"):
            return ()
        with damage_named(self.folder):
            with zipfile.ZipFile(self.folder / QC_FILE) as file:
                collection = parse_json(file.read(EDITS).decode())
            return tuple(map(edit_of_feature, collection["features"]))

    def is_empty(self, name: str) -> bool:
        """True if a mask has no pixel."""
        if not self.is_packed:
            return not self.mask(name).any()
        with damage_named(self.folder):
            return int(self.document["masks"][name]) == 0

    def is_all_judged(self, check: str) -> bool:
        """True if a check judged all tissue that is left."""
        with damage_named(self.folder):
            return int(self.document["unjudged"][check]) == 0

    def unjudged(self, check: str) -> MaskArray:
        """Reads the tissue that a check could not judge, bool (H, W).

        Raises:
            StoreError: it is missing or damaged.
        """
        with damage_named(self.folder):
            num_px = int(self.document["unjudged"][check])
        return self._packed(unjudged_name(check), num_px)

    def mask(self, name: str) -> MaskArray:
        """Reads a mask, bool (H, W).

        Raises:
            StoreError: it is missing or damaged.
        """
        if not self.is_packed:
            return np.asarray(read_png(self.folder / f"{name}.png"), bool)
        with damage_named(self.folder):
            num_px = int(self.document["masks"][name])
        return self._packed(name, num_px)

    def _packed(self, name: str, num_px: int) -> MaskArray:
        """Reads a mask of `qc.zip`; an empty one has no file."""
        width, height = self.frame.size_th
        if num_px == 0:
            return np.zeros((height, width), bool)
        with (
            damage_named(self.folder),
            zipfile.ZipFile(self.folder / QC_FILE) as file,
            file.open(f"{name}.tif") as member,
            Image.open(member) as picture,
        ):
            if picture.size != (width, height) or picture.mode != "1":
                raise ValueError(f"{name} is not a mask of {width} x {height} px")
            return np.array(picture)


def unjudged_name(check: str) -> str:
    """Name of the mask of the tissue that a check could not judge, without its suffix."""
    return f"{check}_{UNJUDGED}"


def read_qc(folder: Path) -> StoredQc:
    """Opens the stored quality control of a slide; only its values are read.

    Raises:
        StoreError: it is missing, damaged or of another format.
    """
    is_packed = (folder / QC_FILE).is_file()
    with damage_named(folder):
        if is_packed:
            with zipfile.ZipFile(folder / QC_FILE) as file:
                if file.getinfo(QC_JSON).file_size > _MOST_JSON_BYTES:
                    raise ValueError(f"{QC_JSON} is too large")
                document = parse_json(file.read(QC_JSON).decode())
        else:
            document = read_json(folder / QC_JSON)
        found_format = document.get("format")
    wanted_format = QC_FORMAT if is_packed else _OLD_FORMAT
    if found_format != wanted_format:
        raise StoreError(
            f"qc result must be {wanted_format!r}, got {found_format!r} in "
            f"{str(folder)!r}; {_REMEDY}"
        )
    return StoredQc(folder=folder, document=document, is_packed=is_packed)


def has_qc(folder: Path) -> bool:
    """True if a folder has the stored quality control of a slide."""
    return (folder / QC_FILE).is_file() or (folder / QC_JSON).is_file()


def damage_named(folder: Path) -> AbstractContextManager[None]:
    """Raises StoreError with the folder and what to do, for whatever a damaged file causes."""
    return rewording(
        "qc result must be complete",
        folder,
        *_DAMAGES,
        error=StoreError,
        more=f"; {_REMEDY}",
    )


def read_png(path: Path) -> npt.NDArray[Any]:
    """Reads the pixels of a stored picture.

    Raises:
        StoreError: it is missing or damaged.
    """
    with damage_named(path), Image.open(path) as picture:
        return np.array(picture)


@dataclass(frozen=True, kw_only=True)
class MaskOutline:
    """Outline that is not empty, of a stored mask or of a correction; `features` computes it."""

    name: str  # name of the annotation and of its class
    color: Color
    features: Callable[[], list[Feature]]  # makes the annotations, in level-0 pixels
    is_shown_only: bool = False  # the check only shows it, and the tissue stays


def _outline_of_mask(
    name: str,
    color: Color,
    frame: MaskFrame,
    read: Callable[[], MaskArray],
    *,
    is_locked: bool = False,
) -> MaskOutline:
    """Outline of a mask, bool (H, W), that `read` reads. Memory: as `mask_features`.

    QuPath does not change the outline of a locked annotation.
    """

    def features() -> list[Feature]:
        outlines = mask_features([(name, read(), color)], frame)
        if is_locked:
            for outline in outlines:
                outline["properties"]["isLocked"] = True
        return outlines

    return MaskOutline(name=name, color=color, features=features)


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
    return [_outline_of_mask("Tissue", TISSUE_COLOR, frame, lambda: mask)]


def _qc_outlines(folder: Path) -> list[MaskOutline]:
    """Outlines of the usable tissue, what each check marked, what it did not judge; corrections.

    What a check marked is its own answer, without corrections.
    """
    stored = read_qc(folder)
    tissue = stored.tissue_name
    checks = [name for name in stored.names if name not in TISSUE_MASKS]
    outlines = []
    for name in (tissue, *checks):
        if stored.is_empty(name):
            continue
        with damage_named(folder):
            red, green, blue = stored.document["colors"][
                MASK_USE if name == tissue else name
            ]
        outline = _outline_of_mask(
            _USABLE if name == tissue else name,
            (int(red), int(green), int(blue)),
            stored.frame,
            partial(stored.mask, name),
            # a brush must change only what a person draws
            is_locked=True,
        )
        is_shown_only = name in stored.document.get("shown", ())
        outlines.append(replace(outline, is_shown_only=is_shown_only))
    for name in stored.unjudged_names:
        if stored.is_all_judged(name):
            continue
        outline = _outline_of_mask(
            f"{name}{NOT_JUDGED}",
            UNJUDGED_COLOR,
            stored.frame,
            partial(stored.unjudged, name),
            is_locked=True,
        )
        outlines.append(outline)
    by_class: dict[str, list[Feature]] = {}
    for edit in stored.edits:
        by_class.setdefault(edit.class_name, []).append(edit_feature(edit))
    for name, features in by_class.items():
        color = EDIT_COLORS[name.partition(" ")[0]]
        outlines.append(
            MaskOutline(name=name, color=color, features=partial(list, features))
        )
    return outlines
