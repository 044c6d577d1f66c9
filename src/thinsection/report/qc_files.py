"""The files that quality control leaves for one slide, and the result read back from them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.errors import StoreError
from thinsection.files.atomic import atomic_path, write_json
from thinsection.files.tables import write_table
from thinsection.qc.checks.check import Score
from thinsection.qc.pictures import TISSUE_COLOR, histogram_picture
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.qc.result import QcResult
from thinsection.store.geojson import write_masks_geojson
from thinsection.types import MaskFrame

Row = Mapping[str, Score]  # of one slide, by column name
QC_FORMAT = "thinsection-qc/2"
QC_JSON = "qc.json"  # written last: where it is, everything is


def write_qc(result: QcResult, folder: Path, *, key: str = "") -> None:
    """Writes pictures, masks, GeoJSON and, last, `qc.json`; each file atomically.

    `<check>.png` is what a check touched, `mask_use.png` what is left (both white = True),
    `thumbnail.png` the work image, `overlay.png` both together, `histogram.png` the colours in
    the mask, `qc.geojson` all masks in level-0 px.

    Args:
        result: of `run_qc`.
        folder: made if it is not there.
        key: of `qc_key`, kept in `qc.json` so that a later run knows the result again.
    """
    for name, mask in result.masks.items():
        write_png(folder / f"{name}.png", mask)
    write_png(folder / "mask_use.png", result.mask_use)
    write_png(folder / "thumbnail.png", result.rgb)
    write_png(folder / "overlay.png", result.overlay())
    for name, table in result.tables.items():
        picture = table if _is_picture(table) else histogram_picture(table)
        write_png(folder / f"{name}.png", picture)
    masks = [("Usable tissue", result.mask_use, TISSUE_COLOR)]
    masks += [(name, result.masks[name], color) for name, color in result.colors.items()]
    write_masks_geojson(folder / "qc.geojson", masks, result.frame)
    write_json(folder / QC_JSON, qc_document(result, key))


def qc_document(result: QcResult, key: str) -> dict[str, Any]:
    """What `qc.json` holds."""
    return {
        "format": QC_FORMAT,
        "key": key,
        "facts": dict(result.facts),
        "scores": dict(result.scores),
        "warnings": list(result.warnings),
        "size_l0": list(result.frame.size_l0),
        "size_th": list(result.frame.size_th),
        "mpp_th": result.mpp_th,
        "masks": [*result.masks, "mask_use"],
        "pipeline": result.pipeline.as_mapping(),
        "seconds": dict(result.seconds),
        "crossings": dict(result.crossings),
        "tables": {n: None if _is_picture(t) else t.tolist() for n, t in result.tables.items()},
    }


def load_qc(folder: Path) -> QcResult:
    """The result that `write_qc` left in a folder, equal to the fresh one; no slide is opened.

    Args:
        folder: with `qc.json` and the PNG files beside it.

    Memory: O(H * W) for each mask, and the work image.

    Raises:
        StoreError: the files are not there, are damaged, or are of another format.
        ConfigError: the pipeline names a check that is not installed.
    """
    document = _read_document(folder / QC_JSON)
    names = [name for name in document["masks"] if name != "mask_use"]
    return QcResult(
        mask_use=_read_png(folder / "mask_use.png"),
        frame=MaskFrame(size_th=tuple(document["size_th"]), size_l0=tuple(document["size_l0"])),
        masks={name: _read_png(folder / f"{name}.png") for name in names},
        scores=document["scores"],
        warnings=tuple(document["warnings"]),
        pipeline=pipeline_from_mapping(document["pipeline"]),
        rgb=_read_png(folder / "thumbnail.png"),
        mpp_th=document["mpp_th"],
        facts=document["facts"],
        tables={
            name: _read_png(folder / f"{name}.png") if rows is None else np.array(rows)
            for name, rows in document["tables"].items()
        },
        seconds=document["seconds"],
        crossings=document["crossings"],
    )


def _read_document(path: Path) -> dict[str, Any]:
    remedy = "run quality control again"
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"qc result must be whole, got {str(path)!r}: {error}; {remedy}") from None
    if document.get("format") != QC_FORMAT:
        found = document.get("format")
        raise StoreError(
            f"qc result must be {QC_FORMAT!r}, got {found!r} in {str(path)!r}; {remedy}"
        )
    return document


def _read_png(path: Path) -> npt.NDArray[Any]:
    try:
        with Image.open(path) as picture:
            return np.array(picture)
    except (OSError, SyntaxError) as error:  # a damaged PNG is a SyntaxError to Pillow
        raise StoreError(
            f"qc picture must be readable, got {str(path)!r}: {error}; run quality control again"
        ) from None


def _is_picture(table: npt.NDArray[Any]) -> bool:
    return table.dtype == np.uint8


def write_png(path: Path, picture: npt.NDArray[Any]) -> None:
    """Writes bool, gray or RGB as PNG, atomically."""
    with atomic_path(path) as tmp:
        Image.fromarray(picture).save(tmp, format="PNG")


def write_qc_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes one line per slide; columns are the union of all rows', in order of appearance.

    A row without a column has an empty cell there, so that rows never misalign.
    """
    plain = [{name: plain_number(value) for name, value in row.items()} for row in rows]
    write_table(path, plain)


def plain_number(value: Score) -> Score | int:
    """Whole numbers without a decimal point."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value
