"""Slides to batches: prefetch across slides, bounded queues, decoding, transfer."""

from thinsection.stream.batches import StageClock, TileBatch
from thinsection.stream.tile_stream import StreamConfig, TileStream, iter_tiles

__all__ = ["StageClock", "StreamConfig", "TileBatch", "TileStream", "iter_tiles"]
