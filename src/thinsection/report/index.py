"""`index.html` of a results folder: what is there, what failed and why, and where to look next.

It is made of the tables and records that lie in the folder, never of slides or tiles; thumbnails
with the tissue's outline lie in a few sheets beside it, which are drawn again only where a picture
changed. The page works from the file system and asks nobody for anything.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from thinsection.files.atomic import atomic_path, read_table, write_text
from thinsection.files.pages import render_page
from thinsection.report.draw import PICTURE, Outline, Picture, paint
from thinsection.store.ledger import SLIDES

INDEX = "index.html"
THUMBNAILS = "index"  # folder of the sheets
CELL = (200, 150)  # px of a thumbnail in a sheet
_COLUMNS, _ROWS = 10, 10  # of a sheet
_NUMBERS = {  # column of a QC or measures table -> what the page calls its distribution
    "focus_removed_percent": "out of focus, share of the tissue",
    "px_focus": "focus of the tiles (median)",
    "deconv_c0_mean": "hematoxylin (mean)",
    "deconv_c1_mean": "eosin (mean)",
}
_SHOWN_OF_RECORDS = (
    *("command", "started", "seconds", "counts", "config", "ended_by", "host"),
    "thinsection_version",
)
_EXPERIMENT = ("name", "task", "target", "metric", "value", "interval", "date")
Row = Mapping[str, str]
Sources = Mapping[str, tuple[Path, ...]]  # the files that a thumbnail is made of, by its key


def write_index(out: Path) -> None:
    """Writes the page from summary.csv, failed.csv, qc_*.csv, records/ and so on; atomically.

    A table that is not there, or cannot be read, leaves out what it would tell.

    Memory: some kB per slide, and one sheet of thumbnails (9 MB).
    """
    slides = _slides(out)
    pictures = {i: found for i, slide in slides.items() if (found := _picture(out / slide["dir"]))}
    for key, place in write_sheets(out / THUMBNAILS, "slides", pictures, _outlined).items():
        slides[key]["thumb"] = place
    records = [_record(path) for path in sorted((out / "records").glob("*/run.json"))]
    data = {
        "slides": list(slides.values()),
        "records": sorted(filter(None, records), key=lambda record: str(record["started"])),
        "experiments": list(_experiments(out)),
        "pages": sorted(path.name for path in out.glob("qc_*.html")),
        "tables": sorted(path.name for path in out.glob("*.csv")),
        "numbers": _NUMBERS,
    }
    page = render_page("thinsection.report", INDEX, data=data, cell=CELL)
    write_text(out / INDEX, page)
    drop_sheets(out / THUMBNAILS, "slides", page)


def _slides(out: Path) -> dict[str, dict[str, Any]]:
    """What the tables say of each slide, by its id: first summary.csv, which has a row per grid."""
    slides: dict[str, dict[str, Any]] = {}
    for row in _table(out / "summary.csv"):
        slide = slides.setdefault(row["slide_id"], {"grids": {}, "numbers": {}, "predictions": {}})
        names = ("slide_id", "slide_path", "status", "patient_id", "label", "split", "stain")
        slide |= {name: row.get(name, "") for name in (*names, "reader", "warnings")}
        slide["dir"] = f"{SLIDES}/{row['slide_id']}"
        width, height, x, y, share = map(
            _number, map(row.get, ("width", "height", "mpp_x", "mpp_y", "tissue_fraction"))
        )
        slide |= {"size": [width, height], "mpp": x, "tissue": share}
        if None not in (width, height, x, y, share):
            slide["area"] = round(width * height * x * y * share / 1e6, 4)  # mm²
        if row.get("grid"):
            told = {name: row.get(name, "") for name in ("features", "slide_features", "also")}
            slide["grids"][row["grid"]] = {"tiles": _number(row.get("num_tiles")), **told}
    for row in _table(out / "failed.csv"):
        if row["slide_id"] in slides:
            slides[row["slide_id"]] |= {name: row.get(name, "") for name in ("stage", "error")}
    for path in sorted([*out.glob("qc_*.csv"), *out.glob("measures_*.csv")]):
        for row in _table(path):
            slide = slides.get(row["slide_id"], {"numbers": {}})
            slide |= {name: row[name] for name in ("verdict", "why") if name in row}
            found = {name: _number(row.get(name)) for name in _NUMBERS}
            slide["numbers"] |= {name: v for name, v in found.items() if v is not None}
    for path in sorted(out.glob("predictions_*.csv")):
        for row in _table(path):
            if row["slide_id"] in slides:
                told = {name: value for name, value in row.items() if name != "slide_id"}
                slides[row["slide_id"]]["predictions"][path.stem.removeprefix("predictions_")] = (
                    told
                )
    for slide_id, seconds in _seconds(out):
        if slide_id in slides:
            slides[slide_id]["seconds"] = seconds
    return slides


def _table(path: Path) -> list[dict[str, str]]:
    """The rows of a table that name a slide; none where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return [row for row in read_table(path) if row.get("slide_id")]
    return []


def _number(text: str | None) -> Any:
    with contextlib.suppress(TypeError, ValueError):
        value = float(text or "")
        return int(value) if value == int(value) else value
    return None


def _document(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None
    return None


def _record(path: Path) -> dict[str, Any] | None:
    """What the page tells of an invocation, and what can be read of it."""
    document = _document(path)
    if document is None:
        return None
    beside = [n for n in ("efficiency.html", "run.log") if (path.parent / n).is_file()]
    shown = {name: document.get(name) for name in _SHOWN_OF_RECORDS}
    sentence = (document.get("efficiency") or {}).get("bottleneck", "")
    return {"name": path.parent.name, "files": beside, "bottleneck": sentence, **shown}


def _experiments(out: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((out / "experiments").glob("*/experiment.json")):
        if (document := _document(path)) is not None:
            yield {"dir": path.parent.name} | {name: document.get(name) for name in _EXPERIMENT}


def _seconds(out: Path) -> Iterator[tuple[str, float]]:
    """Slides and the seconds that they took, older invocations first."""
    for path in sorted((out / "records").glob("*/ended/*.jsonl")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="utf-8").splitlines():
                if '"seconds"' in line:
                    told = json.loads(line)
                    yield told["slide_id"], told["facts"]["seconds"]


def _picture(folder: Path) -> tuple[Path, ...]:
    """The picture of a slide, and the mask that it was stored with."""
    found = [folder, *sorted(folder.glob("qc_*"))]
    for pattern in (f"{PICTURE}*.jpg", "thumbnail*.jpg"):
        for path in (path for one in found for path in sorted(one.glob(pattern))):
            end = path.stem.removeprefix(PICTURE).removeprefix("thumbnail") + ".png"
            masks = [path.with_name(n) for n in (f"tissue{end}", "mask_kept.png", "mask_use.png")]
            return (path, *[mask for mask in masks if mask.is_file()][:1])
    return ()


def _outlined(picture: Path, mask: Path | None = None) -> Image.Image:
    """A thumbnail with the tissue's outline."""
    with Image.open(picture) as file:
        file.draft("RGB", (2 * CELL[0], 2 * CELL[1]))  # decoded at an eighth where that is enough
        image = file.convert("RGB")
    image.thumbnail(CELL)
    if mask is None:
        return image
    with Image.open(mask) as file:
        tissue = np.asarray(file.convert("L")) > 0
    small = Picture(rgb=np.asarray(image), size_l0=image.size)
    return Image.fromarray(paint(small, [Outline(tissue, width=1.2)]))


def write_sheets(
    folder: Path, kind: str, sources: Sources, thumbnail: Callable[..., Image.Image]
) -> dict[str, tuple[str, int, int]]:
    """Name of a sheet of thumbnails, and x and y of the thumbnail in it, by key.

    A sheet is named by the files that it is made of and their sizes: what is there is not drawn
    again, so that a run that finds everything done costs a look at each file.

    Memory: one sheet, 9 MB.
    """
    keys = list(sources)
    placed: dict[str, tuple[str, int, int]] = {}
    for start in range(0, len(keys), _COLUMNS * _ROWS):
        group = keys[start : start + _COLUMNS * _ROWS]
        made_of = [[key, *(path.stat().st_size for path in sources[key])] for key in group]
        name = f"{kind}_{sha256(json.dumps(made_of).encode()).hexdigest()[:16]}.jpg"
        places = [(n % _COLUMNS * CELL[0], n // _COLUMNS * CELL[1]) for n in range(len(group))]
        if not (folder / name).is_file():
            parts = ((place, sources[key]) for place, key in zip(places, group))
            _write_sheet(folder / name, parts, thumbnail, len(group))
        placed |= {key: (f"{folder.name}/{name}", x, y) for key, (x, y) in zip(group, places)}
    return placed


def _write_sheet(path: Path, parts: Any, thumbnail: Callable[..., Image.Image], num: int) -> None:
    rows = -(-num // _COLUMNS)
    sheet = Image.new("RGB", (CELL[0] * _COLUMNS, CELL[1] * rows), "white")
    for (x, y), files in parts:
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # damaged: left white
            image = thumbnail(*files)
            image.thumbnail(CELL)
            sheet.paste(image, (x + (CELL[0] - image.width) // 2, y))
    with atomic_path(path) as tmp:
        sheet.save(tmp, format="JPEG", quality=82)


def drop_sheets(folder: Path, kind: str, page: str) -> None:
    """Removes the sheets that a page, which is in its place, no longer shows."""
    for path in folder.glob(f"{kind}_*.jpg"):
        if path.name not in page:
            path.unlink(missing_ok=True)
