"""HistoQC's own layout of files, so that its UI and CohortFinder open our results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.files.atomic import write_text
from thinsection.report.qc_files import Row, plain_number, write_png

_REGION_CHECKS = (
    *("fatlike_tissue_removed", "small_tissue_filled", "small_tissue_removed"),
    "blurry_removed",
)
HISTOQC_COLUMNS: tuple[str, ...] = (
    *("filename", "comments", "image_bounding_box", "base_mag", "type", "levels", "height"),
    *("width", "mpp_x", "mpp_y", "comment", "pen_markings", "coverslip_edge", "bright", "dark"),
    "flat_areas",
    *(
        f"{check}_{what}"
        for check in _REGION_CHECKS
        for what in ("num_regions", "mean_area", "max_area", "percent")
    ),
    *("spur_pixels", "areaThresh"),
    *(f"template{n}_MSE_hist" for n in range(1, 5)),
    *("tenenGrad_contrast", "michelson_contrast", "rms_contrast"),
    *("grayscale_brightness", "grayscale_brightness_std"),
    *(f"chan{n}_brightness{what}" for n in (1, 2, 3) for what in ("", "_std")),
    *(f"chan{n}_brightness{what}_YUV" for n in (1, 2, 3) for what in ("", "_std")),
    *(f"deconv_c{n}_{what}" for n in range(3) for what in ("mean", "std")),
    *("pixels_to_use", "warnings"),
)
_MISSING = "NA"  # pandas and HistoQC's UI read it as no number
# our picture -> the end of HistoQC's file name
_SUFFIXES = {
    "thumbnail": "_thumb.png",
    "overlay": "_fuse.png",
    "mask_use": "_mask_use.png",
    "flat_areas": "_flat.png",
    "small_filled": "_small_fill.png",
    "small_removed": "_small_remove.png",
    "equalised": "_equalized_thumb.png",
    "histogram": "_hist.png",
}
_SMALL_EDGE_PX = 500


def write_histoqc(out: Path, rows: Sequence[Row], headers: Mapping[str, str]) -> None:
    """Writes `results.tsv`, and per slide a folder named like its file with HistoQC's pictures.

    A slide is named `<slide_id><suffix of its file>`: the file's own name, but for equal names
    from different folders. Failed slides have no line, as in HistoQC.

    Args:
        out: folder of HistoQC's files.
        rows: of the run; `folder` is where a slide's pictures lie, relative to `out` (`slide_id`
            where a row has none).
        headers: of `write_histoqc_tsv`.
    """
    named = []
    for row in rows:
        if row["status"] == "failed":
            continue
        name = f"{row['slide_id']}{Path(str(row['slide_path'])).suffix or '.slide'}"
        named.append({**row, "filename": name})
        _copy_pictures(out / str(row.get("folder", row["slide_id"])), out / name, name)
    write_histoqc_tsv(out / "results.tsv", named, headers)


def _copy_pictures(source: Path, target: Path, name: str) -> None:
    for path in sorted(source.glob("*.png")):
        ending = _SUFFIXES.get(path.stem, f"_{path.stem}.png")
        with Image.open(path) as picture:
            write_png(target / f"{name}{ending}", np.asarray(picture))
            if path.stem == "thumbnail":
                picture.thumbnail((_SMALL_EDGE_PX, _SMALL_EDGE_PX))
                write_png(target / f"{name}_thumb_small.png", np.asarray(picture))


def write_histoqc_tsv(path: Path, rows: Sequence[Row], headers: Mapping[str, str]) -> None:
    """Writes HistoQC's `results.tsv`: five lines about the run, the column names, then the rows.

    Args:
        path: of the file.
        rows: of slides that have a result; columns are taken by name, absent ones are NA.
        headers: 'start_time', 'pipeline', 'outdir', 'config_file' and 'command_line_args'.
    """
    keys = ("start_time", "pipeline", "outdir", "config_file", "command_line_args")
    lines = [f"#{key}:\t{_one_line(headers[key])}" for key in keys]
    lines.append("#dataset:" + "\t".join(HISTOQC_COLUMNS))
    lines += ["\t".join(_cell(row, name) for name in HISTOQC_COLUMNS) for row in rows]
    write_text(path, "\n".join(lines) + "\n")


def _cell(row: Row, name: str) -> str:
    if name == "comments":
        return " "
    if name == "image_bounding_box" and "width" in row:
        return f"(0, 0, {plain_number(row['width'])}, {plain_number(row['height'])})"
    value = row.get(name, "" if name == "warnings" else _MISSING)
    return _one_line(str(plain_number(value)))


def _one_line(text: str) -> str:
    return " ".join(text.replace("\t", " ").split("\n")).replace("\r", " ")
