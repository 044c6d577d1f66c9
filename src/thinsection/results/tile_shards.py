"""Shards of a dataset of tiles, read one after the other through buffers.

    items -> `ShardOrder` -> [thread: TileStream -> buffer] -> items with their place in the epoch

Each rank and worker reads its own shard. A thread reads the next buffer while this one is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from thinsection.config import coerce
from thinsection.errors import InvalidInputError, SlideReadError
from thinsection.machine import cpu_count
from thinsection.results.folder import Listener
from thinsection.results.tile_buffers import BufferReader
from thinsection.results.tile_items import Item, TileItems
from thinsection.results.tile_seeds import seeded
from thinsection.tiles.order import ShardOrder
from thinsection.types import Document


@dataclass(kw_only=True)
class EpochPosition:
    """Position in an epoch, of each worker of this rank.

    Attributes:
        epoch: the epoch.
        first_shard: index, among this rank's shards, of the one whose batch comes next.
        positions: for each shard of this rank, the number of tiles of its order that were passed.
    """

    epoch: int
    first_shard: int = 0
    positions: list[int] = field(default_factory=list)

    @staticmethod
    def of_state(state: Document) -> EpochPosition:
        """Position that `state` has written."""
        return EpochPosition(
            epoch=coerce(state.get("epoch"), int, "epoch"),
            first_shard=coerce(state.get("first_shard"), int, "first_shard"),
            positions=[*coerce(state.get("positions"), tuple[int, ...], "positions")],
        )

    def state(self) -> Document:
        """The position as plain values."""
        return asdict(self)

    def copy(self) -> EpochPosition:
        """Returns the same values in another object."""
        return replace(self, positions=list(self.positions))

    def start(self, num_workers: int) -> EpochPosition:
        """The same position for a loader, whose workers read a shard each.

        Raises InvalidInputError: the position is that of another number of workers.
        """
        if not self.positions:
            return replace(self, positions=[0] * num_workers)
        if num_workers and len(self.positions) != num_workers:
            raise InvalidInputError(
                f"num_workers must be {len(self.positions)} as in the state, got "
                f"{num_workers}"
            )
        return self.copy()

    def own_shard(self) -> int:
        """Shard of this process: a worker of a loader, or the process that iterates itself."""
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        return (self.first_shard + number) % len(self.positions)

    def advance(self, shard: int, position: int) -> None:
        """Notes that a tile was used; the next batch comes from the next shard."""
        self.positions[shard] = max(self.positions[shard], position + 1)
        self.first_shard = (shard + 1) % len(self.positions)


class PlacedItem(NamedTuple):
    """An item with its place in the epoch."""

    item: Item
    shard: int  # index among this rank's shards
    position: (
        int  # number of tiles of the shard before it, also of those that were left out
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class TileShards:
    """All shards of a dataset, and how they are read; plain values that travel to workers.

    Attributes:
        items: the tiles.
        seed: decides the order.
        shuffle: False keeps the order of slides and tables.
        buffer_tiles: tiles that are shuffled together.
        open_slides: slides that are mixed, and stay open.
        even: all shards have the same number of tiles.
        rank, world_size: of the process group.
        on_message: takes a line for each slide that is left out.

    Memory: that of `TileDataset` for each iterator.
    """

    items: TileItems
    seed: int
    shuffle: bool
    buffer_tiles: int
    open_slides: int
    even: bool
    rank: int
    world_size: int
    on_message: Listener

    def identity(self) -> Document:
        """Everything that decides the order, but for the number of workers."""
        return {
            "num_slides": len(self.items.chosen),
            "num_tiles": len(self.items),
            "buffer_tiles": self.buffer_tiles,
            "open_slides": self.open_slides,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "even": self.even,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def check_state(self, state: Document) -> None:
        """Raises InvalidInputError: the state is that of another order."""
        for name, value in self.identity().items():
            if state.get(name) != value:
                raise InvalidInputError(
                    f"state must be of a dataset with {name} {value!r}, got "
                    f"{state.get(name)!r}"
                )

    def order(self, epoch: int, shard: int, num_workers: int) -> ShardOrder:
        """Order of the tiles of one shard of this rank."""
        return ShardOrder(
            counts=[len(tiles) for tiles in self.items.chosen],
            seed=self.seed,
            epoch=epoch,
            shard=self.rank * num_workers + shard,
            num_shards=self.world_size * num_workers,
            buffer_tiles=self.buffer_tiles,
            mixed_slides=self.open_slides,
            shuffle=self.shuffle,
            even=self.even,
        )

    def read(
        self, progress: EpochPosition, *, seeds: bool = False
    ) -> Iterator[PlacedItem]:
        """Yields the items of this worker's shard from a position on.

        Args:
            progress: the position of all workers; that of this worker is brought forward.
            seeds: True seeds the generators of random numbers for each tile's transform.

        Raises:
            SlideReadError: a buffer of even shards has no tile that can be read.
        """
        num_workers = len(progress.positions)
        shard = progress.own_shard()
        order = self.order(progress.epoch, shard, num_workers)
        # a worker's share of the CPUs, which ranks of this machine share too
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with BufferReader(
            self.items,
            buffer_tiles=self.buffer_tiles,
            open_slides=self.open_slides,
            decode_threads=max(1, cpu_count() // (num_workers * num_ranks)),
            on_message=self.on_message,
        ) as reader:
            yield from self._read(order, reader, progress, shard, seeds=seeds)

    def _read(
        self,
        order: ShardOrder,
        reader: BufferReader,
        progress: EpochPosition,
        shard: int,
        *,
        seeds: bool,
    ) -> Iterator[PlacedItem]:
        """Yields the items of a shard from its position on."""
        start = progress.positions[shard]
        number = start // self.buffer_tiles
        for buffer in reader.buffers(order.buffers(number)):
            buffer_indices = order.permutation(number, len(buffer))
            readable = np.flatnonzero(buffer.is_read)
            if self.even and not len(readable):
                raise SlideReadError(
                    f"even shards must have a readable tile in each buffer, got none of "
                    f"{len(buffer)}; leave out the slides that are reported, or pass even=False"
                )
            first = number * self.buffer_tiles
            for position in range(max(start, first), first + len(buffer)):
                place = int(buffer_indices[position - first])
                progress.positions[shard] = position + 1
                if not buffer.is_read[place]:
                    if not self.even:
                        continue
                    place = int(readable[position % len(readable)])
                if seeds:
                    with seeded(self.seed, order.epoch, int(buffer.indices[place])):
                        item = buffer.item(self.items, place)
                else:
                    item = buffer.item(self.items, place)
                yield PlacedItem(item, shard, position)
            number += 1
