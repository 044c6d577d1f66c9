"""The files that quality control leaves for one slide, and the result read back from them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from thinsection.errors import StoreError
from thinsection.files.atomic import atomic_path, write_json
from thinsection.files.tables import write_table
from thinsection.qc.checks.check import Score
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.qc.result import QcResult
from thinsection.qc.tissue import TISSUE_COLOR
from thinsection.store.geojson import write_masks_geojson
from thinsection.types import MaskFrame, RgbArray

Row = Mapping[str, Score]  # of one slide, by column name
QC_FORMAT = "thinsection-qc/2"
QC_JSON = "qc.json"  # written last: where it is, everything is
_HISTOGRAM_PX = (420, 200)  # width, height
_REMEDY = "run quality control again"


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
    drawn = {n: t if _is_picture(t) else _histogram(t) for n, t in result.tables.items()}
    pictures = {**result.masks, "mask_use": result.mask_use, "thumbnail": result.rgb}
    for name, picture in {**pictures, "overlay": result.overlay(), **drawn}.items():
        write_png(folder / f"{name}.png", picture)
    masks = [("Usable tissue", result.mask_use, TISSUE_COLOR)]
    masks += [(name, result.masks[name], color) for name, color in result.colors.items()]
    write_masks_geojson(folder / "qc.geojson", masks, result.frame)
    document = {
        "format": QC_FORMAT,
        "key": key,
        "facts": result.facts,
        "scores": result.scores,
        "warnings": result.warnings,
        "size_l0": result.frame.size_l0,
        "size_th": result.frame.size_th,
        "mpp_th": result.mpp_th,
        "masks": [*result.masks, "mask_use"],
        "pipeline": result.pipeline.as_mapping(),
        "seconds": result.seconds,
        "crossings": result.crossings,
        "tables": {n: None if _is_picture(t) else t.tolist() for n, t in result.tables.items()},
    }
    write_json(folder / QC_JSON, document)


def load_qc(folder: Path) -> QcResult:
    """The result that `write_qc` left in a folder, equal to the fresh one; no slide is opened.

    Memory: O(H * W) for each mask, and the work image.

    Raises:
        StoreError: the files are not there, are damaged, or are of another format.
        ConfigError: the pipeline names a check that is not installed.
    """
    path = folder / QC_JSON
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = f"{str(path)!r}: {error}"
        raise StoreError(f"qc result must be whole, got {got}; {_REMEDY}") from None
    if document.get("format") != QC_FORMAT:
        got = f"{document.get('format')!r} in {str(path)!r}"
        raise StoreError(f"qc result must be {QC_FORMAT!r}, got {got}; {_REMEDY}")
    masks = {name: _read_png(folder / f"{name}.png") for name in document["masks"]}
    tables = {
        name: _read_png(folder / f"{name}.png") if rows is None else np.array(rows)
        for name, rows in document["tables"].items()
    }
    same = ("scores", "mpp_th", "facts", "seconds", "crossings")
    return QcResult(
        mask_use=masks.pop("mask_use"),
        frame=MaskFrame(size_th=tuple(document["size_th"]), size_l0=tuple(document["size_l0"])),
        masks=masks,
        warnings=tuple(document["warnings"]),
        pipeline=pipeline_from_mapping(document["pipeline"]),
        rgb=_read_png(folder / "thumbnail.png"),
        tables=tables,
        **{name: document[name] for name in same},
    )


def _read_png(path: Path) -> npt.NDArray[Any]:
    try:
        with Image.open(path) as picture:
            return np.array(picture)
    except (OSError, SyntaxError) as error:  # a damaged PNG is a SyntaxError to Pillow
        got = f"{str(path)!r}: {error}"
        raise StoreError(f"qc picture must be readable, got {got}; {_REMEDY}") from None


def _is_picture(table: npt.NDArray[Any]) -> bool:
    return table.dtype == np.uint8


def _histogram(density: npt.NDArray[Any]) -> RgbArray:
    """Steps of the density of R, G and B, (bins, 3), over 0 to 255."""
    width, height = _HISTOGRAM_PX
    image = Image.new("RGB", _HISTOGRAM_PX, "white")
    draw = ImageDraw.Draw(image)
    y = height - 12 - (height - 24) * density / max(float(density.max()), 1e-12)
    x = np.arange(len(density) + 1) * width / len(density)
    for channel, color in enumerate(("#c0392b", "#27ae60", "#2e5fc0")):
        steps = zip(np.repeat(x, 2)[1:-1].tolist(), np.repeat(y[:, channel], 2).tolist())
        draw.line(list(steps), fill=color, width=2)
    draw.line([(0, height - 12), (width, height - 12)], fill="#888888")
    return np.asarray(image)


def write_png(path: Path, picture: npt.NDArray[Any]) -> None:
    """Writes bool, gray or RGB as PNG, atomically."""
    with atomic_path(path) as tmp:
        Image.fromarray(picture).save(tmp, format="PNG")


def write_qc_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes one line per slide; columns are the union of all rows', in order of appearance.

    A row without a column has an empty cell there, so that rows never misalign.
    """
    write_table(path, [{name: plain_number(v) for name, v in row.items()} for row in rows])


def plain_number(value: Score) -> Score | int:
    """Whole numbers without a decimal point."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value
