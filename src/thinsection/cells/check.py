"""Checks cells of any tool: doubled, cut at seams, empty, self-crossing, absurd in size, on glass.

The cells are read block by block, each with the neighbours around it, so that memory does not grow
with their number.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.cells.columns import parse_columns
from thinsection.cells.outlines import Flags, Outlines, decode_wkb
from thinsection.cells.place import CellSlide, PlacementCheck, placement_of
from thinsection.cells.seams import (
    AXES,
    CUT_SHARES,
    MAX_BY_CHANCE,
    Seams,
    StraightSides,
    facing_pairs,
    shares_of,
    straight_sides,
)
from thinsection.cells.sources import format_of, reading
from thinsection.cells.spill import BLOCK_PX
from thinsection.cells.table import (
    FACTS_KEY,
    CellTable,
    Window,
    are_within,
    centers_of,
)
from thinsection.cells.writing import CellOrigin, write_cells
from thinsection.types import Floats

if TYPE_CHECKING:
    import pyarrow as pa

    from thinsection.qc.tissue import TissueMask

# share of the smaller of two cells that the other covers
DOUBLE_SHARE = 0.2
# a cell is absurd in size if its area is so many times the median, or so small a part of it
ABSURD_FACTOR = 20.0
_HALO_PX = 512.0
_MAX_CELLS = 40_000  # of a window with its halo
_MIN_WINDOW_PX = 512.0
_NUM_EXAMPLES = 20
_AREA_BINS = 16  # per doubling of the area
_LARGEST_SIDE = 2**40  # px of a slide whose size is not known

KINDS = ("doubled", "cut", "self-crossing", "tiny", "huge", "on glass")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One cell that a check names."""

    kind: str  # one of KINDS
    cell_id: str
    x_l0: float
    y_l0: float
    size_px: float  # longer edge of its box, level-0 px


@dataclass(frozen=True, kw_only=True)
class CellsFindings:
    """What a check found in one file.

    Attributes:
        file: path of the file.
        format: name of its format.
        num_read: objects that could be cells.
        num_cells: cells with a place.
        unusable: number of objects that are no cells, by reason.
        simplified: number of cells that were simplified, by what was done.
        num_doubled_pairs: pairs of which one covers more than a fifth of the smaller one.
        num_by_kind: number of cells of each kind in `KINDS`; 'on glass' only with a slide.
        seams: lines at which cells end, by axis.
        cut_share: share of its box that a side at a seam must take to count as cut.
        num_cut_by_chance: number of sides that would lie at the seams if there were none.
        num_facing_pairs: pairs with straight sides that face each other and have the same ends.
        median_area_px: median area of the cells, level-0 px².
        outside_slide: number of cells outside the slide; None without a slide.
        examples: some cells of each kind.
    """

    file: str
    format: str
    num_read: int
    num_cells: int
    unusable: dict[str, int]
    simplified: dict[str, int]
    num_doubled_pairs: int
    num_by_kind: dict[str, int]
    seams: dict[str, Seams]
    cut_share: float | None
    num_cut_by_chance: float
    num_facing_pairs: int
    median_area_px: float | None
    outside_slide: int | None = None
    examples: tuple[Example, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The findings in words, one thing a line."""
        lines = [
            f"{self.num_cells:,} cells of {self.num_read:,} objects ({self.format})"
        ]
        for reason, number in self.unusable.items():
            lines.append(f"not used: {number:,} {reason}")
        for reason, number in self.simplified.items():
            lines.append(f"simplified: {number:,} {reason}")
        if self.outside_slide:
            lines.append(f"outside the slide: {self.outside_slide:,}")
        for kind, number in self.num_by_kind.items():
            share = number / max(1, self.num_cells)
            more = ""
            if kind == "doubled":
                more = f" in {self.num_doubled_pairs:,} pairs"
            elif kind == "cut" and self.num_cut_by_chance >= 1:
                more = f", of which about {self.num_cut_by_chance:,.0f} by chance"
            lines.append(f"{kind}: {number:,} cells ({share:.2%}){more}")
        for axis, seams in self.seams.items():
            places = sorted({round(place) for place in (*seams.after, *seams.before)})
            lines.append(
                f"seams along {axis}: every {seams.period:.1f} px at "
                f"{', '.join(map(str, places))}, with {seams.num_sides:,} straight sides"
            )
        return lines


def check_cells(
    path: Path,
    *,
    frame: str | None = None,
    columns: tuple[str, ...] = (),
    slide: CellSlide | None = None,
    tissue: "TissueMask | None" = None,
) -> tuple[CellsFindings, dict[Example, list[Outlines]]]:
    """Checks the cells of one file.

    Args:
        path: a file of any format, or a table of `run --cells`.
        frame: unit of the coordinates; None: that of the format.
        columns: columns of a table, as 'class=cell_type'.
        slide: the slide on which the cells lie; None if it is not known.
        tissue: its tissue.

    Returns:
        The findings, and for each example its outline and those around it.

    Memory: some 300 MiB, whatever the number of cells.

    Raises:
        InvalidInputError: the file cannot be read.
    """
    if _is_table(path):
        table = CellTable(path)
        return _check_table(table, str(path), "thinsection", slide, tissue)
    with TemporaryDirectory(prefix="thinsection-cells-") as folder:
        table = _read_anywhere(path, Path(folder), frame, columns, slide)
        name = str(table.facts["source"]["format"])
        return _check_table(table, str(path), name, slide, tissue)


def _is_table(path: Path) -> bool:
    """True for a table of `run --cells`."""
    if path.suffix != ".parquet" or not path.is_file():
        return False
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return FACTS_KEY in (pq.read_metadata(path).metadata or {})
    except (OSError, pa.ArrowInvalid):
        return False  # its reader says what is wrong


class _NoJudge(PlacementCheck):
    """Sees the centres and refuses nothing: a check reports."""

    def finish(self, path: str) -> None:
        """Accepts all."""


def _read_anywhere(
    path: Path,
    folder: Path,
    frame: str | None,
    columns: tuple[str, ...],
    slide: CellSlide | None,
) -> CellTable:
    """The cells of a file as a table, also those outside the slide."""
    cell_format = format_of(path)
    placed_on = slide or CellSlide(
        slide_id="", size_l0=(_LARGEST_SIDE, _LARGEST_SIDE), slide_mpp=(1.0, 1.0)
    )
    with reading(path):
        wanted = frame or cell_format.frame(path)
        if slide is None and frame is None:
            wanted = "px"  # of the file
        placement = placement_of(wanted, placed_on)
        anywhere = CellSlide(
            slide_id=placed_on.slide_id,
            size_l0=(_LARGEST_SIDE, _LARGEST_SIDE),
            slide_mpp=(1.0, 1.0),
        )
        return write_cells(
            folder / "cells.parquet",
            cell_format.read(path, parse_columns(columns)),
            name="check",
            slide=anywhere,
            origin=CellOrigin(path=str(path), digest="", format=cell_format.name),
            placement=placement,
            fit=_NoJudge(anywhere, placement, None),
        )


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """Cells of a window and its halo."""

    ids: list[str]
    centers: Floats
    outlines: Outlines
    bounds: Floats
    area_px: Floats
    is_inner: Flags  # centre in the window itself
    wkb: "pa.Array"


_COLUMNS = ("id", "x_l0", "y_l0", "geometry", "area_um2")


def _read_window(table: CellTable, window: Window) -> _Cells | None:
    """Cells of a window and its halo; None if the window has none."""
    rows = table.to_table(_COLUMNS, _with_halo(window)).combine_chunks()
    if not len(rows):
        return None
    centers = centers_of(rows)
    is_inner = are_within(centers, window)
    if not is_inner.any():
        return None
    wkb = rows["geometry"].combine_chunks()
    outlines = decode_wkb(wkb).outlines
    mpp_x, mpp_y = table.slide_mpp
    return _Cells(
        ids=rows["id"].to_pylist(),
        centers=centers,
        outlines=outlines,
        bounds=outlines.bounds(),
        area_px=rows["area_um2"].to_numpy().astype(np.float64) / (mpp_x * mpp_y),
        is_inner=is_inner,
        wkb=wkb,
    )


def _with_halo(window: Window) -> Window:
    x0, y0, x1, y1 = window
    return (x0 - _HALO_PX, y0 - _HALO_PX, x1 + _HALO_PX, y1 + _HALO_PX)


def _windows(table: CellTable) -> Iterator[Window]:
    """Windows that cover all cells; a window with too many is cut in four."""
    x0, y0, x1, y1 = table.bounds_l0
    for row in range(math.floor(y0 / BLOCK_PX), math.floor(y1 / BLOCK_PX) + 1):
        line = (x0, row * BLOCK_PX, x1 + 1, (row + 1) * BLOCK_PX)
        columns: set[int] = set()
        for batch in table.batches(["x_l0"], line):
            blocks = np.floor(batch["x_l0"].to_numpy() / BLOCK_PX)
            columns.update(np.unique(blocks).astype(int).tolist())
        for column in sorted(columns):
            left = float(column * BLOCK_PX)
            top = float(row * BLOCK_PX)
            yield from _parts(table, (left, top, left + BLOCK_PX, top + BLOCK_PX))


def _parts(table: CellTable, window: Window) -> Iterator[Window]:
    x0, y0, x1, y1 = window
    batches = table.batches(["x_l0"], _with_halo(window))
    num_cells = sum(len(batch) for batch in batches)
    if num_cells <= _MAX_CELLS or x1 - x0 <= _MIN_WINDOW_PX:
        yield window
        return
    middle_x = (x0 + x1) / 2
    middle_y = (y0 + y1) / 2
    yield from _parts(table, (x0, y0, middle_x, middle_y))
    yield from _parts(table, (middle_x, y0, x1, middle_y))
    yield from _parts(table, (x0, middle_y, middle_x, y1))
    yield from _parts(table, (middle_x, middle_y, x1, y1))


@dataclass
class Examples:
    """Some cells of each kind, each cell with the same chance.

    Source: Vitter, reservoir sampling.
    """

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    kept: dict[str, list[Example]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )

    def add(self, kind: str, rows: npt.NDArray[np.int64], cells: Any) -> None:
        """Counts cells of a kind and keeps some."""
        for row in rows.tolist():
            self.counts[kind] += 1
            kept = self.kept[kind]
            place = len(kept)
            if place >= _NUM_EXAMPLES:
                place = int(self.rng.integers(self.counts[kind]))
            if place >= _NUM_EXAMPLES:
                continue
            x0, y0, x1, y1 = cells.bounds[row]
            example = Example(
                kind=kind,
                cell_id=str(cells.ids[row]),
                x_l0=float(cells.centers[row, 0]),
                y_l0=float(cells.centers[row, 1]),
                size_px=float(np.nanmax([x1 - x0, y1 - y0, 1.0])),
            )
            kept[place : place + 1] = [example]

    def merge(self, kind: str, other: "Examples") -> None:
        """Takes the count and the examples of a kind, of which this has none yet."""
        self.counts[kind] = other.counts[kind]
        self.kept[kind] = list(other.kept[kind])

    def chosen(self) -> list[Example]:
        """At most twenty: one of each kind in turn."""
        chosen: list[Example] = []
        for place in range(_NUM_EXAMPLES):
            for kind in KINDS:
                if place < len(self.kept[kind]):
                    chosen.append(self.kept[kind][place])
        return sorted(chosen[:_NUM_EXAMPLES], key=lambda one: KINDS.index(one.kind))


class _Areas:
    """Histogram of areas, from which their median follows."""

    def __init__(self) -> None:
        self._counts = np.zeros(128 * _AREA_BINS, dtype=np.int64)

    def add(self, areas: Floats) -> None:
        """Takes areas; NaN are left out."""
        known = areas[areas > 0]
        bins = np.floor((np.log2(known) + 64) * _AREA_BINS).astype(np.int64)
        bins = np.clip(bins, 0, len(self._counts) - 1)
        self._counts += np.bincount(bins, minlength=len(self._counts))

    def median(self) -> float | None:
        """Median to within 4 %; None without areas."""
        if not self._counts.any():
            return None
        middle = np.searchsorted(self._counts.cumsum(), self._counts.sum() / 2)
        return float(2 ** ((middle + 0.5) / _AREA_BINS - 64))


def _check_table(
    table: CellTable,
    file: str,
    format_name: str,
    slide: CellSlide | None,
    tissue: "TissueMask | None",
) -> tuple[CellsFindings, dict[Example, list[Outlines]]]:
    """Checks a table in two passes: pairs and seams, then each cell."""
    examples = Examples()
    sides = StraightSides()
    areas = _Areas()
    facing = _Facing()
    num_pairs = 0
    for window in _windows(table):
        cells = _read_window(table, window)
        if cells is None:
            continue
        inner = np.flatnonzero(cells.is_inner)
        areas.add(cells.area_px[inner])
        num_pairs += _add_overlaps(cells, examples)
        lengths = straight_sides(cells.outlines, cells.bounds)
        shares = shares_of(lengths, cells.bounds)
        sides.add(shares[inner], cells.bounds[inner])
        facing.add(facing_pairs(shares, lengths, cells.bounds), cells, shares)
    seams = sides.seams()
    cuts = _Cuts(seams)
    num_outside = _add_single_cells(
        table, cuts, examples, median=areas.median(), slide=slide, tissue=tissue
    )
    examples.merge("cut", cuts.examples())
    facing.add_examples(cuts, examples)
    counts = table.counts
    num_by_kind = dict(examples.counts)
    if tissue is None:
        del num_by_kind["on glass"]
    findings = CellsFindings(
        file=file,
        format=format_name,
        num_read=counts.read,
        num_cells=table.num_cells,
        unusable=dict(counts.refused),
        simplified=dict(counts.changed),
        num_doubled_pairs=num_pairs,
        num_by_kind=num_by_kind,
        seams=seams,
        cut_share=cuts.chosen_share() if seams else None,
        num_cut_by_chance=cuts.by_chance(cuts.chosen_share()),
        num_facing_pairs=facing.num_pairs,
        median_area_px=areas.median(),
        outside_slide=num_outside,
        examples=tuple(examples.chosen()),
    )
    around = {example: _around(table, example) for example in findings.examples}
    return findings, around


def _add_overlaps(cells: _Cells, examples: Examples) -> int:
    """Counts the doubled and the self-crossing cells of a window; returns the doubled pairs."""
    import shapely

    polygons = shapely.from_wkb(cells.wkb.to_numpy(zero_copy_only=False))
    has_polygon = ~shapely.is_missing(polygons)
    is_crossing = has_polygon & ~shapely.is_valid(polygons)
    examples.add("self-crossing", np.flatnonzero(is_crossing & cells.is_inner), cells)
    if is_crossing.any():
        polygons[is_crossing] = shapely.buffer(polygons[is_crossing], 0)
    first, second = shapely.STRtree(polygons).query(polygons)
    is_pair = first < second
    first = first[is_pair]
    second = second[is_pair]
    # boxes that share too little need no exact area
    low = np.maximum(cells.bounds[first, :2], cells.bounds[second, :2])
    high = np.minimum(cells.bounds[first, 2:], cells.bounds[second, 2:])
    smaller = np.minimum(shapely.area(polygons[first]), shapely.area(polygons[second]))
    is_near = np.prod(high - low, axis=1) > DOUBLE_SHARE * smaller
    first = first[is_near]
    second = second[is_near]
    shared = shapely.area(shapely.intersection(polygons[first], polygons[second]))
    is_double = shared > DOUBLE_SHARE * smaller[is_near]
    first = first[is_double]
    second = second[is_double]
    doubled = np.zeros(len(cells.is_inner), dtype=bool)
    doubled[first] = True
    doubled[second] = True
    examples.add("doubled", np.flatnonzero(doubled & cells.is_inner), cells)
    # the window of the upper (then left) cell of a pair counts it
    order = np.lexsort((cells.centers[:, 0], cells.centers[:, 1]))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    upper = np.where(rank[first] < rank[second], first, second)
    return int(np.count_nonzero(cells.is_inner[upper]))


class _Facing:
    """Cells that face another along a straight side. They are few.

    Memory: some 300 bytes per such cell.
    """

    def __init__(self) -> None:
        self.num_pairs = 0
        self._cells: list[tuple[str, Floats, Floats, Floats]] = []

    def add(self, pairs: npt.NDArray[np.int64], cells: _Cells, shares: Floats) -> None:
        """Takes the pairs of a window; a pair counts where its first cell lies."""
        self.num_pairs += int(np.count_nonzero(cells.is_inner[pairs[:, 0]]))
        for row in np.unique(pairs).tolist():
            if cells.is_inner[row]:
                self._cells.append(
                    (
                        cells.ids[row],
                        cells.centers[row],
                        cells.bounds[row],
                        shares[row],
                    )
                )

    def add_examples(self, cuts: "_Cuts", examples: Examples) -> None:
        """Counts as cut those that lie at no seam; the others are counted with the seams."""
        if not self._cells:
            return
        ids, centers, bounds, shares = zip(*self._cells, strict=True)
        cells = _Named(
            ids=list(ids), centers=np.array(centers), bounds=np.array(bounds)
        )
        is_at_seam = cuts.holds(np.array(shares), cells.bounds)
        examples.add("cut", np.flatnonzero(~is_at_seam), cells)


@dataclass(frozen=True)
class _Named:
    """Cells of which examples may be kept."""

    ids: list[str]
    centers: Floats
    bounds: Floats


class _Cuts:
    """Counts cells with a straight side at a seam, for several lengths of the side.

    Sides that lie at a seam by chance are as frequent as they are elsewhere. The shortest length is
    chosen at which these are at most three in ten thousand cells.
    """

    def __init__(self, seams: dict[str, Seams]) -> None:
        self._seams = seams
        self._num_cells = 0
        self._examples = {share: Examples() for share in CUT_SHARES}
        # sides that lie elsewhere, by length and side of the box
        self._num_elsewhere = {share: np.zeros(4) for share in CUT_SHARES}

    @property
    def has_seams(self) -> bool:
        """True if there are seams."""
        return bool(self._seams)

    def add(self, shares: Floats, cells: _Named) -> None:
        """Takes cells, each once."""
        self._num_cells += len(shares)
        at_seam = self._at_seam(cells.bounds)
        for share in CUT_SHARES:
            is_long = shares >= share
            is_cut = (is_long & at_seam).any(axis=1)
            self._examples[share].add("cut", np.flatnonzero(is_cut), cells)
            self._num_elsewhere[share] += (is_long & ~at_seam).sum(axis=0)

    def by_chance(self, share: float) -> float:
        """Number of sides of this length that are expected at the seams by chance."""
        expected = 0.0
        for axis, sides in AXES:
            if axis not in self._seams:
                continue
            for is_before, side in enumerate(sides):
                covered = self._seams[axis].covered(before=bool(is_before))
                elsewhere = float(self._num_elsewhere[share][side])
                expected += elsewhere * covered / max(1 - covered, 0.01)
        return expected

    def chosen_share(self) -> float:
        """Shortest length, as a share of the box, with few sides by chance; else the longest."""
        for share in CUT_SHARES:
            if self.by_chance(share) <= MAX_BY_CHANCE * self._num_cells:
                return share
        return CUT_SHARES[-1]

    def examples(self) -> Examples:
        """Count and examples for the chosen length."""
        return self._examples[self.chosen_share()]

    def holds(self, shares: Floats, bounds: Floats) -> Flags:
        """True for each cell that is counted with the chosen length."""
        is_long = shares >= self.chosen_share()
        return np.asarray((is_long & self._at_seam(bounds)).any(axis=1))

    def _at_seam(self, bounds: Floats) -> Flags:
        """(N, 4): True for each side of a box that lies at a seam."""
        at_seam = np.zeros(bounds.shape, dtype=bool)
        for axis, sides in AXES:
            if axis not in self._seams:
                continue
            for is_before, side in enumerate(sides):
                at_seam[:, side] = self._seams[axis].holds(
                    bounds[:, side], before=bool(is_before)
                )
        return at_seam


def _add_single_cells(
    table: CellTable,
    cuts: _Cuts,
    examples: Examples,
    *,
    median: float | None,
    slide: CellSlide | None,
    tissue: "TissueMask | None",
) -> int | None:
    """Counts what each cell shows alone: cuts at seams, size, glass. Returns those outside."""
    mpp_x, mpp_y = table.slide_mpp
    num_outside = 0
    on_slide = None
    if slide is not None:
        on_slide = PlacementCheck(slide, placement_of("px", slide), tissue)
    for batch in table.batches(_COLUMNS):
        outlines = decode_wkb(batch["geometry"]).outlines
        cells = _Named(
            ids=batch["id"].to_pylist(),
            centers=centers_of(batch),
            bounds=outlines.bounds(),
        )
        area = batch["area_um2"].to_numpy(zero_copy_only=False) / (mpp_x * mpp_y)
        if cuts.has_seams:
            lengths = straight_sides(outlines, cells.bounds)
            cuts.add(shares_of(lengths, cells.bounds), cells)
        if median is not None:
            with np.errstate(invalid="ignore"):
                is_tiny = area < median / ABSURD_FACTOR
                is_huge = area > median * ABSURD_FACTOR
            examples.add("tiny", np.flatnonzero(is_tiny), cells)
            examples.add("huge", np.flatnonzero(is_huge), cells)
        if slide is not None and on_slide is not None:
            inside = slide.holds(cells.centers)
            num_outside += int(np.count_nonzero(~inside))
            if tissue is not None:
                is_on_glass = inside & ~on_slide.are_on_tissue(cells.centers)
                examples.add("on glass", np.flatnonzero(is_on_glass), cells)
    return None if slide is None else num_outside


def _around(table: CellTable, example: Example) -> list[Outlines]:
    """Outline of an example, and those of the cells around it."""
    reach = 1.5 * max(example.size_px, 16.0)
    window = (
        example.x_l0 - reach,
        example.y_l0 - reach,
        example.x_l0 + reach,
        example.y_l0 + reach,
    )
    own: list[Outlines] = []
    others: list[Outlines] = []
    for batch in table.batches(["x_l0", "y_l0", "geometry"], window):
        outlines = decode_wkb(batch["geometry"]).outlines
        is_own = (centers_of(batch) == (example.x_l0, example.y_l0)).all(axis=1)
        for row in range(len(outlines)):
            one = outlines.take(np.arange(len(outlines)) == row)
            (own if is_own[row] else others).append(one)
    return own[:1] + others + own[1:]
