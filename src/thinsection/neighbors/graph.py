"""The spatial graph of tiles (or cells) that graph models take, in PyTorch Geometric's layout."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

from thinsection.errors import BudgetError, require
from thinsection.neighbors.api import DEFAULT_BUDGET_BYTES, nearest_neighbors
from thinsection.types import Mpp, format_bytes

Points = npt.NDArray[np.float64]  # (N, 2)
_BYTES_PER_EDGE = 64  # pairs, both directions, their distances and the order of sorting


class TileGraph(NamedTuple):
    """Edges ordered by target, then by distance, then by source."""

    # (2, E): [0] the neighbour (source), [1] the tile it belongs to (target), as messages flow in
    # PyTorch Geometric
    edge_index: npt.NDArray[np.int64]
    distances: npt.NDArray[
        np.float64
    ]  # (E,), µm where the mpp was given, else level-0 px


def tile_graph(
    coords_l0: npt.NDArray[np.integer],
    *,
    k: int | None = None,
    radius_um: float | None = None,
    slide_mpp: Mpp | float | None = None,
    group: npt.NDArray[np.integer] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> TileGraph:
    """Edges to the k nearest tiles of each tile, or to all within a radius, and their lengths.

    A radius graph is symmetric; one of k neighbours need not be. No tile is its own neighbour; one
    with fewer than k others in its group gets fewer edges.

    Args:
        coords_l0: int64 (N, 2), x and y in level-0 px; of tiles of one size, or of cells.
        k: neighbours of each tile; exactly one of k and radius_um is given.
        radius_um: the largest distance of an edge, in µm, inclusive.
        slide_mpp: µm per level-0 px, one number or (x, y); needed with radius_um.
        group: (N,) ids (tissue fragments, slides); edges stay within one.
        budget_bytes: bound on the memory beyond the result.

    Memory: N * k * 40 bytes, or E * 64 for a radius, checked before the pairs are made.
    Raises InvalidInputError: shapes, dtypes, both or none of k and radius_um, no mpp for a radius;
    BudgetError: the edges within the radius do not fit into the budget.
    """
    coords = np.asarray(coords_l0)
    fits = coords.ndim == 2 and coords.shape[1] == 2 and coords.dtype.kind in "iu"
    require(
        fits,
        "coords_l0 must be int64 of shape (N, 2)",
        f"{coords.dtype} {coords.shape}",
    )
    mpp = np.broadcast_to(
        np.asarray(1.0 if slide_mpp is None else slide_mpp, np.float64), (2,)
    )
    require(
        np.isfinite(mpp).all() and (mpp > 0).all(), "slide_mpp must be > 0", slide_mpp
    )
    scaled = np.asarray(coords * mpp)
    rule, got = (
        "tile_graph must get exactly one of k and radius_um",
        f"{k=}, {radius_um=}",
    )
    require((k is None) != (radius_um is None), rule, got)
    shape = (len(scaled),) if group is None else np.shape(group)
    require(shape == (len(scaled),), f"group must be of shape ({len(scaled)},)", shape)
    if radius_um is None:
        return _by_count(scaled, k, group, budget_bytes)
    remedy = "None; pass --slide-mpp or use k"
    require(slide_mpp is not None, "slide_mpp must be given with radius_um", remedy)
    require(
        np.isfinite(radius_um) and radius_um > 0, "radius_um must be > 0", radius_um
    )
    return _by_radius(scaled, float(radius_um), group, budget_bytes)


def _by_count(
    points: Points, k: Any, group: npt.NDArray | None, budget_bytes: int
) -> TileGraph:
    counted = isinstance(k, int | np.integer) and not isinstance(k, bool) and k >= 1
    require(counted, "k must be an int >= 1", repr(k))
    if len(points) < 2:
        return TileGraph(np.empty((2, 0), np.int64), np.empty(0, np.float64))
    wanted = min(int(k), len(points) - 1)
    found = nearest_neighbors(points, k=wanted, group=group, budget_bytes=budget_bytes)
    real = found.indices >= 0
    targets = np.broadcast_to(np.arange(len(points))[:, None], real.shape)[real]
    return TileGraph(np.stack((found.indices[real], targets)), found.distances[real])


def _by_radius(
    points: Points, radius_um: float, group: npt.NDArray | None, budget_bytes: int
) -> TileGraph:
    tree = cKDTree(points)
    reach = radius_um * (
        1 + 1e-9
    )  # the tree proposes, the distance from differences decides
    num_edges = int(tree.count_neighbors(tree, reach)) - len(points)
    most = budget_bytes // _BYTES_PER_EDGE
    rule = f"radius_um must leave at most {most} edges in a budget of {format_bytes(budget_bytes)}"
    got = f"{num_edges} edges at {radius_um:g} µm; use a smaller radius or a larger budget"
    require(num_edges <= most, rule, got, error=BudgetError)
    pairs = tree.query_pairs(reach, output_type="ndarray").astype(np.int64, copy=False)
    difference = points[pairs[:, 0]] - points[pairs[:, 1]]
    distances = np.sqrt(np.square(difference).sum(axis=1))
    keep = distances <= radius_um
    if group is not None:
        keep &= group[pairs[:, 0]] == group[pairs[:, 1]]
    pairs, distances = pairs[keep], np.tile(distances[keep], 2)
    source, target = np.concatenate((pairs, pairs[:, ::-1])).T
    order = np.lexsort((source, distances, target))
    return TileGraph(np.stack((source[order], target[order])), distances[order])
