"""`index.html` of a results folder: its results, failures with reasons, and links to details.

The page is made from the tables and records in the folder, never from slides or tiles. The slides
are in parts beside it, and thumbnails with the tissue's outline in sheets; only those of slides
that changed are written again. The page works from the file system and needs no network. Data that
differ between invocations (times, hosts) are in `records/runs.js`, so that equal results give the
same bytes of the page itself. A page that is opened from the file system may load scripts, and
nothing else: a part is a script with what the page shows of some hundred slides. Its name is a hash
of its content, so one more slide changes one part.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from urllib.parse import quote, urlencode

import numpy as np
from PIL import Image

from thinsection.config import coerce
from thinsection.files.atomic import parse_json, read_json, read_table, write_text
from thinsection.files.pages import render_page
from thinsection.qc.checks.check import EMPTY_SCORE
from thinsection.report.layers import Outline, paint
from thinsection.report.picture import Picture
from thinsection.report.sheets import (
    CELL,
    drop_files,
    drop_sheets,
    stable_groups,
    write_sheets,
)
from thinsection.report.stored import overlay_file, picture_files, read_tissue
from thinsection.store.ledger import SLIDES
from thinsection.types import Document
from thinsection.weights.origin import slug

INDEX = "index.html"
RUNS = "records/runs.js"
# folder with the parts of the page and the sheets of thumbnails
THUMBNAILS = "index"
_SLIDE_SHEETS = "slides"
# slides in a part: the mean, and the most
_USUAL_SLIDES = 200
_MOST_SLIDES = 600
_PART_FILES = "part_*.js"

# column of a QC or measures table -> title of its distribution on the page
_NUMBERS = {
    "focus_removed_percent": "fraction of tissue out of focus",
    "px_focus": "sharpness of the tiles (median)",
    "deconv_c0_mean": "hematoxylin (mean)",
    "deconv_c1_mean": "eosin (mean)",
}
# value for "not measured" in such a column; HistoQC's is -100
_NOTHING = ("", f"{EMPTY_SCORE:g}", f"{EMPTY_SCORE}")
# table -> its columns on the page; for other tables, all columns
_TABLES: dict[str, tuple[str, ...]] = {
    "qc_*.csv": ("slide_id", "folder", "verdict", "why", *_NUMBERS),
    "measures_*.csv": ("slide_id", *_NUMBERS),
    "summary.csv": (),
    "failed.csv": (),
    "predictions_*.csv": (),
}
# JSON values that the page displays
_EXPERIMENT = ("name", "task", "target", "metric", "value", "interval", "date")
_VALIDATION = ("validation", "cases", "metric", "value", "interval")
_PROBE = ("probe", "dataset", "metric", "score")

# file of the seconds that were read so far, so that later commands do not read the records again
SECONDS = "records/seconds.json"
_LOGS = "*/ended/*.jsonl"

# seconds by slide, by the name of the record
_SecondsByRecord = dict[str, dict[str, float]]
TableRow = Mapping[str, str]


def write_index(out: Path, *, draw_thumbnails: bool = True) -> None:
    """Writes the page from summary.csv, failed.csv, qc_*.csv, records/ and so on; atomically.

    If a table is missing or not readable, its part of the page is left out.

    Args:
        out: results folder.
        draw_thumbnails: False shows only thumbnails that are already drawn. This is for a process
            that must end within seconds, while thousands of pictures take minutes.

    Memory:
        Some kB per slide, and one sheet of thumbnails (14 MB).
    """
    tables: dict[str, list[dict[str, str]]] = {}
    for pattern, columns in _TABLES.items():
        for path in out.glob(pattern):
            tables[path.name] = _read_rows(path, columns)
            if path.name.startswith("qc_"):
                for row in tables[path.name]:
                    folder = row.get("folder")
                    overlay = overlay_file(out / folder) if folder else None
                    if overlay is not None:
                        row["overlay"] = f"{folder}/{overlay.name}"
    pictures = {}
    slide_ids = [row["slide_id"] for row in tables.get("summary.csv", [])]
    for slide_id in dict.fromkeys(slide_ids):
        files = picture_files(out / SLIDES / slide_id)
        if files:
            pictures[slide_id] = files
    thumbnails = write_sheets(
        out / THUMBNAILS,
        _SLIDE_SHEETS,
        pictures,
        _outlined_thumbnail,
        draw=draw_thumbnails,
    )
    old_overviews: dict[str, list[str]] = {}
    for path in sorted(out.glob("*/overviews/*.png")):
        if not path.with_suffix(".jpg").is_file():
            old_overviews.setdefault(path.stem, []).append(path.parts[-3])
    beside: dict[str, Mapping[str, object]] = {
        "thumbs": thumbnails,
        "heatmaps": _heatmaps(out),
        "old_overviews": old_overviews,
    }
    parts = _write_parts(out / THUMBNAILS, tables, beside)
    data = {
        "tables": sorted(tables),
        "experiments": _headlines(out, "experiments/*/experiment.json", _EXPERIMENT),
        "validations": _headlines(out, "validation_*/validation.json", _VALIDATION),
        "probes": _probes(out),
        "pages": sorted(path.name for path in out.glob("qc_*.html")),
        "numbers": _NUMBERS,
    }
    runs = {"seconds": slide_seconds(out), "records": _records(out)}
    write_text(out / RUNS, f"const runs = {json.dumps(runs)};\n")
    scripts = [f"{THUMBNAILS}/{name}" for name in parts]
    page = render_page(
        "thinsection.report",
        INDEX,
        data=data,
        runs=RUNS,
        parts=scripts,
        home=INDEX,
    )
    if not (out / INDEX).is_file() or (out / INDEX).read_bytes() != page.encode():
        write_text(out / INDEX, page)
    drop_files(out / THUMBNAILS, _PART_FILES, parts)
    if draw_thumbnails:
        drop_sheets(out / THUMBNAILS, _SLIDE_SHEETS, thumbnails.values())


def _read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a table that name a slide, with these columns or all, without empty cells."""
    rows: list[dict[str, str]] = []
    with contextlib.suppress(OSError, ValueError):
        for row in read_table(path):
            if not row.get("slide_id"):
                continue
            cells = {}
            for name, text in row.items():
                is_empty = not text or (name in _NUMBERS and text in _NOTHING)
                if not is_empty and (not columns or name in columns):
                    cells[name] = text
            if row.get("status") == "skipped":  # an earlier run finished it
                cells["status"] = "done"
            rows.append(cells)
    return rows


def _heatmaps(out: Path) -> dict[str, list[Document]]:
    """Pictures `GRID/heatmap_NAME/ID.COLUMN.png` of each slide.

    A picture has its path. If the record of its folder names it, it also has the key of its layer
    in the viewer, and the middle of the tile with the highest value, in level-0 px.
    """
    heatmaps: dict[str, list[Document]] = {}
    for folder in sorted(out.glob("*/heatmap_*/")):
        record = _read_document(folder / "scale.json")
        # a folder without model has pictures of a column of another table
        prefix = f"{folder.name}:" if record.get("model") else ""
        drawn = record.get("pictures", {}).values()
        columns = {slug(column): column for names in drawn for column in names}
        places = record.get("places", {})
        for path in sorted(folder.glob("*.*.png")):
            slide_id, _, end = path.stem.rpartition(".")
            picture: Document = {"path": path.relative_to(out).as_posix()}
            if end in columns:
                picture["layer"] = f"{folder.parent.name}/{prefix}{columns[end]}"
                picture["middle"] = places.get(slide_id, {}).get(columns[end])
            heatmaps.setdefault(slide_id, []).append(picture)
    return heatmaps


def _headlines(out: Path, pattern: str, names: Sequence[str]) -> list[Document]:
    """Values of experiments or of tests of a model, each with the name of its folder."""
    rows = []
    for path in sorted(out.glob(pattern)):
        document = _read_document(path)
        row: Document = {"dir": path.parent.name}
        rows.append(row | {name: document.get(name) for name in names})
    return rows


def _probes(out: Path) -> list[Document]:
    """Score and page of each probe below `probes/`, and the pages of comparisons."""
    probes = []
    for page in sorted((out / "probes").rglob("*.html")):
        row: Document = {"page": page.relative_to(out).as_posix()}
        document = _read_document(page.with_suffix(".json"))
        row |= {name: document.get(name) for name in _PROBE}
        probes.append(row)
    return probes


def _records(out: Path) -> list[Document]:
    """Invocations, with links to the files of each, and the fingerprints of their encoders."""
    records = []
    for path in sorted((out / "records").glob("*/run.json")):
        document = _read_document(path)
        if not document:
            continue
        document.pop("efficiency", None)
        names = ("efficiency.html", "run.log")
        record = {
            "name": path.parent.name,
            "fingerprints": _fingerprints(document.pop("models", None)),
            "files": [name for name in names if (path.parent / name).is_file()],
        }
        records.append(record | document)
    return records


def _fingerprints(models: object) -> dict[str, str]:
    """What each encoder of a record says about its fingerprint, by its label."""
    fingerprints = {}
    if isinstance(models, dict):
        for label, model in models.items():
            if isinstance(model, dict) and isinstance(model.get("fingerprint"), str):
                fingerprints[label] = model["fingerprint"]
    return fingerprints


def slide_seconds(out: Path) -> dict[str, float]:
    """Seconds by slide; a newer invocation takes precedence over an older one.

    Only notes that were added since the last call are read. If notes were removed, all are read.

    Memory:
        About 100 bytes per slide.
    """
    read_until: dict[str, int] = {}
    seconds_by_record: _SecondsByRecord = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = read_json(out / SECONDS)
        seconds = coerce(document["seconds"], _SecondsByRecord, "seconds")
        read_until = coerce(document["logs"], dict[str, int], "logs")
        seconds_by_record = seconds
    logs: dict[str, Path] = {}
    for path in sorted((out / "records").glob(_LOGS)):
        logs[str(path.relative_to(out))] = path
    sizes = {name: path.stat().st_size for name, path in logs.items()}
    if any(sizes.get(name, -1) < end for name, end in read_until.items()):
        read_until = {}
        seconds_by_record = {}
    ends = dict(read_until)
    for name, path in logs.items():
        start = read_until.get(name, 0)
        if sizes[name] > start:
            notes, ends[name] = _new_notes(path, start)
            seconds_by_record.setdefault(path.parts[-3], {}).update(notes)
    # names of records begin with their time, so the last one is the newest
    record_of: dict[str, str] = {}
    newest: dict[str, float] = {}
    for record in sorted(seconds_by_record):
        newest |= seconds_by_record[record]
        record_of |= dict.fromkeys(seconds_by_record[record], record)
    if ends != read_until:
        seconds = {}
        for slide_id, record in record_of.items():
            seconds.setdefault(record, {})[slide_id] = newest[slide_id]
        write_text(out / SECONDS, json.dumps({"logs": ends, "seconds": seconds}))
    return newest


def _new_notes(path: Path, start: int) -> tuple[dict[str, float], int]:
    """Seconds by slide in the lines of a log from a position on, and the end of the last line."""
    seconds: dict[str, float] = {}
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):  # its process was killed, or still writes
                break
            start += len(line)
            # a line that was damaged is left out
            with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):
                result = parse_json(line.decode(errors="replace"))
                if result.get("seconds"):
                    seconds[result["slide_id"]] = result["seconds"]
    return seconds, start


def _read_document(path: Path) -> Document:
    """JSON object in a file; empty if there is none, or it is not readable."""
    with contextlib.suppress(OSError, ValueError):
        document = read_json(path)
        if isinstance(document, dict):
            return document
    return {}


def _outlined_thumbnail(picture: Path, mask: Path | None = None) -> Image.Image:
    """Thumbnail with the tissue's outline."""
    with Image.open(picture) as file:
        # JPEG decoding at an eighth of the size, if that is enough
        file.draft("RGB", (2 * CELL[0], 2 * CELL[1]))
        image = file.convert("RGB")
    image.thumbnail(CELL)
    if mask is None:
        return image
    small = Picture(rgb=np.asarray(image), size_l0=image.size)
    return Image.fromarray(paint(small, [Outline(read_tissue(mask), width=1.2)]))


def _write_parts(
    folder: Path,
    tables: Mapping[str, Sequence[TableRow]],
    beside: Mapping[str, Mapping[str, object]],
) -> list[str]:
    """Writes the parts that are not there yet; returns the names of all, in their order.

    Args:
        folder: folder of the parts.
        tables: rows that name a slide, by the file of their table.
        beside: what else the page shows of slides, by kind and slide id.

    Memory:
        The rows of all tables, and the text of one part.
    """
    rows_by_slide: dict[str, dict[str, list[TableRow]]] = {}
    for table, rows in tables.items():
        for row in rows:
            tables_of_slide = rows_by_slide.setdefault(row["slide_id"], {})
            tables_of_slide.setdefault(table, []).append(row)
    names = []
    groups = stable_groups(
        sorted(rows_by_slide), usual=_USUAL_SLIDES, most=_MOST_SLIDES
    )
    for slide_ids in groups:
        rows_by_table: dict[str, list[TableRow]] = {}
        for slide_id in slide_ids:
            for table, rows in rows_by_slide[slide_id].items():
                rows_by_table.setdefault(table, []).extend(rows)
        part: Document = {"tables": {}}
        for table, rows in rows_by_table.items():
            columns = list(dict.fromkeys(chain.from_iterable(rows)))
            cells = [[row.get(name, "") for name in columns] for row in rows]
            part["tables"][table] = {"columns": columns, "rows": cells}
        for kind, values in beside.items():
            part[kind] = {name: values[name] for name in slide_ids if name in values}
        text = f"parts.push({json.dumps(part)});\n"
        digest = sha256(text.encode()).hexdigest()[:16]
        path = folder / _PART_FILES.replace("*", digest)
        if not path.is_file():
            write_text(path, text)
        names.append(path.name)
    return names


def is_results_folder(folder: Path) -> bool:
    """True for a folder with slides and records of runs."""
    return (folder / SLIDES).is_dir() and (folder / RUNS).parent.is_dir()


def results_above(folder: Path) -> Path | None:
    """Nearest results folder that contains a folder, or is this folder; None if there is none."""
    for parent in (folder.absolute(), *folder.absolute().parents):
        if is_results_folder(parent):
            return parent
    return None


def index_address(folder: Path, results: Path | None = None) -> str | None:
    """Address of the results' index on a page in a folder, such as '../../index.html'.

    Args:
        folder: folder of the page.
        results: the results from which the page was made, if the page lies outside of them.

    Returns:
        None if the page belongs to no results folder.
    """
    home = results_above(folder)
    if home is None and results is not None:
        home = results_above(results)
    if home is None:
        return None
    return quote(os.path.relpath(home / INDEX, folder.absolute()).replace(os.sep, "/"))


def refresh_index(folder: Path) -> None:
    """Writes the index of the results folder that contains a folder, if there is one."""
    home = results_above(folder)
    if home is not None:
        write_index(home)


def viewer_place(slide_id: str, *, layers: Sequence[str] = ()) -> str:
    """Address of a slide in the viewer, such as 'slide=s1&layer=qc_auto%2F'.

    The viewer adds x and y, the level-0 px in the middle of its window, and downsample, the
    level-0 px per pixel of the screen.

    Args:
        slide_id: id of the slide.
        layers: keys of the layers to show, `view.layers.Layer.key`; a key with '/' at the end
            means all outlines of this group. None of them: those that the viewer shows first.
    """
    return urlencode([("slide", slide_id), *(("layer", key) for key in layers)])
