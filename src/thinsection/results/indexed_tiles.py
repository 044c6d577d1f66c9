"""Tiles of a results folder by their number: a map-style dataset of PyTorch, for samplers."""

from __future__ import annotations

import operator
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import SupportsIndex

import numpy as np
from torch.utils.data import Dataset

from thinsection.errors import InvalidInputError, ThinsectionError
from thinsection.results.tile_items import Item, TileItems
from thinsection.slide import Slide
from thinsection.slide.resize import read_tiles
from thinsection.tiles import TileTable
from thinsection.tiles.order import Numbers
from thinsection.types import Closing, counted


class IndexedTiles(Dataset[Item], Closing):
    """Tiles of a `TileDataset` by their number, from 0 to N - 1; from `TileDataset.map_style`.

    Use it with a sampler of PyTorch: WeightedRandomSampler, SubsetRandomSampler,
    DistributedSampler. `tiles[i]` is the item that the stream gives for the same tile, without
    `shard` and `position`; its "index" is i. A negative number counts from the end. For a slice,
    use `torch.utils.data.Subset`.

    The numbers follow the slides of the results folder, and the rows of their tile tables. So they
    are the same in each process and in each run.

    A loader reads the tiles of a batch slide by slide. Still, reading the stream takes less time,
    because neighbouring tiles share parts of the file that are decoded once.

    Threads may read at once. After a fork or a spawn, each process opens its own slides.

    Memory: in each process the tiles of a batch, twice; 64 MiB and 16 bytes a tile for each of at
    most `open_slides` open slides; one region of the level that is read.
    """

    def __init__(self, items: TileItems, *, open_slides: int) -> None:
        self._items = items
        self._slides = _OpenSlides(items, open_slides)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """Yields all tiles by their number."""
        for index in range(len(self)):
            yield self[index]

    def __getitem__(self, index: SupportsIndex) -> Item:
        """Reads one tile.

        Raises:
            IndexError: the number is too large or too small.
            InvalidInputError: a slice, or no whole number.
            SlideOpenError, SlideReadError, StoreError: the slide cannot be read.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Item]:
        """Reads several tiles, slide by slide; returns them in the order of the numbers.

        A `DataLoader` calls it with the numbers of a batch.

        Raises:
            IndexError: a number is too large or too small.
            InvalidInputError: a number is not whole.
            SlideOpenError, SlideReadError, StoreError: a slide cannot be read.
        """
        wanted = [self._index(index) for index in indices]
        uses = Counter(wanted)
        distinct = np.array(sorted(uses), np.int64)
        numbers = self._items.slides_of(distinct)
        by_index: dict[int, list[Item]] = {}
        for number in np.unique(numbers).tolist():
            of_slide = distinct[numbers == number]
            try:
                for item in self._read(number, of_slide, uses):
                    by_index.setdefault(item["index"], []).append(item)
            except ThinsectionError as error:
                error.add_note(f"slide {self._items.chosen[number].slide_id!r}")
                raise
        return [by_index[index].pop() for index in wanted]

    def close(self) -> None:
        """Closes the slides of this process; the next access opens them again.

        Examples:
            >>> with dataset.map_style() as tiles:
            ...     tiles[3]["image"].shape
            torch.Size([3, 128, 128])
        """
        self._slides.close()

    def __repr__(self) -> str:
        tiles = counted(len(self), "tile")
        slides = counted(len(self._items.chosen), "slide")
        return f"IndexedTiles({tiles} of {self._items.tile_px} px of {slides})"

    def _index(self, index: SupportsIndex) -> int:
        """A number from 0 to N - 1. Raises IndexError or InvalidInputError, see `__getitem__`."""
        try:
            number = operator.index(index)
        except TypeError:
            raise InvalidInputError(
                f"index must be a whole number, got {index!r}; for several tiles use "
                "torch.utils.data.Subset(tiles, range(...))"
            ) from None
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"index must be in [{-count}, {count - 1}], got {number}")
        return number % count

    def _read(
        self, number: int, indices: Numbers, uses: Mapping[int, int]
    ) -> Iterator[Item]:
        """Reads tiles of one slide, and yields an item for each use of a tile."""
        items = self._items
        rows = items.chosen[number].table_rows(indices - items.first_indices[number])
        with self._slides.lend(number) as (slide, table):
            chosen = table.select(rows)
            edge = items.tile_px
            pixels = np.empty((len(chosen), edge, edge, 3), np.uint8)
            read_tiles(slide, chosen.plan, chosen.coords_l0, pixels)
        for place, index in enumerate(indices.tolist()):
            columns = {
                name: np.float32(chosen.columns[name][place]) for name in items.columns
            }
            for _ in range(uses[index]):
                yield items.item(
                    index, pixels[place].copy(), chosen.coords_l0[place], columns
                )


class _OpenSlides:
    """Slides that a process has opened, at most so many; its threads share them.

    A copy in another process begins without slides. Those that a forked process has inherited are
    neither used nor closed there: another thread may have held their locks.
    """

    def __init__(self, items: TileItems, limit: int) -> None:
        self._items = items
        self._limit = limit
        self._process = _SlidesOfProcess()
        self._inherited: list[_SlidesOfProcess] = []

    def __getstate__(self) -> tuple[TileItems, int]:
        return self._items, self._limit

    def __setstate__(self, state: tuple[TileItems, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @contextmanager
    def lend(self, number: int) -> Iterator[tuple[Slide, TileTable]]:
        """Opens a slide if it is closed, and keeps it open within the block.

        If all open slides are in use, it waits until one is free.
        """
        process = self._process
        if process.pid != os.getpid():
            self._inherited.append(process)
            process = self._process = _SlidesOfProcess()
        with process.changed:
            while number not in process.opened and not self._has_room(process):
                process.changed.wait()
            if number not in process.opened:
                process.opened[number] = self._items.open(number)
            process.opened.move_to_end(number)
            process.uses[number] = process.uses.get(number, 0) + 1
            opened = process.opened[number]
        try:
            yield opened
        finally:
            with process.changed:
                process.uses[number] -= 1
                process.changed.notify_all()

    def _has_room(self, process: _SlidesOfProcess) -> bool:
        """Closes the slide whose last use is longest ago, if there is no room for another one."""
        if len(process.opened) < self._limit:
            return True
        for number, (slide, _) in process.opened.items():
            if not process.uses[number]:
                slide.close()
                del process.opened[number]
                return True
        return False

    def close(self) -> None:
        """Closes the slides that are not in use."""
        process = self._process
        if process.pid != os.getpid():
            return
        with process.changed:
            for number in list(process.opened):
                if not process.uses[number]:
                    process.opened.pop(number)[0].close()


class _SlidesOfProcess:
    """Open slides of one process with their tile tables, by number; the last used comes last."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.changed = threading.Condition()
        self.opened: OrderedDict[int, tuple[Slide, TileTable]] = OrderedDict()
        self.uses: dict[int, int] = {}  # threads that read a slide now
