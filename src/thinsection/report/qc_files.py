"""Stored quality control of a slide: one file, `qc.zip`, with the values and the masks.

    qc.zip
      qc.json       scores, warnings, pipeline, colours; the number of pixels of each mask
      mask_use.tif  tissue that passed every check
      CHECK.tif     area that a check marked

The masks have one bit per pixel, in TIFF with CCITT compression, which ImageJ and QuPath open; an
empty mask has no file. Folders of older versions have `qc.json` and a PNG for each mask.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import atomic_path, parse_json, read_json
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.qc.result import QcResult
from thinsection.qc.tissue import TISSUE_COLOR
from thinsection.report.picture import PICTURE_NAME, save_picture
from thinsection.types import Document, MaskArray, MaskFrame, RgbArray

QC_FORMAT = "thinsection-qc/3"
QC_FILE = "qc.zip"
MASK_USE = "mask_use"
MASK_KEPT = "mask_kept"
# format and file of older versions, which stored each mask as a PNG in the same folder
_OLD_FORMAT = "thinsection-qc/2"
_QC_JSON = "qc.json"
# largest size of the values in bytes; they take some 20 kB
_MOST_JSON_BYTES = 64 << 20
# a fixed time, so that equal results give equal bytes
_TIME = (1980, 1, 1, 0, 0, 0)
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
    def names(self) -> list[str]:
        """Names of all masks: those of the checks, `mask_use`, and `mask_kept` if it exists."""
        with damage_named(self.folder):
            return list(self.document["masks"])

    def is_empty(self, name: str) -> bool:
        """True if a mask has no pixel."""
        if not self.is_packed:
            return not self.mask(name).any()
        with damage_named(self.folder):
            return int(self.document["masks"][name]) == 0

    def mask(self, name: str) -> MaskArray:
        """Reads a mask, bool (H, W).

        Raises:
            StoreError: it is missing or damaged.
        """
        if not self.is_packed:
            return np.asarray(read_png(self.folder / f"{name}.png"), bool)
        width, height = self.frame.size_th
        if self.is_empty(name):
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


def pack_qc(folder: Path, document: Document, masks: Mapping[str, MaskArray]) -> None:
    """Writes `qc.zip` atomically; equal arguments give equal bytes.

    Args:
        folder: folder of the slide's quality control.
        document: values for `qc.json`; `masks` is added to them.
        masks: bool (H, W) by name.
    """
    num_pixels = {name: int(np.count_nonzero(mask)) for name, mask in masks.items()}
    text = json.dumps(document | {"masks": num_pixels}, indent=2, allow_nan=False)
    with atomic_path(folder / QC_FILE) as tmp, zipfile.ZipFile(tmp, "w") as file:
        _add_member(file, _QC_JSON, text.encode())
        for name, mask in masks.items():
            if num_pixels[name]:
                buffer = io.BytesIO()
                image = Image.fromarray(mask)
                image.save(buffer, format="TIFF", compression="group4")
                _add_member(file, f"{name}.tif", buffer.getvalue())


def _add_member(file: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, _TIME)
    info.external_attr = 0o644 << 16
    file.writestr(info, content, zipfile.ZIP_DEFLATED)


def read_qc(folder: Path) -> StoredQc:
    """Opens the stored quality control of a slide; only its values are read.

    Raises:
        StoreError: it is missing, damaged or of another format.
    """
    is_packed = (folder / QC_FILE).is_file()
    with damage_named(folder):
        if is_packed:
            with zipfile.ZipFile(folder / QC_FILE) as file:
                if file.getinfo(_QC_JSON).file_size > _MOST_JSON_BYTES:
                    raise ValueError(f"{_QC_JSON} is too large")
                document = parse_json(file.read(_QC_JSON).decode())
        else:
            document = read_json(folder / _QC_JSON)
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
    return (folder / QC_FILE).is_file() or (folder / _QC_JSON).is_file()


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


def write_png(path: Path, pixels: npt.NDArray[Any]) -> None:
    """Writes pixels as a PNG, atomically."""
    with atomic_path(path) as tmp:
        Image.fromarray(pixels).save(tmp, format="PNG")


def write_qc(
    result: QcResult, folder: Path, *, key: str = "", picture: RgbArray | None = None
) -> None:
    """Writes `picture.jpg` and, last, `qc.zip`; each file atomically.

    `qc.zip` has the values and the masks (`qc_store.py`): `mask_use` is the tissue in use,
    `mask_kept` the tissue with overruled checks if that is more, `<check>` the area that a check
    affected.

    Args:
        result: result of quality control for a slide.
        folder: folder of the files.
        key: key by which a later run recognises the result.
        picture: uint8 (H, W, 3), the slide's picture; None stores the work image.
    """
    save_picture(folder / PICTURE_NAME, result.rgb if picture is None else picture)
    masks = {**result.masks, MASK_USE: result.mask_use}
    if result.mask_kept is not None:
        masks[MASK_KEPT] = result.mask_kept
    densities = {}
    for name, table in result.tables.items():
        if table.dtype != np.uint8:
            densities[name] = table.tolist()
    frame = result.frame
    document: Document = {
        "format": QC_FORMAT,
        "key": key,
        "warnings": result.warnings,
        "facts": result.facts,
        "scores": result.scores,
        "mpp_th": result.mpp_th,
        "crossings": result.transfers,
        "size_l0": frame.size_l0,
        "size_th": frame.size_th,
        "colors": result.colors | {MASK_USE: TISSUE_COLOR},
        "pipeline": result.pipeline.as_mapping(),
        "tables": densities,
    }
    pack_qc(folder, document, masks)


def load_qc(folder: Path) -> QcResult:
    """Reads the result that `write_qc` stored; no slide is opened.

    It equals the original, but its work image is made from the stored picture, and it has no
    seconds and no tables that are pictures. Results of older versions have all of them.

    Memory:
        O(H * W) for each mask, and the work image.

    Raises:
        StoreError, ConfigError: files are missing, damaged, of another format or check.
    """
    stored = read_qc(folder)
    document = stored.document
    masks: dict[str, MaskArray] = {name: stored.mask(name) for name in stored.names}
    with damage_named(folder):
        tables = {}
        for name, rows in document["tables"].items():
            # older versions stored a picture in the place of rows
            is_picture = rows is None
            tables[name] = (
                read_png(folder / f"{name}.png") if is_picture else np.array(rows)
            )
        return QcResult(
            pipeline=pipeline_from_mapping(document["pipeline"]),
            facts=document["facts"],
            scores=document["scores"],
            mpp_th=document["mpp_th"],
            # older versions stored them, so that equal results had different bytes
            seconds=document.get("seconds", {}),
            transfers=document["crossings"],
            warnings=tuple(document["warnings"]),
            mask_use=masks.pop(MASK_USE),
            mask_kept=masks.pop(MASK_KEPT, None),
            masks=masks,
            tables=tables,
            frame=stored.frame,
            rgb=_work_image(stored),
            is_stored=True,
        )


def _work_image(stored: StoredQc) -> RgbArray:
    """The work image: exact in results of older versions, else made from the picture."""
    if not stored.is_packed:
        return read_png(stored.folder / "thumbnail.png")
    path = stored.folder / PICTURE_NAME
    if not path.is_file():
        raise StoreError(
            f"qc result must have {PICTURE_NAME}, got none in {str(stored.folder)!r}; "
            "run quality control again"
        )
    with Image.open(path) as picture:
        return np.array(picture.convert("RGB").resize(stored.frame.size_th))
