"""The files that quality control leaves for one slide, and the result read back from them."""

import colorsys
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from thinsection.errors import StoreError
from thinsection.files.atomic import atomic_path, write_json
from thinsection.qc.engine import QcResult
from thinsection.qc.light import Intensity
from thinsection.qc.pipeline import Check, pipeline_from_mapping
from thinsection.store.geojson import TISSUE_COLOR, Color, write_masks_geojson
from thinsection.types import MaskArray, MaskFrame, RgbArray

QC_FORMAT = "thinsection-qc/2"
QC_JSON = "qc.json"  # written last: where it is, everything is
GLASS_COLOR: Color = (222, 226, 231)
_DIMMED = 0.35  # share of its own colour that a px out of use keeps in the overlay


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
    colors = check_colors(result)
    for name, mask in result.masks.items():
        write_png(folder / f"{name}.png", mask)
    write_png(folder / "mask_use.png", result.mask_use)
    write_png(folder / "thumbnail.png", result.rgb)
    write_png(folder / "overlay.png", overlay(result))
    for name, table in result.tables.items():
        picture = table if _is_picture(table) else histogram_picture(table)
        write_png(folder / f"{name}.png", picture)
    masks = [("Usable tissue", result.mask_use, TISSUE_COLOR)]
    masks += [(name, mask, colors[name]) for name, mask in result.masks.items()]
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


def check_colors(result: QcResult) -> dict[str, Color]:
    """A colour per check with a mask: gray for glass, else spread over the hues."""
    glass = {c.name for c in result.pipeline.checks if removes_glass(c)}
    names = [name for name in result.masks if name not in glass]
    hues = [(0.02 + n * 0.618) % 1.0 for n in range(len(names))]
    rgb = [colorsys.hsv_to_rgb(hue, 0.85, 0.9) for hue in hues]
    colors = {
        name: (round(r * 255), round(g * 255), round(b * 255))
        for name, (r, g, b) in zip(names, rgb, strict=True)
    }
    return {name: colors.get(name, GLASS_COLOR) for name in result.masks}


def removes_glass(check: Check) -> bool:
    """Whether what a check removes is plain background."""
    if isinstance(check.params, Intensity):
        return not check.params.invert
    return check.kind in ("local_minimum", "otsu", "brightest_cluster")


def overlay(result: QcResult) -> RgbArray:
    """The work image: out of use dimmed and tinted by the check that took it, the rest outlined."""
    picture = result.rgb.astype(np.float32)
    tint = np.full_like(picture, 255.0)
    for name, color in check_colors(result).items():
        tint[result.masks[name] & ~result.mask_use] = color
    out_of_use = ~result.mask_use
    picture[out_of_use] = picture[out_of_use] * _DIMMED + tint[out_of_use] * (1 - _DIMMED) * 0.9
    picture[_outline(result.mask_use)] = TISSUE_COLOR
    return np.clip(picture, 0, 255).astype(np.uint8)


def _outline(mask: MaskArray) -> MaskArray:
    """Px of the mask with a 4-neighbour outside it."""
    padded = np.pad(mask, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return np.asarray(mask & ~inner)


def histogram_picture(density: npt.NDArray[Any], *, size: tuple[int, int] = (420, 200)) -> RgbArray:
    """Steps of the density of R, G and B, (bins, 3), over 0 to 255."""
    width, height = size
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    highest = max(float(density.max()), 1e-12)
    for channel, color in enumerate(("#c0392b", "#27ae60", "#2e5fc0")):
        points: list[tuple[float, float]] = []
        for n, value in enumerate(density[:, channel]):
            y = height - 12 - (height - 24) * float(value) / highest
            points += [(n * width / len(density), y), ((n + 1) * width / len(density), y)]
        draw.line(points, fill=color, width=2)
    draw.line([(0, height - 12), (width, height - 12)], fill="#888888")
    return np.asarray(image)


def write_png(path: Path, picture: npt.NDArray[Any]) -> None:
    """Writes bool, gray or RGB as PNG, atomically."""
    with atomic_path(path) as tmp:
        Image.fromarray(picture).save(tmp, format="PNG")
