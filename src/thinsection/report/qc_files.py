"""Writes and reads the files of a slide's quality control."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import atomic_path, write_json
from thinsection.files.json_text import read_json
from thinsection.qc.checks.measures import SavedMask
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.qc.result import QcResult
from thinsection.qc.tissue import TISSUE_COLOR
from thinsection.report.draw import write_drawing
from thinsection.report.layers import Layer, Outline, Tint
from thinsection.report.picture import Picture, save_picture
from thinsection.store.geojson import write_masks_geojson
from thinsection.types import MaskFrame, RgbArray

QC_FORMAT = "thinsection-qc/2"
# written last, so that its presence means that all files are complete
QC_JSON = "qc.json"
# width and height in pixels
_HISTOGRAM_PX = (420, 200)
# pixels above and below the curves
_HISTOGRAM_MARGIN = 12
_CHANNEL_COLORS = ("#c0392b", "#27ae60", "#2e5fc0")
_REMEDY = "run quality control again"


def write_qc(
    result: QcResult, folder: Path, *, key: str = "", picture: RgbArray | None = None
) -> None:
    """Writes pictures, masks, GeoJSON and, last, `qc.json`; each file atomically.

    `<check>.png` is the area that a check affected, `mask_use.png` the tissue in use (both white =
    True), `mask_kept.png` the tissue with overruled checks if that is more. `thumbnail.png` is the
    work image, `overlay.jpg` shows it with the masks and a legend, `histogram.png` the colours in
    the mask, `qc.geojson` all masks in level-0 pixels.

    Args:
        result: result of quality control for a slide.
        folder: folder of the files.
        key: key by which a later run recognises the result.
        picture: uint8 (H, W, 3), the slide's picture; the overlay is drawn on it, and it is stored
            as `picture.jpg`. None draws on the work image.
    """
    densities = {}
    pictures: dict[str, npt.NDArray[np.generic]] = {
        **result.masks,
        "mask_use": result.mask_use,
        "thumbnail": result.rgb,
    }
    if result.mask_kept is not None:
        pictures["mask_kept"] = result.mask_kept
    mask_names = [name for name in pictures if name != "thumbnail"]
    for name, table in result.tables.items():
        if table.dtype == np.uint8:
            pictures[name] = table
        else:
            densities[name] = table
            pictures[name] = _histogram(table)
    for name, pixels in pictures.items():
        write_png(folder / f"{name}.png", pixels)
    if picture is not None:
        save_picture(folder / "picture.jpg", picture)
    _write_overlay(result, folder / "overlay.jpg", picture)
    # older versions wrote a PNG
    (folder / "overlay.png").unlink(missing_ok=True)
    _write_outlines(result, folder)
    tables: dict[str, Any] = dict.fromkeys(result.tables)
    for name, density in densities.items():
        tables[name] = density.tolist()
    frame = result.frame
    document = {
        "format": QC_FORMAT,
        "key": key,
        "warnings": result.warnings,
        "facts": result.facts,
        "scores": result.scores,
        "mpp_th": result.mpp_th,
        "seconds": result.seconds,
        "crossings": result.transfers,
        "size_l0": frame.size_l0,
        "size_th": frame.size_th,
        "masks": mask_names,
        "pipeline": result.pipeline.as_mapping(),
        "tables": tables,
    }
    write_json(folder / QC_JSON, document)


def _write_overlay(result: QcResult, path: Path, picture: RgbArray | None) -> None:
    """Draws the masks over the slide's picture, or the work image."""
    downsample_x, downsample_y = result.frame.downsample_xy
    base = Picture(
        rgb=result.rgb if picture is None else picture,
        size_l0=result.frame.size_l0,
        slide_mpp=(result.mpp_th / downsample_x, result.mpp_th / downsample_y),
    )
    write_drawing(path, base, _overlay_layers(result))


def _write_outlines(result: QcResult, folder: Path) -> None:
    """Writes the GeoJSON of all masks, and of each saved mask that requests its own."""
    for check in result.pipeline.checks:
        if not isinstance(check, SavedMask) or not check.geojson:
            continue
        if check.name in result.tables:
            saved = [(check.name, result.tables[check.name] > 0, TISSUE_COLOR)]
            write_masks_geojson(folder / f"{check.name}.geojson", saved, result.frame)
    masks = [("Usable tissue", result.mask_use, TISSUE_COLOR)]
    for name, color in result.colors.items():
        masks.append((name, result.masks[name], color))
    write_masks_geojson(folder / "qc.geojson", masks, result.frame)


def _overlay_layers(result: QcResult) -> list[Layer]:
    """Layers of the overlay: passed tissue is unchanged, other areas lighter, the largest first."""
    use = result.mask_use
    num_px = max(1, use.size)
    glass_checks = {
        check.name
        for check in result.pipeline.checks
        if check.removes_glass or check.fills
    }
    taken = {
        name: mask & ~use
        for name, mask in result.masks.items()
        if name not in glass_checks
    }
    counts = {name: int(mask.sum()) for name, mask in taken.items()}
    layers: list[Layer] = [Tint(~use, color=(255, 255, 255), opacity=0.5)]
    for name in sorted(counts, key=lambda name: -counts[name]):
        if counts[name]:
            words = name.replace("_", " ")
            label = f"{words}, {counts[name] / num_px:.2%} of the slide"
            layers.append(Tint(taken[name], label, result.colors[name]))
    what = "tissue without artefacts" if taken else "tissue"
    layers.append(Outline(use, f"{what}, {use.mean():.1%} of the slide"))
    return layers


def _histogram(density: npt.NDArray[Any]) -> RgbArray:
    """Steps of the density of R, G and B, (bins, 3), over 0 to 255."""
    width, height = _HISTOGRAM_PX
    image = Image.new("RGB", _HISTOGRAM_PX, "white")
    pen = ImageDraw.Draw(image)
    baseline = height - _HISTOGRAM_MARGIN
    highest = max(float(density.max()), 1e-12)
    y = baseline - (height - 2 * _HISTOGRAM_MARGIN) * density / highest
    x = np.arange(len(density) + 1) * width / len(density)
    for channel, color in enumerate(_CHANNEL_COLORS):
        step_x = np.repeat(x, 2)[1:-1].tolist()
        step_y = np.repeat(y[:, channel], 2).tolist()
        pen.line(list(zip(step_x, step_y)), fill=color, width=2)
    pen.line([(0, baseline), (width, baseline)], fill="#888888")
    return np.asarray(image)


def load_qc(folder: Path) -> QcResult:
    """Reads the result that `write_qc` stored, equal to the original; no slide is opened.

    Memory:
        O(H * W) for each mask, and the work image.

    Raises:
        StoreError, ConfigError: files are missing, damaged, of another format or check.
    """
    path = folder / QC_JSON
    # the file may have a list in place of a table
    damages = (OSError, AttributeError, KeyError, TypeError, ValueError)
    with _rewording("qc result must be complete", path, *damages):
        document = read_json(path)
        found_format = document.get("format")
        if found_format != QC_FORMAT:
            raise StoreError(
                f"qc result must be {QC_FORMAT!r}, got {found_format!r} in {str(path)!r}; "
                f"{_REMEDY}"
            )
        masks = {name: read_png(folder / f"{name}.png") for name in document["masks"]}
        tables = {}
        for name, rows in document["tables"].items():
            is_picture = rows is None
            tables[name] = (
                read_png(folder / f"{name}.png") if is_picture else np.array(rows)
            )
        return QcResult(
            pipeline=pipeline_from_mapping(document["pipeline"]),
            facts=document["facts"],
            scores=document["scores"],
            mpp_th=document["mpp_th"],
            seconds=document["seconds"],
            transfers=document["crossings"],
            warnings=tuple(document["warnings"]),
            mask_use=masks.pop("mask_use"),
            mask_kept=masks.pop("mask_kept", None),
            masks=masks,
            tables=tables,
            frame=MaskFrame(
                size_th=tuple(document["size_th"]), size_l0=tuple(document["size_l0"])
            ),
            rgb=read_png(folder / "thumbnail.png"),
        )


def _rewording(
    rule: str, path: Path, *damages: type[Exception]
) -> AbstractContextManager[None]:
    return rewording(rule, path, *damages, error=StoreError, more=f"; {_REMEDY}")


def read_png(path: Path) -> npt.NDArray[Any]:
    """Reads the pixels of a stored picture.

    Raises:
        StoreError: it is missing or damaged.
    """
    # Pillow raises SyntaxError for a damaged PNG
    readable = _rewording("qc picture must be readable", path, OSError, SyntaxError)
    with readable, Image.open(path) as picture:
        return np.array(picture)


def write_png(path: Path, pixels: npt.NDArray[Any]) -> None:
    """Writes pixels as a PNG, atomically."""
    with atomic_path(path) as tmp:
        Image.fromarray(pixels).save(tmp, format="PNG")
