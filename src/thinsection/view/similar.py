"""Tiles with embeddings most similar to that of one tile, in a slide and its cohort."""

from collections.abc import Iterator
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, slide_boundary
from thinsection.results.folder import Results
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.types import PointL0

# factor on the requested tiles: candidates in float32, which are then sorted in float64
_CANDIDATES = 4


class FoundTile(TypedDict):
    """Tile of a search, as JSON holds it; its corner and size are in level-0 pixels."""

    slide: str
    row: int
    x: int
    y: int
    width: float
    height: float
    similarity: float


class SearchState(TypedDict):
    """Best tiles after a number of slides, as JSON holds them."""

    tile: FoundTile  # the tile at the point
    of: int  # number of slides that are searched
    # most similar tiles of the same slide (without the tile itself), and of the others so far
    slide: list[FoundTile]
    cohort: list[FoundTile]
    done: int  # number of slides that were searched
    left_out: dict[str, str]  # why a slide could not be searched


def similar_tiles(
    results: Results,
    slide_id: str,
    features: str,
    point_l0: PointL0,
    *,
    count: int,
    budget: int,
) -> Iterator[SearchState]:
    """Tiles whose embeddings have the largest cosine to that of one tile: exact, slide by slide.

    Args:
        results: results folder.
        slide_id: slide of the tile.
        features: address of the embeddings.
        point_l0: point in the tile.
        count: number of tiles from this slide, and from all other slides.
        budget: memory in bytes.

    Yields:
        The best tiles so far, after each slide. A slide with damaged embeddings is left out.

    Memory:
        The budget, for any number of tiles, since embeddings are read in blocks.

    Raises:
        InvalidInputError: there is no tile at the point.
        StoreError: the embeddings of the tile's own slide are damaged.
    """
    # imports PyTorch, so it is imported at the first search
    from thinsection.probe.compute import nearest_rows

    rows = results.embedding_rows(slide_id, features)
    row = _row_at(rows, point_l0)
    query = rows[[row]].astype(np.float32)
    (tile,) = _describe(slide_id, rows, query, [row])
    names = [
        name for name, ledger in results.ledgers.items() if features in ledger.stages
    ]
    names.sort(key=lambda name: name != slide_id)  # the tile's own slide comes first
    own_tiles: list[FoundTile] = []
    other_tiles: list[FoundTile] = []
    left_out: dict[str, str] = {}
    for num_done, name in enumerate(names, start=1):
        is_own = name == slide_id
        with slide_boundary(name, left_out.__setitem__):
            rows = results.embedding_rows(name, features)
            num_candidates = min(_CANDIDATES * count + is_own, len(rows))
            near = np.empty(0, np.int64)
            if num_candidates:
                (near,) = nearest_rows(query, rows, num_candidates, budget_bytes=budget)
            if is_own:
                near = near[near != row]
            tiles = own_tiles if is_own else other_tiles
            if len(near):
                tiles += _describe(name, rows, query, np.sort(near).tolist())
            tiles.sort(key=lambda tile: -tile["similarity"])
            del tiles[count:]
        yield {
            "tile": tile,
            "of": len(names),
            "slide": [*own_tiles],
            "cohort": [*other_tiles],
            "done": num_done,
            "left_out": {**left_out},
        }


def _row_at(rows: EmbeddingRows, point_l0: PointL0) -> int:
    """Row of the tile at a point; if tiles overlap, the one with the nearest centre."""
    tile_size_l0 = np.array(rows.tiles.size_l0)
    offset = np.array(point_l0) - rows.tiles.coords_l0
    is_inside = ((offset >= 0) & (offset < tile_size_l0)).all(axis=1)
    if not is_inside.any():
        raise InvalidInputError(f"point must be in a tile, got {point_l0}")
    distance = np.abs(offset - tile_size_l0 / 2).max(axis=1)
    return int(np.where(is_inside, distance, np.inf).argmin())


def _describe(
    slide_id: str,
    rows: EmbeddingRows,
    query: npt.NDArray[np.float32],
    indices: list[int],
) -> list[FoundTile]:
    """Tiles with their position and their cosine to the query, in float64."""
    embeddings = rows[indices].astype(np.float64)
    wanted = query[0].astype(np.float64)
    lengths = np.linalg.norm(embeddings, axis=1) * np.linalg.norm(wanted)
    cosines = embeddings @ wanted / np.where(lengths > 0, lengths, 1.0)
    width, height = rows.tiles.size_l0
    corners = rows.tiles.coords_l0[indices].tolist()
    return [
        {
            "slide": slide_id,
            "row": index,
            "x": x,
            "y": y,
            "width": width,
            "height": height,
            "similarity": cosine,
        }
        for index, (x, y), cosine in zip(indices, corners, cosines.tolist())
    ]
