"""Sheets of thumbnails for a page: many small pictures in few files."""

import contextlib
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from PIL import Image

from thinsection.files.atomic import atomic_path

# width and height of a thumbnail in a sheet, in pixels
CELL = (200, 150)
_COLUMNS = 10
_ROWS = 10

# files for each thumbnail, by its key
Sources = Mapping[str, tuple[Path, ...]]
# name of a sheet, and x and y of a thumbnail in it in pixels
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

    The name of a sheet is a hash of its source files and their sizes. An existing sheet is not
    drawn again, so that a run with nothing to do only reads the size of each file.

    Args:
        folder: folder of the sheets.
        kind: prefix of their names.
        sources: files for each thumbnail.
        thumbnail: makes a thumbnail from its files.
        draw: False leaves out keys whose sheet does not exist.

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
    """Removes sheets that the finished page no longer uses."""
    for path in folder.glob(f"{kind}_*.jpg"):
        if path.name not in page:
            path.unlink(missing_ok=True)


def _digest(group: Sources) -> str:
    """Hash for the name of a sheet, from its files and their sizes."""
    files = [[key, *(path.stat().st_size for path in group[key])] for key in group]
    return sha256(json.dumps(files).encode()).hexdigest()[:16]


def _corner(number: int) -> tuple[int, int]:
    """(x, y) of the corner of a thumbnail in its sheet, in pixels."""
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
