"""The tile grid: every tile of a slide, ordered so that neighbours are read together."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from thinsection.config import option
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.files.pages import notebook_html
from thinsection.qc.tissue import TissueMask, box_fractions
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan, plan_read
from thinsection.tiles.filters import FILTERS, MASK_FILTER
from thinsection.types import CoordsL0, MaskArray, MaskFrame, Size
from thinsection.units import format_mpp

# Tiles are ordered in blocks of this many columns and rows: a block is read as one region, so that
# segments of the file which several tiles share are decoded once.
BLOCK_TILES = 8

Tissue = TissueMask | tuple[MaskArray, MaskFrame]  # what says where tissue is


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesConfig:
    """Settings of the tile grid and of the filters on it."""

    tile_px: int = option(256, "Edge of a tile (patch), px.")
    tile_mpp: str = option("0.5", "Resolution of a tile, µm/px, or 'native' for level 0 as it is.")
    overlap: int = option(0, "Px that neighbouring tiles share.")
    min_tissue_fraction: float = option(0.5, "Least share of tissue in a tile, [0, 1].")
    tile_filter: tuple[str, ...] = option(
        (MASK_FILTER,), "Tile filter; repeat for several.", choices=FILTERS.names
    )
    edge: Literal["drop", "pad"] = option(
        "drop", "Tiles that the slide's border cuts: 'drop' them or 'pad' them with white."
    )

    def __post_init__(self) -> None:
        if self.tile_px < 1:
            raise ConfigError(f"tiles.tile_px must be >= 1, got {self.tile_px}")
        if not 0 <= self.overlap < self.tile_px:
            raise ConfigError(f"tiles.overlap must be in [0, tile_px), got {self.overlap}")
        if not 0 <= (fraction := self.min_tissue_fraction) <= 1:
            raise ConfigError(f"tiles.min_tissue_fraction must be in [0, 1], got {fraction}")
        _ = self.mpp

    @property
    def mpp(self) -> float | None:
        """`tile_mpp` as a number; None for 'native'."""
        if self.tile_mpp == "native":
            return None
        try:
            value = float(self.tile_mpp)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ConfigError(
                f"tiles.tile_mpp must be a number > 0 or 'native', got {self.tile_mpp!r}"
            )
        return value


@dataclass(frozen=True, kw_only=True)
class TileTable:
    """Tiles of one slide, in the order in which they are read and stored.

    Attributes:
        coords_l0: int64 (N, 2), x and y of top-left corners in level-0 px.
        plan: how each of them is read.
        columns: name -> (N,) array, what is known per tile ('tissue_fraction', QC checks).

    Memory: 16 bytes per tile and the columns' items.
    """

    coords_l0: CoordsL0
    plan: ReadPlan
    columns: Mapping[str, npt.NDArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_coords(self.coords_l0)
        for name, column in self.columns.items():
            if column.shape != (shape := (len(self),)):
                raise InvalidInputError(
                    f"column {name!r} must have shape {shape}, got {column.shape}"
                )

    def __len__(self) -> int:
        return int(self.coords_l0.shape[0])

    def __repr__(self) -> str:
        return f"TileTable({', '.join(self._facts())})"

    def _repr_html_(self) -> str:
        return notebook_html(None, "TileTable", self._facts())

    def _facts(self) -> list[str]:
        mpp = self.plan.tile_mpp
        size = f"{self.plan.tile_px} px at {format_mpp(None if mpp is None else (mpp, mpp))}"
        facts = [f"{len(self)} tiles of {size}"]
        if len(self):
            low, high = self.coords_l0.min(axis=0), self.coords_l0.max(axis=0) + self.plan.size_l0
            spans = [f"{a} to {b}" for a, b in zip(low.tolist(), high.tolist())]
            facts.append(f"x {spans[0]} and y {spans[1]} in level-0 px")
        return [*facts, f"columns: {', '.join(self.columns) or 'none'}"]

    def select(self, keep: npt.NDArray) -> "TileTable":
        """The table of the tiles that a boolean mask (N,) or index array picks."""
        columns = {name: column[keep] for name, column in self.columns.items()}
        return replace(self, coords_l0=self.coords_l0[keep], columns=columns)

    def with_columns(self, columns: Mapping[str, npt.NDArray]) -> "TileTable":
        """The table with further columns."""
        return replace(self, columns={**self.columns, **columns})


def check_coords(coords_l0: npt.NDArray) -> None:
    """Refuses what is not int64 (N, 2).

    Raises:
        InvalidInputError: with the dtype and shape that came.
    """
    if coords_l0.dtype != np.int64 or coords_l0.ndim != 2 or coords_l0.shape[1] != 2:
        got = f"{coords_l0.dtype} {tuple(coords_l0.shape)}"
        raise InvalidInputError(f"coords_l0 must be int64 of shape (N, 2), got {got}")


def tile_grid(
    slide: Slide, config: TilesConfig | None = None, *, tissue: Tissue | None = None
) -> TileTable:
    """The tiles of a slide that hold enough tissue.

    Args:
        slide: an opened slide.
        config: tile size, resolution, overlap, least tissue fraction, edge rule.
        tissue: a `TissueMask`, or mask (H, W) and its frame; None keeps the whole grid.

    Returns:
        The table, with column `tissue_fraction` (float32; NaN without a mask).

    Memory: about 150 bytes per grid position while the mask is applied.

    Raises:
        MissingMppError: a tile_mpp is asked for and the slide has none.
        UpsamplingError: tile_mpp is finer than the slide.
    """
    config = config or TilesConfig()
    plan = plan_read(
        slide.levels,
        slide.slide_mpp,
        tile_px=config.tile_px,
        tile_mpp=config.mpp,
        overlap=config.overlap,
        slide=slide.slide_path,
    )
    coords_l0 = grid_coords(slide.size, plan, pad=config.edge == "pad")
    fraction = np.full(len(coords_l0), np.nan, dtype=np.float32)
    if tissue is not None:
        fraction = box_fractions(*mask_and_frame(tissue), coords_l0, plan.size_l0)
    table = TileTable(coords_l0=coords_l0, plan=plan, columns={"tissue_fraction": fraction})
    if tissue is None:
        return table
    # a threshold of 0 still needs some tissue: 'tissue' asked for, tissue given
    return table.select(fraction >= max(config.min_tissue_fraction, 1e-30))


def mask_and_frame(tissue: Tissue) -> tuple[MaskArray, MaskFrame]:
    """The mask, bool (H, W), and where it lies.

    Raises:
        InvalidInputError: another dtype, or a shape that is not the frame's.
    """
    mask, frame = tissue if isinstance(tissue, tuple) else (tissue.mask, tissue.frame)
    if mask.dtype != np.bool_ or mask.shape != frame.size_th[::-1]:
        rule = f"bool of shape {frame.size_th[::-1]}"
        raise InvalidInputError(f"tissue_mask must be {rule}, got {mask.dtype} {mask.shape}")
    return mask, frame


def grid_coords(size_l0: Size, plan: ReadPlan, *, pad: bool = False) -> CoordsL0:
    """Top-left corners of the grid, int64 (N, 2), block by block.

    Blocks of `BLOCK_TILES` x `BLOCK_TILES` tiles go row by row, and so do the tiles in a block.
    Tiles that stick out of the slide are left out unless `pad`.
    """
    x, y = (
        np.arange(0, extent + 1 - (1 if pad else tile), stride, dtype=np.int64)
        for extent, tile, stride in zip(size_l0, plan.size_l0, plan.stride_l0)
    )
    column, row = np.meshgrid(np.arange(len(x)), np.arange(len(y)))
    columns, rows = column.ravel(), row.ravel()
    order = np.lexsort((columns, rows, columns // BLOCK_TILES, rows // BLOCK_TILES))
    return np.stack([x[columns[order]], y[rows[order]]], axis=1)
