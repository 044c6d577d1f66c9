"""Tables of a QC run: `qc.csv` by column name, and the `results.tsv` that HistoQC's UI reads."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinsection.files.atomic import write_text
from thinsection.qc.view import Score

Row = Mapping[str, Score]

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


def write_qc_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes one line per slide; columns are the union of all rows', in order of appearance.

    A row without a column has an empty cell there, so that rows never misalign.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    write_text(path, text.getvalue())


def read_qc_csv(path: Path) -> list[dict[str, Score]]:
    """The rows of a `qc.csv`; cells that are numbers come back as float."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {k: number if (number := _number(v)) is not None else v for k, v in row.items()}
            for row in csv.DictReader(file)
        ]


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
        return f"(0, 0, {_plain(row['width'])}, {_plain(row['height'])})"
    value = row.get(name, "" if name == "warnings" else _MISSING)
    return _one_line(str(_plain(value)))


def _plain(value: Score) -> Score | int:
    """Whole numbers without a decimal point."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _one_line(text: str) -> str:
    return " ".join(text.replace("\t", " ").split("\n")).replace("\r", " ")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
