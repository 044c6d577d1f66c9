"""A segmenter over a whole slide: overlapping windows, blended, in a strip of bounded memory.

    windows that touch tissue -> network -> weighted sums in a strip of rows -> labels of finished
    rows into a file as large as the map -> a TIFF of labels, and each class's share at a coarser
    resolution

Weights fall from a window's middle to its border, so that no seam shows. A map too wide for the
strip's memory is done in bands of columns; windows that two bands share are computed for both, so
that the labels are the same to the bit.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from thinsection.errors import BudgetError, require
from thinsection.qc.tissue import Color, Shares, box_fractions, hues, tissue_mask
from thinsection.segment.segmenter import Segmenter, SegmenterSpec, load_segmenter
from thinsection.slide import Slide, read_resized
from thinsection.slide.geometry import ReadPlan, plan_read
from thinsection.stream import StreamConfig, iter_tiles
from thinsection.tiles import TileTable
from thinsection.tiles.grid import Tissue, mask_and_frame
from thinsection.types import (
    CoordsL0,
    MaskArray,
    MaskFrame,
    Size,
    format_bytes,
    parse_bytes,
)

_FIT_EDGE_PX = 2048  # long side of the picture that channels are fitted to
_TIFF_TILE_PX = 512
_LEAST_WEIGHT = 1e-3  # of a px at a window's corner, against 1 in its middle
Places = npt.NDArray[np.int64]  # (N, 2): x, y of windows, px of the map
Range = tuple[int, int]
Labels = npt.NDArray[np.uint8]  # (H, W): 0 no class, 1 the first class, ...


@dataclass(frozen=True, kw_only=True, repr=False)
class Segmentation:
    """What a segmenter says of one slide."""

    classes: tuple[str, ...]
    shares: npt.NDArray[
        np.uint8
    ]  # (K, H, W), of each class in 255 steps, by px of the frame
    frame: MaskFrame
    size: Size  # (width, height) of the map at the network's resolution
    mpp: float  # µm/px of that map
    num_windows: int  # that were computed

    def __repr__(self) -> str:
        size, found = (
            f"{self.size[0]} x {self.size[1]} px at {self.mpp:g} µm/px",
            self.fractions,
        )
        return f"Segmentation({size}, {', '.join(f'{n} {s:.1%}' for n, s in found.items())})"

    @property
    def fractions(self) -> dict[str, float]:
        """The share of the slide's area that each class has, [0, 1]."""
        return {
            name: float(s.mean()) / 255 for name, s in zip(self.classes, self.shares)
        }

    @cached_property
    def labels(self) -> Labels:
        """Of each px of the frame the class that has most of it; 0 where half of it has none."""
        rest = 255 - self.shares.sum(axis=0, dtype=np.int64)
        return np.asarray(np.stack([rest, *self.shares]).argmax(axis=0), dtype=np.uint8)

    def mask(self, name: str) -> MaskArray:
        """Where a class is, bool (H, W) of the frame."""
        return np.asarray(self.labels == self.classes.index(name) + 1)

    @property
    def colors(self) -> dict[str, Color]:
        """A colour per class, spread over the hues."""
        return dict(zip(self.classes, hues(len(self.classes))))

    def tile_columns(self, coords_l0: CoordsL0, size_l0: Size) -> dict[str, Shares]:
        """Per class the share of each tile's area, float32 (N,); tiles have corners coords_l0."""
        shares = [
            box_fractions(s / 255, self.frame, coords_l0, size_l0) for s in self.shares
        ]
        return dict(zip(self.classes, shares))


def segment(
    slide: Slide,
    segmenter: str | Path | Segmenter,
    *,
    tissue: Tissue | None = None,
    labels_path: Path | None = None,
    share_mpp: float = 4.0,
    memory: str = "512MiB",
    stream: StreamConfig | None = None,
) -> Segmentation:
    """Runs a network over a slide's tissue.

    Args:
        slide: opened.
        segmenter: a name of `SEGMENTERS`, a TOML file, or what `load_segmenter` gave.
        tissue: what lies outside has no class; None: by the default detector.
        labels_path: a tiled TIFF of labels (uint8) at the network's resolution is written there.
        share_mpp: resolution of the classes' shares, µm/px; never finer than the network's.
        memory: of the strip of rows that windows are blended in.
        stream: memory and threads of decoding.

    Memory: 4 (K + 1) px * columns <= `memory` for K outputs, one window's decoding and the network
        on it; 1 byte per class and px of the shares. The map itself is a temporary file.

    Raises:
        MissingMppError, UpsamplingError: the slide has no resolution, or a coarser one.
        BudgetError: the memory does not hold a strip as wide as three windows.
        SlideReadError: a window cannot be decoded.
    """
    if not isinstance(segmenter, Segmenter):
        segmenter = load_segmenter(segmenter)
    spec, found = segmenter.spec, tissue_mask(slide) if tissue is None else tissue
    grid = WindowGrid.of(slide, spec)
    channels = segmenter.channels(_picture(slide, grid.size), slide.slide_path)
    bands = grid.bands(parse_bytes(memory), len(spec.outputs))
    num_windows = 0
    with tempfile.TemporaryFile() as file:
        file.truncate(grid.size[0] * grid.size[1])
        for first, last in bands:
            places = grid.places(found, first, last)
            strip = _Strip(grid, segmenter, (first, last), found, file)
            table = TileTable(coords_l0=grid.coords_l0(places), plan=grid.plan)
            for batch in iter_tiles(slide, table, batch_size=1, config=stream):
                outputs = segmenter.network(channels(batch.tiles))
                strip.add(places[int(batch.indices[0])], outputs[0])
            strip.emit()
            num_windows += len(places)
        shares, frame = _shares(
            file, grid, len(spec.classes), max(1, round(share_mpp / spec.mpp))
        )
        if labels_path is not None:
            _write_tiff(labels_path, file, grid.size, spec.mpp)
    where: dict[str, Any] = {"frame": frame, "size": grid.size, "mpp": spec.mpp}
    return Segmentation(
        classes=spec.classes, shares=shares, num_windows=num_windows, **where
    )


def _picture(slide: Slide, size: Size) -> npt.NDArray[np.uint8]:
    """A small picture of the slide, for what is fitted once per slide."""
    factor = min(1.0, _FIT_EDGE_PX / max(size))
    width, height = (
        min(max(1, round(n * factor)), full) for n, full in zip(size, slide.size)
    )
    return read_resized(slide, (width, height))


@dataclass(frozen=True, kw_only=True)
class WindowGrid:
    """Windows of a network over a slide, in px of its resolution (`x`, `y` here)."""

    plan: ReadPlan
    size: Size  # (width, height) of the map
    scale: tuple[float, float]  # level-0 px per px of it, (x, y)
    starts: tuple[Places, Places]  # of columns, of rows

    @classmethod
    def of(cls, slide: Slide, spec: SegmenterSpec) -> "WindowGrid":
        """Windows that cover the slide, the last ones end with it; small slides are centred."""
        px, step = spec.px, spec.px - round(spec.overlap * spec.px)
        what: dict[str, Any] = {
            "tile_px": px,
            "tile_mpp": spec.mpp,
            "slide": slide.slide_path,
        }
        plan = plan_read(slide.levels, slide.slide_mpp, **what)
        x, y = (edge * plan.downsample / px for edge in plan.size_lv)
        width, height = (max(1, round(n / s)) for n, s in zip(slide.size, (x, y)))

        def starts(n: int) -> Places:
            inside = np.minimum(np.arange(0, n - px + step, step), n - px)
            return np.unique(inside) if n > px else np.array([(n - px) // 2])

        both = (starts(width), starts(height))
        return cls(plan=plan, size=(width, height), scale=(x, y), starts=both)

    def bands(self, memory: int, num_outputs: int) -> list[tuple[int, int]]:
        """Ranges [first, last) of columns whose strip fits the memory."""
        px, width = self.plan.tile_px, self.size[0]
        fit = memory // (4 * (num_outputs + 1) * px)
        if width <= max(fit, px):
            return [(0, width)]
        least, got = format_bytes(8 * (num_outputs + 1) * px * px), format_bytes(memory)
        require(
            fit >= 2 * px, f"segment_memory must be >= {least}", got, error=BudgetError
        )
        return [(x, min(x + fit, width)) for x in range(0, width, fit)]

    def places(self, tissue: Tissue, first: int, last: int) -> Places:
        """Windows (N, 2) that touch the tissue and the band, row by row."""
        px, (columns, rows) = self.plan.tile_px, self.starts
        columns = columns[(columns < last) & (columns + px > first)]
        places = np.stack(np.meshgrid(columns, rows), axis=-1).reshape(-1, 2)
        shares = box_fractions(
            *mask_and_frame(tissue), self.coords_l0(places), self.plan.size_l0
        )
        return np.asarray(places[shares > 0])

    def coords_l0(self, places: Places) -> CoordsL0:
        """Their corners in level-0 px."""
        return np.asarray(np.rint(places.reshape(-1, 2) * self.scale), dtype=np.int64)


class _Strip:
    """Sums of the outputs of windows, weighted, over the rows that more windows will touch."""

    def __init__(
        self,
        grid: WindowGrid,
        segmenter: Segmenter,
        columns: Range,
        tissue: Tissue,
        file: BinaryIO,
    ) -> None:
        self._grid, self._segmenter, self._file = grid, segmenter, file
        (self._first, self._last), self._tissue = columns, mask_and_frame(tissue)
        px, width, self._y = (
            grid.plan.tile_px,
            self._last - self._first,
            int(grid.starts[1][0]),
        )
        self._sums = np.zeros(
            (len(segmenter.spec.outputs), px, width), dtype=np.float32
        )
        self._weights = np.zeros((px, width), dtype=np.float32)
        bell = np.exp(
            -0.5 * ((np.arange(px) - (px - 1) / 2) / (px / 8)) ** 2
        )  # as MONAI's
        self._weight = np.maximum(np.outer(bell, bell), _LEAST_WEIGHT).astype(
            np.float32
        )

    def add(self, place: Places, outputs: npt.NDArray[np.float32]) -> None:
        """Adds the outputs (K, px, px) of the window at (x, y); rows come in order."""
        px, (x, y) = self._grid.plan.tile_px, place.tolist()
        outputs, wanted = outputs[:, :px, :px], (len(self._sums), px, px)
        got = f"{outputs.shape} of {self._segmenter.spec.name!r}"
        require(outputs.shape == wanted, f"segmenter must give {wanted}", got)
        self.emit(y)
        left, right = max(x, self._first), min(x + px, self._last)
        theirs, ours = (
            slice(left - x, right - x),
            slice(left - self._first, right - self._first),
        )
        weight = self._weight[:, theirs]
        self._sums[:, :, ours] += outputs[:, :, theirs] * weight
        self._weights[:, ours] += weight

    def emit(self, y: int | None = None) -> None:
        """Writes the rows above `y` (None: all), which no window will touch, and moves on to it."""
        width, height = self._grid.size
        y = self._y + len(self._weights) if y is None else y
        rows = min(y - self._y, len(self._weights))
        weights = self._weights[:rows]
        if weights.any():
            labels = self._segmenter.labels(
                self._sums[:, :rows] / np.maximum(weights, 1e-30)
            )
            labels[(weights == 0) | ~self._tissue_at(rows)] = 0
            shown = slice(max(0, -self._y), max(0, height - self._y))
            for row, line in enumerate(labels[shown], start=self._y + shown.start):
                self._file.seek(row * width + self._first)
                self._file.write(line.tobytes())
        for array in (self._sums, self._weights):
            kept = array.shape[-2] - rows
            array[..., :kept, :] = array[..., rows:, :]
            array[..., kept:, :] = 0
        self._y = y

    def _tissue_at(self, rows: int) -> MaskArray:
        """The tissue mask at the next rows of the strip."""
        mask, frame = self._tissue
        axes = (np.arange(self._first, self._last), np.arange(self._y, self._y + rows))
        scales = zip(axes, self._grid.scale, frame.downsample_xy, frame.size_th)
        x, y = (
            ((a + 0.5) * s / d).astype(np.int64).clip(0, n - 1) for a, s, d, n in scales
        )
        return np.asarray(mask[np.ix_(y, x)])


def _strips(file: BinaryIO, size: Size, rows: int) -> Iterator[Labels]:
    """The map's labels, so many rows at a time."""
    width, height = size
    file.seek(0)
    for y in range(0, height, rows):
        count = min(rows, height - y)
        yield np.frombuffer(file.read(count * width), dtype=np.uint8).reshape(
            count, width
        )


def _shares(
    file: BinaryIO, grid: WindowGrid, num_classes: int, factor: int
) -> tuple[npt.NDArray[np.uint8], MaskFrame]:
    """Each class's share of blocks of factor x factor px, in 255 steps; px beyond count as none."""
    columns, rows = (-(-edge // factor) for edge in grid.size)
    shares = np.zeros((num_classes, rows, columns), dtype=np.uint8)
    starts = np.arange(0, grid.size[0], factor)
    for row, strip in enumerate(_strips(file, grid.size, factor)):
        for number, share in enumerate(shares[:, row], start=1):
            counts = np.add.reduceat((strip == number).sum(axis=0), starts)
            share[:] = np.rint(counts * (255 / factor**2))
    x, y = (max(1, round(n * factor * s)) for n, s in zip((columns, rows), grid.scale))
    return shares, MaskFrame(size_th=(columns, rows), size_l0=(x, y))


def _write_tiff(path: Path, file: BinaryIO, size: Size, mpp: float) -> None:
    """A tiled, compressed TIFF of the labels; memory: one row of its tiles."""
    import tifffile

    edge, per_cm = _TIFF_TILE_PX, (1e4 / mpp, 1e4 / mpp)
    options: dict[str, Any] = {
        "tile": (edge, edge),
        "compression": "deflate",
        "bigtiff": True,
    }
    options |= {"resolution": per_cm, "resolutionunit": "CENTIMETER", "dtype": np.uint8}

    def tiles() -> Iterator[Labels]:
        for strip in _strips(file, size, edge):
            for x in range(0, size[0], edge):
                part = strip[:, x : x + edge]
                yield np.pad(
                    part, ((0, edge - part.shape[0]), (0, edge - part.shape[1]))
                )

    tifffile.imwrite(path, tiles(), shape=size[::-1], **options)
