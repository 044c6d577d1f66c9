"""The contact sheet `qc.html`: one page for a run, opened from the file system."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from thinsection.files.atomic import write_text
from thinsection.files.pages import data_uri, render_page
from thinsection.qc.checks.check import EMPTY_SCORE, Score

THUMBNAIL_EDGE_PX = 160
_OUTLIER_DEVIATIONS = 3.5  # of the median absolute deviation, scaled to a normal's sigma
_MIN_SLIDES = 5  # fewer say nothing about what is usual
_FIRST = ("pixels_to_use", "bright", "dark", "pen_markings", "coverslip_edge")


def write_qc_sheet(path: Path, rows: Sequence[Mapping[str, Score]], *, title: str) -> None:
    """Writes the page: thumbnails with overlays, sortable columns, outliers marked.

    Thumbnails are inside the page; the larger pictures are links into the slides' folders, so that
    a page of 1,000 slides stays below 20 MB. No server, no address outside.

    Args:
        path: of the page.
        rows: of the run, as in qc.csv; `folder` is where a slide's pictures lie, relative to the
            page's folder (`slide_id` where a row has none).
        title: of the page.
    """
    columns = _columns(rows)
    usual = {name: _usual(rows, name) for name in columns}
    lines = [_line(row, columns, usual, path.parent) for row in rows]
    page = render_page(
        "thinsection.report",
        "qc_sheet.html",
        title=title,
        columns=columns,
        lines=lines,
        num_failed=sum(line["failed"] for line in lines),
        num_outliers=sum(line["num_outliers"] > 0 for line in lines),
    )
    write_text(path, page)


def _columns(rows: Sequence[Mapping[str, Score]]) -> list[str]:
    """Columns of numbers: the telling ones first."""
    names = list(dict.fromkeys(n for row in rows for n, v in row.items() if not isinstance(v, str)))
    first = [n for n in _FIRST if n in names]
    return first + [n for n in names if n not in first]


def _usual(rows: Sequence[Mapping[str, Score]], name: str) -> tuple[float, float] | None:
    """Median and scaled median absolute deviation of a column; None where slides are too few."""
    values = [v for row in rows if isinstance(v := row.get(name), float) and math.isfinite(v)]
    values = [v for v in values if v != EMPTY_SCORE]
    if len(values) < _MIN_SLIDES:
        return None
    median = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(v - median) for v in values)
    return median, deviation


def is_outlier(value: Score | None, usual: tuple[float, float] | None) -> bool:
    """Whether a value lies far from the run's usual; -100 (nothing to measure) always does."""
    if not isinstance(value, float):
        return False
    if value == EMPTY_SCORE:
        return True
    if usual is None:
        return False
    median, deviation = usual
    least = 1e-3 * max(1.0, abs(median))  # equal slides make a deviation of 0
    return abs(value - median) > _OUTLIER_DEVIATIONS * max(deviation, least)


def _line(
    row: Mapping[str, Score],
    columns: Sequence[str],
    usual: Mapping[str, tuple[float, float] | None],
    folder: Path,
) -> dict[str, Any]:
    """What the page's template shows of a slide."""
    slide_id = str(row["slide_id"])
    cells = [_cell(row.get(name), usual[name]) for name in columns]
    where = str(row.get("folder", slide_id))
    pictures = sorted((folder / where).glob("*.png"), key=_picture_order)
    return {
        "slide_id": slide_id,
        "failed": row["status"] == "failed",
        "warnings": [w for w in str(row.get("warnings", "")).split("|") if w],
        "thumbnail": _thumbnail(folder / where / "overlay.png"),
        "pictures": [(p.stem, quote(f"{where}/{p.name}")) for p in pictures],
        "cells": cells,
        "num_outliers": sum(cell["outlier"] for cell in cells),
    }


def _picture_order(path: Path) -> tuple[int, str]:
    first = ("overlay", "thumbnail", "mask_use")
    return (first.index(path.stem) if path.stem in first else len(first), path.stem)


def _cell(value: Score | None, usual: tuple[float, float] | None) -> dict[str, Any]:
    if value is None or isinstance(value, str):
        return {"text": value or "", "sort": "", "outlier": False}
    text = f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
    return {"text": text, "sort": repr(value), "outlier": is_outlier(value, usual)}


def _thumbnail(path: Path) -> str:
    """The picture inside the page; '' where there is none."""
    if not path.is_file():
        return ""
    with Image.open(path) as picture:
        return data_uri(picture, THUMBNAIL_EDGE_PX)
