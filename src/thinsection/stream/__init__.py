"""Slides to batches: prefetch across slides, bounded queues, decoding, transfer."""

from thinsection.stream.batches import TileBatch
from thinsection.stream.budget import StreamConfig
from thinsection.stream.threads import StageClock
from thinsection.stream.tile_stream import TileStream, iter_tiles

__all__ = ["StageClock", "StreamConfig", "TileBatch", "TileStream", "iter_tiles"]
