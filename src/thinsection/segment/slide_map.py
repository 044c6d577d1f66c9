"""Runs a segmenter on a whole slide: overlapping windows, blended in bounded memory.

    windows that touch tissue -> network -> weighted sums in a strip of rows -> labels of finished
    rows into a file as large as the map -> a TIFF of labels, and each class's share at a coarser
    resolution

A map that is too wide for the strip's memory is computed in bands of columns. Windows that two
bands share are computed twice, so that the labels are the same to the bit.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from thinsection.files.pages import NOTEBOOK_EDGE_PX, notebook_html
from thinsection.qc.own_tissue import AnyTissue, as_tissue
from thinsection.qc.tissue import Color, Shares, box_fractions, hues, tissue_mask
from thinsection.segment.label_map import (
    ClassShares,
    Labels,
    LabelStrip,
    class_shares,
    write_labels_tiff,
)
from thinsection.segment.segmenter import Segmenter, load_segmenter
from thinsection.segment.windows import WindowGrid
from thinsection.slide import Slide, read_resized
from thinsection.tiles import StreamConfig, TileTable, iter_tiles
from thinsection.types import (
    CoordsL0,
    MaskArray,
    MaskFrame,
    RgbArray,
    Size,
    parse_bytes,
)

# Long side of the small picture that channels are fitted to.
_FIT_EDGE_PX = 2048


@dataclass(frozen=True, kw_only=True, repr=False)
class Segmentation:
    """Result of a segmenter on one slide."""

    classes: tuple[str, ...]
    # (K, H, W), fraction of each class in steps of 1/255, by pixel of the frame
    shares: ClassShares
    frame: MaskFrame
    size: Size  # (width, height) of the map at the network's resolution
    mpp: float  # µm/px of that map
    num_windows: int  # windows that were computed

    def __repr__(self) -> str:
        width, height = self.size
        fractions = [f"{name} {share:.1%}" for name, share in self.fractions.items()]
        return (
            f"Segmentation({width} x {height} px at {self.mpp:g} µm/px, "
            f"{', '.join(fractions)})"
        )

    def _repr_html_(self) -> str:
        """Returns the classes in their colours, and their fractions of the slide."""
        palette = np.array([(255, 255, 255), *self.colors.values()], dtype=np.uint8)
        step = max(1, max(self.labels.shape) // NOTEBOOK_EDGE_PX)
        lines = [f"{name}: {share:.1%}" for name, share in self.fractions.items()]
        picture = palette[self.labels[::step, ::step]]
        return notebook_html(picture, "Segmentation", lines)

    @property
    def fractions(self) -> dict[str, float]:
        """Fraction of the slide's area that each class has, [0, 1]."""
        return {
            name: float(share.mean()) / 255
            for name, share in zip(self.classes, self.shares)
        }

    @cached_property
    def labels(self) -> Labels:
        """Per pixel of the frame its largest class; 0 if the part without a class is larger."""
        none = 255 - self.shares.sum(axis=0, dtype=np.int64)
        return np.asarray(np.stack([none, *self.shares]).argmax(axis=0), dtype=np.uint8)

    def mask(self, name: str) -> MaskArray:
        """The mask of a class, bool (H, W) of the frame."""
        return np.asarray(self.labels == self.classes.index(name) + 1)

    @property
    def colors(self) -> dict[str, Color]:
        """A colour for each class, spread over the hues."""
        return dict(zip(self.classes, hues(len(self.classes))))

    def tile_columns(self, coords_l0: CoordsL0, size_l0: Size) -> dict[str, Shares]:
        """For each class, its fraction of each tile's area, float32 (N,)."""
        return {
            name: box_fractions(share / 255, self.frame, coords_l0, size_l0)
            for name, share in zip(self.classes, self.shares)
        }


def segment(
    slide: Slide,
    segmenter: str | Path | Segmenter,
    *,
    tissue: AnyTissue | None = None,
    labels_path: str | Path | None = None,
    share_mpp: float = 4.0,
    memory: str = "512MiB",
    stream: StreamConfig | None = None,
) -> Segmentation:
    """Runs a network over a slide's tissue.

    Args:
        slide: opened slide.
        segmenter: a name of `SEGMENTERS`, a TOML file, or the result of `load_segmenter`.
        tissue: pixels outside it have no class; as for `tile_grid`; None uses the default detector.
        labels_path: path for a tiled TIFF of labels (uint8) at the network's resolution.
        share_mpp: resolution of the classes' fractions, µm/px; never finer than the network's.
        memory: memory for the strip of rows in which windows are blended.
        stream: memory and threads of decoding.

    Memory: 4 (K + 1) px * columns <= `memory` for K outputs; decoding of one window and the network
        on it; 1 byte per class and pixel of the fractions. The map itself is a temporary file.

    Raises:
        MissingMppError: the slide has no resolution.
        UpsamplingError: the slide's resolution is coarser than the network's.
        BudgetError: the memory does not hold a strip as wide as two windows.
        SlideReadError: a window cannot be decoded.
    """
    if not isinstance(segmenter, Segmenter):
        segmenter = load_segmenter(segmenter)
    spec = segmenter.spec
    within = tissue_mask(slide) if tissue is None else as_tissue(slide, tissue)
    grid = WindowGrid.cover(slide, spec)
    channels = segmenter.channels(_fit_picture(slide, grid.size), slide.slide_path)
    num_windows = 0
    with tempfile.TemporaryFile() as file:
        file.truncate(grid.size[0] * grid.size[1])
        for band in grid.bands(parse_bytes(memory), len(spec.outputs)):
            places = grid.places(within, band)
            strip = LabelStrip(grid, segmenter, band, within, file)
            table = TileTable(coords_l0=grid.coords_l0(places), plan=grid.plan)
            for batch in iter_tiles(slide, table, batch_size=1, config=stream):
                outputs = segmenter.network(channels(batch.tiles))
                strip.add(places[int(batch.indices[0])], outputs[0])
            strip.emit()
            num_windows += len(places)
        factor = max(1, round(share_mpp / spec.mpp))
        shares, frame = class_shares(file, grid, len(spec.classes), factor)
        if labels_path is not None:
            write_labels_tiff(Path(labels_path), file, grid.size, spec.mpp)
    return Segmentation(
        classes=spec.classes,
        shares=shares,
        frame=frame,
        size=grid.size,
        mpp=spec.mpp,
        num_windows=num_windows,
    )


def _fit_picture(slide: Slide, size: Size) -> RgbArray:
    """A small picture of the slide, for values that are fitted once per slide."""
    factor = min(1.0, _FIT_EDGE_PX / max(size))
    width = min(max(1, round(size[0] * factor)), slide.size[0])
    height = min(max(1, round(size[1] * factor)), slide.size[1])
    return read_resized(slide, (width, height))
