"""Pictures of a slide's quality control, on request, and HistoQC's files from them.

They serve to look at the steps of a pipeline. `write_histoqc` writes `results.tsv` and a folder of
pictures per slide, as HistoQC does.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from thinsection.files.atomic import atomic_path, safe_cell, write_text
from thinsection.qc.checks.measures import SavedMask
from thinsection.qc.edits import EDITED_AREAS
from thinsection.qc.result import QcResult
from thinsection.qc.tissue import TISSUE_COLOR
from thinsection.report.qc_files import masks_of, write_png
from thinsection.report.qc_sheet import Row, picture_folder, plain_number
from thinsection.report.stored import read_png
from thinsection.store.geojson import write_masks_geojson
from thinsection.types import RgbArray

# width and height in pixels
_HISTOGRAM_PX = (420, 200)
# pixels above and below the curves
_HISTOGRAM_MARGIN = 12
_CHANNEL_COLORS = ("#c0392b", "#27ae60", "#2e5fc0")
# longer edge of HistoQC's small thumbnail
SMALL_EDGE_PX = 500
# weights of R, G and B in HistoQC's grey pictures
_GRAY_WEIGHTS = (0.2125, 0.7154, 0.0721)
# HistoQC's first columns, about the file itself; the columns of the checks follow
_FIRST_COLUMNS = (
    "filename",
    "comments",
    "image_bounding_box",
    "base_mag",
    "type",
    "levels",
    "height",
    "width",
    "mpp_x",
    "mpp_y",
    "comment",
)
_LAST_COLUMNS = ("pixels_to_use", "warnings")
# our own columns in a row that do not come from checks
_OWN_COLUMNS = (
    "slide_id",
    "slide_path",
    "folder",
    "status",
    "fails",
    EDITED_AREAS,
)
# our column -> HistoQC's name
_COLUMN_NAMES = {"tissue_pieces_num_regions": "#pieces_of_tissue"}
# text that no cell of HistoQC's table may contain
_BREAKS = re.compile(r"[\t\n\r]")
_HEADERS = ("start_time", "pipeline", "outdir", "config_file", "command_line_args")
# our picture -> the ending of HistoQC's file name
_SUFFIXES = {
    "thumbnail": "thumb",
    "thumbnail_small": "thumb_small",
    "flat_areas": "flat",
    "histogram": "hist",
    "small_filled": "small_fill",
    "small_removed": "small_remove",
    "equalised": "equalized_thumb",
}


def write_qc_pictures(
    result: QcResult, folder: str | Path, *, small: RgbArray | None = None
) -> tuple[str, ...]:
    """Writes a PNG of each mask and table, and of the work image; returns the names of all files.

    `<check>.png` is the area that a check affected, `mask_use.png` the tissue in use (both white =
    True), `mask_kept.png` the tissue with overruled checks if that is more. `thumbnail.png` is the
    work image, `histogram.png` the colours in the mask. A saved mask that requests its outlines
    also gets `<check>.geojson`, in level-0 pixels.

    Args:
        result: fresh result of quality control; one that was read back lacks tables.
        folder: folder of the files.
        small: picture of the slide whose longer edge is `SMALL_EDGE_PX`, for
            `thumbnail_small.png`.
    """
    folder = Path(folder)
    names = []
    for name, pixels in _pictures(result, small):
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


def _pictures(
    result: QcResult, small: RgbArray | None
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Names and pixels of the pictures; masks are unpacked one after the other."""
    yield from masks_of(result)
    yield "thumbnail", result.rgb
    if small is not None:
        yield "thumbnail_small", small
    for name, table in result.tables.items():
        yield name, table if table.dtype == np.uint8 else _histogram(table)


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


def write_histoqc(out: Path, rows: Sequence[Row], headers: Mapping[str, str]) -> None:
    """Writes `results.tsv`, and per slide a folder with HistoQC's pictures, named as its file.

    A slide is named `<slide_id><suffix of its file>`. This is its file's name, except for files
    with the same name in different folders. Failed slides have no row, as in HistoQC. Columns come
    from the pipeline's checks in their order, with HistoQC's names, and ours for the rest. Missing
    values are NA, which pandas and HistoQC's UI do not read as numbers. A slide that was checked
    earlier without `--qc-pictures` has a row and no pictures.

    Args:
        out: folder for HistoQC's files.
        rows: rows of the run; `folder` (else `slide_id`) is the path of its pictures in `out`.
        headers: 'start_time', 'pipeline', 'outdir', 'config_file' and 'command_line_args'.
    """
    done = [row for row in rows if row["status"] != "failed"]
    apart = {*_FIRST_COLUMNS, *_LAST_COLUMNS, *_OWN_COLUMNS}
    check_columns: dict[str, None] = {}
    for row in sorted(done, key=len, reverse=True):
        check_columns |= {name: None for name in row if name not in apart}
    columns = [*_FIRST_COLUMNS, *check_columns, *_LAST_COLUMNS]
    names = [_COLUMN_NAMES.get(name, name) for name in columns]
    lines = [f"#{name}:\t{_one_line(headers[name])}" for name in _HEADERS]
    lines.append("#dataset:" + "\t".join(names))
    for row in done:
        suffix = Path(str(row["slide_path"])).suffix or ".slide"
        name = f"{row['slide_id']}{suffix}"
        _copy_pictures(out / picture_folder(row), out / name)
        cells = {"warnings": "", **row, "filename": name, "comments": " "}
        if "width" in row:
            width = plain_number(row["width"])
            height = plain_number(row["height"])
            cells["image_bounding_box"] = f"(0, 0, {width}, {height})"
        values = [plain_number(cells.get(column, "NA")) for column in columns]
        lines.append("\t".join(_one_line(str(safe_cell(value))) for value in values))
    write_text(out / "results.tsv", "\n".join(lines) + "\n")


def _one_line(text: str) -> str:
    return _BREAKS.sub(" ", text)


def _copy_pictures(source: Path, target: Path) -> None:
    """Writes the pictures of a slide under HistoQC's names."""
    prefix = target.name
    for path in sorted(source.glob("*.geojson")):
        if path.stem != "qc":
            with atomic_path(target / f"{prefix}_{path.name}") as tmp:
                shutil.copyfile(path, tmp)
    work_image = source / "thumbnail.png"
    if work_image.is_file():
        gray = read_png(work_image) / 255 @ _GRAY_WEIGHTS
        gray8 = np.rint(gray * 255).astype(np.uint8)
        mask = read_png(source / "mask_use.png").astype(np.uint8) * 255
        fused = np.stack([mask, gray8, mask], axis=2)
        write_png(target / f"{prefix}_fuse.png", fused)
    for path in sorted(source.glob("*.png")):
        ending = _SUFFIXES.get(path.stem, path.stem)
        with Image.open(path) as picture:
            is_mask = picture.mode == "1"
            plain = picture.convert("L") if is_mask else picture  # 0 and 255
            write_png(target / f"{prefix}_{ending}.png", np.asarray(plain))
