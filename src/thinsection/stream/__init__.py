"""Slides to batches: prefetch across slides, bounded queues, decoding, transfer."""

from thinsection.stream.batches import (
    SlideFailed,
    SlideFinished,
    SlideStarted,
    SlideTiles,
    StreamEvent,
    TileBatch,
)
from thinsection.stream.budget import (
    StreamBudget,
    StreamConfig,
    cpu_count,
    scratch_bytes,
    stream_budget,
)
from thinsection.stream.threads import StageClock
from thinsection.stream.tile_stream import TileStream, iter_tiles

__all__ = [
    "SlideFailed",
    "SlideFinished",
    "SlideStarted",
    "SlideTiles",
    "StageClock",
    "StreamBudget",
    "StreamConfig",
    "StreamEvent",
    "TileBatch",
    "TileStream",
    "cpu_count",
    "iter_tiles",
    "scratch_bytes",
    "stream_budget",
]
