"""The label map of a slide: windows are blended, strip by strip, into a file.

A window's weight decreases from its middle to its border, so that no seams are visible.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.qc.own_tissue import Tissue
from thinsection.segment.segmenter import Segmenter
from thinsection.segment.windows import Band, Places, WindowGrid
from thinsection.tiles.grid import mask_and_frame
from thinsection.types import MaskArray, MaskFrame, Size

Labels = npt.NDArray[np.uint8]  # (H, W): 0 no class, 1 the first class, ...
ClassShares = npt.NDArray[np.uint8]  # (K, H, W), in steps of 1/255

_TIFF_TILE_PX = 512
# Weight of a pixel at a window's corner; a pixel in the middle has 1.
_LEAST_WEIGHT = 1e-3


class LabelStrip:
    """Weighted sums of windows' outputs, for the rows that later windows may still change."""

    def __init__(
        self,
        grid: WindowGrid,
        segmenter: Segmenter,
        band: Band,
        tissue: Tissue,
        file: BinaryIO,
    ) -> None:
        self._grid = grid
        self._segmenter = segmenter
        self._first, self._last = band
        self._mask, self._frame = mask_and_frame(tissue)
        self._file = file
        # first row of the strip, px of the map
        self._y = int(grid.row_starts[0])
        px = grid.plan.tile_px
        width = self._last - self._first
        num_outputs = len(segmenter.spec.outputs)
        self._sums = np.zeros((num_outputs, px, width), dtype=np.float32)
        self._weights = np.zeros((px, width), dtype=np.float32)
        self._window_weight = _window_weight(px)

    def add(self, place: Places, outputs: npt.NDArray[np.float32]) -> None:
        """Adds the outputs (K, px, px) of the window at (x, y); rows come in order."""
        px = self._grid.plan.tile_px
        x, y = place.tolist()
        outputs = outputs[:, :px, :px]
        shape = (len(self._sums), px, px)
        if outputs.shape != shape:
            raise InvalidInputError(
                f"segmenter must return {shape}, got {outputs.shape} of "
                f"{self._segmenter.spec.name!r}"
            )
        self.emit(y)
        left = max(x, self._first)
        right = min(x + px, self._last)
        in_window = slice(left - x, right - x)
        in_strip = slice(left - self._first, right - self._first)
        weight = self._window_weight[:, in_window]
        self._sums[:, :, in_strip] += outputs[:, :, in_window] * weight
        self._weights[:, in_strip] += weight

    def emit(self, y: int | None = None) -> None:
        """Writes the rows above `y` (None: all), which no later window changes."""
        if y is None:
            y = self._y + len(self._weights)
        num_rows = min(y - self._y, len(self._weights))
        weights = self._weights[:num_rows]
        if weights.any():
            means = self._sums[:, :num_rows] / np.maximum(weights, 1e-30)
            labels = self._segmenter.labels(means)
            labels[(weights == 0) | ~self._tissue_rows(num_rows)] = 0
            width, height = self._grid.size
            for row, line in enumerate(labels, start=self._y):
                # rows above and below the map are not written
                if 0 <= row < height:
                    self._file.seek(row * width + self._first)
                    self._file.write(line.tobytes())
        _shift_up(self._sums, num_rows)
        _shift_up(self._weights, num_rows)
        self._y = y

    def _tissue_rows(self, num_rows: int) -> MaskArray:
        """The tissue mask of the strip's first rows."""
        scale_x, scale_y = self._grid.scale
        downsample_x, downsample_y = self._frame.downsample_xy
        width, height = self._frame.size_th
        columns = np.arange(self._first, self._last)
        rows = np.arange(self._y, self._y + num_rows)
        x = ((columns + 0.5) * scale_x / downsample_x).astype(np.int64)
        y = ((rows + 0.5) * scale_y / downsample_y).astype(np.int64)
        indices = np.ix_(y.clip(0, height - 1), x.clip(0, width - 1))
        return np.asarray(self._mask[indices])


def _window_weight(px: int) -> npt.NDArray[np.float32]:
    """Weights (px, px) of a window: a Gaussian, as in MONAI."""
    offsets = np.arange(px) - (px - 1) / 2
    bell = np.exp(-0.5 * (offsets / (px / 8)) ** 2)
    return np.maximum(np.outer(bell, bell), _LEAST_WEIGHT).astype(np.float32)


def _shift_up(array: npt.NDArray[np.float32], num_rows: int) -> None:
    """Drops the first rows of (..., H, W) and adds empty ones."""
    num_kept = array.shape[-2] - num_rows
    array[..., :num_kept, :] = array[..., num_rows:, :]
    array[..., num_kept:, :] = 0


def read_strips(file: BinaryIO, size: Size, num_rows: int) -> Iterator[Labels]:
    """Reads the labels of the map, `num_rows` rows at a time."""
    width, height = size
    file.seek(0)
    for y in range(0, height, num_rows):
        count = min(num_rows, height - y)
        labels = np.frombuffer(file.read(count * width), dtype=np.uint8)
        yield labels.reshape(count, width)


def class_shares(
    file: BinaryIO, grid: WindowGrid, num_classes: int, factor: int
) -> tuple[ClassShares, MaskFrame]:
    """Fraction of each class in blocks of factor x factor px; outside the map there is no class."""
    columns = -(-grid.size[0] // factor)
    rows = -(-grid.size[1] // factor)
    shares = np.zeros((num_classes, rows, columns), dtype=np.uint8)
    starts = np.arange(0, grid.size[0], factor)
    for row, strip in enumerate(read_strips(file, grid.size, factor)):
        for number, share in enumerate(shares[:, row], start=1):
            counts = np.add.reduceat((strip == number).sum(axis=0), starts)
            share[:] = np.rint(counts * (255 / factor**2))
    width_l0 = max(1, round(columns * factor * grid.scale[0]))
    height_l0 = max(1, round(rows * factor * grid.scale[1]))
    frame = MaskFrame(size_th=(columns, rows), size_l0=(width_l0, height_l0))
    return shares, frame


def write_labels_tiff(path: Path, file: BinaryIO, size: Size, mpp: float) -> None:
    """Writes a tiled, compressed TIFF of the labels.

    Memory: one row of TIFF tiles.
    """
    import tifffile

    px_per_cm = 1e4 / mpp
    tifffile.imwrite(
        path,
        _tiff_tiles(file, size),
        shape=size[::-1],
        dtype=np.uint8,
        tile=(_TIFF_TILE_PX, _TIFF_TILE_PX),
        compression="deflate",
        bigtiff=True,
        resolution=(px_per_cm, px_per_cm),
        resolutionunit="CENTIMETER",
    )


def _tiff_tiles(file: BinaryIO, size: Size) -> Iterator[Labels]:
    for strip in read_strips(file, size, _TIFF_TILE_PX):
        for x in range(0, size[0], _TIFF_TILE_PX):
            part = strip[:, x : x + _TIFF_TILE_PX]
            missing_rows = _TIFF_TILE_PX - part.shape[0]
            missing_columns = _TIFF_TILE_PX - part.shape[1]
            yield np.pad(part, ((0, missing_rows), (0, missing_columns)))
