"""Sheets of thumbnails beside a page: many small pictures in few files."""

import contextlib
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from PIL import Image

from thinsection.files.atomic import atomic_path

# px of a thumbnail in a sheet: width, height
CELL = (200, 150)
_COLUMNS = 10
_ROWS = 10

# files that a thumbnail is made of, by its key
Sources = Mapping[str, tuple[Path, ...]]
# name of a sheet, and x and y of a thumbnail in it, px
Place = tuple[str, int, int]


def write_sheets(
    folder: Path,
    kind: str,
    sources: Sources,
    thumbnail: Callable[..., Image.Image],
    *,
    draw: bool = True,
) -> dict[str, Place]:
    """Draws thumbnails into sheets, and returns the place of each by its key.

    A sheet is named by the files that it is made of and their sizes: what is there is not drawn
    again, so that a run that finds everything done costs a look at each file.

    Args:
        folder: folder of the sheets.
        kind: how their names begin.
        sources: files of each thumbnail.
        thumbnail: makes a thumbnail from its files.
        draw: without it keys whose sheet is not there are left out.

    Memory:
        One sheet, 9 MB.
    """
    keys = list(sources)
    places: dict[str, Place] = {}
    for start in range(0, len(keys), _COLUMNS * _ROWS):
        group = {key: sources[key] for key in keys[start : start + _COLUMNS * _ROWS]}
        path = folder / f"{kind}_{_digest(group)}.jpg"
        if not path.is_file():
            if not draw:
                continue
            _draw_sheet(path, group, thumbnail)
        for number, key in enumerate(group):
            places[key] = (f"{folder.name}/{path.name}", *_corner(number))
    return places


def drop_sheets(folder: Path, kind: str, page: str) -> None:
    """Removes the sheets that a page, which is in its place, no longer shows."""
    for path in folder.glob(f"{kind}_*.jpg"):
        if path.name not in page:
            path.unlink(missing_ok=True)


def _digest(group: Sources) -> str:
    """A name for the files of a sheet and their sizes."""
    files = [[key, *(path.stat().st_size for path in group[key])] for key in group]
    return sha256(json.dumps(files).encode()).hexdigest()[:16]


def _corner(number: int) -> tuple[int, int]:
    """(x, y) of the corner of a thumbnail in its sheet, px."""
    row, column = divmod(number, _COLUMNS)
    return column * CELL[0], row * CELL[1]


def _draw_sheet(
    path: Path, group: Sources, thumbnail: Callable[..., Image.Image]
) -> None:
    """Writes a sheet; a thumbnail whose files are damaged is left white."""
    last_row = _corner(len(group) - 1)[1]
    sheet = Image.new("RGB", (CELL[0] * _COLUMNS, last_row + CELL[1]), "white")
    for number, files in enumerate(group.values()):
        x, y = _corner(number)
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            image = thumbnail(*files)
            image.thumbnail(CELL)
            sheet.paste(image, (x + (CELL[0] - image.width) // 2, y))
    with atomic_path(path) as tmp:
        sheet.save(tmp, format="JPEG", quality=82)
