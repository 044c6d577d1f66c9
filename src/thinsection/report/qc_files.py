"""Writes the quality control of a slide as `qc.zip`, and makes a result of a stored one.

`stored.py` says what the file holds, and reads it.
"""

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays.packed import PackedArrays
from thinsection.errors import StoreError
from thinsection.files.atomic import atomic_path
from thinsection.qc.edits import edit_feature, edits_key
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.qc.result import QcResult
from thinsection.qc.tissue import TISSUE_COLOR
from thinsection.report.picture import PICTURE_NAME, save_picture
from thinsection.report.stored import (
    EDITED_KEPT,
    EDITED_USE,
    EDITS,
    MASK_KEPT,
    MASK_USE,
    QC_FILE,
    QC_FORMAT,
    QC_JSON,
    StoredQc,
    damage_named,
    read_png,
    read_qc,
    unjudged_name,
)
from thinsection.types import Document, MaskArray, RgbArray

# a fixed time, so that equal results give equal bytes
_TIME = (1980, 1, 1, 0, 0, 0)


def pack_qc(
    folder: Path,
    document: Document,
    areas: Mapping[str, MaskArray],
    tissue: Mapping[str, MaskArray],
    *,
    unjudged: Mapping[str, MaskArray],
    features: Sequence[Document] = (),
) -> None:
    """Writes `qc.zip` atomically; equal arguments give equal bytes.

    Args:
        folder: folder of the slide's quality control.
        document: values for `qc.json`; `masks` and `unjudged` are added to them.
        areas: what each check found, bool (H, W) by check.
        tissue: masks of usable tissue, bool (H, W) by name.
        unjudged: bool (H, W) by check, tissue that the check could not judge.
        features: corrections as annotations; without any there is no `edits.geojson`.

    Memory: one mask, if the mappings unpack a mask when it is read.
    """

    def masks() -> Iterator[tuple[str, MaskArray]]:
        # each mask is unpacked when it is its turn
        return chain(areas.items(), tissue.items())

    counts: Document = {
        "masks": {name: int(np.count_nonzero(mask)) for name, mask in masks()},
        "unjudged": {
            name: int(np.count_nonzero(mask)) for name, mask in unjudged.items()
        },
    }
    text = json.dumps(document | counts, indent=2, allow_nan=False)
    with atomic_path(folder / QC_FILE) as tmp, zipfile.ZipFile(tmp, "w") as file:
        _add_member(file, QC_JSON, text.encode())
        for name, mask in chain(masks(), _named_unjudged(unjudged)):
            if not mask.any():
                continue
            buffer = io.BytesIO()
            image = Image.fromarray(mask)
            image.save(buffer, format="TIFF", compression="group4")
            _add_member(file, f"{name}.tif", buffer.getvalue())
        if features:
            collection = {"type": "FeatureCollection", "features": features}
            _add_member(file, EDITS, json.dumps(collection, allow_nan=False).encode())


def masks_of(result: QcResult) -> Iterator[tuple[str, MaskArray]]:
    """Names and masks of a result, bool (H, W): of its checks, and the tissue in use."""
    yield from result.masks.items()
    yield MASK_USE, result.mask_use
    if result.mask_kept is not None:
        yield MASK_KEPT, result.mask_kept


def _named_unjudged(
    unjudged: Mapping[str, MaskArray],
) -> Iterator[tuple[str, MaskArray]]:
    """Names of files and masks of tissue that a check did not judge."""
    for name, mask in unjudged.items():
        yield unjudged_name(name), mask


def _add_member(file: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, _TIME)
    info.external_attr = 0o644 << 16
    file.writestr(info, content, zipfile.ZIP_DEFLATED)


def write_png(path: Path, pixels: npt.NDArray[Any]) -> None:
    """Writes pixels as a PNG, atomically."""
    with atomic_path(path) as tmp:
        Image.fromarray(pixels).save(tmp, format="PNG")


def write_qc(
    result: QcResult,
    folder: str | Path,
    *,
    key: str = "",
    picture: RgbArray | None = None,
) -> None:
    """Writes `picture.jpg` and, last, `qc.zip`; each file atomically.

    `qc.zip` has the values and the masks (`stored.py`): `mask_use` is the tissue in use,
    `mask_kept` the tissue with overruled checks if that is more, `<check>` the area that a check
    affected, `<check>_unjudged` the tissue that it could not judge. Corrections of
    a person are stored beside the answers of the checks.

    Args:
        result: result of quality control for a slide.
        folder: folder of the files.
        key: key by which a later run recognises the result.
        picture: uint8 (H, W, 3), the slide's picture; None stores the work image.
    """
    folder = Path(folder)
    save_picture(folder / PICTURE_NAME, result.rgb if picture is None else picture)
    write_values(result, folder, key=key)


def write_values(result: QcResult, folder: Path, *, key: str) -> None:
    """Writes `qc.zip` alone, as `write_qc`; a picture must be there.

    The masks of the checks are those before corrections. Beside them are the corrections, the
    tissue with these corrections, and the values that differ.
    """
    edited = result
    result = edited.checked or edited
    tissue = {MASK_USE: result.mask_use}
    if result.mask_kept is not None:
        tissue[MASK_KEPT] = result.mask_kept
    edits: Document = {}
    if edited.edits:
        tissue[EDITED_USE] = edited.mask_use
        if edited.mask_kept is not None:
            tissue[EDITED_KEPT] = edited.mask_kept
        scores = {
            name: value
            for name, value in edited.scores.items()
            if result.scores.get(name) != value
        }
        edits = {
            "key": edits_key(edited.edits),
            "areas": len(edited.edits),
            "scores": scores,
            "warnings": edited.warnings[len(result.warnings) :],
        }
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
        "overruled": result.overruled,
        # checks that only show what they found
        "shown": sorted(result.shown & result.masks.keys()),
    }
    if edits:
        document["edits"] = edits
    features = [edit_feature(edit) for edit in edited.edits]
    pack_qc(
        folder,
        document,
        result.masks,
        tissue,
        unjudged=result.unjudged,
        features=features,
    )


def load_qc(folder: str | Path) -> QcResult:
    """Reads the result that `write_qc` stored; no slide is opened.

    It equals the original, but its work image is made from the stored picture, and it has no
    seconds and no tables that are pictures. Results of older versions have all of them.

    Memory:
        The work image, one mask, and the others compressed: about 3 % of a byte per pixel for each.

    Raises:
        StoreError, ConfigError: files are missing, damaged, of another format or check.
    """
    folder = Path(folder)
    stored = read_qc(folder)
    document = stored.document
    masks = PackedArrays()
    for name in stored.names:
        if name not in (EDITED_USE, EDITED_KEPT):
            masks[name] = stored.mask(name)
    unjudged = PackedArrays()
    for name in stored.unjudged_names:
        unjudged[name] = stored.unjudged(name)
    with damage_named(folder):
        tables = {}
        for name, rows in document["tables"].items():
            # older versions stored a picture in the place of rows
            is_picture = rows is None
            tables[name] = (
                read_png(folder / f"{name}.png") if is_picture else np.array(rows)
            )
        result = QcResult(
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
            unjudged=unjudged,
            tables=tables,
            frame=stored.frame,
            rgb=_work_image(stored),
            # older versions did not store them
            overruled=tuple(document.get("overruled", ())),
            is_stored=True,
        )
        return result.with_edits(stored.edits)


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
