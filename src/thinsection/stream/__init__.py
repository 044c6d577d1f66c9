"""Slides to batches: prefetch across slides, bounded queues, decoding, transfer."""

from thinsection.stream.budget import (
    StreamBudget,
    StreamConfig,
    cpu_count,
    scratch_bytes,
    stream_budget,
)
from thinsection.stream.clock import StageClock
from thinsection.stream.events import (
    PrepareFailed,
    SlideFailed,
    SlideFinished,
    SlideStarted,
    SlideTiles,
    StreamEvent,
    TileBatch,
)
from thinsection.stream.pipeline import TileStream
from thinsection.stream.single import iter_tiles

__all__ = [
    "PrepareFailed",
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
