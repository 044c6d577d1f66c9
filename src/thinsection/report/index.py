"""`index.html` of a results folder: what is there, what failed and why, and where to look next.

It is made of the tables and records that lie in the folder, never of slides or tiles; thumbnails
with the tissue's outline lie in a few sheets beside it, which are drawn again only where a picture
changed. The page works from the file system and asks nobody for anything. What differs from one
invocation to the next (times, hosts) lies in `records/runs.js`: the page itself says of equal
results the same bytes.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from thinsection.files.atomic import atomic_path, read_table, write_text
from thinsection.files.json_text import parse_json, read_json
from thinsection.files.pages import render_page
from thinsection.qc.checks.check import EMPTY_SCORE
from thinsection.report.draw import Outline, Picture, paint, picture_files, read_mask
from thinsection.store.ledger import SLIDES

INDEX, RUNS, THUMBNAILS = (
    "index.html",
    "records/runs.js",
    "index",
)  # the last: folder of the sheets
CELL = (200, 150)  # px of a thumbnail in a sheet
_COLUMNS, _ROWS = 10, 10  # of a sheet
_NUMBERS = {  # column of a QC or measures table -> what the page calls its distribution
    "focus_removed_percent": "out of focus, share of the tissue",
    "px_focus": "focus of the tiles (median)",
    "deconv_c0_mean": "hematoxylin (mean)",
    "deconv_c1_mean": "eosin (mean)",
}
_NOTHING = {
    "",
    f"{EMPTY_SCORE:g}",
    f"{EMPTY_SCORE}",
}  # in such a column; HistoQC's is -100
_SHOWN = {  # tables -> the columns that the page has of them; of others all
    "qc_*.csv": ("slide_id", "folder", "verdict", "why", *_NUMBERS),
    "measures_*.csv": ("slide_id", *_NUMBERS),
    **dict.fromkeys(("summary.csv", "failed.csv", "predictions_*.csv"), ()),
}
Sources = Mapping[
    str, tuple[Path, ...]
]  # the files that a thumbnail is made of, by its key
_EXPERIMENT = ("name", "task", "target", "metric", "value", "interval", "date")


def write_index(out: Path, *, draw_thumbnails: bool = True) -> None:
    """Writes the page from summary.csv, failed.csv, qc_*.csv, records/ and so on; atomically.

    A table that is not there, or cannot be read, leaves out what it would tell. Without
    `draw_thumbnails` the page shows those that are drawn already: for a process that is asked to
    end, which has seconds and not the minutes that thousands of pictures take.

    Memory: some kB per slide, and one sheet of thumbnails (9 MB).
    """
    tables = {
        p.name: _rows(p, shown)
        for glob, shown in _SHOWN.items()
        for p in out.glob(glob)
    }
    slides = dict.fromkeys(row["slide_id"] for row in tables.get("summary.csv", ()))
    pictures = {name: picture_files(out / SLIDES / name) for name in slides}
    found = {name: files for name, files in pictures.items() if files}
    heatmaps: dict[
        str, list[str]
    ] = {}  # of each slide, `GRID/heatmap_NAME/ID.COLUMN.png`
    for path in sorted(out.glob("*/heatmap_*/*.*.png")):
        heatmaps.setdefault(path.stem.rpartition(".")[0], []).append(
            str(path.relative_to(out))
        )
    experiments = []
    for path in sorted((out / "experiments").glob("*/experiment.json")):
        told = _document(path)
        experiments.append(
            {"dir": path.parent.name} | {n: told.get(n) for n in _EXPERIMENT}
        )
    data = {
        "tables": dict(sorted(tables.items())),
        "thumbs": write_sheets(
            out / THUMBNAILS, "slides", found, _outlined, draw=draw_thumbnails
        ),
        "experiments": experiments,
        "pages": sorted(path.name for path in out.glob("qc_*.html")),
        **{"heatmaps": heatmaps, "numbers": _NUMBERS},
    }
    records = filter(None, map(_record, sorted((out / "records").glob("*/run.json"))))
    runs = {"seconds": dict(_seconds(out)), "records": [*records]}
    write_text(out / RUNS, f"const runs = {json.dumps(runs)};\n")
    page = render_page("thinsection.report", INDEX, data=data, runs=RUNS)
    if not (out / INDEX).is_file() or (out / INDEX).read_bytes() != page.encode():
        write_text(out / INDEX, page)
    if draw_thumbnails:
        drop_sheets(out / THUMBNAILS, "slides", page)


def _rows(path: Path, shown: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table that name a slide, with these columns or all; no empty cells."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for row in filter(lambda row: row.get("slide_id"), read_table(path)):
            known = {
                k: v
                for k, v in row.items()
                if v and (k not in _NUMBERS or v not in _NOTHING)
            }
            kept = {k: v for k, v in known.items() if not shown or k in shown}
            done = (
                {"status": "done"} if row.get("status") == "skipped" else {}
            )  # by an earlier run
            found.append(kept | done)
    return found


def _document(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}


def _record(path: Path) -> dict[str, Any] | None:
    """What the page tells of an invocation, and what of it can be opened."""
    if not (document := _document(path)):
        return None
    beside = [n for n in ("efficiency.html", "run.log") if (path.parent / n).is_file()]
    sentence = (document.pop("efficiency", None) or {}).get("bottleneck", "")
    shown = {name: value for name, value in document.items() if name != "models"}
    return {"name": path.parent.name, "files": beside, "bottleneck": sentence, **shown}


def _seconds(out: Path) -> Iterator[tuple[str, float]]:
    """Slides and the seconds that they took, older invocations first."""
    for path in sorted((out / "records").glob("*/ended/*.jsonl")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="utf-8").splitlines():
                if seconds := (told := parse_json(line)).get("seconds"):
                    yield told["slide_id"], seconds


def _outlined(picture: Path, mask: Path | None = None) -> Image.Image:
    """A thumbnail with the tissue's outline."""
    with Image.open(picture) as file:
        file.draft(
            "RGB", (2 * CELL[0], 2 * CELL[1])
        )  # decoded at an eighth where that is enough
        image = file.convert("RGB")
    image.thumbnail(CELL)
    if mask is None:
        return image
    small = Picture(rgb=np.asarray(image), size_l0=image.size)
    return Image.fromarray(paint(small, [Outline(read_mask(mask), width=1.2)]))


def write_sheets(
    folder: Path,
    kind: str,
    sources: Sources,
    thumbnail: Callable[..., Image.Image],
    *,
    draw: bool = True,
) -> dict[str, tuple[str, int, int]]:
    """Name of a sheet of thumbnails, and x and y of the thumbnail in it, by key.

    A sheet is named by the files that it is made of and their sizes: what is there is not drawn
    again, so that a run that finds everything done costs a look at each file. Without `draw` keys
    whose sheet is not there are left out.

    Memory: one sheet, 9 MB.
    """
    keys, at_once = list(sources), _COLUMNS * _ROWS
    placed: dict[str, tuple[str, int, int]] = {}
    for group in (
        keys[start : start + at_once] for start in range(0, len(keys), at_once)
    ):
        made_of = [
            [key, *(path.stat().st_size for path in sources[key])] for key in group
        ]
        name = f"{kind}_{sha256(json.dumps(made_of).encode()).hexdigest()[:16]}.jpg"
        places = [
            (n % _COLUMNS * CELL[0], n // _COLUMNS * CELL[1]) for n in range(len(group))
        ]
        there = (folder / name).is_file()
        if not there and not draw:
            continue
        for key, place in zip(group, places):
            placed[key] = (f"{folder.name}/{name}", *place)
        if there:
            continue
        height = CELL[1] * (places[-1][1] // CELL[1] + 1)
        sheet = Image.new("RGB", (CELL[0] * _COLUMNS, height), "white")
        for key, (x, y) in zip(group, places):
            with contextlib.suppress(
                OSError, SyntaxError, ValueError
            ):  # damaged: left white
                image = thumbnail(*sources[key])
                image.thumbnail(CELL)
                sheet.paste(image, (x + (CELL[0] - image.width) // 2, y))
        with atomic_path(folder / name) as tmp:
            sheet.save(tmp, format="JPEG", quality=82)
    return placed


def drop_sheets(folder: Path, kind: str, page: str) -> None:
    """Removes the sheets that a page, which is in its place, no longer shows."""
    for path in folder.glob(f"{kind}_*.jpg"):
        if path.name not in page:
            path.unlink(missing_ok=True)
