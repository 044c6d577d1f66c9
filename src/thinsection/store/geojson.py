"""Masks as GeoJSON that QuPath opens as annotations: outlines in level-0 px, exact along px edges.

A piece is a 4-connected region; its holes are 8-connected. An island inside a hole is a piece of
its own. Where a piece or a hole touches itself at a px corner its ring is split there, so that
every ring is simple, as the OGC's rules (and JTS, which QuPath uses) ask.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import require
from thinsection.files.atomic import write_text
from thinsection.qc.tissue import Color
from thinsection.types import MaskArray, MaskFrame

Ring = npt.NDArray[np.float64]  # (K, 2): x, y of the corners, not closed
Polygon = list[Ring]  # the exterior, counter-clockwise in the (x, y) plane, then clockwise holes
_IntArray = npt.NDArray[np.int64]


def write_masks_geojson(
    path: Path, masks: Iterable[tuple[str, MaskArray, Color]], frame: MaskFrame
) -> None:
    """Writes masks as one FeatureCollection of annotations, atomically; empty ones are left out.

    Coordinates are level-0 px, x to the right and y down, as QuPath reads them. A mask is its name
    (of annotation and class), bool (H, W), and color; its pieces are polygons of one MultiPolygon.

    Memory: O(H * W + corners of all masks), the text included.
    """
    outlined = ((name, mask_polygons(mask, frame), color) for name, mask, color in masks)
    features = [_feature(polygons, name, color) for name, polygons, color in outlined if polygons]
    collection = {"type": "FeatureCollection", "features": features}
    write_text(path, json.dumps(collection, allow_nan=False) + "\n")


def _feature(polygons: list[Polygon], name: str, color: Color) -> dict[str, Any]:
    parts = [list(map(_closed, rings)) for rings in polygons]
    kind, coordinates = ("MultiPolygon", parts) if len(parts) > 1 else ("Polygon", parts[0])
    classification = {"name": name, "color": list(color)}
    return {
        "type": "Feature",
        "geometry": {"type": kind, "coordinates": coordinates},
        "properties": {"objectType": "annotation", "name": name, "classification": classification},
    }


def _closed(ring: Ring) -> list[list[float]]:
    """Corners with the first repeated, to 1/1000 px."""
    points: list[list[float]] = ring.round(3).tolist()
    return [*points, points[0]]


def mask_polygons(mask: MaskArray, frame: MaskFrame) -> list[Polygon]:
    """Every piece of the mask in level-0 px, in the order of its first px, row by row.

    Rasterising the polygons at px centres gives the mask back; nothing is simplified but corners
    on a straight edge. Memory: O(H * W + corners).

    Raises InvalidInputError: the mask is not bool (H, W) of the frame's size.
    """
    from scipy import ndimage

    shape = tuple(frame.size_th)[::-1]
    fits = mask.dtype == np.bool_ and mask.shape == shape
    got = f"{mask.dtype} {mask.shape}; pass the frame that the mask was computed in"
    require(fits, f"mask must be bool of shape {shape}", got)
    labels, num_pieces = ndimage.label(mask)
    polygons: list[Polygon] = [[] for _ in range(num_pieces)]
    downsample_xy = np.array(frame.downsample_xy)
    for corners, piece in _rings(mask, labels):
        (x, y), rings = corners.T, polygons[piece - 1]
        exterior = np.dot(x, np.roll(y, -1)) > np.dot(y, np.roll(x, -1))  # its area is positive
        rings.insert(0 if exterior else len(rings), corners * downsample_xy)
    return polygons


def _rings(mask: MaskArray, labels: npt.NDArray[np.int32]) -> Iterator[tuple[_IntArray, int]]:
    """Simple rings of (x, y) corners in mask px, each with the label of the piece it bounds."""
    tails, heads, pieces = _boundary_edges(mask, labels)
    follow = _next_edge(mask, tails, heads)
    step = heads - tails
    turns = np.zeros(len(tails), dtype=bool)  # True for an edge whose tail is a corner of its ring
    turns[follow] = step != step[follow]
    unseen = np.ones(len(tails), dtype=bool)
    tail_list, next_list, turn_list = tails.tolist(), follow.tolist(), turns.tolist()

    def ring(vertices: list[int]) -> tuple[_IntArray, int]:
        y, x = np.divmod(np.array(vertices, dtype=np.int64), mask.shape[1] + 1)
        return np.stack([x, y], axis=1), int(pieces[start])

    for start in range(len(tail_list)):
        path: list[int] = []
        place: dict[int, int] = {}  # vertex -> where it stands in the path
        edge = start
        while unseen[edge]:
            unseen[edge] = False
            if turn_list[edge]:
                vertex = tail_list[edge]
                if vertex in place:  # the ring touches itself here: the loop is a ring of its own
                    loop = path[(at := place[vertex]) :]
                    yield ring(loop)
                    for gone in loop:
                        del place[gone]
                    del path[at:]
                place[vertex] = len(path)
                path.append(vertex)
            edge = next_list[edge]
        if path:
            yield ring(path)


def _boundary_edges(
    mask: MaskArray, labels: npt.NDArray[np.int32]
) -> tuple[_IntArray, _IntArray, npt.NDArray[np.int32]]:
    """Unit edges between inside and outside: tail and head vertex ids, and the piece's label.

    Directed so that positive area (x right, y down, shoelace of the plain numbers) is an exterior:
    the top side of a px runs to the right. A vertex (x, y) has the id y * (W + 1) + x.
    """
    padded, width = np.pad(mask, 1), mask.shape[1] + 1
    edges = []
    sides = (
        (padded[:-2, 1:-1], (0, 0), (1, 0)),  # top: (x, y) -> (x + 1, y)
        (padded[1:-1, 2:], (1, 0), (1, 1)),  # right
        (padded[2:, 1:-1], (1, 1), (0, 1)),  # bottom
        (padded[1:-1, :-2], (0, 1), (0, 0)),  # left
    )
    for neighbour, (tail_x, tail_y), (head_x, head_y) in sides:
        rows, columns = np.nonzero(mask & ~neighbour)
        tail = (rows + tail_y) * width + columns + tail_x
        head = (rows + head_y) * width + columns + head_x
        edges.append((tail, head, labels[rows, columns]))
    tails, heads, pieces = map(np.concatenate, zip(*edges, strict=True))
    return tails, heads, pieces


def _next_edge(mask: MaskArray, tails: _IntArray, heads: _IntArray) -> _IntArray:
    """Index of the edge that follows each edge along its ring.

    Where two px meet only at a corner (two edges leave the vertex) the ring stays with its px: the
    edge that turns to the right in these axes (x right, y down).
    """
    order, width, steps = np.argsort(tails, kind="stable"), mask.shape[1] + 1, heads - tails
    first = np.searchsorted(tails, heads, side="left", sorter=order)
    last = np.searchsorted(tails, heads, side="right", sorter=order) - 1
    one, two, along_x = order[first], order[last], np.abs(steps) == 1
    # (dx, dy) turned right with y down is (-dy, dx)
    wanted = np.where(along_x, steps * width, -(steps // width))
    return np.where((one == two) | (steps[one] == wanted), one, two)
