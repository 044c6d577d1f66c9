"""Sheets of thumbnails for a page: many small pictures in few files."""

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from PIL import Image

from thinsection.files.atomic import atomic_path

# width and height of a thumbnail in a sheet, in pixels
CELL = (200, 150)
_COLUMNS = 10
# thumbnails in a sheet: the mean, and the most
_USUAL_CELLS = 50
_MOST_CELLS = 150

# files for each thumbnail, by its key
Sources = Mapping[str, tuple[Path, ...]]
# name of a sheet, and x and y of a thumbnail in it in pixels
Place = tuple[str, int, int]


def stable_groups(
    keys: Iterable[str], *, usual: int, most: int
) -> list[tuple[str, ...]]:
    """Cuts ordered keys into groups, so that one more key changes one group.

    A key whose hash says so begins a group. So the cuts do not depend on the other keys, except
    in a group that would get too long.

    Args:
        keys: keys in an order that one more key does not change.
        usual: mean number of keys in a group.
        most: largest number of keys in a group.
    """
    groups: list[list[str]] = []
    for key in keys:
        number = int.from_bytes(sha256(key.encode(errors="replace")).digest()[:4])
        if not groups or number % usual == 0 or len(groups[-1]) == most:
            groups.append([])
        groups[-1].append(key)
    return [tuple(group) for group in groups]


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
    drawn again, so that a run with nothing to do only reads the size of each file. One more key
    changes one sheet.

    Args:
        folder: folder of the sheets.
        kind: prefix of their names.
        sources: files for each thumbnail, in an order that one more key does not change.
        thumbnail: makes a thumbnail from its files.
        draw: False leaves out keys whose sheet does not exist.

    Memory:
        One sheet, at most 14 MB.
    """
    places: dict[str, Place] = {}
    for keys in stable_groups(sources, usual=_USUAL_CELLS, most=_MOST_CELLS):
        group = {key: sources[key] for key in keys}
        files = [[key, *(p.stat().st_size for p in group[key])] for key in group]
        digest = sha256(json.dumps(files).encode()).hexdigest()[:16]
        path = folder / f"{kind}_{digest}.jpg"
        if not path.is_file():
            if not draw:
                continue
            _draw_sheet(path, group, thumbnail)
        for number, key in enumerate(group):
            places[key] = (f"{folder.name}/{path.name}", *_corner(number))
    return places


def drop_files(folder: Path, pattern: str, used: Collection[str]) -> None:
    """Removes files of a folder that the finished page no longer uses; `used` has their names."""
    for path in folder.glob(pattern):
        if path.name not in used:
            path.unlink(missing_ok=True)


def drop_sheets(folder: Path, kind: str, places: Iterable[Place]) -> None:
    """Removes sheets that the finished page no longer uses."""
    used = {sheet.rpartition("/")[2] for sheet, _, _ in places}
    drop_files(folder, f"{kind}_*.jpg", used)


def _corner(number: int) -> tuple[int, int]:
    """(x, y) of the corner of a thumbnail in its sheet, in pixels."""
    row, column = divmod(number, _COLUMNS)
    return column * CELL[0], row * CELL[1]


def _draw_sheet(
    path: Path, group: Sources, thumbnail: Callable[..., Image.Image]
) -> None:
    """Writes a sheet; a thumbnail whose files are damaged is left white."""
    num_rows = math.ceil(len(group) / _COLUMNS)
    size = (CELL[0] * _COLUMNS, CELL[1] * num_rows)
    sheet = Image.new("RGB", size, "white")
    for number, files in enumerate(group.values()):
        x, y = _corner(number)
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            image = thumbnail(*files)
            image.thumbnail(CELL)
            sheet.paste(image, (x + (CELL[0] - image.width) // 2, y))
    with atomic_path(path) as tmp:
        sheet.save(tmp, format="JPEG", quality=82)
