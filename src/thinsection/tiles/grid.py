"""The tile grid, ordered so that neighbours are read together; measures and filters of tiles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import filters, get_namespace
from thinsection.config import nearest, option
from thinsection.errors import ConfigError, require
from thinsection.files.pages import notebook_html
from thinsection.qc.checks.artefacts import Focus, detail_bands
from thinsection.qc.engine import QcRule, parse_rule
from thinsection.qc.tissue import TissueMask, box_fractions
from thinsection.registry import Entry, Registry
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan, nominal_mpp, plan_read, positive_number
from thinsection.slide.resize import Resample
from thinsection.types import (
    CoordsL0,
    MaskArray,
    MaskFrame,
    Size,
    TileArray,
    format_mpp,
)

# Tiles are ordered in blocks of this many columns and rows, so that segments of the file which
# several tiles share are still in the reader's cache when the next tile cuts them.
BLOCK_TILES = 8
_MAX_TOLERANCE = 0.3  # of resolution: more is another one

Tissue = TissueMask | tuple[MaskArray, MaskFrame]  # what says where tissue is
TileFilter = Callable[
    [TileArray], npt.NDArray[np.bool_]
]  # (B, H, W, 3) -> (B,), True = keep

_CHANNELS = ("red", "green", "blue")
_COLOURS = tuple(
    f"px_{what}_{c}" for what in ("mean", "std", "min", "max") for c in _CHANNELS
)
_STAINS = ("px_hematoxylin", "px_eosin", "px_dab")
FOCUS = "px_focus"
MEASURES = (*_COLOURS, *_STAINS, FOCUS)  # columns of the tile table, float32


def measure_tiles(
    tiles: TileArray, names: Sequence[str] = MEASURES
) -> npt.NDArray[np.float32]:
    """Measures of tiles uint8 (B, H, W, 3) by name, float32 (B, names), in the order of `names`.

    `px_mean_*`, `px_std_*` (of the population), `px_min_*`, `px_max_*`: of a channel, 0 to 255.
    `px_hematoxylin`, `px_eosin`, `px_dab`: mean over the px of the amounts by
    `arrays.filters.stain_tables`, which may be below 0.
    `px_focus`: median over blocks of 32 px of the ratio that quality control's `focus` judges by.

    Memory: 6 KiB a tile, beside 20 H W bytes for the focus.
    """
    found: dict[str, npt.NDArray[np.floating]] = {}
    if any(name != FOCUS for name in names):
        found = _of_histograms(tiles)
    if FOCUS in names:
        focus, ns = Focus(), get_namespace()
        bands = (detail_bands(ns, tile, focus.block_px) for tile in tiles)
        found[FOCUS] = np.array(
            [np.median(one / (two + focus.floor)) for one, two in bands]
        )
    return np.stack([found[name] for name in names], axis=1).astype(np.float32)


def rule_filter(rule: QcRule, tiles: TileArray) -> npt.NDArray[np.bool_]:
    """Which tiles, (B,), a rule on one of `MEASURES` holds for."""
    return np.asarray(rule.holds(measure_tiles(tiles, (rule.column,))[:, 0]))


def _of_histograms(tiles: TileArray) -> dict[str, npt.NDArray[np.floating]]:
    """Colours and stains: a histogram has all that they depend on."""
    histograms = [Image.fromarray(tile).histogram() for tile in tiles]
    counts = np.array(histograms, dtype=np.int64).reshape(
        -1, 3, 256
    )  # (B, channel, value)
    values, num_px = np.arange(256), tiles.shape[1] * tiles.shape[2]
    mean = counts @ values / num_px
    # sums of whole numbers are exact: equal px have a deviation of 0
    variance = (counts @ values**2 * num_px - (counts @ values) ** 2) / num_px**2
    there = counts > 0
    lowest, highest = there.argmax(axis=2), 255 - there[:, :, ::-1].argmax(axis=2)
    densities, unmixing = filters.stain_tables("hed_from_rgb")
    amounts = (counts @ densities / num_px) @ unmixing
    columns = np.concatenate(
        [mean, np.sqrt(variance), lowest, highest, amounts], axis=1
    )
    return dict(zip((*_COLOURS, *_STAINS), columns.T))


def contrast(tiles: TileArray) -> npt.NDArray[np.bool_]:
    """Keeps tiles with both dark and white px: (B, H, W, 3) -> (B,).

    Over all channel values of a tile: minimum < 135, maximum >= 255, 5th percentile < 162 and
    median < 225, percentiles with linear interpolation between order statistics. Memory: 2 KiB per
    tile, beside one tile's values widened to 8 bytes. Source: the tile rule of the OHSU GPU
    tutorial.
    """
    counts = np.stack([np.bincount(tile.ravel(), minlength=256) for tile in tiles])
    cumulative = counts.cumsum(axis=1)
    low, middle = _percentile(cumulative, 5.0), _percentile(cumulative, 50.0)
    dark, white = cumulative[:, 134] > 0, counts[:, 255] > 0
    return np.asarray(dark & white & (low < 162) & (middle < 225))


def _percentile(
    cumulative: npt.NDArray[np.int64], percent: float
) -> npt.NDArray[np.float64]:
    """NumPy's default percentile of each row's values, from cumulative histograms (B, 256)."""
    last = int(cumulative[0, -1]) - 1
    position = percent / 100 * last
    below = int(position)
    low, high = ((cumulative <= min(i, last)).sum(axis=1) for i in (below, below + 1))
    return np.asarray(low + (position - below) * (high - low), dtype=np.float64)


MASK_FILTER = (
    "tissue"  # needs no px: it is applied to the grid, before anything is read
)
_OURS = (
    Entry(name=MASK_FILTER, help="Tiles that hold enough tissue.", target=None),
    Entry(name="contrast", help="Tiles with both dark and white px.", target=contrast),
)
FILTERS: Registry[TileFilter] = Registry(
    "tile filter", "thinsection.tile_filters", _OURS
)


def load_filters(names: Sequence[str]) -> tuple[TileFilter, ...]:
    """The pixel filters of these names, rules on px last; 'tissue' and other rules are skipped."""
    rules = [
        parse_rule(name) for name in filter(is_rule, names)
    ]  # said before any work
    of_px = (partial(rule_filter, rule) for rule in rules if rule.column in MEASURES)
    own = (name for name in names if name != MASK_FILTER and not is_rule(name))
    return (*(FILTERS.load(name) for name in own), *of_px)


def is_rule(name: str) -> bool:
    """Whether a filter compares a column with a number: 'epithelium>0.3'."""
    return any(symbol in name for symbol in "<>=")


def kept_by_rules(table: "TileTable", names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which tiles, (N,), all rules on columns hold for; ConfigError: one on a missing column."""
    keep = np.ones(len(table), dtype=np.bool_)
    for rule in map(parse_rule, filter(is_rule, names)):
        if rule.column in MEASURES:  # a pixel filter
            continue
        if rule.column not in table.columns:
            hint = nearest(rule.column, (*table.columns, *MEASURES))
            raise ConfigError(
                f"tile_filter must name a column, got {rule.column!r}{hint}"
            )
        keep &= rule.holds(table.columns[rule.column])
    return keep


def magnification(text: str) -> tuple[str, str]:
    """Nominal magnification: 20, 40x."""
    power = positive_number(text.lower().removesuffix("x"))
    if power is None:
        raise ConfigError(f"mag must be a magnification such as 20, got {text!r}")
    mpp = f"{nominal_mpp(power):g}"
    return (
        mpp,
        f"--mag {text} is taken as --tile-mpp {mpp} (µm/px), whatever the objective was",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesConfig:
    """Settings of the tile grid and of the filters on it."""

    tile_px: int = option(
        256, "Edge of a tile (patch), px.", flag=("--tile-px", "--patch-size")
    )
    tile_mpp: str = option(
        "0.5",
        "Resolution of a tile, µm/px, or 'native' for level 0 as it is.",
        also={"--mag": magnification},
    )
    mpp_tolerance: float = option(
        0.05, "Relative difference up to which a level counts as of that resolution."
    )
    resample: Resample = option(
        "exact",
        "'fast' decodes JPEG at 1/2, 1/4 or 1/8 where that is not coarser than the tiles.",
    )
    overlap: int = option(0, "Px that neighbouring tiles share.")
    min_tissue_fraction: float = option(0.5, "Least share of tissue in a tile, [0, 1].")
    tile_filter: tuple[str, ...] = option(
        (MASK_FILTER,),
        "Tile filter; repeat for several: tissue, contrast, a rule on a column: 'stroma>0.3'.",
    )
    edge: Literal["drop", "pad"] = option(
        "drop",
        "Tiles that the slide's border cuts: 'drop' them or 'pad' them with white.",
    )

    def __post_init__(self) -> None:
        tolerance, fraction = self.mpp_tolerance, self.min_tissue_fraction
        known = self.mpp is not None or self.tile_mpp == "native"
        for name, ok, rule in (
            ("tile_px", self.tile_px >= 1, ">= 1"),
            ("overlap", 0 <= self.overlap < self.tile_px, "in [0, tile_px)"),
            (
                "mpp_tolerance",
                0 <= tolerance <= _MAX_TOLERANCE,
                f"in [0, {_MAX_TOLERANCE}]",
            ),
            ("min_tissue_fraction", 0 <= fraction <= 1, "in [0, 1]"),
            ("tile_mpp", known, "a number > 0 or 'native'"),
        ):
            got = repr(getattr(self, name))
            require(ok, f"tiles.{name} must be {rule}", got, error=ConfigError)

    @property
    def mpp(self) -> float | None:
        """`tile_mpp` as a number; None for 'native'."""
        return positive_number(self.tile_mpp)

    def plan(self, slide: Slide) -> ReadPlan:
        """How tiles of a slide are read; raises as `plan_read` does."""
        hints = list(slide.notes)
        if slide.objective_power:  # a guess, which is left to the person
            mpp = nominal_mpp(slide.objective_power)
            hints.append(f"its {slide.objective_power:g}x usually means {mpp:g} µm/px")
        levels = (*slide.levels, *(slide.reduced if self.resample == "fast" else ()))
        name, hint = Path(slide.slide_path).name, "; ".join(hints)
        asked: dict[str, Any] = {"tile_px": self.tile_px, "tile_mpp": self.mpp}
        asked |= {"overlap": self.overlap, "mpp_tolerance": self.mpp_tolerance}
        return plan_read(levels, slide.slide_mpp, slide=name, hint=hint, **asked)


@dataclass(frozen=True, kw_only=True)
class TileTable:
    """Tiles of one slide, in the order in which they are read and stored.

    `columns` holds what is known per tile ('tissue_fraction', QC checks): name -> (N,) array.
    Memory: 16 bytes per tile and the columns' items.
    """

    coords_l0: CoordsL0  # int64 (N, 2), x and y of top-left corners in level-0 px
    plan: ReadPlan  # how each of them is read
    columns: Mapping[str, npt.NDArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_coords(self.coords_l0)
        for name, column in self.columns.items():
            shape = (len(self),)
            require(
                column.shape == shape,
                f"column {name!r} must have shape {shape}",
                column.shape,
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
            low, high = (
                self.coords_l0.min(axis=0),
                self.coords_l0.max(axis=0) + self.plan.size_l0,
            )
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
    """Raises InvalidInputError for what is not int64 (N, 2)."""
    fits = (
        coords_l0.dtype == np.int64 and coords_l0.ndim == 2 and coords_l0.shape[1] == 2
    )
    got = f"{coords_l0.dtype} {tuple(coords_l0.shape)}"
    require(fits, "coords_l0 must be int64 of shape (N, 2)", got)


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
    plan = config.plan(slide)
    coords_l0 = grid_coords(slide.size, plan, pad=config.edge == "pad")
    fraction = np.full(len(coords_l0), np.nan, dtype=np.float32)
    if tissue is not None:
        given = mask_and_frame(tissue)
        share_of = (
            partial(box_fractions, *given)
            if isinstance(tissue, tuple)
            else tissue.fractions
        )
        fraction = share_of(coords_l0, plan.size_l0)
    table = TileTable(
        coords_l0=coords_l0, plan=plan, columns={"tissue_fraction": fraction}
    )
    least = max(
        config.min_tissue_fraction, 1e-30
    )  # 0 still needs some tissue where it is given
    return table if tissue is None else table.select(fraction >= least)


def mask_and_frame(tissue: Tissue) -> tuple[MaskArray, MaskFrame]:
    """The mask, bool (H, W), and where it lies; InvalidInputError where it is not the frame's."""
    mask, frame = tissue if isinstance(tissue, tuple) else (tissue.mask, tissue.frame)
    shape, got = frame.size_th[::-1], f"{mask.dtype} {mask.shape}"
    fits = mask.dtype == np.bool_ and mask.shape == shape
    require(fits, f"tissue_mask must be bool of shape {shape}", got)
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
