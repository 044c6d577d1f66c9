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
from thinsection.cells.outlines import decode_wkb
from thinsection.errors import InvalidInputError
from thinsection.extras import importing
from thinsection.types import MIB

# pieces of a label with more empty rows between them are two cells, whatever the bands
MAX_GAP_ROWS = 256
_BAND_BYTES = 16 * MIB
_MAX_CHUNK_ROW_BYTES = 256 * MIB
_MAX_WAITING_RUNS = 1 << 23

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
    rows, starts = np.nonzero(is_border[:, :-1])
    ends = np.nonzero(is_border[:, 1:])[1] + 1
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
    import shapely

    cell = np.repeat(np.arange(len(num_runs)), num_runs)
    row = runs[:, 1]
    boxes = shapely.box(runs[:, 2], row, runs[:, 3], row + 1)
    pieces = shapely.multipolygons(boxes, indices=cell)
    shapes = shapely.simplify(shapely.union_all(pieces[:, None], axis=1), 0)
    wkb = pa.array(shapely.to_wkb(shapes, byte_order=1), type=pa.binary())
    decoded = decode_wkb(wkb)
    changed = {
        "with holes, which are filled": decoded.num_with_holes,
        "of several pieces: the largest is kept": decoded.num_in_pieces,
    }
    first_runs = np.cumsum(num_runs) - num_runs
    return CellBatch(
        ids=pa.array(runs[first_runs, 0]).cast(pa.string()),
        outlines=decoded.outlines,
        changed={reason: count for reason, count in changed.items() if count},
    )


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
    group = zarr.open_group(path, mode="r")
    if "labels" in group:
        labels = group["labels"]
        names = sorted(name for name, _ in labels.members())
        if len(names) != 1:
            raise InvalidInputError(
                f"an OME-Zarr must have one image of labels, got {', '.join(names) or 'none'} in "
                f"{str(path)!r}; write one of them to a store of its own"
            )
        group = labels[names[0]]
    attributes = dict(group.attrs)
    multiscales = attributes.get("ome", attributes).get("multiscales")
    if not multiscales:
        raise InvalidInputError(
            f"labels of an OME-Zarr must state multiscales, got none in {str(path)!r}"
        )
    yield group[str(multiscales[0]["datasets"][0]["path"])]


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
