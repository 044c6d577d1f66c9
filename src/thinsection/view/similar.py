"""The tiles whose embeddings are most similar to one tile's, in a slide and its cohort."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.pipeline.folder import Results
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.types import PointL0

# times as many tiles as wanted are found in float32, and ordered in float64
_CANDIDATES = 4

# JSON values of a tile: slide, row, x, y, width, height, similarity
FoundTile = dict[str, Any]


def similar_tiles(
    results: Results,
    slide_id: str,
    features: str,
    point_l0: PointL0,
    *,
    count: int,
    budget: int,
) -> Iterator[dict[str, Any]]:
    """The tiles whose embeddings have the largest cosine to one tile's: exact, slide by slide.

    Args:
        results: the results folder.
        slide_id: slide of the tile.
        features: address of the embeddings.
        point_l0: a point in the tile.
        count: tiles that are wanted of this slide, and of the others.
        budget: bytes.

    Yields:
        `tile` in which the point lies; `slide` and `cohort`, the `count` most similar tiles of this
        slide (the tile left out) and of the others so far; `done` slides `of` all. A tile has
        slide, row, x, y, width, height, similarity.

    Memory:
        The budget, whatever the number of tiles: embeddings are read in blocks.

    Raises:
        InvalidInputError: no tile is there.
    """
    # with PyTorch, so imported when it is first asked for
    from thinsection.probe.compute import nearest_rows

    rows = results.embedding_rows(slide_id, features)
    row = _row_at(rows, point_l0)
    query = rows[[row]].astype(np.float32)
    (tile,) = _describe(slide_id, rows, query, [row])
    names = [
        name for name, ledger in results.ledgers.items() if features in ledger.stages
    ]
    names.sort(key=lambda name: name != slide_id)  # its own slide comes first
    best: dict[str, list[FoundTile]] = {"slide": [], "cohort": []}
    for num_done, name in enumerate(names, start=1):
        is_own = name == slide_id
        rows = results.embedding_rows(name, features)
        num_candidates = min(_CANDIDATES * count + is_own, len(rows))
        if num_candidates:
            (near,) = nearest_rows(query, rows, num_candidates, budget_bytes=budget)
            if is_own:
                near = near[near != row]
            near = np.sort(near)
            kind = "slide" if is_own else "cohort"
            tiles = best[kind] + _describe(name, rows, query, near.tolist())
            tiles.sort(key=lambda tile: -tile["similarity"])
            best[kind] = tiles[:count]
        yield {"tile": tile, "of": len(names), **best, "done": num_done}


def _row_at(rows: EmbeddingRows, point_l0: PointL0) -> int:
    """The row of the tile in which a point lies; where tiles overlap, of the nearest centre."""
    tile_size_l0 = np.array(rows.tiles.size_l0)
    offset = np.array(point_l0) - rows.tiles.coords_l0
    is_inside = ((offset >= 0) & (offset < tile_size_l0)).all(axis=1)
    if not is_inside.any():
        raise InvalidInputError(f"point must lie in a tile, got {point_l0}")
    distance = np.abs(offset - tile_size_l0 / 2).max(axis=1)
    return int(np.where(is_inside, distance, np.inf).argmin())


def _describe(
    slide_id: str,
    rows: EmbeddingRows,
    query: npt.NDArray[np.float32],
    indices: list[int],
) -> list[FoundTile]:
    """Tiles with their place and their cosine to the query, in float64."""
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
