"""Tables and page of a quality control: a row per slide, with verdicts and outliers."""

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from PIL import Image

import thinsection
from thinsection.extras import importing
from thinsection.files.atomic import atomic_path, write_table, write_text
from thinsection.files.pages import render_page
from thinsection.qc.checks.check import EMPTY_SCORE, Score
from thinsection.qc.rules import parse_rule
from thinsection.report import verdict as verdicts
from thinsection.report.index import INDEX, THUMBNAILS, viewer_place
from thinsection.report.picture import OVERLAYS, PICTURE_NAME
from thinsection.report.sheets import Place, drop_sheets, write_sheets
from thinsection.report.stored import file_names
from thinsection.report.values import column_order, column_words, group_of, natural_key
from thinsection.report.verdict import VerdictRule, load_rules
from thinsection.types import Document, PlainValues

# scores of one slide, by column name
Row = Mapping[str, Score]
# median and scaled median absolute deviation of a column; None if there are too few slides
Usual = tuple[float, float] | None

# factor on the median absolute deviation, scaled to sigma of a normal distribution
_OUTLIER_DEVIATIONS = 3.5
# fewer slides do not define usual values
_MIN_SLIDES = 5
# endings of columns with areas in pixels of the work image
_AREAS = ("_mean_area", "_max_area")
_FIRST_COLUMNS = ("slide_id", "slide_path", "folder", "status")
# pictures that come first; the first one that exists is the thumbnail
_FIRST_PICTURES = ("overlay", "marks and tiles", "picture", "thumbnail", "mask_use")
# columns of the page's plots
_PLOTTED = (
    "grayscale_brightness",
    "chan1_brightness",
    "chan3_brightness",
    "deconv_c0_mean",
    "deconv_c1_mean",
)


def write_qc_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes one line per slide with the columns of all rows; missing values are empty."""
    lines = []
    for row in rows:
        lines.append({name: plain_number(value) for name, value in row.items()})
    write_table(path, lines)


def plain_number(value: Score) -> Score | int:
    """The value; a whole number loses its decimal point."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def write_qc_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Writes the same table as Parquet; text columns are strings, missing values are null."""
    with importing("Parquet tables", "pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    columns = {}
    for name in names:
        column = [row.get(name) for row in rows]
        if any(isinstance(value, str) for value in column):
            column = [None if value is None else str(value) for value in column]
        columns[name] = pa.array(column)
    with atomic_path(path) as tmp:
        pq.write_table(pa.table(columns), tmp)


def judge_rows(
    rows: Sequence[Row], rules: Sequence[VerdictRule]
) -> list[dict[str, Score]]:
    """Rows with columns `verdict` and `why`; these rows define the usual values."""
    usual = _usual_by_column(rows)
    judged_rows: list[dict[str, Score]] = []
    for row in rows:
        outliers = []
        for name in usual:
            value = row.get(name)
            if value != EMPTY_SCORE and is_outlier(value, usual[name]):
                outliers.append(name)
        verdict, why = verdicts.verdict(row, rules, outliers)
        judged = {name: row[name] for name in _FIRST_COLUMNS if name in row}
        judged["verdict"] = verdict
        judged["why"] = why
        judged_rows.append(judged | dict(row))
    return judged_rows


def usual_of(column: Sequence[Score | None]) -> Usual:
    """Median and scaled median absolute deviation of a column; None for too few slides."""
    values = []
    for value in column:
        number = _measured(value)
        if number is not None and math.isfinite(number):
            values.append(number)
    if len(values) < _MIN_SLIDES:
        return None
    median = statistics.median(values)
    return median, 1.4826 * statistics.median(abs(value - median) for value in values)


def is_outlier(value: Score | None, usual: Usual) -> bool:
    """True if a value is far from the run's usual values, or -100 (not measured)."""
    if value == EMPTY_SCORE:
        return True
    if not isinstance(value, float) or usual is None:
        return False
    return abs(deviations(value, usual)) > _OUTLIER_DEVIATIONS


def deviations(value: float, usual: tuple[float, float]) -> float:
    """Distance above the median in scaled median absolute deviations: a robust z."""
    median, deviation = usual
    least = 1e-3 * max(1.0, abs(median))  # equal slides would give a deviation of 0
    return (value - median) / max(deviation, least)


def _measured(value: Score | None) -> float | None:
    """The value if it is a measured number."""
    return value if isinstance(value, float) and value != EMPTY_SCORE else None


def _usual_by_column(rows: Sequence[Row]) -> dict[str, Usual]:
    """Usual values of each numeric column, in the order of the page."""
    names: dict[str, None] = {}
    for row in rows:
        names |= {name: None for name in row if not isinstance(row[name], str)}
    ordered = column_order(list(names))
    return {name: usual_of([row.get(name) for row in rows]) for name in ordered}


def write_qc_sheet(
    path: Path,
    rows: Sequence[Row],
    *,
    title: str,
    rules: Sequence[VerdictRule] | None = None,
    overviews: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Writes the page: verdicts, thumbnails with overlays, sortable columns, outliers marked.

    Thumbnails are in sheets in the folder `index` beside it, and larger pictures are links. The
    page needs no server and loads nothing from the network.

    Args:
        path: path of the page.
        rows: rows of qc.csv; `folder` (else `slide_id`) is the path of a slide's pictures, relative
            to the page's folder.
        title: title of the page.
        rules: rules of the verdicts; None uses the built-in ones.
        overviews: path of a picture with marks and tiles by slide id, relative to the page's
            folder.
        notes: sentences about the whole table, which stand above it.
    """
    rules = rules or load_rules(None)
    ordered = sorted(rows, key=lambda row: natural_key(str(row["slide_id"])))
    pictures = _pictures(path.parent, ordered, overviews or {})
    sources = {}
    for slide_id, files in pictures.items():
        if files:
            sources[slide_id] = (path.parent / next(iter(files.values())),)
    thumbnails = write_sheets(path.parent / THUMBNAILS, path.stem, sources, Image.open)
    stamp = _stamp([title, rules, ordered, thumbnails, pictures, notes])
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - len(stamp)))
            if file.read() == stamp.encode():
                return
    usual = _usual_by_column(ordered)
    judged = judge_rows(ordered, rules)
    lines = []
    for row in judged:
        slide_id = str(row["slide_id"])
        thumbnail = thumbnails.get(slide_id)
        lines.append(_page_line(row, usual, pictures[slide_id], thumbnail))
    groups = groupby(usual, key=group_of)
    deciding = set()
    rule_words = []
    for rule in rules:
        parsed = parse_rule(rule.rule)
        deciding.add(parsed.column)
        condition = f"{column_words(parsed.column)} {parsed.symbol} {parsed.limit:g}"
        words = f"{rule.verdict}: {rule.words} ({condition})"
        rule_words.append((rule.rule, words))
    page = render_page(
        "thinsection.report",
        "qc_sheet.html",
        title=title,
        home=INDEX,
        notes=notes,
        columns=[(name, column_words(name)) for name in usual],
        lines=lines,
        groups=[(group, len(list(columns))) for group, columns in groups],
        deciding=sorted(deciding & usual.keys()),
        rules=rule_words,
        counts=Counter(row["verdict"] for row in judged),
        points=[_plot_point(row) for row in judged if row["status"] != "failed"],
        num_outliers=sum(line["num_outliers"] > 0 for line in lines),
    )
    write_text(path, f"{page.rstrip()}\n{stamp}")
    drop_sheets(path.parent / THUMBNAILS, path.stem, thumbnails.values())


def _stamp(content: object) -> str:
    """Comment at the end of a page with a hash of all that it is made from."""
    digest = hashlib.sha256(thinsection.__version__.encode())
    for template in sorted((Path(__file__).parent / "templates").iterdir()):
        digest.update(template.read_bytes())
    digest.update(json.dumps(content, default=repr).encode())
    return f"<!-- {digest.hexdigest()} -->\n"


def _pictures(
    folder: Path, rows: Sequence[Row], overviews: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Path of each picture of a slide by its name, by slide id; the most telling one is first.

    Args:
        folder: folder of the page; paths are relative to it.
        rows: rows of the page.
        overviews: path of a picture with marks and tiles by slide id.
    """
    pictures = {}
    for row in rows:
        slide_id = str(row["slide_id"])
        home = picture_folder(row)
        files = {}
        for name in file_names(folder / home):
            if name in OVERLAYS or name.endswith(".png") or name == PICTURE_NAME:
                files[Path(name).stem] = f"{home}/{name}"
        if slide_id in overviews:
            files["marks and tiles"] = overviews[slide_id]
        first = [name for name in _FIRST_PICTURES if name in files]
        others = sorted(files.keys() - set(first))
        pictures[slide_id] = {name: files[name] for name in [*first, *others]}
    return pictures


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """Value in a row of the page."""

    text: str
    sort: str  # value by which the column is sorted
    outlier: bool


def _page_line(
    row: Row,
    usual: Mapping[str, Usual],
    pictures: Mapping[str, str],
    thumbnail: Place | None,
) -> Document:
    """Row of the page, one slide, for the page's template.

    `place` is in the viewer, `pictures` are names and URLs, `outliers` are columns in words.
    """
    slide_id = str(row["slide_id"])
    cells = [_cell(row, name, usual[name]) for name in usual]
    home = Path(picture_folder(row)).name
    if thumbnail is not None:
        sheet, x, y = thumbnail
        # the page displays thumbnails at half their size
        thumbnail = (quote(sheet), x // 2, y // 2)
    return {
        "verdict": row["verdict"],
        "why": row["why"],
        "slide_id": slide_id,
        "place": viewer_place(slide_id, layers=[f"{home}/"]),
        "failed": row["status"] == "failed",
        "warnings": [text for text in str(row.get("warnings", "")).split("|") if text],
        "thumb": thumbnail,
        "pictures": [(name, quote(address)) for name, address in pictures.items()],
        "cells": cells,
        "num_outliers": sum(cell.outlier for cell in cells),
        "outliers": "; ".join(
            column_words(name) for name, cell in zip(usual, cells) if cell.outlier
        ),
    }


def _cell(row: Row, name: str, usual: Usual) -> _Cell:
    """Cell of a value; areas in mm², where the resolution is known."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return _Cell(text=value or "", sort="", outlier=False)
    outlier = is_outlier(value, usual)
    unit = ""
    if name.endswith(_AREAS) and value != EMPTY_SCORE:
        px_mm2 = _px_mm2(row)
        unit = " px" if px_mm2 is None else ""
        value *= px_mm2 or 1.0
    text = f"{value:,.0f}" if value == int(value) else f"{value:.3g}"
    return _Cell(text=text + unit, sort=repr(value), outlier=outlier)


def _px_mm2(row: Row) -> float | None:
    """Area of a pixel of the work image in mm², from the usable tissue; None if unknown."""
    usable_mm2 = row.get("usable_mm2")
    pixels = row.get("pixels_to_use")
    if (
        not isinstance(usable_mm2, float)
        or not isinstance(pixels, float)
        or pixels <= 1
    ):
        return None
    return usable_mm2 / pixels


def _plot_point(row: Row) -> PlainValues:
    """Values of a slide in the page's plots of batches."""
    point: dict[str, object] = {
        "slide": str(row["slide_id"]),
        "scanner": str(row.get("type", "")),
        "folder": Path(str(row["slide_path"])).parent.name,
    }
    for name in _PLOTTED:
        point[name] = _measured(row.get(name))
    return point


def picture_folder(row: Row) -> str:
    """Folder of a slide's pictures, relative to the page's."""
    return str(row.get("folder", row["slide_id"]))
