"""The tile grid, ordered so that neighbours are read one after the other, and regions of tiles.

A region is a square of whole tiles, for encoders that read all tiles of a region (HIPT, TITAN).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

import numpy as np
import numpy.typing as npt

from thinsection.config import from_mapping, listing_settings, option
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc.own_tissue import AnyTissue, Tissue, as_tissue
from thinsection.qc.tissue import Shares, TissueMask, box_fractions
from thinsection.slide import Slide, check_slide
from thinsection.slide.geometry import ReadPlan, nominal_mpp, plan_read, positive_number
from thinsection.slide.resize import Resample
from thinsection.tiles.filters import MASK_FILTER
from thinsection.tiles.table import Column, TileTable
from thinsection.types import CoordsL0, MaskArray, MaskFrame, PlainValues, Size

if TYPE_CHECKING:
    from thinsection.settings_types import TilesSettings

REGION = "region"
REGION_ROW = "region_row"
REGION_COLUMN = "region_column"


def region_plan(plan: ReadPlan, tiles_across: int) -> ReadPlan:
    """The plan with the size and stride of a region in place of a tile, for a grid of regions."""
    width, height = plan.size_l0
    step_x, step_y = plan.stride_l0
    size_l0 = (
        width + (tiles_across - 1) * step_x,
        height + (tiles_across - 1) * step_y,
    )
    stride_l0 = (tiles_across * step_x, tiles_across * step_y)
    return replace(plan, size_l0=size_l0, stride_l0=stride_l0)


def tiles_of_regions(
    corners_l0: CoordsL0, stride_l0: Size, tiles_across: int
) -> CoordsL0:
    """Corners of the tiles of each region, row by row, int64 (R * tiles_across², 2).

    Embeddings (N, D) in this order are regions by `reshape(-1, tiles_across, tiles_across, D)`.

    Args:
        corners_l0: top-left corners of the regions, int64 (R, 2).
        stride_l0: step from one tile to the next.
        tiles_across: tiles along the edge of a region.
    """
    rows, columns = np.divmod(np.arange(tiles_across**2), tiles_across)
    steps = np.stack([columns, rows], axis=1) * np.array(stride_l0)
    coords_l0: CoordsL0 = (corners_l0[:, None] + steps).reshape(-1, 2)
    return coords_l0


def region_columns(num_regions: int, tiles_across: int) -> dict[str, Column]:
    """For each tile its region's number, and its row and column in the region, int32 (N,)."""
    tiles_of_each = tiles_across**2
    rows, columns = np.divmod(np.arange(tiles_of_each, dtype=np.int32), tiles_across)
    numbers = np.arange(num_regions, dtype=np.int32)
    return {
        REGION: np.repeat(numbers, tiles_of_each),
        REGION_ROW: np.tile(rows, num_regions),
        REGION_COLUMN: np.tile(columns, num_regions),
    }


def region_means(columns: Mapping[str, Column], values: Column) -> Column:
    """Mean of `values` (N,) over the region of each tile; without regions, the values."""
    if REGION not in columns:
        return values
    numbers = columns[REGION]
    sums = np.bincount(numbers, weights=values)
    counts = np.bincount(numbers)
    return (sums / np.maximum(counts, 1))[numbers]


# Columns and rows of a block. Tiles are ordered block by block, so that compressed parts of the
# file (TIFF tiles or strips) that several tiles share are still in the reader's cache.
BLOCK_TILES = 8
# Largest `mpp_tolerance` that may be set. Levels that differ by a larger share do not have the same
# resolution.
_MAX_TOLERANCE = 0.3
# Lower bound at min_tissue_fraction=0: a tile must have some tissue, beyond floating-point error.
_ANY_TISSUE = 1e-9


def mpp_of_magnification(text: str) -> tuple[str, str]:
    """The tile_mpp for a nominal magnification such as 20 or 40x, and a notice for the user."""
    power = positive_number(text.lower().removesuffix("x"))
    if power is None:
        raise ConfigError(f"mag must be a magnification such as 20, got {text!r}")
    mpp = f"{nominal_mpp(power):g}"
    notice = f"--mag {text} sets --tile-mpp {mpp} (µm/px), independent of the slide's objective"
    return mpp, notice


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesConfig:
    """Settings of the tile grid and of the filters on it."""

    tile_px: int = option(
        256, "Edge of a tile in pixels.", daily=True, flag=("--tile-px", "--patch-size")
    )
    tile_mpp: str | float | tuple[str | float, ...] = option(
        "0.5",
        "Resolution in µm/px, or native for level 0; repeat the option for several "
        "grids. --mag 20 is 0.5 µm/px.",
        daily=True,
        also={"--mag": mpp_of_magnification},
    )
    mpp_tolerance: float = option(
        0.05,
        "Relative difference in resolution up to which a level is used without "
        "resampling.",
    )
    resample: Resample = option(
        "exact",
        "How tiles are reduced from a finer level. fast decodes JPEG at 1/2, 1/4 or 1/8"
        " of its size if that is not coarser than the tiles.",
    )
    overlap: int = option(0, "Pixels that neighbouring tiles share.", daily=True)
    region_px: int = option(
        0,
        "Edge of a region in pixels, such as 4096: a multiple of the edge of a tile. The "
        "tiles of a region are kept or dropped together, for encoders that read regions. 0 "
        "makes no regions.",
    )
    min_tissue_fraction: float = option(
        0.5, "Smallest share of tissue in a tile, from 0 to 1.", daily=True
    )
    tile_filter: tuple[str, ...] = option(
        (MASK_FILTER,),
        "Filter that a tile must pass: tissue, contrast, or a rule on a column such as "
        "'stroma>0.3'; repeat the option for several.",
    )
    edge: Literal["drop", "pad"] = option(
        "drop",
        "What to do with tiles that cross the border of the slide: drop them, or pad "
        "them with white.",
    )

    def __post_init__(self) -> None:
        # plain text, or a tuple of it, so that equal settings are recorded in the same way
        texts = tuple(map(str, self._listed_mpp()))
        object.__setattr__(self, "tile_mpp", texts[0] if len(texts) == 1 else texts)
        if self.tile_px < 1:
            raise ConfigError(f"tiles.tile_px must be >= 1, got {self.tile_px}")
        if not 0 <= self.overlap < self.tile_px:
            raise ConfigError(
                f"tiles.overlap must be in [0, tile_px), got {self.overlap}"
            )
        if not 0 <= self.mpp_tolerance <= _MAX_TOLERANCE:
            raise ConfigError(
                f"tiles.mpp_tolerance must be in [0, {_MAX_TOLERANCE}], "
                f"got {self.mpp_tolerance}"
            )
        if not 0 <= self.min_tissue_fraction <= 1:
            raise ConfigError(
                f"tiles.min_tissue_fraction must be in [0, 1], "
                f"got {self.min_tissue_fraction}"
            )
        if self.region_px % self.tile_px or self.region_px < 0:
            raise ConfigError(
                f"tiles.region_px must be a multiple of tile_px {self.tile_px}, "
                f"got {self.region_px}"
            )
        if self.region_px and self.overlap:
            raise ConfigError(
                f"tiles.overlap must be 0 with regions, got {self.overlap}"
            )
        self._check_mpp(texts)

    def _listed_mpp(self) -> tuple[str | float, ...]:
        """Resolutions in `tile_mpp`."""
        return self.tile_mpp if isinstance(self.tile_mpp, tuple) else (self.tile_mpp,)

    def _check_mpp(self, texts: tuple[str, ...]) -> None:
        """Raises ConfigError: no resolution, a wrong one, or the same one twice."""
        numbers = [positive_number(text) for text in texts]
        for text, number in zip(texts, numbers):
            if number is None and text != "native":
                raise ConfigError(
                    f"tiles.tile_mpp must be a number > 0 or 'native', got {text!r}"
                )
        if not numbers or len(set(numbers)) < len(numbers):
            raise ConfigError(
                f"tiles.tile_mpp must be different resolutions, got {', '.join(texts)}"
            )

    @property
    def grids(self) -> tuple[TilesConfig, ...]:
        """The settings of each grid: one for each resolution."""
        return tuple(replace(self, tile_mpp=mpp) for mpp in self._listed_mpp())

    @property
    def mpp(self) -> float | None:
        """`tile_mpp` as a number; None for 'native'.

        Raises ConfigError: these are the settings of several grids.
        """
        if isinstance(self.tile_mpp, tuple):
            raise ConfigError(
                "tiles.tile_mpp must be one resolution for one grid, got "
                f"{', '.join(map(str, self.tile_mpp))}"
            )
        return positive_number(str(self.tile_mpp))

    @property
    def tiles_across(self) -> int:
        """Tiles along the edge of a region; 1 without regions."""
        return max(1, self.region_px // self.tile_px)

    def plan(self, slide: Slide) -> ReadPlan:
        """Plans how tiles of a slide are read; raises as `plan_read` does."""
        levels = slide.levels
        if self.resample == "fast":
            # JPEG levels that are decoded at 1/2, 1/4 or 1/8
            levels = (*levels, *slide.reduced)
        hints = list(slide.notes)
        if slide.objective_power:
            # only a hint in the error message; the resolution is never guessed
            mpp = nominal_mpp(slide.objective_power)
            hints.append(f"at {slide.objective_power:g}x it is usually {mpp:g} µm/px")
        return plan_read(
            levels,
            slide.slide_mpp,
            tile_px=self.tile_px,
            tile_mpp=self.mpp,
            overlap=self.overlap,
            mpp_tolerance=self.mpp_tolerance,
            slide=Path(slide.slide_path).name,
            hint="; ".join(hints),
        )


@listing_settings(TilesConfig)
def tile_grid(
    slide: Slide,
    config: TilesConfig | None = None,
    *,
    tissue: AnyTissue | None = None,
    **settings: Unpack[TilesSettings],
) -> TileTable:
    """The tiles of a slide that hold enough tissue.

    Args:
        slide: an opened slide.
        config: tile size, resolution, overlap, least tissue fraction, edge rule.
        tissue: a `TissueMask`; a result of `run_qc`; a mask, bool (H, W) of NumPy or torch, with
            its µm/px: (mask, 8.0); a shapely geometry or GeoJSON in level-0 pixels; a file of
            outlines. None keeps the whole grid.
        settings: single settings, which replace those of `config`: tile_px=224, tile_mpp=1.0.

    Returns:
        The table, with column `tissue_fraction` (float32; NaN without a mask). With `region_px`
        it has all tiles of the regions with enough tissue, and the columns of `region_columns`.

    Memory: about 150 bytes per grid position while the mask is applied.

    Raises:
        MissingMppError: a tile_mpp is asked for and the slide has none.
        UpsamplingError: tile_mpp is finer than the slide.
        InvalidInputError: tissue of another form, or of another slide.
        ConfigError: no such setting.
    """
    check_slide(slide)
    config = _with_settings(config or TilesConfig(), settings)
    plan = config.plan(slide)
    mask = None if tissue is None else as_tissue(slide, tissue)
    # selects whole regions, each like one large tile; without regions it is the plan of the tiles
    unit_plan = region_plan(plan, config.tiles_across)
    corners = grid_coords(slide.size, unit_plan, pad=config.edge == "pad")
    fractions = _tissue_fractions(mask, corners, unit_plan.size_l0)
    if mask is not None:
        is_selected = fractions >= max(config.min_tissue_fraction, _ANY_TISSUE)
        corners = corners[is_selected]
        fractions = fractions[is_selected]
    # a reader of another package need not have it
    slide_name = getattr(slide, "slide_name", None)
    if not config.region_px:
        return TileTable(
            coords_l0=corners,
            plan=plan,
            columns={"tissue_fraction": fractions},
            slide_size_l0=slide.size,
            slide_name=slide_name,
        )
    coords_l0 = tiles_of_regions(corners, plan.stride_l0, config.tiles_across)
    columns = {
        "tissue_fraction": _tissue_fractions(mask, coords_l0, plan.size_l0),
        **region_columns(len(corners), config.tiles_across),
    }
    return TileTable(
        coords_l0=coords_l0,
        plan=plan,
        columns=columns,
        slide_size_l0=slide.size,
        slide_name=slide_name,
    )


def _with_settings(config: TilesConfig, settings: PlainValues) -> TilesConfig:
    """The configuration with single settings replaced."""
    if not isinstance(config, TilesConfig):
        raise ConfigError(
            f"config must be a TilesConfig, got {config!r}; single settings have names: "
            "tile_grid(slide, tile_px=224)"
        )
    if not settings:
        return config
    return from_mapping(TilesConfig, {**asdict(config), **settings}, where="tiles.")


def _tissue_fractions(
    tissue: Tissue | None, coords_l0: CoordsL0, size_l0: Size
) -> Shares:
    """Share of tissue in each box; NaN without tissue."""
    if tissue is None:
        return np.full(len(coords_l0), np.nan, dtype=np.float32)
    mask, frame = mask_and_frame(tissue)  # also checks the type and size of the mask
    if isinstance(tissue, TissueMask):
        return tissue.fractions(coords_l0, size_l0)
    return box_fractions(mask, frame, coords_l0, size_l0)


def mask_and_frame(tissue: Tissue) -> tuple[MaskArray, MaskFrame]:
    """The mask, bool (H, W), and the frame that says where it lies on the slide.

    Raises:
        InvalidInputError: the mask is not bool or has another size than its frame.
    """
    if isinstance(tissue, TissueMask):
        mask = tissue.mask
        frame = tissue.frame
    else:
        mask, frame = tissue
    width, height = frame.size_th
    shape = (height, width)
    if mask.dtype != np.bool_ or mask.shape != shape:
        raise InvalidInputError(
            f"tissue_mask must be bool of shape {shape}, got {mask.dtype} {mask.shape}"
        )
    return mask, frame


def grid_coords(size_l0: Size, plan: ReadPlan, *, pad: bool = False) -> CoordsL0:
    """Top-left corners of the grid, int64 (N, 2), block by block.

    Blocks of `BLOCK_TILES` x `BLOCK_TILES` tiles go row by row, and so do the tiles in
    a block. Tiles that stick out of the slide are left out unless `pad`.
    """
    x = _tile_starts(size_l0[0], plan.size_l0[0], plan.stride_l0[0], pad=pad)
    y = _tile_starts(size_l0[1], plan.size_l0[1], plan.stride_l0[1], pad=pad)
    columns = np.tile(np.arange(len(x)), len(y))
    rows = np.repeat(np.arange(len(y)), len(x))
    order = np.lexsort((columns, rows, columns // BLOCK_TILES, rows // BLOCK_TILES))
    return np.stack([x[columns[order]], y[rows[order]]], axis=1)


def _tile_starts(
    extent: int, tile: int, stride: int, *, pad: bool
) -> npt.NDArray[np.int64]:
    """First pixel of each tile along one axis, all in level-0 px."""
    end = extent if pad else extent - tile + 1
    return np.arange(0, end, stride, dtype=np.int64)
