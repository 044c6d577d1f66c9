"""Slides to batches: prefetch across slides, bounded queues, decoding, transfer."""

from thinsection.stream.batches import (
    SlideFailed,
    SlideFinished,
    SlideStarted,
    SlideTiles,
    StageClock,
    TileBatch,
)
from thinsection.stream.plan import StreamConfig
from thinsection.stream.tile_stream import TileStream, iter_tiles

__all__ = [
    "SlideFailed",
    "SlideFinished",
    "SlideStarted",
    "SlideTiles",
    "StageClock",
    "StreamConfig",
    "TileBatch",
    "TileStream",
    "iter_tiles",
]
