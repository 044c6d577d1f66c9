"""Layers of cells: their number in small squares, and outlines square by square.

A browser draws the numbers while many cells are in view, and the outlines of the squares in view
otherwise. So a slide with a million cells is drawn as fast as one with a thousand.
"""

import numpy as np

from thinsection.cells.outlines import Outlines, decode_wkb
from thinsection.cells.table import CellTable, centers_of, class_codes
from thinsection.types import Floats

# edge of a square whose cells are counted, and of one whose outlines are sent, level-0 px
COUNTED_PX = 256
OUTLINED_PX = 2048


def count_in_squares(table: CellTable) -> bytes:
    """Numbers of cells in squares of 256 px, in the form of a layer of tiles with values.

    Memory: 8 bytes per square, and 65,536 cells.
    """
    width, height = table.size_l0
    shape = (-(-height // COUNTED_PX), -(-width // COUNTED_PX))
    counts = np.zeros(shape, dtype=np.int64)
    for batch in table.batches(["x_l0", "y_l0"]):
        columns, rows = (centers_of(batch) / COUNTED_PX).astype(np.int64).T
        places = rows * shape[1] + columns
        counts += np.bincount(places, minlength=counts.size).reshape(shape)
    rows, columns = np.nonzero(counts)
    corners = np.stack((columns, rows), axis=1) * COUNTED_PX
    head = np.array([len(corners), *(COUNTED_PX,) * 4], dtype="<u4")
    values = counts[rows, columns].astype("<f4")
    return head.tobytes() + corners.astype("<i4").tobytes() + values.tobytes()


def outlines_in_square(table: CellTable, column: int, row: int) -> bytes:
    """Outlines of the cells whose centre lies in a square of 2,048 px.

    The bytes are little-endian: uint32 N; uint32 (N,) places of the classes, one after the last for
    none; uint32 (N + 1,) first points; float32 (P, 2) points, from the corner of the square. A
    cell without an outline has its centre as the only point.

    Memory: a row group of the table, at most 65,536 cells.
    """
    corner = np.array((column, row)) * OUTLINED_PX
    window = (*corner.tolist(), *(corner + OUTLINED_PX).tolist())
    codes = [np.empty(0, dtype=np.int64)]
    counts = [np.empty(0, dtype=np.int64)]
    points = [np.empty((0, 2))]
    for batch in table.batches(["x_l0", "y_l0", "class", "geometry"], window):
        places = class_codes(batch)
        codes.append(np.where(places < 0, len(table.classes), places))
        outlines = decode_wkb(batch.column("geometry")).outlines
        outlines = _with_centers(outlines, centers_of(batch))
        counts.append(outlines.num_points)
        points.append(outlines.points)
    number = np.concatenate(counts)
    first = np.concatenate(([0], np.cumsum(number)))
    return b"".join(
        (
            np.array([len(number)], dtype="<u4").tobytes(),
            np.concatenate(codes).astype("<u4").tobytes(),
            first.astype("<u4").tobytes(),
            (np.concatenate(points) - corner).astype("<f4").tobytes(),
        )
    )


def _with_centers(outlines: Outlines, centers: Floats) -> Outlines:
    """The outlines, with the centre of a cell as its only point where it has none."""
    is_bare = outlines.num_points == 0
    if not is_bare.any():
        return outlines
    places = outlines.offsets[:-1][is_bare]
    points = np.insert(outlines.points, places, centers[is_bare], axis=0)
    counts = np.where(is_bare, 1, outlines.num_points)
    return Outlines(points, np.concatenate(([0], np.cumsum(counts))))
