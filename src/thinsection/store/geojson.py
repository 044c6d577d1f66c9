"""Masks as GeoJSON that QuPath opens as annotations: outlines in level-0 px, exact along px edges.

A piece is a 4-connected region; its holes are 8-connected. An island inside a hole is a piece of
its own. Where a piece or a hole touches itself at a px corner its ring is split there, so that
every ring is simple, as the OGC's rules (and JTS, which QuPath uses) ask.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from thinsection.errors import InvalidInputError
from thinsection.files.atomic import write_text
from thinsection.qc.pictures import TISSUE_COLOR, Color
from thinsection.types import MaskArray, MaskFrame

Ring = npt.NDArray[np.float64]  # (K, 2): x, y of the corners, not closed
_IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPolygon:
    """One 4-connected piece of a mask.

    Attributes:
        exterior_l0: (K, 2) x, y of its corners in level-0 px, counter-clockwise in the (x, y)
            plane, first corner not repeated.
        holes_l0: the same for each hole, clockwise.
        area_px: px of the mask inside it.
    """

    exterior_l0: Ring
    holes_l0: tuple[Ring, ...]
    area_px: int


def mask_feature(
    mask: MaskArray, frame: MaskFrame, *, name: str, color: Color = TISSUE_COLOR
) -> dict[str, Any] | None:
    """The mask as one GeoJSON annotation, or None if it is empty.

    Coordinates are level-0 px, x to the right and y down, as QuPath reads them. Pieces are
    polygons of one MultiPolygon (a Polygon if there is one piece), each with its holes.

    Args:
        mask: bool (H, W).
        frame: where the mask lies on its slide.
        name: name of the annotation and of its class.
        color: of the class.
    """
    polygons = [_coordinates(polygon) for polygon in mask_polygons(mask, frame)]
    if not polygons:
        return None
    geometry = (
        {"type": "Polygon", "coordinates": polygons[0]}
        if len(polygons) == 1
        else {"type": "MultiPolygon", "coordinates": polygons}
    )
    properties = {
        "objectType": "annotation",
        "name": name,
        "classification": {"name": name, "color": list(color)},
    }
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def write_masks_geojson(
    path: Path, masks: Iterable[tuple[str, MaskArray, Color]], frame: MaskFrame
) -> None:
    """Writes masks as one FeatureCollection, atomically; empty masks are left out.

    Args:
        path: of the file.
        masks: name, mask and color of each.
        frame: of all of them.

    Memory: O(H * W + corners of all masks), the text included.
    """
    features = [mask_feature(mask, frame, name=name, color=color) for name, mask, color in masks]
    collection = {"type": "FeatureCollection", "features": [f for f in features if f is not None]}
    write_text(path, json.dumps(collection, allow_nan=False) + "\n")


def write_mask_geojson(
    path: Path, mask: MaskArray, frame: MaskFrame, *, name: str, color: Color = TISSUE_COLOR
) -> None:
    """Writes one mask as a FeatureCollection of one annotation, or of none if it is empty.

    Memory: O(H * W + corners of the mask), the text included.
    """
    write_masks_geojson(path, [(name, mask, color)], frame)


def _coordinates(polygon: MaskPolygon) -> list[list[list[float]]]:
    return [_closed(polygon.exterior_l0), *(_closed(hole) for hole in polygon.holes_l0)]


def _closed(ring: Ring) -> list[list[float]]:
    """Corners with the first repeated, to 1/1000 px."""
    points: list[list[float]] = ring.round(3).tolist()
    return [*points, points[0]]


def mask_polygons(mask: MaskArray, frame: MaskFrame) -> list[MaskPolygon]:
    """Every piece of the mask, in the order of its first px, row by row.

    Rasterising the polygons at px centres gives the mask back; nothing is simplified but corners
    on a straight edge.

    Args:
        mask: bool (H, W).
        frame: where the mask lies; `frame.size_th` must be (W, H).

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
    holes: dict[int, list[Ring]] = {}
    scale = np.array(frame.downsample_xy)
    for corners, piece in _rings(mask, labels):
        ring = corners * scale
        if _signed_area(corners) > 0:
            exteriors[piece] = ring
        else:
            holes.setdefault(piece, []).append(ring)
    return [
        MaskPolygon(
            exterior_l0=exteriors[piece],
            holes_l0=tuple(holes.get(piece, ())),
            area_px=int(areas[piece]),
        )
        for piece in range(1, num_pieces + 1)
    ]


def _rings(mask: MaskArray, labels: npt.NDArray[np.int32]) -> list[tuple[_IntArray, int]]:
    """Simple rings of (x, y) corners in mask px, each with the label of the piece it bounds."""
    tails, heads, pieces = _boundary_edges(mask, labels)
    follow = _next_edge(mask, tails, heads)
    width = mask.shape[1] + 1
    turns = _is_turn(tails, heads, follow)
    rings: list[tuple[_IntArray, int]] = []
    seen = np.zeros(len(tails), dtype=bool)
    tail_list, next_list, turn_list = tails.tolist(), follow.tolist(), turns.tolist()
    for start in range(len(tail_list)):
        if seen[start]:
            continue
        path: list[int] = []
        place: dict[int, int] = {}  # vertex -> where it stands in the path
        edge = start
        while not seen[edge]:
            seen[edge] = True
            if turn_list[edge]:
                vertex = tail_list[edge]
                if vertex in place:  # the ring touches itself here: the loop is a ring of its own
                    at = place[vertex]
                    rings.append((_points(path[at:], width), int(pieces[start])))
                    for gone in path[at:]:
                        del place[gone]
                    del path[at:]
                place[vertex] = len(path)
                path.append(vertex)
            edge = next_list[edge]
        rings.append((_points(path, width), int(pieces[start])))
    return rings


def _boundary_edges(
    mask: MaskArray, labels: npt.NDArray[np.int32]
) -> tuple[_IntArray, _IntArray, npt.NDArray[np.int32]]:
    """Unit edges between inside and outside: tail and head vertex ids, and the piece's label.

    Directed so that positive area (x right, y down, shoelace of the plain numbers) is an exterior:
    the top side of a px runs to the right. A vertex (x, y) has the id y * (W + 1) + x.
    """
    padded = np.pad(mask, 1)
    inside = padded[1:-1, 1:-1]
    width = mask.shape[1] + 1
    tails, heads, pieces = [], [], []
    sides = (
        (padded[:-2, 1:-1], (0, 0), (1, 0)),  # top: (x, y) -> (x + 1, y)
        (padded[1:-1, 2:], (1, 0), (1, 1)),  # right
        (padded[2:, 1:-1], (1, 1), (0, 1)),  # bottom
        (padded[1:-1, :-2], (0, 1), (0, 0)),  # left
    )
    for neighbour, (tail_x, tail_y), (head_x, head_y) in sides:
        rows, columns = np.nonzero(inside & ~neighbour)
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
    if is_saddle.any():
        width = mask.shape[1] + 1
        step = (heads - tails)[is_saddle]
        dx = np.where(np.abs(step) == 1, step, 0)
        dy = np.where(np.abs(step) == 1, 0, step // width)
        wanted = -dy + dx * width  # (dx, dy) turned right with y down is (-dy, dx)
        one, two = order[first[is_saddle]], order[first[is_saddle] + 1]
        follow[is_saddle] = np.where((heads - tails)[one] == wanted, one, two)
    return follow


def _is_turn(tails: _IntArray, heads: _IntArray, follow: _IntArray) -> npt.NDArray[np.bool_]:
    """True for an edge whose tail is a corner of its ring."""
    step = heads - tails
    turns = np.zeros(len(tails), dtype=bool)
    turns[follow] = step != step[follow]
    return turns


def _points(vertices: list[int], width: int) -> _IntArray:
    ids = np.array(vertices, dtype=np.int64)
    return np.stack([ids % width, ids // width], axis=1)


def _signed_area(points: _IntArray) -> float:
    x, y = points[:, 0], points[:, 1]
    return float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
