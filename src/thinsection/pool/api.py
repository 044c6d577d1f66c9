"""Slide embeddings from tile embeddings, and patient embeddings from slides, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.pool import encoder as slide_encoders
from thinsection.pool.encoder import (
    SlideEmbedding,
    SlideEncoder,
    TiledSlide,
    TileEmbeddings,
    TileLayout,
    naming_slide,
)
from thinsection.pool.pooling import checked_slide
from thinsection.tiles import TileTable
from thinsection.types import CoordsL0

Fusion = Literal["early", "late"]
GAP_TILES = 2  # empty tiles between two slides in early fusion


def aggregate(
    tile_embeddings: TileEmbeddings,
    coords_l0: CoordsL0 | None = None,
    *,
    tiles: TileTable | None = None,
    slide_encoder: str | SlideEncoder = "mean",
    tile_px_l0: int | None = None,
    stride_l0: int | None = None,
    **options: Any,
) -> SlideEmbedding:
    """Slide embedding (D',) of one slide.

    Args:
        tile_embeddings: (N, D) float, N >= 1.
        coords_l0: int64 (N, 2), top-left corners, level-0 px; left out with `tiles`.
        tiles: tile table of these N tiles, as returned by `embed_tiles`: coordinates and layout.
        slide_encoder: a name or a loaded slide encoder.
        tile_px_l0: edge of a tile, level-0 px; left out with `tiles`.
        stride_l0: step from one tile to the next, level-0 px; needed where tiles overlap, left
            out with `tiles`.
        options: options of `load_slide_encoder`, if `slide_encoder` is a name.

    Raises InvalidInputError: shapes, dtypes or values do not fit; neither tiles nor coordinates.
    """
    arguments = {
        "tiles": tiles,
        "coords_l0": coords_l0,
        "tile_px_l0": tile_px_l0,
        "stride_l0": stride_l0,
    }
    passed = [name for name, value in arguments.items() if value is not None]
    complete = (
        ["tiles"],
        ["coords_l0", "tile_px_l0"],
        ["coords_l0", "tile_px_l0", "stride_l0"],
    )
    if passed not in complete:
        got = " and ".join(passed) or "none of them"
        raise InvalidInputError(
            "aggregate needs tiles, or coords_l0 with tile_px_l0 (and stride_l0 if tiles "
            f"overlap), got {got}"
        )
    if tiles is not None:
        coords_l0 = tiles.coords_l0
        layout = TileLayout(tiles.plan.size_l0, tiles.plan.stride_l0)
    else:
        assert coords_l0 is not None and tile_px_l0 is not None
        layout = TileLayout.square(tile_px_l0, stride_l0)
    encoder = _loaded(slide_encoder, options)
    return encoder.encode_tiles(tile_embeddings, coords_l0, layout)


def patient_embedding(
    slides: Sequence[tuple[TileEmbeddings, CoordsL0]],
    *,
    slide_encoder: str | SlideEncoder = "mean",
    tile_px_l0: int | Sequence[int],
    stride_l0: int | Sequence[int] | None = None,
    fusion: Fusion = "late",
    **options: Any,
) -> SlideEmbedding:
    """One embedding (D',) from all slides of a patient.

    'late' combines the slide embeddings: by their mean, or as the encoder was trained to do
    ('moozy:case'). Every slide counts the same. 'early' encodes all tiles as one slide, with the
    slides side by side along x and GAP_TILES empty tiles between them. Every tile counts the same,
    and slides attend to each other. For one slide, both give the same embedding.

    Args:
        slides: (tile_embeddings, coords_l0) of each slide, at least one.
        tile_px_l0: edge of a tile, level-0 px; one, or one per slide.
        stride_l0: step between tiles, level-0 px, where tiles overlap; one, or one per slide.

    Memory: 'early' holds a float32 copy of all tile embeddings of the patient.
    Raises InvalidInputError: no slides, another fusion, a slide that does not fit (named by index).
    """
    if not slides:
        raise InvalidInputError("slides must contain at least one slide, got none")
    if fusion not in get_args(Fusion):
        raise InvalidInputError(f"fusion must be 'early' or 'late', got {fusion!r}")
    edges = _per_slide("tile_px_l0", tile_px_l0, len(slides))
    strides: Sequence[int | None] = [None] * len(slides)
    if stride_l0 is not None:
        strides = _per_slide("stride_l0", stride_l0, len(slides))
    tiled_slides = [
        (tiles, coords, TileLayout.square(edge, stride))
        for (tiles, coords), edge, stride in zip(slides, edges, strides, strict=True)
    ]
    encoder = _loaded(slide_encoder, options)
    if fusion == "early":
        return encode_side_by_side(encoder, tiled_slides)
    return encoder.encode_case(tiled_slides)


def _per_slide(name: str, lengths: int | Sequence[int], count: int) -> list[int]:
    if isinstance(lengths, int | np.integer):
        return [int(lengths)] * count
    if len(lengths) != count:
        raise InvalidInputError(
            f"{name} must be one int or one per slide ({count}), got {len(lengths)}"
        )
    return list(lengths)


def encode_side_by_side(
    encoder: SlideEncoder, slides: Sequence[TiledSlide]
) -> SlideEmbedding:
    """Embedding (D',) of all tiles of a patient, encoded as one slide: early fusion.

    Memory: a float32 copy of all tile embeddings.
    """
    tiles, coords, columns = _side_by_side(slides)
    first_layout = slides[0][2]
    try:
        return encoder.encode_tiles(tiles, coords, first_layout)
    except InvalidInputError as error:
        error.add_note(
            f"{len(slides)} slides side by side, up to column {columns} in tiles; "
            "fusion='late' encodes them one by one"
        )
        raise


def _side_by_side(
    slides: Sequence[TiledSlide],
) -> tuple[npt.NDArray[np.float32], CoordsL0, int]:
    """All tiles, their corners in level-0 px of the first slide, and the number of the last column.

    The first slide stays in place. The other slides keep their rows and move to the right by whole
    tiles, so that they lie on its grid.
    """
    frame = slides[0][2]
    edge = frame.size_l0[0]
    all_tiles = []
    all_coords = []
    next_column = 0
    for index, (tiles, coords_l0, own) in enumerate(slides):
        with naming_slide(index):
            checked, coords, own_edge = checked_slide(tiles, coords_l0, own.size_l0[0])
            _check_same_overlap(own, frame)
        scaled = coords * edge // own_edge
        phase = scaled.min(0) % edge
        if index == 0:
            first_phase = phase
        scaled = scaled + (first_phase - phase)
        columns = scaled[:, 0] // edge
        shift = 0 if index == 0 else next_column - int(columns.min())
        all_tiles.append(checked.detach().float().cpu().numpy())
        all_coords.append(scaled + np.array([shift * edge, 0]))
        next_column = int(columns.max()) + shift + 1 + GAP_TILES
    widths = sorted({tiles.shape[1] for tiles in all_tiles})
    if len(widths) != 1:
        raise InvalidInputError(
            f"tile_embeddings must have the same number of channels in all slides, got {widths}"
        )
    last_column = next_column - 1 - GAP_TILES
    return np.concatenate(all_tiles), np.concatenate(all_coords), last_column


def _check_same_overlap(own: TileLayout, frame: TileLayout) -> None:
    """Raise InvalidInputError if tiles overlap by another fraction than in the first slide."""
    if own.stride_l0 is None or frame.stride_l0 is None:
        return
    if own.stride_l0[0] * frame.size_l0[0] != frame.stride_l0[0] * own.size_l0[0]:
        raise InvalidInputError(
            "stride_l0 must be the same fraction of tile_px_l0 in all slides, got "
            f"{own.stride_l0[0]} of {own.size_l0[0]} px and {frame.stride_l0[0]} of "
            f"{frame.size_l0[0]} px in slide 0; use fusion='late'"
        )


def _loaded(slide_encoder: str | SlideEncoder, options: dict[str, Any]) -> SlideEncoder:
    if isinstance(slide_encoder, str):
        return slide_encoders.load_slide_encoder(slide_encoder, **options)
    if options:
        raise InvalidInputError(
            f"options must be omitted with a loaded slide encoder, got {', '.join(options)}"
        )
    return slide_encoder
