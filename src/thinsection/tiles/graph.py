"""The spatial graph of tiles (or cells) that graph models take, in PyTorch Geometric's layout."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

from thinsection.errors import BudgetError, InvalidInputError
from thinsection.types import MIB, Mpp, format_bytes

__all__ = ["TileGraph", "tile_graph"]

Points = npt.NDArray[np.float64]  # (N, 2)
GroupIds = npt.NDArray[np.integer]  # (N,)
Neighbors = tuple[npt.NDArray[np.int64], Points]  # rows and distances, (N, k) each
SquareRoot = Callable[[Points], Points]

DEFAULT_BUDGET_BYTES = 256 * MIB
# bytes of a pair in both directions, its distances and its order when sorted
_BYTES_PER_EDGE = 64
# bytes of a row that is listed twice and sorted, its coordinates, distances and order
_BYTES_PER_CANDIDATE = 80
# candidates beyond k in the first round: the tile itself, and ties on a grid
_SPARE = 8
_GROWTH = 4  # factor of each further round
# relative tolerance; distances of the tree and our distances differ by a few parts in 1e16
_ROUNDING = 1e-12


class TileGraph(NamedTuple):
    """Edges ordered by target, then by distance, then by source."""

    # (2, E): row 0 has the neighbours (sources), row 1 the tiles whose neighbours they are
    # (targets), as messages flow in PyTorch Geometric
    edge_index: npt.NDArray[np.int64]
    # (E,), lengths in µm if the mpp was given, else in level-0 px
    distances: npt.NDArray[np.float64]


def tile_graph(
    coords_l0: npt.NDArray[np.integer] | npt.NDArray[np.floating],
    *,
    k: int | None = None,
    radius_um: float | None = None,
    slide_mpp: Mpp | float | None = None,
    group: GroupIds | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> TileGraph:
    """Edges to the k nearest tiles of each tile, or to all within a radius, and their lengths.

    A radius graph is symmetric; a graph of k neighbours need not be. No tile is its own neighbour.
    A tile with fewer than k other tiles in its group gets fewer edges. If several tiles have the
    same distance, those in lower rows are taken.

    Args:
        coords_l0: (N, 2), x and y in level-0 px: int64 of tiles of one size, or floats of cells.
        k: neighbours of each tile; exactly one of k and radius_um is given.
        radius_um: the largest distance of an edge, in µm, inclusive.
        slide_mpp: µm per level-0 px, one number or (x, y); needed with radius_um.
        group: (N,) ids (tissue fragments, slides); edges stay within a group.
        budget_bytes: limit for the memory in addition to the result and a tree of 56 bytes a tile.

    Memory: N * k * 40 bytes, or E * 64 for a radius, checked before the pairs are made.
    Raises InvalidInputError: shapes, dtypes, both or none of k and radius_um, no mpp for a radius;
    BudgetError: the edges within the radius do not fit into the budget.
    """
    points = _scaled_points(coords_l0, slide_mpp)
    if (k is None) == (radius_um is None):
        raise InvalidInputError(
            f"tile_graph must get exactly one of k and radius_um, got {k=}, {radius_um=}"
        )
    if group is not None and np.shape(group) != (len(points),):
        raise InvalidInputError(
            f"group must be of shape ({len(points)},), got {np.shape(group)}"
        )
    if radius_um is None:
        return _graph_by_count(points, k, group, budget_bytes)
    if slide_mpp is None:
        raise InvalidInputError(
            "slide_mpp must be set with radius_um, got None; pass slide_mpp=... or use k"
        )
    if not (np.isfinite(radius_um) and radius_um > 0):
        raise InvalidInputError(f"radius_um must be > 0, got {radius_um}")
    return _graph_by_radius(points, float(radius_um), group, budget_bytes)


def _scaled_points(
    coords_l0: npt.NDArray[np.integer] | npt.NDArray[np.floating],
    slide_mpp: Mpp | float | None,
) -> Points:
    """Corners in µm, or in level-0 px without an mpp."""
    coords = np.asarray(coords_l0)
    if coords.ndim != 2 or coords.shape[1] != 2 or coords.dtype.kind not in "iuf":
        raise InvalidInputError(
            f"coords_l0 must be int64 of shape (N, 2), got {coords.dtype} {coords.shape}"
        )
    if coords.dtype.kind == "f" and not np.isfinite(coords).all():
        raise InvalidInputError("coords_l0 must be finite, got NaN or infinity")
    mpp = np.asarray(1.0 if slide_mpp is None else slide_mpp, np.float64)
    mpp_xy = np.broadcast_to(mpp, (2,))
    if not (np.isfinite(mpp_xy).all() and (mpp_xy > 0).all()):
        raise InvalidInputError(f"slide_mpp must be > 0, got {slide_mpp}")
    return np.asarray(coords * mpp_xy)


def _checked_count(k: object) -> int:
    """The number of neighbours. Raises InvalidInputError: it is no int of at least 1."""
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 1:
        raise InvalidInputError(f"k must be an int >= 1, got {k!r}")
    return int(k)


def _graph_by_count(
    points: Points, k: object, group: GroupIds | None, budget_bytes: int
) -> TileGraph:
    most_neighbors = _checked_count(k)
    if len(points) < 2:
        return TileGraph(np.empty((2, 0), np.int64), np.empty(0, np.float64))
    shape = (len(points), min(most_neighbors, len(points) - 1))
    rows = np.full(shape, -1, np.int64)
    distances = np.full(shape, np.inf)
    groups = np.zeros(len(points), np.int64) if group is None else np.asarray(group)
    if groups.dtype.kind not in "iu":
        raise InvalidInputError(f"group must be of integer ids, got {groups.dtype}")
    for group_id in np.unique(groups):
        members = np.flatnonzero(groups == group_id)
        nearest, lengths = _nearest(points[members], shape[1], budget_bytes)
        rows[members, : nearest.shape[1]] = members[nearest]
        distances[members, : nearest.shape[1]] = lengths
    exists = rows >= 0
    targets = np.broadcast_to(np.arange(len(points))[:, None], shape)
    edges = np.stack((rows[exists], targets[exists]))
    return TileGraph(edges, distances[exists])


def _nearest(points: Points, k: int, budget_bytes: int) -> Neighbors:
    """The k nearest other points of each point, or all of fewer; ties go to the lower row."""
    k = min(k, len(points) - 1)
    rows = np.empty((len(points), k), np.int64)
    distances = np.empty((len(points), k))
    for block in _nearest_blocks(points, k, budget_bytes, _square_root_of_torch):
        rows[block.targets] = block.rows
        distances[block.targets] = block.distances
    return rows, distances


def _square_root_of_torch(squares: Points) -> Points:
    """Square roots, whose last bit may differ from NumPy's.

    Earlier graphs of tiles were computed by it, and stay the same.
    """
    import torch

    roots: Points = torch.from_numpy(squares).sqrt_().numpy()
    return roots


class NearestBlock(NamedTuple):
    """The nearest other points of some points, in the order of their distance."""

    targets: slice  # rows of these n points
    rows: npt.NDArray[np.int64]  # (n, k), rows of their neighbours
    distances: Points  # (n, k)


def nearest_blocks(
    coords_l0: npt.NDArray[np.floating],
    *,
    k: int,
    slide_mpp: Mpp | float | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> Iterator[NearestBlock]:
    """Yields the k nearest other points of each point, as `tile_graph`, block by block.

    Args:
        coords_l0: (N, 2), x and y in level-0 px.
        k: neighbours of each point; fewer if there are no more points.
        slide_mpp: µm per level-0 px; None for distances in px.
        budget_bytes: limit for the memory of a block.

    Memory: the budget, the coordinates in µm, and a tree of 56 bytes per point.
    Raises InvalidInputError: shapes, dtypes, or a k below 1.
    """
    points = _scaled_points(coords_l0, slide_mpp)
    num_neighbors = min(_checked_count(k), len(points) - 1)
    yield from _nearest_blocks(points, num_neighbors, budget_bytes, np.sqrt)


def _nearest_blocks(
    points: Points, k: int, budget_bytes: int, square_root: SquareRoot
) -> Iterator[NearestBlock]:
    """Yields the k nearest other points of each point; there are more than k points."""
    if k < 1:
        return
    tree = cKDTree(points)
    size = max(1, budget_bytes // ((k + _SPARE) * _BYTES_PER_CANDIDATE))
    for start in range(0, len(points), size):
        targets = slice(start, min(start + size, len(points)))
        rows, distances = _nearest_of(tree, targets, k, budget_bytes, square_root)
        yield NearestBlock(targets, rows, distances)


def _nearest_of(
    tree: cKDTree,
    targets: slice,
    k: int,
    budget_bytes: int,
    square_root: SquareRoot,
) -> Neighbors:
    """The k nearest other points of some points of a tree; ties go to the lower row.

    The tree lists points at equal distances in any order. So a point is finished when no unlisted
    point can be as near as its k-th neighbour. Otherwise the tree is asked for more candidates.
    """
    points: Points = tree.data
    num_points = len(points)
    shape = (targets.stop - targets.start, k)
    rows = np.empty(shape, np.int64)
    distances = np.empty(shape)
    pending = np.arange(shape[0])
    num_candidates = min(k + _SPARE, num_points)
    while len(pending):
        rows_at_once = max(1, budget_bytes // (num_candidates * _BYTES_PER_CANDIDATE))
        unproven = []
        for start in range(0, len(pending), rows_at_once):
            places = pending[start : start + rows_at_once]
            block = targets.start + places
            tree_distances, candidates = tree.query(points[block], k=num_candidates)
            candidates.sort(
                axis=1
            )  # so that a stable order gives ties to the lower row
            differences = points[candidates] - points[block, None]
            lengths = square_root(np.square(differences).sum(axis=2))
            lengths[candidates == block[:, None]] = np.inf
            order = np.argsort(lengths, axis=1, kind="stable")[:, :k]
            rows[places] = np.take_along_axis(candidates, order, axis=1)
            distances[places] = np.take_along_axis(lengths, order, axis=1)
            nearest_unlisted = tree_distances[:, -1] * (1 - _ROUNDING)
            unproven.append(places[distances[places, -1] >= nearest_unlisted])
        if num_candidates == num_points:
            break
        pending = np.concatenate(unproven)
        num_candidates = min(num_candidates * _GROWTH, num_points)
    return rows, distances


def _graph_by_radius(
    points: Points, radius_um: float, group: GroupIds | None, budget_bytes: int
) -> TileGraph:
    tree = cKDTree(points)
    # the tree only proposes pairs; the distance that is computed from differences decides
    reach = radius_um * (1 + 1e-9)
    num_edges = int(tree.count_neighbors(tree, reach)) - len(points)
    most_edges = budget_bytes // _BYTES_PER_EDGE
    if num_edges > most_edges:
        raise BudgetError(
            f"radius_um must give at most {most_edges} edges in a budget of "
            f"{format_bytes(budget_bytes)}, got {num_edges} edges at {radius_um:g} µm; use a "
            "smaller radius or a larger budget"
        )
    pairs = tree.query_pairs(reach, output_type="ndarray").astype(np.int64, copy=False)
    difference = points[pairs[:, 0]] - points[pairs[:, 1]]
    distances = np.sqrt(np.square(difference).sum(axis=1))
    is_edge = distances <= radius_um
    if group is not None:
        is_edge &= group[pairs[:, 0]] == group[pairs[:, 1]]
    pairs = pairs[is_edge]
    both_ways = np.tile(distances[is_edge], 2)
    source, target = np.concatenate((pairs, pairs[:, ::-1])).T
    order = np.lexsort((source, both_ways, target))
    return TileGraph(np.stack((source[order], target[order])), both_ways[order])
