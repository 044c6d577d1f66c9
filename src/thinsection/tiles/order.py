"""Order in which tiles of a cohort are read for training: shards, chunks, buffers. It is pure.

    shuffled slides -> one row of tiles -> equal shards -> shuffled chunks -> shuffled buffers

The order is a function of seed, epoch and shard, so that a position in it is one number. A chunk
is a run of neighbouring tiles: segments of the file that they share are decoded once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
# Tiles of a chunk: a block of the tile grid has 8 x 8.
CHUNK_TILES = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `start` to `stop` of the tile table of one slide."""

    slide: int  # index in the list of slides
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class ShardOrder:
    """Order of the tiles of one shard in one epoch.

    Args:
        counts: tiles of each slide.
        seed, epoch: decide the order.
        shard, num_shards: index of the shard, and number of equal shards of the epoch.
        buffer_tiles: tiles that are shuffled together.
        mixed_slides: slides whose chunks are mixed; they are open at the same time.
        shuffle: False keeps the order of the slides and of their tables.
        even: True leaves out up to `num_shards - 1` tiles, so that all shards have the same number.

    Memory: 8 bytes per slide, and 24 bytes per chunk of `mixed_slides` slides.
    """

    counts: Sequence[int]
    seed: int
    epoch: int
    shard: int
    num_shards: int
    buffer_tiles: int
    mixed_slides: int
    shuffle: bool = True
    even: bool = False

    def __len__(self) -> int:
        start, stop = self._bounds()
        return stop - start

    def runs(self) -> list[Run]:
        """Tiles of the shard before chunks are shuffled; a shard may begin within a slide."""
        start, stop = self._bounds()
        order = np.arange(len(self.counts))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        runs = []
        offset = 0
        for slide in order.tolist():
            count = self.counts[slide]
            first = max(start - offset, 0)
            last = min(stop - offset, count)
            if first < last:
                runs.append(Run(slide, first, last))
            offset += count
        return runs

    def buffers(self, first: int = 0) -> Iterator[list[Run]]:
        """Yields the buffers from number `first` on; each but the last has `buffer_tiles` tiles."""
        to_skip = first * self.buffer_tiles
        room = self.buffer_tiles
        buffer: list[Run] = []
        for run in self._chunks():
            if to_skip >= len(run):
                to_skip -= len(run)
                continue
            start = run.start + to_skip
            to_skip = 0
            while start < run.stop:
                stop = min(start + room, run.stop)
                buffer.append(Run(run.slide, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield buffer
                    buffer = []
                    room = self.buffer_tiles
        if buffer:
            yield buffer

    def permutation(self, buffer: int, num_tiles: int) -> Numbers:
        """Order in which the tiles of a buffer are yielded, (num_tiles,)."""
        order = np.arange(num_tiles)
        return self._generator(0, buffer).permutation(order) if self.shuffle else order

    def _bounds(self) -> tuple[int, int]:
        """First and last place of the shard in the row of all tiles."""
        total = sum(self.counts)
        if self.even:
            share = total // self.num_shards
            return self.shard * share, (self.shard + 1) * share
        return (
            self.shard * total // self.num_shards,
            (self.shard + 1) * total // self.num_shards,
        )

    def _chunks(self) -> Iterator[Run]:
        """Yields the chunks in the order in which they enter buffers."""
        runs = self.runs()
        for group, first in enumerate(range(0, len(runs), self.mixed_slides)):
            chunks = []
            for run in runs[first : first + self.mixed_slides]:
                chunks += split_run(run)
            order = np.arange(len(chunks))
            if self.shuffle:
                order = self._generator(1, group).permutation(order)
            yield from (chunks[place] for place in order.tolist())

    def _generator(self, purpose: int, number: int) -> np.random.Generator:
        key = [self.seed, self.epoch, self.num_shards, self.shard, purpose, number]
        return np.random.default_rng(key)


def split_run(run: Run) -> list[Run]:
    """Splits a run where blocks of the tile table end."""
    ends = range((run.start // CHUNK_TILES + 1) * CHUNK_TILES, run.stop, CHUNK_TILES)
    borders = [run.start, *ends, run.stop]
    return [Run(run.slide, start, stop) for start, stop in pairwise(borders)]
