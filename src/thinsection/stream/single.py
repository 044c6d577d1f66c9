"""Tiles of one slide: the simple face of the stream."""

from collections.abc import Iterator, Sequence

from thinsection.slide import Slide
from thinsection.stream.budget import StreamConfig, cpu_count, scratch_bytes, stream_budget
from thinsection.stream.events import SlideFailed, SlideTiles, TileBatch
from thinsection.stream.pipeline import TileStream
from thinsection.tiles import TileFilter, TileTable, TileTransform
from thinsection.units import parse_bytes


def iter_tiles(
    slide: Slide,
    tiles: TileTable,
    *,
    batch_size: int = 64,
    filters: Sequence[TileFilter] = (),
    transform: TileTransform | None = None,
    config: StreamConfig | None = None,
) -> Iterator[TileBatch]:
    """Batches of decoded tiles of one opened slide, in table order.

    `batch.tiles` is valid until the next batch is asked for; copy what should stay.

    Args:
        slide: opened; stays open.
        tiles: from `tile_grid`, or a table of your own coordinates.
        batch_size: tiles per batch.
        filters: pixel filters, see `thinsection.tiles.load_filters`.
        transform: changes the tiles that are kept, in place; see `thinsection.tiles.fit_stain`.
        config: memory and decoding threads.

    Yields:
        `TileBatch` with indices (b,), coords_l0 (b, 2) and tiles uint8 (b, tile_px, tile_px, 3).

    Memory: `config.memory`, whatever the slide's size.

    Raises:
        SlideReadError: a region cannot be decoded.
        BudgetError: the memory does not hold three batches.
    """
    config = config or StreamConfig()
    workers = config.decode_workers or cpu_count()
    budget = stream_budget(
        budget_bytes=parse_bytes(config.memory),
        batch_size=batch_size,
        tile_px=tiles.plan.tile_px,
        workers=workers,
        scratch_bytes=scratch_bytes(tiles.plan),
    )

    source = SlideTiles(
        key=slide.slide_path, slide=slide, table=tiles, transform=transform, owned=False
    )
    with TileStream(
        [source], lambda given: given, budget=budget, batch_size=batch_size, filters=filters
    ) as stream:
        for event in stream:
            if isinstance(event, SlideFailed):
                raise event.error
            if isinstance(event, TileBatch):
                yield event
                event.release()
