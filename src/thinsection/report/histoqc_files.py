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
_REGION_COLUMNS = ("num_regions", "mean_area", "max_area", "percent")
HISTOQC_COLUMNS: tuple[str, ...] = (
    *("filename", "comments", "image_bounding_box", "base_mag", "type", "levels", "height"),
    *("width", "mpp_x", "mpp_y", "comment", "pen_markings", "coverslip_edge", "bright", "dark"),
    "flat_areas",
    *(f"{check}_{what}" for check in _REGION_CHECKS for what in _REGION_COLUMNS),
    *("spur_pixels", "areaThresh"),
    *(f"template{n}_MSE_hist" for n in range(1, 5)),
    *("tenenGrad_contrast", "michelson_contrast", "rms_contrast"),
    *("grayscale_brightness", "grayscale_brightness_std"),
    *(f"chan{n}_brightness{what}" for n in (1, 2, 3) for what in ("", "_std")),
    *(f"chan{n}_brightness{what}_YUV" for n in (1, 2, 3) for what in ("", "_std")),
    *(f"deconv_c{n}_{what}" for n in range(3) for what in ("mean", "std")),
    *("pixels_to_use", "warnings"),
)
_HEADERS = ("start_time", "pipeline", "outdir", "config_file", "command_line_args")
# our picture -> the end of HistoQC's file name
_SUFFIXES = {
    **{"thumbnail": "thumb", "overlay": "fuse", "flat_areas": "flat", "histogram": "hist"},
    **{"small_filled": "small_fill", "small_removed": "small_remove"},
    "equalised": "equalized_thumb",
}
_SMALL_EDGE_PX = 500


def write_histoqc(out: Path, rows: Sequence[Row], headers: Mapping[str, str]) -> None:
    """Writes `results.tsv`, and per slide a folder named like its file with HistoQC's pictures.

    A slide is named `<slide_id><suffix of its file>`: the file's own name, but for equal names
    from different folders. Failed slides have no line, as in HistoQC. Above the columns stand five
    lines about the run; what a row lacks is NA, no number to pandas and HistoQC's UI.

    Args:
        out: folder of HistoQC's files.
        rows: of the run; `folder` is where a slide's pictures lie, relative to `out` (`slide_id`
            where a row has none).
        headers: 'start_time', 'pipeline', 'outdir', 'config_file' and 'command_line_args'.
    """
    lines = [f"#{key}:\t{_one_line(headers[key])}" for key in _HEADERS]
    lines.append("#dataset:" + "\t".join(HISTOQC_COLUMNS))
    for row in rows:
        if row["status"] != "failed":
            name = f"{row['slide_id']}{Path(str(row['slide_path'])).suffix or '.slide'}"
            _copy_pictures(out / str(row.get("folder", row["slide_id"])), out / name)
            known = {"warnings": "", **row, "filename": name, "comments": " "}
            if "width" in row:
                width, height = plain_number(row["width"]), plain_number(row["height"])
                known["image_bounding_box"] = f"(0, 0, {width}, {height})"
            cells = (str(plain_number(known.get(column, "NA"))) for column in HISTOQC_COLUMNS)
            lines.append("\t".join(map(_one_line, cells)))
    write_text(out / "results.tsv", "\n".join(lines) + "\n")


def _copy_pictures(source: Path, target: Path) -> None:
    for path in sorted(source.glob("*.png")):
        ending = _SUFFIXES.get(path.stem, path.stem)
        with Image.open(path) as picture:
            write_png(target / f"{target.name}_{ending}.png", np.asarray(picture))
            if path.stem == "thumbnail":
                picture.thumbnail((_SMALL_EDGE_PX, _SMALL_EDGE_PX))
                write_png(target / f"{target.name}_thumb_small.png", np.asarray(picture))


def _one_line(text: str) -> str:
    return " ".join(text.replace("\t", " ").split("\n")).replace("\r", " ")
