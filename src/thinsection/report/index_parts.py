"""Parts of the index: the slides of a results folder, in scripts that the page loads.

A page that is opened from the file system may load scripts, and nothing else. A part has what the
page shows of some hundred slides. Its name is a hash of its content, so one more slide changes one
part.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from thinsection.files.atomic import write_text
from thinsection.report.sheets import Place, stable_groups
from thinsection.types import Document

# slides in a part: the mean, and the most
_USUAL_SLIDES = 200
_MOST_SLIDES = 600
PATTERN = "part_*.js"

TableRow = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class SlideData:
    """Content of the page for all slides."""

    # rows of each table that name a slide, by the table's file
    tables: Mapping[str, Sequence[TableRow]]
    thumbnails: Mapping[str, Place]  # by slide id
    heatmaps: Mapping[str, Sequence[Document]]  # pictures by slide id
    # tile grids whose overview is a PNG of an older version, by slide id
    old_overviews: Mapping[str, Sequence[str]]


def write_parts(folder: Path, data: SlideData) -> list[str]:
    """Writes the parts that are not there yet; returns the names of all, in their order.

    Memory:
        The rows of all tables, and the text of one part.
    """
    rows_by_slide: dict[str, dict[str, list[TableRow]]] = {}
    for table, rows in data.tables.items():
        for row in rows:
            tables = rows_by_slide.setdefault(row["slide_id"], {})
            tables.setdefault(table, []).append(row)
    names = []
    groups = stable_groups(
        sorted(rows_by_slide), usual=_USUAL_SLIDES, most=_MOST_SLIDES
    )
    for slide_ids in groups:
        part = {
            "tables": _part_tables([rows_by_slide[name] for name in slide_ids]),
            "thumbs": _those_of(slide_ids, data.thumbnails),
            "heatmaps": _those_of(slide_ids, data.heatmaps),
            "old_overviews": _those_of(slide_ids, data.old_overviews),
        }
        text = f"parts.push({json.dumps(part)});\n"
        digest = sha256(text.encode()).hexdigest()[:16]
        path = folder / PATTERN.replace("*", digest)
        if not path.is_file():
            write_text(path, text)
        names.append(path.name)
    return names


def _part_tables(slides: Sequence[Mapping[str, Sequence[TableRow]]]) -> object:
    """Rows by table: the names of the columns once, and the cells of each row in their order."""
    rows_by_table: dict[str, list[TableRow]] = {}
    for tables in slides:
        for table, rows in tables.items():
            rows_by_table.setdefault(table, []).extend(rows)
    part = {}
    for table, rows in rows_by_table.items():
        columns: dict[str, None] = {}
        for row in rows:
            columns |= dict.fromkeys(row)
        cells = [[row.get(name, "") for name in columns] for row in rows]
        part[table] = {"columns": list(columns), "rows": cells}
    return part


def _those_of(slide_ids: Sequence[str], values: Mapping[str, object]) -> object:
    return {name: values[name] for name in slide_ids if name in values}
