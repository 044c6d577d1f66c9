"""Pictures of a slide's quality control, which are written on request.

HistoQC's files are made from them, and they serve to look at the steps of a pipeline.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from thinsection.qc.checks.measures import SavedMask
from thinsection.qc.result import QcResult
from thinsection.qc.tissue import TISSUE_COLOR
from thinsection.report.qc_store import MASK_KEPT, MASK_USE, write_png
from thinsection.store.geojson import write_masks_geojson
from thinsection.types import RgbArray

# width and height in pixels
_HISTOGRAM_PX = (420, 200)
# pixels above and below the curves
_HISTOGRAM_MARGIN = 12
_CHANNEL_COLORS = ("#c0392b", "#27ae60", "#2e5fc0")


def write_qc_pictures(result: QcResult, folder: Path) -> tuple[str, ...]:
    """Writes a PNG of each mask and table, and of the work image; returns the names of all files.

    `<check>.png` is the area that a check affected, `mask_use.png` the tissue in use (both white =
    True), `mask_kept.png` the tissue with overruled checks if that is more. `thumbnail.png` is the
    work image, `histogram.png` the colours in the mask. A saved mask that requests its outlines
    also gets `<check>.geojson`, in level-0 pixels.

    Args:
        result: fresh result of quality control; one that was read back lacks tables.
        folder: folder of the files.
    """
    pictures: dict[str, npt.NDArray[np.generic]] = {
        **result.masks,
        MASK_USE: result.mask_use,
        "thumbnail": result.rgb,
    }
    if result.mask_kept is not None:
        pictures[MASK_KEPT] = result.mask_kept
    for name, table in result.tables.items():
        pictures[name] = table if table.dtype == np.uint8 else _histogram(table)
    names = []
    for name, pixels in pictures.items():
        write_png(folder / f"{name}.png", pixels)
        names.append(f"{name}.png")
    for check in result.pipeline.checks:
        if not isinstance(check, SavedMask) or not check.geojson:
            continue
        if check.name in result.tables:
            saved = [(check.name, result.tables[check.name] > 0, TISSUE_COLOR)]
            write_masks_geojson(folder / f"{check.name}.geojson", saved, result.frame)
            names.append(f"{check.name}.geojson")
    return tuple(names)


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
