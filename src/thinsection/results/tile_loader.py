"""Loader of tiles that counts epochs and knows its position: `TileDataset.loader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from thinsection.config import nearest
from thinsection.errors import InvalidInputError
from thinsection.results.tile_items import Item
from thinsection.results.tile_seeds import Stateful, seeded
from thinsection.results.tile_shards import EpochPosition, PlacedItem, TileShards
from thinsection.types import Document, counted

Collate = Callable[[list[Item]], Any]
States = dict[int, Any]  # state of the transform by shard of this rank


class LoaderOptions(TypedDict, total=False):
    """Further arguments of PyTorch's `DataLoader`."""

    pin_memory: bool
    pin_memory_device: str
    prefetch_factor: int
    persistent_workers: bool
    multiprocessing_context: Any
    timeout: float
    worker_init_fn: Callable[[int], None]


class TileLoader:
    """Batches of tiles; each iteration is an epoch.

    `for batch in loader` reads an epoch, and the next such loop the next epoch. An iteration that
    is left by `break` counts as an epoch too. A batch is what `collate_fn` makes of items; they
    are those of `TileDataset` without `shard` and `position`.

    The state is the position after the last batch that an iteration gave. A new loader that loads
    it goes on with the next batch, in the same epoch.

    **Random transforms** give the same after a stop as without it. Before each tile, the generators
    of PyTorch (CPU), NumPy and `random` are seeded by the dataset's seed, the epoch and the tile,
    and set back after it. So neither the number of workers nor a stop changes what a tile gets. A
    transform with a generator of its own needs `state_dict` and `load_state_dict`. Each worker has
    a copy of it; their states are part of the loader's state and go from one epoch to the next.

    `len(loader)` is the number of batches of an epoch on this rank, if all slides can be read.

    Args:
        shards: the shards of a dataset.
        batch_size: tiles of a batch.
        num_workers: processes that decode tiles; 0 decodes in threads of this process.
        drop_last: leave out the last batch of a worker if it is not full.
        collate_fn: makes a batch of a list of items; None uses that of PyTorch.
        options: further arguments of PyTorch's `DataLoader`.

    Memory: that of `TileDataset` in each worker, and `prefetch_factor` batches for each.

    Raises:
        InvalidInputError: no such option; workers that persist with a transform that has a state.
    """

    def __init__(
        self,
        shards: TileShards,
        *,
        batch_size: int,
        num_workers: int,
        drop_last: bool,
        collate_fn: Collate | None,
        options: LoaderOptions,
    ) -> None:
        known = tuple(LoaderOptions.__annotations__)
        for name in options:
            if name not in known:
                raise InvalidInputError(
                    f"options must be of {', '.join(known)}, got {name!r}{nearest(name, known)}; "
                    "order and seed belong to TileDataset"
                )
        if batch_size < 1:
            raise InvalidInputError(f"batch_size must be >= 1, got {batch_size}")
        self._persists = options.get("persistent_workers", False)
        if self._persists and isinstance(shards.items.transform, Stateful):
            raise InvalidInputError(
                "persistent_workers must be False with a transform that has a state_dict, got True"
            )
        self._shards = shards
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._drop_last = drop_last
        self._collate = _Collate(collate_fn, shards.seed)
        self._options = options
        self._progress = EpochPosition(epoch=0)
        self._states: States = {}
        # True once an iteration of the epoch in `_progress` has begun
        self._has_begun = False
        # loader whose workers wait for the next epoch
        self._waiting: DataLoader[Any] | None = None

    @property
    def epoch(self) -> int:
        """Epoch that is being read, or that the next iteration reads.

        Examples:
            >>> loader = dataset.loader()
            >>> for batch in loader:
            ...     pass
            >>> loader.epoch
            1
        """
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration, which begins at its start.

        It changes nothing if that iteration reads this epoch anyway, also from a position that was
        loaded. A loop that calls it for each epoch can thus be resumed.

        Examples:
            >>> loader = dataset.loader()
            >>> loader.set_epoch(3)
            >>> loader.epoch
            3
        """
        if epoch == self._progress.epoch and not self._has_begun:
            return
        self._progress = EpochPosition(epoch=epoch)
        self._has_begun = False
        self._waiting = None

    def __len__(self) -> int:
        num_shards = max(1, self._num_workers)
        num_batches = 0
        for shard in range(num_shards):
            num_tiles = len(self._shards.order(self.epoch, shard, num_shards))
            if not self._drop_last:
                num_tiles += self._batch_size - 1
            num_batches += num_tiles // self._batch_size
        return num_batches

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            self._progress = EpochPosition(epoch=self._progress.epoch + 1)
        progress = self._progress.start(max(1, self._num_workers))
        loader = self._loader_at(progress.copy())
        self._waiting = None
        self._progress = progress
        self._has_begun = True
        for placed in loader:
            progress.advance(placed.shard, placed.position)
            if placed.state is not None:
                self._states[placed.shard] = placed.state
            yield placed.batch
        if self._progress is progress:
            self._progress = EpochPosition(epoch=progress.epoch + 1)
            self._has_begun = False
            self._waiting = loader if self._persists else None

    def state_dict(self) -> Document:
        """Position after the last batch, and states of the transform; each rank stores its own.

        The values are plain but for the states of a transform, which are as it returns them.

        Examples:
            >>> loader = dataset.loader(batch_size=16)
            >>> for batch in loader:
            ...     state = loader.state_dict()
            ...     break
            >>> state["epoch"], state["positions"]
            (0, [16])
        """
        return (
            self._shards.identity()
            | self._progress.state()
            | {"transforms": dict(self._states)}
        )

    def load_state_dict(self, state: Document) -> None:
        """Continues at a position with the next iteration.

        Raises:
            InvalidInputError: the position is that of another order: other slides, seed, memory,
                rank or number of ranks; or of another number of workers within an epoch.

        Examples:
            >>> loader = dataset.loader(batch_size=16)
            >>> first = next(iter(loader))
            >>> resumed = dataset.loader(batch_size=16)
            >>> resumed.load_state_dict(loader.state_dict())
            >>> second = next(iter(resumed))
            >>> set(first["index"].tolist()) & set(second["index"].tolist())
            set()
        """
        self._shards.check_state(state)
        progress = EpochPosition.of_state(state)
        # raises an error now, and not in a worker
        progress.start(max(1, self._num_workers))
        self._progress = progress
        # JSON makes texts of numbers
        self._states = {
            int(shard): saved for shard, saved in state.get("transforms", {}).items()
        }
        self._has_begun = False
        self._waiting = None

    def __repr__(self) -> str:
        tiles = counted(self._batch_size, "tile")
        workers = counted(self._num_workers, "worker")
        return f"TileLoader(epoch {self.epoch}, batches of {tiles}, {workers})"

    def _loader_at(self, progress: EpochPosition) -> DataLoader[Any]:
        """PyTorch's loader of the tiles that follow a position."""
        if self._waiting is not None:
            # its workers read the epoch from memory that they share with this process
            tiles = self._waiting.dataset
            assert isinstance(tiles, _PlacedTiles)
            tiles.epoch.fill_(progress.epoch)
            return self._waiting
        tiles = _PlacedTiles(self._shards, progress, dict(self._states))
        return DataLoader(
            tiles,
            batch_size=self._batch_size,
            num_workers=self._num_workers,
            drop_last=self._drop_last,
            collate_fn=self._collate,
            # a generator of its own: a pass must not draw from that of the training
            generator=torch.Generator().manual_seed(self._shards.seed),
            **self._options,
        )


class _PlacedTiles(IterableDataset["_PlacedTile"]):
    """Items with their places, from a position on; workers that persist go on to later epochs."""

    def __init__(
        self, shards: TileShards, start: EpochPosition, states: States
    ) -> None:
        super().__init__()
        self._shards = shards
        self._start = start
        self._states = states
        self.epoch = torch.tensor(start.epoch).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[_PlacedTile]:
        epoch = int(self.epoch)
        progress = self._start.copy()
        if progress.epoch != epoch:
            progress = EpochPosition(
                epoch=epoch, positions=[0] * len(progress.positions)
            )
        transform: object = self._shards.items.transform
        stateful = transform if isinstance(transform, Stateful) else None
        shard = progress.own_shard()
        if stateful is not None and shard in self._states:
            stateful.load_state_dict(self._states[shard])
        seeds = transform is not None
        for placed in self._shards.read(progress, seeds=seeds):
            state = None if stateful is None else stateful.state_dict()
            yield _PlacedTile(placed, epoch, state)


class _PlacedTile(NamedTuple):
    """An item with its place, its epoch, and the state of the transform after it."""

    placed: PlacedItem
    epoch: int
    state: Any


class _PlacedBatch(NamedTuple):
    """A batch with the place of its last tile, and the state of the transform after it."""

    batch: Any
    shard: int
    position: int
    state: Any


@dataclass(frozen=True)
class _Collate:
    """Makes a batch of placed items; random numbers of the user's function are seeded too."""

    collate_fn: Collate | None
    seed: int

    def __call__(self, tiles: Sequence[_PlacedTile]) -> _PlacedBatch:
        items = [tile.placed.item for tile in tiles]
        _, shard, position = tiles[-1].placed
        if self.collate_fn is None:
            batch = default_collate(items)
        else:
            # after the key of a tile comes a number, so that no tile has the same seed
            with seeded(self.seed, tiles[-1].epoch, items[-1]["index"], 1):
                batch = self.collate_fn(items)
        return _PlacedBatch(batch, shard, position, tiles[-1].state)
