"""Tiles of a results folder as a PyTorch dataset, to train networks on the pixels.

results -> chosen tiles with labels -> `TileShards` -> items, in a `TileLoader` or any DataLoader
                                    -> `IndexedTiles`, for samplers
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from thinsection.errors import BudgetError, InvalidInputError
from thinsection.results.folder import Listener, Results, open_results
from thinsection.results.indexed_tiles import IndexedTiles
from thinsection.results.label_tables import LabelTable
from thinsection.results.tile_items import Item, TileItems
from thinsection.results.tile_labels import (
    Labels,
    balanced_weights,
    choose_tiles,
    count_labels,
)
from thinsection.results.tile_loader import Collate, LoaderOptions, TileLoader
from thinsection.results.tile_shards import EpochPosition, TileShards
from thinsection.results.tiled_slide import TiledSlide, with_columns
from thinsection.tiles.budget import CHANNELS
from thinsection.tiles.categories import Categories
from thinsection.types import (
    Document,
    Floats,
    RgbArray,
    counted,
    format_bytes,
    parse_bytes,
    shortened,
)


def warn(text: str) -> None:
    """Shows a message as a warning of Python."""
    warnings.warn(text, stacklevel=2)


class TileDataset(IterableDataset[Item]):
    """Tiles of the slides of a results folder, decoded while a network trains.

    It is a stream: use `loader`, or a `torch.utils.data.DataLoader`. `map_style` gives the same
    tiles by number, for samplers. An item is a dict:

        image      uint8 tensor (3, tile_px, tile_px), or what `transform` returns
        label      label of the tile, if `labels` is given
        slide_id   id of the slide
        coords_l0  int64 (2,): x and y of the top-left corner, level-0 px
        row        row number in the slide's tile table
        index      number of the tile in the dataset, from 0 to num_tiles - 1
        (columns)  float32, one entry for each name in `columns`; NaN for no value
        shard, position   place in the epoch, see `advance`

    Each worker of the loader, on each rank of `torch.distributed`, reads one shard of the tiles. In
    one process the shards of an epoch have each tile once, and their sizes differ by one at most.
    With several ranks all shards have the same size: each leaves out at most one tile, see `even`.
    Initialise the process group before the dataset is made. The
    order depends on `seed`, the epoch, and the number of ranks and workers. Call `set_epoch`
    before each epoch, as for PyTorch's DistributedSampler; `loader` does so itself.

    Slides come in random order, `open_slides` at a time. Their tiles enter a buffer in chunks of 64
    neighbours, and the buffer is shuffled. A slide that cannot be read is reported to `on_message`,
    and its tiles of that buffer are left out.

    Args:
        results: results folder of a `run` that has made at least the tile tables.
        grid: tile grid, if there are several.
        slides: ids of the slides to use; None means all.
        labels: one of four:
            a mapping with a value for each slide id; slides that it lacks are not used;
            a table with a column `slide_id` and the column that `label` names: a path (CSV, TSV,
            Excel, Parquet), a table of pandas or pyarrow, or `results.rows("labels.csv")`; slides
            without a label are not used, and are named;
            the name of a column of `results.tiles(slide_id)`, also of words;
            a function of the slide id and `results.tiles(slide_id)` that returns a label for each
            tile, (N,).
            Tiles with a missing label (NaN, None, '') are left out, and their number is reported.
        label: column of the table `labels`.
        classes: labels to use; an item has the index of its label in this sequence. Tiles of other
            labels are left out. None keeps labels as they are.
        columns: columns of the tile tables that items contain, as in `results.tiles`. Of categories
            the item has the place in `dataset.categories[NAME].names`, the same on all slides.
        transform: gets uint8 (tile_px, tile_px, 3) and returns the image of the item, or several
            images as a tuple. Of a transform for Pillow's images, pass
            `lambda tile: augment(Image.fromarray(tile))`.
        shuffle: False keeps the order of slides and tables.
        seed: decides the order.
        memory: size of decoded tiles in one worker: two buffers.
        open_slides: slides that are mixed, and stay open.
        even: True gives all shards the same number of tiles. Each shard then leaves out at most one
            tile, and a tile that cannot be read is replaced by another one of its buffer. False
            gives each tile once. DDP without `Join` and FSDP hang at the end of an epoch if ranks
            have different numbers of batches. None means True if a process group with several
            ranks is initialised, else False.
        on_message: takes a line for each slide that is left out, in the process that reads it, and
            a line about tiles without a label; None makes them warnings of Python.

    Memory: for each worker: `memory` for two buffers of `buffer_tiles` = memory / (6 tile_px²)
    tiles; in addition 5/32 of `memory` for batches that are decoded and not yet in a buffer; one
    region of the level that is read for each decoding thread; 64 MiB and 16 bytes a tile for each
    open slide. About 1 kB per slide of the folder. Labels of tiles take 16 bytes a tile, and words
    4 for each letter of the longest word; otherwise the number of tiles does not matter.

    Raises:
        StoreError: no results folder, or a file of labels that is no table.
        InvalidInputError: no such grid, slide or column; labels of another length; no tiles.
        BudgetError: the memory does not hold two tiles.
    """

    def __init__(
        self,
        results: str | Path | Results,
        *,
        grid: str | None = None,
        slides: Sequence[str] | None = None,
        labels: Labels | LabelTable | None = None,
        label: str | None = None,
        classes: Sequence[object] | None = None,
        columns: Sequence[str] = (),
        transform: Callable[[RgbArray], object] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        memory: str = "512MiB",
        open_slides: int = 8,
        even: bool | None = None,
        on_message: Listener | None = None,
    ) -> None:
        super().__init__()
        if open_slides < 1:
            raise InvalidInputError(f"open_slides must be >= 1, got {open_slides}")
        if not isinstance(results, Results):
            results = open_results(results)
        on_message = on_message or warn
        chosen = choose_tiles(
            results,
            grid=grid,
            slide_ids=slides,
            labels=labels,
            label=label,
            classes=classes,
            on_message=on_message,
        )
        slides_with_columns = with_columns(
            results, chosen[0].slide.grid, [tiles.slide for tiles in chosen], columns
        )
        chosen = [
            replace(tiles, slide=slide)
            for tiles, slide in zip(chosen, slides_with_columns, strict=True)
        ]
        self.tile_px = _tile_px(chosen[0].slide)
        two_tiles_bytes = 2 * self.tile_px * self.tile_px * CHANNELS
        self.buffer_tiles = parse_bytes(memory, name="memory") // two_tiles_bytes
        if self.buffer_tiles < 1:
            raise BudgetError(
                f"memory must be >= {format_bytes(two_tiles_bytes)} for two tiles of "
                f"{self.tile_px} px, got {memory}"
            )
        rank = 0
        world_size = 1
        if distributed.is_available() and distributed.is_initialized():
            rank = distributed.get_rank()
            world_size = distributed.get_world_size()
        self._classes = classes
        self._items = TileItems(
            chosen=chosen,
            tile_px=self.tile_px,
            has_labels=labels is not None,
            columns=tuple(columns),
            transform=transform,
        )
        self._shards = TileShards(
            items=self._items,
            seed=seed,
            shuffle=shuffle,
            buffer_tiles=self.buffer_tiles,
            open_slides=open_slides,
            even=world_size > 1 if even is None else even,
            rank=rank,
            world_size=world_size,
            on_message=on_message,
        )
        # Epoch, and number of workers; shared, because workers that persist have copies of this
        # object.
        self._shared = torch.tensor([0, 0]).share_memory_()  # type: ignore[no-untyped-call]
        # Position that `load_state_dict` has set, at which the next iteration starts.
        self._resumed: EpochPosition | None = None
        # Position that this iteration has reached: tiles that were read, or used (`advance`).
        self._progress: EpochPosition | None = None

    def __repr__(self) -> str:
        columns = shortened(self._items.columns)
        return (
            f"TileDataset({counted(self.num_tiles, 'tile')} of {self.tile_px} px of "
            f"{counted(len(self.slide_ids), 'slide')}, columns: {columns}, rank "
            f"{self._shards.rank} of {self._shards.world_size})"
        )

    @property
    def categories(self) -> Mapping[str, Categories]:
        """Names and colours of the columns of categories; their items are places in the names.

        Examples:
            >>> dict(dataset.categories)
            {}
        """
        return self._items.chosen[0].slide.categories

    @property
    def slide_ids(self) -> tuple[str, ...]:
        """Ids of the slides that are used.

        Examples:
            >>> dataset.slide_ids
            ('a', 'b')
        """
        return tuple(tiles.slide_id for tiles in self._items.chosen)

    @property
    def num_tiles(self) -> int:
        """Tiles of one epoch, of all ranks and workers.

        Examples:
            >>> dataset.num_tiles == len(dataset.map_style())
            True
        """
        return len(self._items)

    @property
    def label_counts(self) -> dict[object, int]:
        """Number of tiles of each label, in the order of `classes`, or else of the labels.

        Examples:
            >>> ts.TileDataset("results", labels={"a": "high", "b": "low"}).label_counts
            {'high': ..., 'low': ...}
        """
        self._check_labels("label_counts")
        return count_labels(self._items.chosen, self._classes)

    def weights(self, *, by_slide: bool = False) -> Floats:
        """Returns a weight for each tile, so that a sampler draws the classes equally often.

        For `torch.utils.data.WeightedRandomSampler` with the tiles of `map_style`.

        Args:
            by_slide: True draws the slides of a class equally often too. Without labels, it draws
                all slides equally often.

        Returns:
            float64 (num_tiles,) with a mean of 1, by the number of the tile.

        Memory: 8 bytes per tile.

        Raises:
            InvalidInputError: there are no labels, or they are numbers that measure.

        Examples:
            >>> weights = dataset.weights(by_slide=True)
            >>> weights.shape == (dataset.num_tiles,)
            True
        """
        if not by_slide:
            self._check_labels("weights")
        return balanced_weights(self._items.chosen, by_slide=by_slide)

    def map_style(self) -> IndexedTiles:
        """Returns the same tiles as a map-style dataset, with `len` and `[]`, for samplers.

        Memory: see `IndexedTiles`.

        Examples:
            >>> tiles = dataset.map_style()
            >>> tiles[0]["slide_id"], tiles[-1]["slide_id"]
            ('a', 'b')
        """
        return IndexedTiles(self._items, open_slides=self._shards.open_slides)

    def loader(
        self,
        *,
        batch_size: int = 32,
        num_workers: int = 0,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        **options: Unpack[LoaderOptions],
    ) -> TileLoader:
        """Returns a loader of batches that counts epochs and knows its position.

        Args:
            batch_size: tiles of a batch.
            num_workers: processes that decode tiles; 0 decodes in threads of this process.
            drop_last: True leaves out the last batch of a worker if it is not full.
            collate_fn: makes a batch of a list of items; None uses that of PyTorch.
            options: further arguments of PyTorch's `DataLoader`: pin_memory=True.

        Memory: see `TileLoader`.

        Examples:
            >>> for batch in dataset.loader(batch_size=16):
            ...     images = batch["image"]
            >>> images.shape[1:]
            torch.Size([3, 128, 128])
        """
        return TileLoader(
            self._shards,
            batch_size=batch_size,
            num_workers=num_workers,
            drop_last=drop_last,
            collate_fn=collate_fn,
            options=options,
        )

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration reads; it changes the order.

        Examples:
            >>> dataset.set_epoch(1)
            >>> dataset.state_dict()["epoch"]
            1
        """
        self._shared[0] = epoch
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        self._progress = None

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        self._shared[1] = 1 if worker is None else worker.num_workers
        progress = self._begin()
        self._progress = progress
        # A second iteration of this process begins at the beginning.
        self._resumed = None
        for item, shard, position in self._shards.read(progress):
            yield item | {"shard": shard, "position": position}

    def advance(self, batch: Mapping[str, Any]) -> None:
        """Notes that a batch was used, so that `state_dict` continues after it.

        Needed for a DataLoader with workers, which read ahead of what is used. `loader` does so
        itself.

        Examples:
            >>> from torch.utils.data import DataLoader
            >>> for batch in DataLoader(dataset, batch_size=16, num_workers=1):
            ...     dataset.advance(batch)
            >>> dataset.state_dict()["positions"] == [dataset.num_tiles]
            True
        """
        shards = np.ravel(batch["shard"])
        positions = np.ravel(batch["position"])
        if self._progress is None:
            self._progress = self._begin()
        for shard, position in zip(shards.tolist(), positions.tolist()):
            self._progress.advance(shard, position)

    def state_dict(self) -> Document:
        """Position in the epoch, as plain values; each rank stores its own.

        Without workers it is the position after the last item. With workers, call `advance` with
        each batch, or use torchdata's StatefulDataLoader, which asks the workers.

        Examples:
            >>> first = next(iter(dataset))
            >>> dataset.state_dict()["positions"]
            [1]
        """
        progress = self._progress or self._begin()
        return self._shards.identity() | progress.state()

    def load_state_dict(self, state: Document) -> None:
        """Continues at a position; iterate a new DataLoader with as many workers afterwards.

        Raises:
            InvalidInputError: the position is that of another order: other slides, seed, memory,
                rank or number of ranks.

        Examples:
            >>> first = next(iter(dataset))
            >>> dataset.load_state_dict(dataset.state_dict())
            >>> next(iter(dataset))["position"]
            1
        """
        self._shards.check_state(state)
        self._resumed = EpochPosition.of_state(state)
        self._progress = None
        self._shared[0] = self._resumed.epoch

    def _begin(self) -> EpochPosition:
        """Position from which the next iteration reads."""
        epoch, num_workers = self._shared.tolist()
        progress = self._resumed
        if progress is None or progress.epoch != epoch:
            progress = EpochPosition(epoch=epoch)
        return progress.start(num_workers)

    def _check_labels(self, name: str) -> None:
        """Raises InvalidInputError: the dataset has no labels."""
        if not self._items.has_labels:
            raise InvalidInputError(
                f"labels must be given for {name}, got none; pass labels=..., or by_slide=True "
                "for weights by slide alone"
            )


def _tile_px(slide: TiledSlide) -> int:
    """Edge of a slide's tiles in pixels; the slide of another tool's grid is opened for it."""
    if slide.plan is not None:
        return slide.plan.tile_px
    with slide.open() as opened:
        return slide.table(opened).plan.tile_px
