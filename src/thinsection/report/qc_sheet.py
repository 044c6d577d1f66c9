"""The contact sheet `qc.html`: one page for a run, opened from the file system."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from thinsection.files.atomic import write_text
from thinsection.files.pages import data_uri, render_page
from thinsection.qc.checks.check import EMPTY_SCORE, Score
from thinsection.report.qc_files import Row

_THUMBNAIL_EDGE_PX = 160
_OUTLIER_DEVIATIONS = 3.5  # of the median absolute deviation, scaled to a normal's sigma
_MIN_SLIDES = 5  # fewer say nothing about what is usual
_Usual = tuple[float, float] | None  # a column's median and scaled median absolute deviation
_FIRST = ("pixels_to_use", "bright", "dark", "pen_markings", "coverslip_edge")


def write_qc_sheet(path: Path, rows: Sequence[Row], *, title: str) -> None:
    """Writes the page: thumbnails with overlays, sortable columns, outliers marked.

    Rows are those of qc.csv; `folder` (else `slide_id`) is where a slide's pictures lie, relative
    to the page's folder. Thumbnails are inside the page; the larger pictures are links, so that a
    page of 1,000 slides stays below 20 MB. No server, no address outside.
    """
    names = dict.fromkeys(n for row in rows for n, v in row.items() if not isinstance(v, str))
    columns = sorted(names, key=_order(_FIRST))
    usual = {name: _usual([row.get(name) for row in rows]) for name in columns}
    lines = [_line(row, usual, path.parent) for row in rows]
    counts = {
        "num_failed": sum(line["failed"] for line in lines),
        "num_outliers": sum(line["num_outliers"] > 0 for line in lines),
    }
    values = {"title": title, "columns": columns, "lines": lines, **counts}
    write_text(path, render_page("thinsection.report", "qc_sheet.html", **values))


def _order(first: Sequence[str]) -> Callable[[str], int]:
    """The telling names first, the others as they come."""
    return lambda name: first.index(name) if name in first else len(first)


def _usual(column: Sequence[Score | None]) -> _Usual:
    """Median and scaled median absolute deviation of a column; None where slides are too few."""
    values = [v for v in column if isinstance(v, float) and math.isfinite(v) and v != EMPTY_SCORE]
    if len(values) < _MIN_SLIDES:
        return None
    median = statistics.median(values)
    return median, 1.4826 * statistics.median(abs(v - median) for v in values)


def is_outlier(value: Score | None, usual: _Usual) -> bool:
    """Whether a value lies far from the run's usual; -100 (nothing to measure) always does."""
    if not isinstance(value, float) or usual is None or value == EMPTY_SCORE:
        return value == EMPTY_SCORE
    median, deviation = usual
    least = 1e-3 * max(1.0, abs(median))  # equal slides make a deviation of 0
    return abs(value - median) > _OUTLIER_DEVIATIONS * max(deviation, least)


def _line(row: Row, usual: Mapping[str, _Usual], folder: Path) -> dict[str, Any]:
    """What the page's template shows of a slide."""
    cells = [_cell(row.get(name), usual[name]) for name in usual]
    where, thumbnail = str(row.get("folder", row["slide_id"])), ""
    names = sorted(path.stem for path in (folder / where).glob("*.png"))
    if "overlay" in names:
        with Image.open(folder / where / "overlay.png") as picture:
            thumbnail = data_uri(picture, _THUMBNAIL_EDGE_PX)
    order = _order(("overlay", "thumbnail", "mask_use"))
    return {
        "slide_id": str(row["slide_id"]),
        "failed": row["status"] == "failed",
        "warnings": [w for w in str(row.get("warnings", "")).split("|") if w],
        "thumbnail": thumbnail,
        "pictures": [(n, quote(f"{where}/{n}.png")) for n in sorted(names, key=order)],
        "cells": cells,
        "num_outliers": sum(cell["outlier"] for cell in cells),
    }


def _cell(value: Score | None, usual: _Usual) -> dict[str, Any]:
    if value is None or isinstance(value, str):
        return {"text": value or "", "sort": "", "outlier": False}
    text = f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
    return {"text": text, "sort": repr(value), "outlier": is_outlier(value, usual)}
