"""Tiles of a results folder as a PyTorch dataset, to train networks on the pixels.

    results -> slides with grids -> `ShardOrder` -> [thread: TileStream -> buffer] -> items

Each rank and worker reads its own shard. A thread reads the next buffer while this one is used.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from thinsection.config import coerce
from thinsection.errors import BudgetError, InvalidInputError, SlideReadError
from thinsection.machine import cpu_count
from thinsection.results.folder import Listener, Results, open_results
from thinsection.results.tile_buffers import Buffer, BufferReader
from thinsection.results.tiled_slide import TiledSlide, tiled_slides, with_columns
from thinsection.tiles.budget import CHANNELS
from thinsection.tiles.categories import Categories
from thinsection.tiles.order import ShardOrder
from thinsection.types import (
    Document,
    RgbArray,
    counted,
    format_bytes,
    parse_bytes,
    shortened,
)

Item = dict[str, Any]


def warn(text: str) -> None:
    """Shows a message as a warning of Python."""
    warnings.warn(text, stacklevel=2)


@dataclass(kw_only=True)
class Progress:
    """Position in an epoch, of each worker of this rank.

    Attributes:
        epoch: the epoch.
        first_shard: index, among this rank's shards, of the one whose batch comes next.
        positions: for each shard of this rank, the number of tiles of its order that were passed.
    """

    epoch: int
    first_shard: int = 0
    positions: list[int] = field(default_factory=list)

    def copy(self) -> Progress:
        """Returns the same values in another object."""
        return replace(self, positions=list(self.positions))


class TileDataset(IterableDataset[Item]):
    """Tiles of the slides of a results folder, decoded while a network trains.

    Use it in a `torch.utils.data.DataLoader`. An item is a dict:

        image      uint8 tensor (3, tile_px, tile_px), or what `transform` returns
        label      value of `labels` for the slide, if `labels` is given
        slide_id   id of the slide
        coords_l0  int64 (2,): x and y of the top-left corner, level-0 px
        row        row number in the slide's tile table
        (columns)  float32, one entry for each name in `columns`; NaN for no value
        shard, position   place in the epoch, see `advance`

    The tiles of an epoch are divided among the ranks of `torch.distributed` and the workers of the
    loader: each tile is in one shard, and sizes of shards differ by one at most. Initialise the
    process group before the dataset is made. The order depends on `seed`, the epoch, and the number
    of ranks and workers. Call `set_epoch` before each epoch, as for PyTorch's DistributedSampler.

    Slides come in random order, `open_slides` at a time. Their tiles enter a buffer in chunks of 64
    neighbours, and the buffer is shuffled. A slide that cannot be read is reported to `on_message`,
    and its tiles of that buffer are left out.

    Args:
        results: results folder of a `run` that has made at least the tile tables.
        grid: tile grid, if there are several.
        slides: ids of the slides to use; None means all.
        labels: value for each slide id; slides that it lacks are not used.
        columns: columns of the tile tables that items contain, as in `results.tiles`. Of categories
            the item has the place in `dataset.categories[NAME].names`, the same on all slides.
        transform: gets uint8 (tile_px, tile_px, 3) and returns the image of the item.
        shuffle: False keeps the order of slides and tables.
        seed: decides the order.
        memory: size of decoded tiles in one worker: two buffers.
        open_slides: slides that are mixed, and stay open.
        even: give all shards the same number of tiles: leave out up to one tile a shard, and repeat
            other tiles of a buffer in place of those that cannot be read. DDP without `Join` and
            FSDP hang at the end of an epoch if ranks have different numbers of batches.
        on_message: takes a line for each slide that is left out, in the process that reads it; None
            makes it a warning of Python.

    Memory: for each worker: `memory` for two buffers of `buffer_tiles` = memory / (6 tile_px²)
    tiles; in addition 5/32 of `memory` for batches that are decoded and not yet in a buffer; one
    region of the level that is read for each decoding thread; 64 MiB and 16 bytes a tile for each
    open slide. About 1 kB per slide of the folder. The number of tiles does not matter.

    Raises:
        StoreError: no results folder.
        InvalidInputError: no such grid, slide or column; no tiles.
        BudgetError: the memory does not hold two tiles.
    """

    def __init__(
        self,
        results: str | Path | Results,
        *,
        grid: str | None = None,
        slides: Sequence[str] | None = None,
        labels: Mapping[str, object] | None = None,
        columns: Sequence[str] = (),
        transform: Callable[[RgbArray], object] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        memory: str = "512MiB",
        open_slides: int = 8,
        even: bool = False,
        on_message: Listener | None = None,
    ) -> None:
        super().__init__()
        if open_slides < 1:
            raise InvalidInputError(f"open_slides must be >= 1, got {open_slides}")
        if not isinstance(results, Results):
            results = open_results(results)
        on_message = on_message or warn
        self._slides = _choose_slides(results, grid, slides, labels, on_message)
        self._slides = with_columns(
            results, self._slides[0].grid, self._slides, columns
        )
        first = self._slides[0]
        if first.plan is not None:
            self.tile_px = first.plan.tile_px
        else:
            with first.open() as opened:
                self.tile_px = first.table(opened).plan.tile_px
        two_tiles_bytes = 2 * self.tile_px * self.tile_px * CHANNELS
        self.buffer_tiles = parse_bytes(memory, name="memory") // two_tiles_bytes
        if self.buffer_tiles < 1:
            raise BudgetError(
                f"memory must be >= {format_bytes(two_tiles_bytes)} for two tiles of "
                f"{self.tile_px} px, got {memory}"
            )
        self._labels = labels
        self._columns = tuple(columns)
        self._transform = transform
        self._shuffle = shuffle
        self._seed = seed
        self._open_slides = open_slides
        self._even = even
        self._on_message = on_message
        self._rank = 0
        self._world_size = 1
        if distributed.is_available() and distributed.is_initialized():
            self._rank = distributed.get_rank()
            self._world_size = distributed.get_world_size()
        # Epoch, and number of workers; shared, because workers that persist have copies of this
        # object.
        self._shared = torch.tensor([0, 0]).share_memory_()  # type: ignore[no-untyped-call]
        # Position that `load_state_dict` has set, at which the next iteration starts.
        self._resumed: Progress | None = None
        # Position that this iteration has reached: tiles that were read, or used (`advance`).
        self._progress: Progress | None = None

    def __repr__(self) -> str:
        columns = shortened(self._columns)
        return (
            f"TileDataset({counted(self.num_tiles, 'tile')} of {self.tile_px} px of "
            f"{counted(len(self._slides), 'slide')}, columns: {columns}, rank {self._rank} of "
            f"{self._world_size})"
        )

    @property
    def categories(self) -> Mapping[str, Categories]:
        """Names and colours of the columns of categories; their items are places in the names."""
        return self._slides[0].categories

    @property
    def slide_ids(self) -> tuple[str, ...]:
        """Ids of the slides that are used."""
        return tuple(slide.entry.slide_id for slide in self._slides)

    @property
    def num_tiles(self) -> int:
        """Tiles of one epoch, of all ranks and workers."""
        return sum(slide.num_tiles for slide in self._slides)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration reads; it changes the order."""
        self._shared[0] = epoch
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        self._progress = None

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        index = 0 if worker is None else worker.id
        num_workers = 1 if worker is None else worker.num_workers
        self._shared[1] = num_workers
        progress = self._begin()
        self._progress = progress
        # A second iteration of this process begins at the beginning.
        self._resumed = None
        shard = (progress.first_shard + index) % num_workers
        order = ShardOrder(
            counts=[slide.num_tiles for slide in self._slides],
            seed=self._seed,
            epoch=progress.epoch,
            shard=self._rank * num_workers + shard,
            num_shards=self._world_size * num_workers,
            buffer_tiles=self.buffer_tiles,
            mixed_slides=self._open_slides,
            shuffle=self._shuffle,
            even=self._even,
        )
        # a worker's share of the CPUs, which ranks of this machine share too
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with BufferReader(
            self._slides,
            tile_px=self.tile_px,
            buffer_tiles=self.buffer_tiles,
            columns=self._columns,
            open_slides=self._open_slides,
            decode_threads=max(1, cpu_count() // (num_workers * num_ranks)),
            on_message=self._on_message,
        ) as reader:
            yield from self._items(order, reader, progress, shard)

    def advance(self, batch: Mapping[str, Any]) -> None:
        """Notes that a batch was used, so that `state_dict` continues after it.

        Needed for a DataLoader with workers, which read ahead of what is used.
        """
        shards = np.ravel(batch["shard"])
        positions = np.ravel(batch["position"])
        if self._progress is None:
            self._progress = self._begin()
        reached = self._progress.positions
        for shard, position in zip(shards.tolist(), positions.tolist()):
            reached[shard] = max(reached[shard], position + 1)
        self._progress.first_shard = (int(shards[-1]) + 1) % len(reached)

    def state_dict(self) -> Document:
        """Position in the epoch, as plain values; each rank stores its own.

        Without workers it is the position after the last item. With workers, call `advance` with
        each batch, or use torchdata's StatefulDataLoader, which asks the workers.
        """
        progress = self._progress or self._begin()
        return self._identity() | asdict(progress)

    def load_state_dict(self, state: Document) -> None:
        """Continues at a position; iterate a new DataLoader with as many workers afterwards.

        Raises:
            InvalidInputError: the position is that of another order: other slides, seed, memory,
                rank or number of ranks.
        """
        identity = self._identity()
        for name, value in identity.items():
            if state.get(name) != value:
                raise InvalidInputError(
                    f"state must be of a dataset with {name} {value!r}, got "
                    f"{state.get(name)!r}"
                )
        self._resumed = Progress(
            epoch=coerce(state.get("epoch"), int, "epoch"),
            first_shard=coerce(state.get("first_shard"), int, "first_shard"),
            positions=[*coerce(state.get("positions"), tuple[int, ...], "positions")],
        )
        self._progress = None
        self._shared[0] = self._resumed.epoch

    def _identity(self) -> Document:
        """Everything that decides the order, but for the number of workers."""
        return {
            "num_slides": len(self._slides),
            "num_tiles": self.num_tiles,
            "buffer_tiles": self.buffer_tiles,
            "open_slides": self._open_slides,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "even": self._even,
            "rank": self._rank,
            "world_size": self._world_size,
        }

    def _begin(self) -> Progress:
        """Position from which the next iteration reads."""
        epoch, num_workers = self._shared.tolist()
        resumed = self._resumed
        if resumed is None or resumed.epoch != epoch or not resumed.positions:
            return Progress(epoch=epoch, positions=[0] * num_workers)
        if num_workers and len(resumed.positions) != num_workers:
            raise InvalidInputError(
                f"num_workers must be {len(resumed.positions)} as in the state, got "
                f"{num_workers}"
            )
        return resumed.copy()

    def _items(
        self,
        order: ShardOrder,
        reader: BufferReader,
        progress: Progress,
        shard: int,
    ) -> Iterator[Item]:
        """Yields the items of a shard from its position on."""
        start = progress.positions[shard]
        number = start // self.buffer_tiles
        for buffer in reader.buffers(order.buffers(number)):
            buffer_indices = order.permutation(number, len(buffer))
            readable = np.flatnonzero(buffer.is_read)
            if self._even and not len(readable):
                raise SlideReadError(
                    f"even shards must have a readable tile in each buffer, got none of "
                    f"{len(buffer)}; leave out the slides that are reported, or pass even=False"
                )
            first = number * self.buffer_tiles
            for position in range(max(start, first), first + len(buffer)):
                buffer_index = int(buffer_indices[position - first])
                progress.positions[shard] = position + 1
                if not buffer.is_read[buffer_index]:
                    if not self._even:
                        continue
                    buffer_index = int(readable[position % len(readable)])
                item = self._item(buffer, buffer_index)
                yield item | {"shard": shard, "position": position}
            number += 1

    def _item(self, buffer: Buffer, place: int) -> Item:
        """Item of the tile at an index of the buffer.

        Its pixels are copied, because a view would keep the buffer.
        """
        slide_id = self._slides[buffer.slides[place]].entry.slide_id
        tile = buffer.tiles[place].copy()
        if self._transform is None:
            image: object = torch.from_numpy(tile).permute(2, 0, 1).contiguous()
        else:
            image = self._transform(tile)
        item: Item = {"image": image}
        if self._labels is not None:
            item["label"] = self._labels[slide_id]
        item["slide_id"] = slide_id
        item["coords_l0"] = buffer.coords_l0[place].copy()
        item["row"] = int(buffer.rows[place])
        for name, values in buffer.columns.items():
            item[name] = values[place]
        return item


# functions that choose the slides and make the parts of a dataset


def _choose_slides(
    results: Results,
    grid: str | None,
    slide_ids: Sequence[str] | None,
    labels: Mapping[str, object] | None,
    on_message: Listener,
) -> list[TiledSlide]:
    """Slides with tiles that were asked for and have a label."""
    address = results.choose_grid(grid)
    if slide_ids is not None:
        ledgers = {slide_id: results.ledger(slide_id) for slide_id in slide_ids}
        results = replace(results, ledgers=ledgers)
    if labels is not None:
        ledgers = {
            slide_id: ledger
            for slide_id, ledger in results.ledgers.items()
            if slide_id in labels
        }
        results = replace(results, ledgers=ledgers)
    chosen = [
        slide for slide in tiled_slides(results, address, on_message) if slide.num_tiles
    ]
    if not chosen:
        raise InvalidInputError(
            f"slides must have tiles of grid {address}, got none in "
            f"{str(results.folder)!r}; check slides and labels"
        )
    return chosen
