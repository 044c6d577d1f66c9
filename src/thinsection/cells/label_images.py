"""Reads cells from label images, TIFF or OME-Zarr: the value of a pixel is the number of its cell.

The outline of a cell runs along the edges of its pixels, so that its area is their number. The
image is read in bands of rows; the runs of a cell wait until the rows below no longer have it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.cells.batch import MAX_CELLS, CellBatch
from thinsection.cells.outlines import DecodedWkb, Outlines, decode_wkb
from thinsection.cells.place import PX
from thinsection.errors import InvalidInputError
from thinsection.extras import importing
from thinsection.types import MIB, Document, Floats

# pieces of a label with more empty rows between them are two cells, whatever the bands
MAX_GAP_ROWS = 256
_BAND_BYTES = 16 * MIB
_MAX_CHUNK_ROW_BYTES = 256 * MIB
_MAX_WAITING_RUNS = 1 << 23
# units of OME-Zarr in which slides are measured, µm
_UNITS_UM = {"nanometer": 0.001, "micrometer": 1.0, "millimeter": 1000.0}

_Ints = npt.NDArray[np.int64]
# (R, 4): runs of pixels of one label in one row, as label, row, start and end
_Runs = npt.NDArray[np.int64]


def read_label_cells(path: Path) -> Iterator[CellBatch]:
    """Yields the cells of a label image, in px of the image. 0 is the background.

    Pieces of a label are one cell, unless more than 256 rows lie between them. The id of a cell is
    its label.

    Memory: some 330 MiB, and 32 bytes for each run of pixels in the last 256 rows.

    Raises:
        InvalidInputError: the file is no image of labels.
    """
    with _open_labels(path) as image:
        yield from label_cells(_bands(image, path))


def label_cells(bands: Iterator[npt.NDArray[Any]]) -> Iterator[CellBatch]:
    """Yields the cells of an image that comes in bands of rows, (H, W), from top to bottom."""
    waiting = np.zeros((0, 4), dtype=np.int64)
    bottom = 0
    for band in bands:
        waiting = np.concatenate([waiting, _runs(band, bottom)])
        bottom += len(band)
        is_open = _are_open(waiting, bottom - MAX_GAP_ROWS)
        yield from _batches(waiting[~is_open])
        waiting = waiting[is_open]
        if len(waiting) > _MAX_WAITING_RUNS:
            raise InvalidInputError(
                f"cells of an image must be small, got {len(waiting):,} runs of pixels in "
                f"cells that go on at row {bottom:,}"
            )
    yield from _batches(waiting)


def _runs(band: npt.NDArray[Any], top: int) -> _Runs:
    """Runs of the labels of a band whose first row has this number."""
    is_border = np.ones((band.shape[0], band.shape[1] + 1), dtype=bool)
    is_border[:, 1:-1] = band[:, 1:] != band[:, :-1]
    rows, columns = np.divmod(np.flatnonzero(is_border), band.shape[1] + 1)
    is_start = columns < band.shape[1]
    # the next border in the same row
    ends = columns[1:][is_start[:-1]]
    rows = rows[is_start]
    starts = columns[is_start]
    labels = band[rows, starts].astype(np.int64)
    runs = np.stack([labels, rows + top, starts, ends], axis=1)
    return np.asarray(runs[labels != 0])


def _are_open(runs: _Runs, first_row: int) -> npt.NDArray[np.bool_]:
    """True for each run of a label that has pixels in this row or below."""
    labels, places = np.unique(runs[:, 0], return_inverse=True)
    is_open = np.zeros(len(labels), dtype=bool)
    is_open[places[runs[:, 1] >= first_row]] = True
    return is_open[places]


def _batches(runs: _Runs) -> Iterator[CellBatch]:
    """Yields the cells of complete runs."""
    if not len(runs):
        return
    runs = runs[np.lexsort((runs[:, 2], runs[:, 1], runs[:, 0]))]
    step = np.diff(runs, axis=0)
    is_first = np.ones(len(runs), dtype=bool)
    is_first[1:] = (step[:, 0] != 0) | (step[:, 1] > MAX_GAP_ROWS)
    starts = np.append(np.flatnonzero(is_first), len(runs))
    for first in range(0, len(starts) - 1, MAX_CELLS):
        part = starts[first : first + MAX_CELLS + 1]
        yield _batch(runs[part[0] : part[-1]], np.diff(part))


def _batch(runs: _Runs, num_runs: _Ints) -> CellBatch:
    """The cells of runs, of which each cell has so many."""
    import pyarrow as pa

    cell = np.repeat(np.arange(len(num_runs)), num_runs)
    is_stack = _are_stacks(runs, cell, len(num_runs))
    points, counts = _outlines_of_stacks(runs[is_stack[cell]], num_runs[is_stack])
    changed = {}
    if not is_stack.all():
        other = _union(runs[~is_stack[cell]], num_runs[~is_stack])
        changed = {
            "with holes, which are filled": other.num_with_holes,
            "of several pieces: the largest is kept": other.num_in_pieces,
        }
        all_counts = np.zeros(len(num_runs), dtype=np.int64)
        all_counts[is_stack] = counts
        all_counts[~is_stack] = other.outlines.num_points
        is_of_stack = np.repeat(is_stack, all_counts)
        all_points = np.empty((len(is_of_stack), 2))
        all_points[is_of_stack] = points
        all_points[~is_of_stack] = other.outlines.points
        points, counts = all_points, all_counts
    first_runs = np.cumsum(num_runs) - num_runs
    return CellBatch(
        ids=pa.array(runs[first_runs, 0]).cast(pa.string()),
        outlines=Outlines.of_counts(points, counts),
        changed={reason: count for reason, count in changed.items() if count},
    )


def _are_stacks(runs: _Runs, cell: _Ints, num_cells: int) -> npt.NDArray[np.bool_]:
    """True for each cell with one run in each of its rows, which touches that of the next row."""
    _, rows, starts, ends = runs.T
    touches = np.maximum(starts[1:], starts[:-1]) < np.minimum(ends[1:], ends[:-1])
    touches &= np.diff(rows) == 1
    is_stack = np.ones(num_cells, dtype=bool)
    is_stack[cell[1:][(cell[1:] == cell[:-1]) & ~touches]] = False
    return is_stack


def _outlines_of_stacks(runs: _Runs, num_runs: _Ints) -> tuple[Floats, _Ints]:
    """Points of the outlines of stacks of runs, and the number of points of each.

    An outline goes down along the starts of the runs, and up along their ends. Two runs that begin
    in the same column have no point between them there.
    """
    _, rows, starts, ends = runs.T
    is_last = np.zeros(len(runs), dtype=bool)
    is_last[np.cumsum(num_runs) - 1] = True
    is_first = np.roll(is_last, 1)
    has_step = np.ones(
        (2, len(runs) + 1), dtype=bool
    )  # of starts and ends, above each run
    has_step[0, 1:-1] = starts[1:] != starts[:-1]
    has_step[1, 1:-1] = ends[1:] != ends[:-1]
    is_corner = np.empty((len(runs), 4), dtype=bool)
    corners = np.empty((len(runs), 4, 2))
    for place, (x, row, step, border) in enumerate(
        (
            (starts, rows, has_step[0, :-1], is_first),
            (starts, rows + 1, has_step[0, 1:], is_last),
            (ends, rows + 1, has_step[1, 1:], is_last),
            (ends, rows, has_step[1, :-1], is_first),
        )
    ):
        corners[:, place] = np.stack([x, row], axis=1)
        is_corner[:, place] = step | border
    # place of each corner: down the left side from the first run on, and up the right side
    first = np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
    number = np.arange(len(runs)) - first
    places = np.empty((len(runs), 4), dtype=np.int64)
    places[:, 0] = 4 * first + 2 * number
    places[:, 1] = places[:, 0] + 1
    places[:, 2] = 4 * first + 4 * np.repeat(num_runs, num_runs) - 2 * (number + 1)
    places[:, 3] = places[:, 2] + 1
    points = np.empty((4 * len(runs), 2))
    points[places.ravel()] = corners.reshape(-1, 2)
    is_kept = np.empty(4 * len(runs), dtype=bool)
    is_kept[places.ravel()] = is_corner.ravel()
    num_kept = np.concatenate([[0], np.cumsum(is_kept)])
    limits = 4 * np.concatenate([[0], np.cumsum(num_runs)])
    return points[is_kept], np.diff(num_kept[limits])


def _union(runs: _Runs, num_runs: _Ints) -> DecodedWkb:
    """Outlines of cells of any form, of which each has so many runs."""
    import pyarrow as pa
    import shapely

    cell = np.repeat(np.arange(len(num_runs)), num_runs)
    row = runs[:, 1]
    boxes = shapely.box(runs[:, 2], row, runs[:, 3], row + 1)
    pieces = shapely.multipolygons(boxes, indices=cell)
    shapes = shapely.simplify(shapely.union_all(pieces[:, None], axis=1), 0)
    wkb = pa.array(shapely.to_wkb(shapes, byte_order=1), type=pa.binary())
    return decode_wkb(wkb)


def label_frame(path: Path) -> str:
    """Frame of the coordinates: the µm of a pixel that an OME-Zarr states, else px of level 0.

    Raises:
        InvalidInputError: its pixels are not square, or it does not begin at the corner.
    """
    if path.suffix.lower() != ".zarr":
        return PX
    with importing("cells in label images", "zarr"):
        import zarr
    multiscale = _multiscale(_label_group(zarr.open_group(path, mode="r"), path), path)
    # a multiscale may have transformations of its own, after those of the level
    levels = [multiscale["datasets"][0], multiscale]
    steps = [
        step
        for level in levels
        for step in level.get("coordinateTransformations") or ()
    ]
    units = [axis.get("unit") for axis in multiscale.get("axes") or () if _is_xy(axis)]
    unit_um = (
        _UNITS_UM.get(units[0]) if len(units) == 2 and units[0] == units[1] else None
    )
    if unit_um is None:
        return PX
    mpp_y, mpp_x = unit_um, unit_um
    moved_um = 0.0
    for step in steps:
        *_, y, x = step.get(step.get("type")) or (0, 0)
        if step.get("type") == "scale":
            mpp_y, mpp_x = mpp_y * y, mpp_x * x
        elif step.get("type") == "translation":
            moved_um = max(moved_um, abs(x) * unit_um, abs(y) * unit_um)
    if not np.isclose(mpp_x, mpp_y, rtol=0.01) or moved_um > max(mpp_x, mpp_y):
        raise InvalidInputError(
            "labels of an OME-Zarr must have square pixels and begin at the corner of the slide, "
            f"got {mpp_x:g} x {mpp_y:g} µm per pixel, moved by {moved_um:g} µm, in {str(path)!r}; "
            "state the frame (px, or the µm of one pixel)"
        )
    return repr(float(mpp_x))


def _is_xy(axis: object) -> bool:
    """True for x and y; OME-Zarr 0.3 has names alone, which state no unit."""
    return isinstance(axis, dict) and axis.get("name") in ("x", "y")


@contextmanager
def _open_labels(path: Path) -> Iterator[Any]:
    """Opens the finest level of a file as an array of Zarr."""
    with importing("cells in label images", "zarr"):
        import zarr
    if path.suffix.lower() != ".zarr":
        import tifffile

        try:
            store = tifffile.imread(path, aszarr=True, level=0)
        except tifffile.TiffFileError as error:
            raise InvalidInputError(
                f"cells must be readable, got {str(path)!r}: {error}"
            ) from None
        with store:
            yield zarr.open_array(store, mode="r")
        return
    group = _label_group(zarr.open_group(path, mode="r"), path)
    yield group[str(_multiscale(group, path)["datasets"][0]["path"])]


def _label_group(group: Any, path: Path) -> Any:
    """Group of the only image of labels of a store."""
    if "labels" not in group:
        return group
    labels = group["labels"]
    names = sorted(name for name, _ in labels.members())
    if len(names) != 1:
        raise InvalidInputError(
            f"an OME-Zarr must have one image of labels, got {', '.join(names) or 'none'} in "
            f"{str(path)!r}; write one of them to a store of its own"
        )
    return labels[names[0]]


def _multiscale(group: Any, path: Path) -> Document:
    """What a group says of its levels, as OME-Zarr 0.3 to 0.5 keeps it."""
    attributes = dict(group.attrs)
    multiscales = attributes.get("ome", attributes).get("multiscales")
    if not multiscales:
        raise InvalidInputError(
            f"labels of an OME-Zarr must state multiscales, got none in {str(path)!r}"
        )
    return dict(multiscales[0])


def is_label_zarr(path: Path) -> bool:
    """True for a store of Zarr that has images or labels, and no shapes."""
    if (path / "shapes").is_dir():
        return False
    texts = [path / name for name in (".zattrs", "zarr.json")]
    return (path / "labels").is_dir() or any(
        b"multiscales" in text.read_bytes() for text in texts if text.is_file()
    )


def _bands(image: Any, path: Path) -> Iterator[npt.NDArray[Any]]:
    """Yields the rows of an image in bands of whole chunks.

    Raises InvalidInputError: it is no image of labels, or its chunks are too large.
    """
    height, width = image.shape[-2:]
    if image.ndim < 2 or max(image.shape[:-2], default=1) != 1:
        raise InvalidInputError(
            f"an image of labels must have one plane, got {image.shape} in {str(path)!r}"
        )
    if image.dtype.kind not in "ui":
        raise InvalidInputError(
            f"labels must be integers, got {image.dtype} in {str(path)!r}"
        )
    chunk_rows = image.chunks[-2]
    row_bytes = width * image.dtype.itemsize
    if chunk_rows * row_bytes > _MAX_CHUNK_ROW_BYTES:
        raise InvalidInputError(
            f"an image of labels must be stored in tiles or short strips, got strips of "
            f"{chunk_rows} x {width} px in {str(path)!r}; write it in tiles"
        )
    band_rows = max(1, _BAND_BYTES // (chunk_rows * row_bytes)) * chunk_rows
    plane = (0,) * (image.ndim - 2)
    for top in range(0, height, band_rows):
        band = np.asarray(image[(*plane, slice(top, top + band_rows))])
        if band.dtype.kind == "i" and band.size and band.min() < 0:
            raise InvalidInputError(
                f"labels must be >= 0, got {band.min()} in {str(path)!r}"
            )
        yield band
