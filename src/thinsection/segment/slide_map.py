"""A segmenter over a whole slide: overlapping windows, blended, in a strip of bounded memory.

    windows that touch tissue -> network -> weighted sums in a strip of rows -> labels of finished
    rows into a file as large as the map -> a TIFF of labels, and each class's share at a coarser
    resolution

Weights fall from a window's middle to its border, so that no seam shows. A map too wide for the
strip's memory is done in bands of columns; windows that two bands share are computed for both, so
that the labels are the same to the bit.
"""

import colorsys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from thinsection.errors import BudgetError, InvalidInputError, require
from thinsection.qc.tissue import Color, Shares, box_fractions, tissue_mask
from thinsection.segment.channels import fit_channels
from thinsection.segment.segmenter import Segmenter, load_segmenter
from thinsection.slide import Slide, read_resized
from thinsection.slide.geometry import ReadPlan, plan_read
from thinsection.stream import StreamConfig, iter_tiles
from thinsection.tiles import TileTable
from thinsection.tiles.grid import Tissue, mask_and_frame
from thinsection.types import CoordsL0, MaskArray, MaskFrame, RgbArray, Size
from thinsection.units import format_bytes, parse_bytes

_FIT_EDGE_PX = 2048  # long side of the picture that channels are fitted to
_TIFF_TILE_PX = 512
_LEAST_WEIGHT = 1e-3  # of a px at a window's corner, against 1 in its middle
Labels = npt.NDArray[np.uint8]  # (H, W): 0 no class, 1 the first class, ...


@dataclass(frozen=True, kw_only=True, repr=False)
class Segmentation:
    """What a segmenter says of one slide."""

    classes: tuple[str, ...]
    shares: npt.NDArray[np.uint8]  # (K, H, W), of each class in 255 steps, by px of the frame
    frame: MaskFrame
    size: Size  # (width, height) of the map at the network's resolution
    mpp: float  # µm/px of that map
    num_windows: int  # that were computed

    def __repr__(self) -> str:
        size, found = f"{self.size[0]} x {self.size[1]} px at {self.mpp:g} µm/px", self.fractions
        return f"Segmentation({size}, {', '.join(f'{n} {s:.1%}' for n, s in found.items())})"

    @property
    def fractions(self) -> dict[str, float]:
        """The share of the slide's area that each class has, [0, 1]."""
        return {name: float(s.mean()) / 255 for name, s in zip(self.classes, self.shares)}

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
        hues = [(0.02 + n * 0.618) % 1.0 for n in range(len(self.classes))]
        spread = [colorsys.hsv_to_rgb(hue, 0.85, 0.9) for hue in hues]
        return {
            n: (round(r * 255), round(g * 255), round(b * 255))
            for n, (r, g, b) in zip(self.classes, spread)
        }

    def tile_columns(self, coords_l0: CoordsL0, size_l0: Size) -> dict[str, Shares]:
        """Per class the share of each tile's area, float32 (N,); tiles have corners coords_l0."""
        found = (
            box_fractions(share / 255, self.frame, coords_l0, size_l0) for share in self.shares
        )
        return dict(zip(self.classes, found))


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
    grid = WindowGrid.of(slide, spec.px, spec.mpp, spec.overlap)
    channels = fit_channels(spec, _picture(slide, grid.size), slide.slide_path)
    bands = grid.bands(parse_bytes(memory), len(spec.outputs))
    num_windows = 0
    with tempfile.TemporaryFile() as file:
        file.truncate(grid.size[0] * grid.size[1])
        for first, last in bands:
            places = grid.places(found, first, last)
            strip = _Strip(grid, segmenter, (first, last), mask_and_frame(found), file)
            table = TileTable(coords_l0=grid.coords_l0(places), plan=grid.plan)
            for batch in iter_tiles(slide, table, batch_size=1, config=stream):
                outputs = segmenter.network(channels(batch.tiles))
                strip.add(places[int(batch.indices[0])], outputs[0])
            strip.finish()
            num_windows += len(places)
        shares, frame = _shares(file, grid, len(spec.classes), max(1, round(share_mpp / spec.mpp)))
        if labels_path is not None:
            _write_tiff(labels_path, file, grid.size, spec.mpp)
    return Segmentation(
        classes=spec.classes,
        shares=shares,
        frame=frame,
        size=grid.size,
        mpp=spec.mpp,
        num_windows=num_windows,
    )


def _picture(slide: Slide, size: Size) -> RgbArray:
    """A small picture of the slide, for what is fitted once per slide."""
    factor = min(1.0, _FIT_EDGE_PX / max(size))
    width, height = (min(max(1, round(n * factor)), full) for n, full in zip(size, slide.size))
    return read_resized(slide, (width, height))


@dataclass(frozen=True, kw_only=True)
class WindowGrid:
    """Windows of a network over a slide, in px of its resolution (`x`, `y` here)."""

    plan: ReadPlan
    size: Size  # (width, height) of the map
    scale: tuple[float, float]  # level-0 px per px of it, (x, y)
    starts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # of columns, of rows
    size_l0: Size

    @classmethod
    def of(cls, slide: Slide, px: int, mpp: float, overlap: float) -> "WindowGrid":
        """Windows that cover the slide, the last ones end with it; small slides are centred."""
        plan = plan_read(
            slide.levels, slide.slide_mpp, tile_px=px, tile_mpp=mpp, slide=slide.slide_path
        )
        scale = (plan.size_lv[0] * plan.downsample / px, plan.size_lv[1] * plan.downsample / px)
        size = tuple(max(1, round(n / s)) for n, s in zip(slide.size, scale))
        step = px - round(overlap * px)
        starts = tuple(
            np.unique(np.minimum(np.arange(0, n - px + step, step), n - px))
            if n > px
            else np.array([(n - px) // 2])
            for n in size
        )
        return cls(plan=plan, size=size, scale=scale, starts=starts, size_l0=slide.size)  # type: ignore[arg-type]

    def bands(self, memory: int, num_outputs: int) -> list[tuple[int, int]]:
        """Ranges [first, last) of columns whose strip fits the memory."""
        px = self.plan.tile_px
        fit = memory // (4 * (num_outputs + 1) * px)
        if self.size[0] <= max(fit, px):
            return [(0, self.size[0])]
        if fit < 2 * px:
            least = format_bytes(8 * (num_outputs + 1) * px * px)
            raise BudgetError(f"segment_memory must be >= {least}, got {format_bytes(memory)}")
        return [(x, min(x + fit, self.size[0])) for x in range(0, self.size[0], fit)]

    def places(self, tissue: Tissue, first: int, last: int) -> npt.NDArray[np.int64]:
        """Windows (N, 2) that touch the tissue and the band, row by row."""
        px = self.plan.tile_px
        columns = [x for x in self.starts[0].tolist() if x < last and x + px > first]
        grid = [(x, y) for y in self.starts[1].tolist() for x in columns]
        places = np.array(grid, dtype=np.int64)
        mask, frame = mask_and_frame(tissue)
        shares = box_fractions(mask, frame, self.coords_l0(places), self.plan.size_l0)
        kept: npt.NDArray[np.int64] = places[shares > 0]
        return kept

    def coords_l0(self, places: npt.NDArray[np.int64]) -> CoordsL0:
        """Their corners in level-0 px."""
        corners: CoordsL0 = np.rint(places.reshape(-1, 2) * self.scale).astype(np.int64)
        return corners


class _Strip:
    """Sums of the outputs of windows, weighted, over the rows that more windows will touch."""

    def __init__(
        self,
        grid: WindowGrid,
        segmenter: Segmenter,
        columns: tuple[int, int],
        tissue: tuple[MaskArray, MaskFrame],
        file: BinaryIO,
    ) -> None:
        self._grid, self._segmenter, self._file, self._tissue = grid, segmenter, file, tissue
        (first, last), self._y = columns, int(grid.starts[1][0])
        self._first, self._last = columns
        px = grid.plan.tile_px
        num = len(segmenter.spec.outputs)
        self._sums = np.zeros((num, px, last - first), dtype=np.float32)
        self._weights = np.zeros((px, last - first), dtype=np.float32)
        middle = (px - 1) / 2
        bell = np.exp(-0.5 * ((np.arange(px) - middle) / (px / 8)) ** 2)  # as MONAI's
        self._weight = np.maximum(np.outer(bell, bell), _LEAST_WEIGHT).astype(np.float32)

    def add(self, place: npt.NDArray[np.int64], outputs: npt.NDArray[np.float32]) -> None:
        """Adds the outputs (K, px, px) of the window at (x, y); rows come in order."""
        px, (x, y) = self._grid.plan.tile_px, place.tolist()
        outputs = outputs[:, :px, :px]
        got = f"{outputs.shape} of {self._segmenter.spec.name!r}"
        rule = f"segmenter must give ({len(self._sums)}, {px}, {px})"
        require(outputs.shape == (len(self._sums), px, px), rule, got, error=InvalidInputError)
        self._emit(y)
        left, right = max(x, self._first), min(x + px, self._last)
        theirs, ours = slice(left - x, right - x), slice(left - self._first, right - self._first)
        weight = self._weight[:, theirs]
        self._sums[:, :, ours] += outputs[:, :, theirs] * weight
        self._weights[:, ours] += weight

    def finish(self) -> None:
        """Writes what is left."""
        self._emit(self._y + self._grid.plan.tile_px)

    def _emit(self, y: int) -> None:
        """Writes the rows above `y`, which no further window touches, and moves on to it."""
        width, height = self._grid.size
        rows = min(y - self._y, len(self._weights))
        if rows > 0 and self._weights[:rows].any():
            sums = self._sums[:, :rows].copy()
            sums /= np.maximum(self._weights[:rows], 1e-30)
            labels = self._segmenter.labels(sums)
            labels[(self._weights[:rows] == 0) | ~self._tissue_at(rows)] = 0
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
        axes = ((self._y, self._y + rows), (self._first, self._last))
        found = []
        for (start, end), scale, down, last in zip(
            axes, self._grid.scale[::-1], frame.downsample_xy[::-1], mask.shape
        ):
            centres = (np.arange(start, end) + 0.5) * scale / down
            found.append(np.clip(centres.astype(np.int64), 0, last - 1))
        return mask[np.ix_(*found)]


def _strips(file: BinaryIO, size: Size, rows: int) -> Iterator[Labels]:
    """The map's labels, so many rows at a time."""
    width, height = size
    file.seek(0)
    for y in range(0, height, rows):
        count = min(rows, height - y)
        yield np.frombuffer(file.read(count * width), dtype=np.uint8).reshape(count, width)


def _shares(
    file: BinaryIO, grid: WindowGrid, num_classes: int, factor: int
) -> tuple[npt.NDArray[np.uint8], MaskFrame]:
    """Each class's share of blocks of factor x factor px, in 255 steps; px beyond count as none."""
    width, height = grid.size
    columns, rows = -(-width // factor), -(-height // factor)
    shares = np.zeros((num_classes, rows, columns), dtype=np.uint8)
    padded = np.zeros((factor, columns * factor), dtype=np.uint8)
    for row, strip in enumerate(_strips(file, grid.size, factor)):
        if not strip.any():
            continue
        padded[:] = 0
        padded[: len(strip), :width] = strip
        blocks = padded.reshape(factor, columns, factor)
        for number in range(num_classes):
            counts = (blocks == number + 1).sum(axis=(0, 2))
            shares[number, row] = np.rint(counts * (255 / factor**2))
    size_l0 = tuple(max(1, round(n * factor * s)) for n, s in zip((columns, rows), grid.scale))
    return shares, MaskFrame(size_th=(columns, rows), size_l0=size_l0)  # type: ignore[arg-type]


def _write_tiff(path: Path, file: BinaryIO, size: Size, mpp: float) -> None:
    """A tiled, compressed TIFF of the labels; memory: one row of its tiles."""
    import tifffile

    edge = _TIFF_TILE_PX

    def tiles() -> Iterator[Labels]:
        for strip in _strips(file, size, edge):
            for x in range(0, size[0], edge):
                part = strip[:, x : x + edge]
                yield np.pad(part, ((0, edge - part.shape[0]), (0, edge - part.shape[1])))

    tifffile.imwrite(
        path,
        tiles(),
        shape=size[::-1],
        dtype=np.uint8,
        tile=(edge, edge),
        compression="deflate",
        bigtiff=True,
        resolution=(1e4 / mpp, 1e4 / mpp),
        resolutionunit="CENTIMETER",
    )
