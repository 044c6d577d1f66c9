"""One call: tile embeddings of a slide in, its embedding out; and slides of a patient to one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np

from thinsection.errors import InvalidInputError, require
from thinsection.pool import encoder as slide_encoders
from thinsection.pool.encoder import SlideEmbedding, SlideEncoder, TileEmbeddings
from thinsection.pool.pooling import checked_slide
from thinsection.tiles import TileTable
from thinsection.types import CoordsL0

Fusion = Literal["early", "late"]
GAP_TILES = 2  # empty tiles between two slides that early fusion lays side by side


def aggregate(
    tile_embeddings: TileEmbeddings,
    coords_l0: CoordsL0 | None = None,
    *,
    tiles: TileTable | None = None,
    slide_encoder: str | SlideEncoder = "mean",
    tile_px_l0: int | None = None,
    **options: Any,
) -> SlideEmbedding:
    """Slide embedding (D',) of one slide.

    Args:
        tile_embeddings: (N, D) float, N >= 1.
        coords_l0: int64 (N, 2), top-left corners, level-0 px; left out with `tiles`.
        tiles: the table of these N tiles, as `embed_tiles` gives it back: coordinates and size.
        slide_encoder: a name or a loaded slide encoder.
        tile_px_l0: edge of a tile, level-0 px; left out with `tiles`.
        options: of `load_slide_encoder`, where `slide_encoder` is a name.

    Raises InvalidInputError: shapes, dtypes, values do not fit; neither tiles nor coordinates.
    """
    arguments = {"tiles": tiles, "coords_l0": coords_l0, "tile_px_l0": tile_px_l0}
    given = [name for name, value in arguments.items() if value is not None]
    rule, got = "get tiles, or coords_l0 with tile_px_l0", " and ".join(given) or "none of them"
    require(given in (["tiles"], ["coords_l0", "tile_px_l0"]), f"aggregate must {rule}", got)
    if tiles is not None:
        coords_l0, tile_px_l0 = tiles.coords_l0, tiles.plan.size_l0[0]
    assert coords_l0 is not None and tile_px_l0 is not None
    encoder = _loaded(slide_encoder, options)
    return encoder.encode(tile_embeddings, coords_l0, tile_px_l0=tile_px_l0)


def patient_embedding(
    slides: Sequence[tuple[TileEmbeddings, CoordsL0]],
    *,
    slide_encoder: str | SlideEncoder = "mean",
    tile_px_l0: int | Sequence[int],
    fusion: Fusion = "late",
    **options: Any,
) -> SlideEmbedding:
    """One embedding (D',) from all slides of a patient.

    'late' takes the mean of the slide embeddings: every slide counts the same. 'early' encodes all
    tiles as one slide, the slides side by side along x with GAP_TILES empty tiles between them:
    every tile counts the same, and slides attend to each other.

    Args:
        slides: (tile_embeddings, coords_l0) of each slide, at least one.
        tile_px_l0: edge of a tile, level-0 px; one, or one per slide.

    Memory: 'early' holds a float32 copy of all tile embeddings of the patient.
    Raises InvalidInputError: no slides, another fusion, a slide that does not fit (named by index).
    """
    require(slides, "slides must hold at least one slide", "none")
    require(fusion in get_args(Fusion), "fusion must be 'early' or 'late'", repr(fusion))
    edges = [tile_px_l0] * len(slides) if isinstance(tile_px_l0, int) else list(tile_px_l0)
    rule = f"tile_px_l0 must be one int or one per slide ({len(slides)})"
    require(len(edges) == len(slides), rule, len(edges))
    encoder = _loaded(slide_encoder, options)
    if fusion == "early":
        tiles, coords = _side_by_side(slides, edges)
        return encoder.encode(tiles, coords, tile_px_l0=1)
    embeddings = []
    for index, ((tiles, coords), edge) in enumerate(zip(slides, edges, strict=True)):
        with _naming(index):
            embeddings.append(encoder.encode(tiles, coords, tile_px_l0=edge))
    mean: SlideEmbedding = np.stack(embeddings).mean(0, dtype=np.float64).astype(np.float32)
    return mean


def _side_by_side(
    slides: Sequence[tuple[TileEmbeddings, CoordsL0]], edges: Sequence[int]
) -> tuple[Any, CoordsL0]:
    """All tiles with coordinates in tiles (so that slides of other magnification line up)."""
    all_tiles, all_cells, right = [], [], 0
    for index, ((tiles, coords), edge) in enumerate(zip(slides, edges, strict=True)):
        with _naming(index):
            checked, places, edge_l0 = checked_slide(tiles, coords, edge)
        cells = (places - places.min(0)) // edge_l0
        all_tiles.append(checked.detach().float().cpu().numpy())
        all_cells.append(cells + np.array([right, 0]))
        right += int(cells[:, 0].max()) + 1 + GAP_TILES
    widths = sorted({t.shape[1] for t in all_tiles})
    require(len(widths) == 1, "tile_embeddings must have one D over all slides", widths)
    return np.concatenate(all_tiles), np.concatenate(all_cells)


@contextmanager
def _naming(index: int) -> Iterator[None]:
    try:
        yield
    except InvalidInputError as error:
        error.add_note(f"slide {index} of the patient")
        raise


def _loaded(slide_encoder: str | SlideEncoder, options: dict[str, Any]) -> SlideEncoder:
    if isinstance(slide_encoder, str):
        return slide_encoders.load_slide_encoder(slide_encoder, **options)
    rule = "options must be left out with a loaded slide encoder"
    require(not options, rule, ", ".join(options))
    return slide_encoder
