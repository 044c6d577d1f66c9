"""The tiles whose embeddings are most like one tile's: exact, of the slide and of the cohort."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.pipeline.folder import Results, one_address
from thinsection.probe.compute import cosine_neighbours
from thinsection.store.tile_tables import EmbeddingRows

Found = list[dict[str, Any]]  # slide, row, x, y, width, height, similarity


def similar_tiles(
    results: Results,
    slide_id: str,
    features: str | None,
    point_l0: tuple[int, int],
    *,
    count: int,
    budget_bytes: int,
) -> Iterator[dict[str, Any]]:
    """Slide by slide what is found so far, this slide first; similarity is the cosine.

    Yields: `tile` that the point lies in, `slide` and `cohort`: the `count` most similar tiles of
    this slide and of the others, the tile itself left out; `done` slides `of` all.

    Memory: budget_bytes, whatever the number of tiles: embeddings are read in blocks.

    Raises InvalidInputError: no tile is there.
    """
    address = one_address(results.features, features, "features")
    own = results.embedding_rows(slide_id, address)
    row = _tile_at(own, point_l0)
    query = own[[row]].astype(np.float32)
    others = [n for n, lg in results.ledgers.items() if address in lg.stages and n != slide_id]
    told: dict[str, Any] = {"tile": _described(slide_id, own, [row], [1.0])[0], "of": 1 + len(others)}
    best: dict[str, Found] = {"slide": [], "cohort": []}
    for done, name in enumerate([slide_id, *others], 1):
        rows = results.embedding_rows(name, address)
        if k := min(count + 1, len(rows)):
            (found,) = cosine_neighbours(query, rows, k, budget_bytes=budget_bytes)
            found = found[(found != row) | (name != slide_id)][:count]
            near = rows[found].astype(np.float64)
            length = np.linalg.norm(near, axis=1) * np.linalg.norm(query.astype(np.float64))
            cosines = near @ query[0].astype(np.float64) / np.maximum(length, 1e-12)
            kind = "slide" if name == slide_id else "cohort"
            best[kind] += _described(name, rows, found.tolist(), cosines.tolist())
            best[kind] = sorted(best[kind], key=lambda tile: -tile["similarity"])[:count]
        yield told | best | {"done": done}


def _tile_at(rows: EmbeddingRows, point_l0: tuple[int, int]) -> int:
    """The row of the tile in which a point lies; of several the one whose centre is nearest."""
    tiles = rows.tiles
    offset = np.array(point_l0) - tiles.coords_l0
    inside = ((offset >= 0) & (offset < tiles.size_l0)).all(axis=1)
    if not inside.any():
        raise InvalidInputError(f"point must lie in a tile, got {point_l0}")
    far = np.abs(offset - np.array(tiles.size_l0) / 2).max(axis=1)
    return int(np.where(inside, far, np.inf).argmin())


def _described(slide_id: str, rows: EmbeddingRows, found: list[int], cosines: list[float]) -> Found:
    tiles = rows.tiles
    (width, height), corners = tiles.size_l0, tiles.coords_l0[found].tolist()
    return [
        {"slide": slide_id, "row": row, "x": x, "y": y, "width": width, "height": height}
        | {"similarity": round(cosine, 6)}
        for row, (x, y), cosine in zip(found, corners, cosines)
    ]
