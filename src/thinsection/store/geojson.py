"""Masks as GeoJSON that QuPath opens as annotations: outlines in level-0 px, exact along px edges.

A piece is a 4-connected region; its holes are 8-connected. An island inside a hole is a piece of
its own. Where a piece or a hole touches itself at a px corner its ring is split there, so that
every ring is simple, as the OGC's rules (and JTS, which QuPath uses) ask.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from thinsection.errors import InvalidInputError
from thinsection.files.atomic import write_text
from thinsection.qc.tissue import Color
from thinsection.types import MaskArray, MaskFrame

Ring = npt.NDArray[np.float64]  # (K, 2): x, y of the corners, not closed
_IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPolygon:
    """One 4-connected piece of a mask: corners (K, 2) in level-0 px, and its px of the mask.

    The exterior is counter-clockwise in the (x, y) plane, holes are clockwise.
    """

    exterior_l0: Ring
    holes_l0: tuple[Ring, ...]
    area_px: int


def write_masks_geojson(
    path: Path, masks: Iterable[tuple[str, MaskArray, Color]], frame: MaskFrame
) -> None:
    """Writes masks as one FeatureCollection of annotations, atomically; empty ones are left out.

    Coordinates are level-0 px, x to the right and y down, as QuPath reads them. Pieces are
    polygons of one MultiPolygon (a Polygon if there is one piece), each with its holes.

    `masks` are name (of the annotation and of its class), bool (H, W), color of the class.

    Memory: O(H * W + corners of all masks), the text included.
    """
    features = [
        _feature(polygons, name, color)
        for name, mask, color in masks
        if (polygons := mask_polygons(mask, frame))
    ]
    collection = {"type": "FeatureCollection", "features": features}
    write_text(path, json.dumps(collection, allow_nan=False) + "\n")


def _feature(polygons: list[MaskPolygon], name: str, color: Color) -> dict[str, Any]:
    parts = [[_closed(ring) for ring in (p.exterior_l0, *p.holes_l0)] for p in polygons]
    one = len(parts) == 1
    geometry = {
        "type": "Polygon" if one else "MultiPolygon",
        "coordinates": parts[0] if one else parts,
    }
    properties = {
        "objectType": "annotation",
        "name": name,
        "classification": {"name": name, "color": list(color)},
    }
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def _closed(ring: Ring) -> list[list[float]]:
    """Corners with the first repeated, to 1/1000 px."""
    points: list[list[float]] = ring.round(3).tolist()
    return [*points, points[0]]


def mask_polygons(mask: MaskArray, frame: MaskFrame) -> list[MaskPolygon]:
    """Every piece of the mask, in the order of its first px, row by row.

    Rasterising the polygons at px centres gives the mask back; nothing is simplified but corners
    on a straight edge.

    Memory: O(H * W + corners).

    Raises:
        InvalidInputError: the mask is not bool (H, W) of the frame's size.
    """
    if mask.dtype != np.bool_ or mask.ndim != 2 or mask.shape[::-1] != tuple(frame.size_th):
        raise InvalidInputError(
            f"mask must be bool of shape {tuple(frame.size_th)[::-1]}, "
            f"got {mask.dtype} {mask.shape}; pass the frame that the mask was computed in"
        )
    labels, num_pieces = ndimage.label(mask)
    areas = np.bincount(labels.ravel(), minlength=num_pieces + 1)
    exteriors: dict[int, Ring] = {}
    holes: dict[int, list[Ring]] = defaultdict(list)
    for corners, piece in _rings(mask, labels):
        ring = corners * np.array(frame.downsample_xy)
        if _is_exterior(corners):
            exteriors[piece] = ring
        else:
            holes[piece].append(ring)
    return [
        MaskPolygon(exterior_l0=exteriors[i], holes_l0=tuple(holes[i]), area_px=int(areas[i]))
        for i in range(1, num_pieces + 1)
    ]


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
    padded = np.pad(mask, 1)
    width = mask.shape[1] + 1
    tails, heads, pieces = [], [], []
    sides = (
        (padded[:-2, 1:-1], (0, 0), (1, 0)),  # top: (x, y) -> (x + 1, y)
        (padded[1:-1, 2:], (1, 0), (1, 1)),  # right
        (padded[2:, 1:-1], (1, 1), (0, 1)),  # bottom
        (padded[1:-1, :-2], (0, 1), (0, 0)),  # left
    )
    for neighbour, (tail_x, tail_y), (head_x, head_y) in sides:
        rows, columns = np.nonzero(mask & ~neighbour)
        tails.append((rows + tail_y) * width + columns + tail_x)
        heads.append((rows + head_y) * width + columns + head_x)
        pieces.append(labels[rows, columns])
    return np.concatenate(tails), np.concatenate(heads), np.concatenate(pieces)


def _next_edge(mask: MaskArray, tails: _IntArray, heads: _IntArray) -> _IntArray:
    """Index of the edge that follows each edge along its ring.

    Where two px meet only at a corner (two edges leave the vertex) the ring stays with its px: the
    edge that turns to the right in these axes (x right, y down).
    """
    order = np.argsort(tails, kind="stable")
    sorted_tails = tails[order]
    first = np.searchsorted(sorted_tails, heads, side="left")
    is_saddle = np.searchsorted(sorted_tails, heads, side="right") - first == 2
    follow = order[first]
    width = mask.shape[1] + 1
    step = (heads - tails)[is_saddle]
    along_x = np.abs(step) == 1
    # (dx, dy) turned right with y down is (-dy, dx)
    wanted = np.where(along_x, step * width, -(step // width))
    one, two = order[first[is_saddle]], order[first[is_saddle] + 1]
    follow[is_saddle] = np.where((heads - tails)[one] == wanted, one, two)
    return follow


def _is_exterior(corners: _IntArray) -> bool:
    """Whether the shoelace's signed area is positive."""
    x, y = corners.T
    return bool(np.dot(x, np.roll(y, -1)) > np.dot(y, np.roll(x, -1)))
