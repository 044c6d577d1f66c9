"""Counts of cells per tile: each cell once, and values of the cells that lie in a tile.

A tile holds a cell if the cell's centroid lies in it; the left and the upper border belong to the
tile, the right and the lower one do not. Where tiles overlap, several may hold a cell. The counts
give it to the tile whose centre is nearest, with distances in units of a tile's edge, and to the
earlier row of the table if two centres are equally near. So counts add up to the number of cells.
Densities, areas and shares describe a tile by itself: they are of all cells that it holds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinsection.cells.table import centers_of
from thinsection.errors import InvalidInputError
from thinsection.tiles.table import Tiles
from thinsection.types import Floats, Mpp

if TYPE_CHECKING:
    import pyarrow

# columns of a cell table that are counted
COUNTED = ("x_l0", "y_l0", "class", "area_um2")

Rows = npt.NDArray[np.int64]
# rows of cells, and the row of a tile that holds each of them
Pairs = tuple[Rows, Rows]


class TileFinder:
    """Finds the tiles of a table that hold points.

    Tiles are sorted into buckets of the size of a tile. The tiles that may hold a point lie in four
    buckets: that of the point, and those to the left of it and above it.

    Memory: 40 bytes per tile.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.num_tiles = len(tiles.coords_l0)
        self._coords_l0 = tiles.coords_l0
        self._size_l0 = np.array(tiles.size_l0, dtype=np.int64)
        buckets = self._coords_l0 // self._size_l0
        self._first = buckets.min(axis=0, initial=0)
        # a column and a row more, so that neighbours of the border have keys of their own
        self._shape = buckets.max(axis=0, initial=0) - self._first + 2
        keys = self._key(buckets)
        # stable: within a bucket, tiles keep the order of the table
        self._order = np.argsort(keys, kind="stable")
        self._keys, self._starts, self._counts = np.unique(
            keys[self._order], return_index=True, return_counts=True
        )

    def _key(self, buckets: Rows) -> Rows:
        columns, rows = (buckets - self._first).T
        return np.asarray(rows * self._shape[0] + columns)

    def find(self, points_l0: Floats) -> tuple[Rows, Pairs]:
        """Row of the tile to which each point belongs, -1 for none; and all pairs.

        Args:
            points_l0: (n, 2), x and y in level-0 px.

        Returns:
            The rows (n,), and the pairs of a point and a tile that holds it.

        Memory: about 100 bytes per point, and 16 per pair.
        """
        home = np.full(len(points_l0), -1, dtype=np.int64)
        nearest = np.full(len(points_l0), np.inf)
        pairs: list[Pairs] = []
        for near, candidates in self._candidates(points_l0):
            offset = points_l0[near] - self._coords_l0[candidates]
            is_inside = ((offset >= 0) & (offset < self._size_l0)).all(axis=1)
            points = near[is_inside]
            tiles = candidates[is_inside]
            # Twice the distance from the centre, times the other edge: exact where coordinates
            # are, and so are ties.
            from_centre = 2 * offset[is_inside] - self._size_l0
            distance = ((from_centre * self._size_l0[::-1]) ** 2).sum(axis=1)
            is_tie = (distance == nearest[points]) & (tiles < home[points])
            is_better = (distance < nearest[points]) | is_tie
            home[points[is_better]] = tiles[is_better]
            nearest[points[is_better]] = distance[is_better]
            pairs.append((points, tiles))
        if not pairs:
            return home, (np.empty(0, np.int64), np.empty(0, np.int64))
        return home, (
            np.concatenate([points for points, _ in pairs]),
            np.concatenate([tiles for _, tiles in pairs]),
        )

    def _candidates(self, points_l0: Floats) -> Iterator[Pairs]:
        """Pairs of points and tiles that may hold them; in each part a point comes once."""
        if not self.num_tiles:
            return
        last = self._first + self._shape - 1
        with np.errstate(invalid="ignore"):
            own = np.floor_divide(points_l0, self._size_l0)
        for step in np.array(((0, 0), (1, 0), (0, 1), (1, 1))):
            buckets = own - step
            is_near = ((buckets >= self._first) & (buckets < last)).all(axis=1)
            points = np.flatnonzero(is_near)
            keys = self._key(buckets[points].astype(np.int64))
            places = np.searchsorted(self._keys, keys)
            places[places == len(self._keys)] = 0
            is_used = self._keys[places] == keys
            points = points[is_used]
            places = places[is_used]
            number = 0
            while len(points):
                yield points, self._order[self._starts[places] + number]
                number += 1
                has_more = self._counts[places] > number
                points = points[has_more]
                places = places[has_more]


@dataclass(frozen=True, kw_only=True)
class TileCounts:
    """Counts of cells, and sums over cells, for each of N tiles and C classes.

    The last of the C + 1 columns is of cells without a class. `num_held`, `num_areas`, `area_sum`
    and `area_squares` are of all cells that a tile holds, also of those that another tile counts.
    """

    classes: tuple[str, ...]
    num_cells: int
    count: npt.NDArray[np.int64]  # (N, C + 1), each cell once
    num_held: npt.NDArray[np.int64]  # (N, C + 1)
    num_areas: npt.NDArray[np.int64]  # (N,) cells with a known area
    area_sum: Floats  # (N,) µm²
    # squared differences from `area_origin`, and that value, µm² of a cell
    area_squares: Floats
    area_origin: float

    @property
    def num_in_no_tile(self) -> int:
        """Cells whose centroid lies in no tile."""
        return self.num_cells - int(self.count.sum())

    def shares(self) -> Floats:
        """Share of each class among the cells that a tile holds, (N, C); NaN without cells."""
        total = self.num_held.sum(axis=1, keepdims=True)
        return _ratio(self.num_held[:, :-1], total)

    def areas_um2(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the cells' areas (N,), µm²; NaN without cells.

        The cells of a tile are all there are, not a sample: the squares are divided by their
        number.
        """
        mean = _ratio(self.area_sum, self.num_areas)
        from_origin = mean - self.area_origin
        variance = _ratio(self.area_squares, self.num_areas) - from_origin**2
        return mean, np.sqrt(np.maximum(variance, 0))


def tissue_mm2(
    tiles: Tiles, tissue_fraction: npt.NDArray[np.floating], slide_mpp: Mpp | None
) -> Floats:
    """Area of the tissue in each tile (N,), mm²; NaN without a resolution."""
    if slide_mpp is None:
        return np.full(len(tiles.coords_l0), np.nan)
    width, height = tiles.size_l0
    tile_um2 = width * slide_mpp[0] * height * slide_mpp[1]
    return np.asarray(tissue_fraction, dtype=np.float64) * tile_um2 / 1e6


def per_mm2(num_cells: npt.NDArray[np.int64], area_mm2: Floats) -> Floats:
    """Cells per mm² of tissue; NaN where there is no tissue."""
    return _ratio(num_cells, area_mm2)


def _ratio(above: npt.ArrayLike, below: npt.ArrayLike) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.asarray(above, dtype=np.float64) / np.asarray(below, np.float64)
    return np.where(np.isfinite(ratio), ratio, np.nan)


def count_cells(
    batches: Iterable["pyarrow.RecordBatch"], tiles: Tiles, classes: Sequence[str]
) -> TileCounts:
    """Counts the cells of a table in the tiles of a grid.

    Args:
        batches: parts of a cell table, with the columns `COUNTED`.
        tiles: the tiles, in any order; they may overlap.
        classes: names of the cells' classes.

    Memory: 40 bytes per tile, 16 for each class, and about 200 per cell of a batch.

    Raises:
        InvalidInputError: a cell has another class.
    """
    finder = TileFinder(tiles)
    num_columns = len(classes) + 1
    shape = (finder.num_tiles, num_columns)
    count = np.zeros(shape, dtype=np.int64)
    num_held = np.zeros(shape, dtype=np.int64)
    num_areas = np.zeros(finder.num_tiles, dtype=np.int64)
    area_sum = np.zeros(finder.num_tiles)
    area_squares = np.zeros(finder.num_tiles)
    area_origin = np.nan
    num_cells = 0
    for batch in batches:
        centers = centers_of(batch)
        codes = _class_codes(batch.column("class"), classes)
        areas = batch.column("area_um2").to_numpy(zero_copy_only=False)
        areas = np.asarray(areas, dtype=np.float64)
        num_cells += len(centers)
        home, (cells, rows) = finder.find(centers)
        counted = np.flatnonzero(home >= 0)
        places = home[counted] * num_columns + codes[counted]
        np.add.at(count.reshape(-1), places, 1)
        np.add.at(num_held.reshape(-1), rows * num_columns + codes[cells], 1)
        has_area = np.isfinite(areas[cells])
        rows = rows[has_area]
        values = areas[cells[has_area]]
        if not len(values):
            continue
        if np.isnan(area_origin):
            area_origin = float(values.mean())
        np.add.at(num_areas, rows, 1)
        np.add.at(area_sum, rows, values)
        np.add.at(area_squares, rows, (values - area_origin) ** 2)
    return TileCounts(
        classes=tuple(classes),
        num_cells=num_cells,
        count=count,
        num_held=num_held,
        num_areas=num_areas,
        area_sum=area_sum,
        area_squares=area_squares,
        area_origin=area_origin,
    )


def _class_codes(column: "pyarrow.Array", classes: Sequence[str]) -> Rows:
    """Place of each cell's class, (n,); `len(classes)` for cells without one."""
    # parquet may give words in place of a dictionary
    if not hasattr(column, "indices"):
        column = column.dictionary_encode()
    place_of: dict[str | None, int] = {
        name: place for place, name in enumerate(classes)
    }
    place_of[None] = len(classes)
    places = [place_of.get(name, -1) for name in column.dictionary.to_pylist()]
    indices = column.indices.fill_null(len(places)).to_numpy(zero_copy_only=False)
    codes: Rows = np.array([*places, len(classes)], dtype=np.int64)[indices]
    if len(codes) and codes.min() < 0:
        name = column.dictionary.to_pylist()[places.index(-1)]
        raise InvalidInputError(
            f"class of a cell must be one of {', '.join(map(repr, classes)) or 'none'}, got "
            f"{name!r}; import the cells again"
        )
    return codes
