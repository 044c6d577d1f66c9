"""Bags: the tile embeddings of a case, whose rows are read from the stored files when needed.

A bag that fits completely into the memory budget is kept from its first use on. Training cycles
through all bags, and no other rule has more cache hits in a cycle. For other bags only the drawn
rows are read from the file (`EmbeddingRows`): 2,048 of 20,000 tiles are a tenth of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from thinsection.errors import DatasetError
from thinsection.evaluation.embeddings import (
    added_in_order,
    check_finite_rows,
    open_embeddings,
)
from thinsection.store.hdf5 import open_h5, read_values
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import TilesFile, check_numbers
from thinsection.types import Closing, CoordsL0, Floats, Reals

PREFETCH = 1  # number of bags that are read ahead
# largest index that is kept in memory for a slide whose rows are not
INDEX_BYTES = 8192
SMALL_BYTES = 1 << 20  # a bag in memory of at most this size is not read in the thread
SUM_ROWS = 512  # rows that are summed or copied at a time
SLIDE_GAP = 1024  # number of empty cells between the slides of a bag

Rows = npt.NDArray[np.int64]
# embeddings of one slide, on disk or in memory
Stored = EmbeddingRows | Reals


class Bag(NamedTuple):
    """Tiles of a case, one slide after the other."""

    features: npt.NDArray[np.float32]  # (N, D)
    cells: Rows | None  # (N, 2), see `grid_cells`; None if they were not requested
    # (C,) numbers of the case, NaN for none; None without covariates
    covariates: npt.NDArray[np.float32] | None = None

    def tensors(
        self, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Features, cells and covariates on a device, as input of a head."""
        features = torch.from_numpy(self.features).to(device)
        cells = None
        if self.cells is not None:
            cells = torch.from_numpy(self.cells).to(device)
        covariates = None
        if self.covariates is not None:
            covariates = torch.from_numpy(self.covariates).to(device)
        return features, cells, covariates


class Bags(Closing):
    """Bags of cases; several slides of a case form one bag.

    Args:
        files: for each case, one embeddings file per slide.
        budget_bytes: memory for bags that are kept, in their stored data type.
        cells: True adds the positions of tiles to bags.
        covariates: numbers (n, C) of the cases, NaN for none; None without covariates.

    Memory: budget_bytes, 8 KiB per slide, and PREFETCH + 1 bags as requested (twice if float16 is
    stored, or a case has several slides). Compressed files and
    formats other than HDF5 are read whole.
    """

    def __init__(
        self,
        files: Sequence[Sequence[Path]],
        *,
        budget_bytes: int = 0,
        cells: bool = False,
        covariates: Floats | None = None,
    ) -> None:
        self.covariates = covariates
        self._files = files
        self._bytes_left = budget_bytes
        self.cells = cells
        self._kept: dict[int, Sequence[Stored]] = {}
        self._small: dict[int, Bag] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bags")

    def __len__(self) -> int:
        return len(self._files)

    def read(
        self, case: int, *, most: int = 0, rng: np.random.Generator | None = None
    ) -> Bag:
        """Bag of a case: all tiles, or with `rng` at most `most` random ones, in their order.

        Raises DatasetError: no tiles, slides of several encoders, or values that are not finite.
        """
        paths = self._files[case]
        slides = self._slides(case)
        total = sum(len(slide) for slide in slides)
        _check_slides(slides, paths)
        rows = None
        if rng is not None and 0 < most < total:
            rows = np.sort(rng.choice(total, most, replace=False))
        parts = [slide[:] for slide in slides] if rows is None else _take(slides, rows)
        features = _joined(parts, paths)
        cells = None
        if self.cells:
            cells = _read_cells(paths)
            cells = cells if rows is None else cells[rows]
        covariates = None
        if self.covariates is not None:
            covariates = self.covariates[case].astype(np.float32)
        return Bag(features, cells, covariates)

    def stored(self, case: int) -> StoredBag:
        """All tiles of a case, which are read in blocks; see `StoredBag` for its errors."""
        return StoredBag(self._slides(case), self._files[case])

    def covariates_of(self, case: int) -> torch.Tensor | None:
        """Covariates (C,) of a case in float32; None without."""
        if self.covariates is None:
            return None
        return torch.from_numpy(self.covariates[case].astype(np.float32))

    def _slides(self, case: int) -> Sequence[Stored]:
        """Slides of a case, kept from the first use on if the budget allows it."""
        if case in self._kept:
            return self._kept[case]
        slides: list[Stored] = [open_embeddings(path) for path in self._files[case]]
        size = sum(
            len(slide) * slide.shape[1] * slide.dtype.itemsize for slide in slides
        )
        if size <= self._bytes_left:
            self._bytes_left -= size
            slides = [slide[:] for slide in slides]
            self._kept[case] = slides
        elif all(
            isinstance(slide, EmbeddingRows) and slide.index_bytes <= INDEX_BYTES
            for slide in slides
        ):
            self._kept[case] = slides  # keep the positions of rows, not the rows
        return slides

    def stream(
        self, cases: Sequence[int], *, most: int = 0, seed: Sequence[int] = ()
    ) -> Iterator[tuple[int, Bag]]:
        """Yields each case and its bag, read ahead; `most` draws tiles by seed and case alone."""
        todo = iter(cases)
        waiting = deque[tuple[int, Future[Bag]]]()
        while True:
            for case in islice(todo, PREFETCH + 1 - len(waiting)):
                waiting.append((case, self._start(case, most, seed)))
            if not waiting:
                return
            case, future = waiting.popleft()
            yield case, future.result()

    def _start(self, case: int, most: int, seed: Sequence[int]) -> Future[Bag]:
        """Reads a bag in the thread; a small bag in memory is taken completely and at once.

        For such a bag, passing it through the thread would take longer than reading it.
        """
        bag = self._small_bag(case)
        if bag is not None and (most == 0 or most >= len(bag.features)):
            done = Future[Bag]()
            done.set_result(bag)
            return done
        rng = np.random.default_rng([*seed, case]) if most else None
        return self._thread.submit(self.read, case, most=most, rng=rng)

    def _small_bag(self, case: int) -> Bag | None:
        """Complete bag of a case, if its slides are in memory and small; None if not.

        The bag is kept, checked and joined, if it takes no memory or the budget has some left.
        """
        if case in self._small:
            return self._small[case]
        slides = [s for s in self._kept.get(case, ()) if isinstance(s, np.ndarray)]
        size = sum(slide.nbytes for slide in slides)
        if self.cells or not 0 < size <= SMALL_BYTES:
            return None
        bag = self.read(case)
        is_copy = not np.shares_memory(bag.features, slides[0])
        extra_bytes = bag.features.nbytes if is_copy else 0
        if extra_bytes <= max(0, self._bytes_left):
            self._bytes_left -= extra_bytes
            self._small[case] = bag
        return bag

    def close(self) -> None:
        """Ends the thread and releases the bags."""
        self._thread.shutdown(cancel_futures=True)
        self._kept.clear()
        self._small.clear()


@dataclass(frozen=True)
class StoredBag:
    """Tiles of a case in its files, one slide after the other, which are read in blocks.

    Raises DatasetError: see `Bags.read`.
    """

    slides: Sequence[Stored]
    paths: Sequence[Path]

    def __post_init__(self) -> None:
        _check_slides(self.slides, self.paths)
        for slide, path in zip(self.slides, self.paths, strict=True):
            if isinstance(slide, EmbeddingRows):
                slide.check()
            else:
                check_finite_rows(slide, path)

    def __len__(self) -> int:
        return sum(len(slide) for slide in self.slides)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tiles in float32."""
        return 4 * len(self) * self.dim

    @property
    def dim(self) -> int:
        """Channels of an embedding."""
        return int(self.slides[0].shape[1])

    def blocks(self, num_rows: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yields the tiles in blocks of `num_rows`, also across slides; the last may be smaller.

        Memory: two blocks.
        """
        block = np.empty((0, self.dim), np.float32)
        for slide in self.slides:
            start = 0
            while start < len(slide):
                rows = slide[start : start + num_rows - len(block)]
                start += len(rows)
                block = rows if not len(block) else np.concatenate([block, rows])
                if len(block) == num_rows:
                    yield np.ascontiguousarray(block, dtype=np.float32)
                    block = block[:0]
        if len(block):
            yield np.ascontiguousarray(block, dtype=np.float32)

    def mean(self) -> Floats:
        """Mean of the tiles (D,), summed row by row."""
        return mean_of_blocks(self.blocks(SUM_ROWS))

    def read(self, *, cells: bool) -> Bag:
        """All tiles. Memory: `num_bytes`, and a block."""
        features = np.empty((len(self), self.dim), np.float32)
        start = 0
        for block in self.blocks(SUM_ROWS):
            features[start : start + len(block)] = block
            start += len(block)
        return Bag(features, _read_cells(self.paths) if cells else None)


def mean_of_blocks(blocks: Iterable[Reals]) -> Floats:
    """Mean over the rows of all blocks in float64: the bits that NumPy gives for one array.

    Memory: one block in float64.
    """
    total = None
    count = 0
    for block in blocks:
        rows = block.astype(np.float64)
        total = rows.sum(axis=0) if total is None else added_in_order(total, rows)
        count += len(block)
    assert total is not None, "a bag has tiles"
    return np.asarray(total / count)


def _joined(slides: Sequence[Reals], paths: Sequence[Path]) -> npt.NDArray[np.float32]:
    """Embeddings of all slides as finite float32."""
    joined = slides[0] if len(slides) == 1 else np.concatenate(slides)
    features = np.ascontiguousarray(joined, dtype=np.float32)
    check_finite_rows(features, paths[0])
    return features


def _check_slides(slides: Sequence[Stored], paths: Sequence[Path]) -> None:
    """Raises DatasetError: no tiles, or several encoders."""
    names = ", ".join(repr(str(path)) for path in paths)
    if not any(len(slide) for slide in slides):
        raise DatasetError(f"a case must have tiles, got none in {names}")
    widths = sorted({slide.shape[1] for slide in slides})
    if len(widths) > 1:
        raise DatasetError(
            f"slides of a case must have embeddings of one encoder, got {widths} channels in "
            f"{names}"
        )


def _take(slides: Sequence[Stored], rows: Rows) -> list[Reals]:
    """Rows of each slide; `rows` are numbered through all slides."""
    parts = []
    first = 0
    for slide in slides:
        last = first + len(slide)
        parts.append(slide[rows[(rows >= first) & (rows < last)] - first])
        first = last
    return parts


def _read_cells(paths: Sequence[Path]) -> Rows:
    """Cells of all tiles of a case. Memory: 32 N bytes."""
    slides = []
    for path in paths:
        with open_h5(path) as file:
            stored = read_values(file, "coords", path)
            attributes = dict(file.attrs) | dict(file["coords"].attrs)
            coords = stored.astype(np.int64).reshape(-1, 2)
        check_numbers(attributes, path)
        tiles = TilesFile(coords_l0=coords, features=None, attributes=attributes)
        if not tiles.tile_px_l0:
            raise DatasetError(
                f"coords must state their patch_size_level0, got none in {str(path)!r}; use a "
                "head that ignores tile positions"
            )
        slides.append((coords, int(tiles.tile_px_l0)))
    return grid_cells(slides)


def grid_cells(slides: Sequence[tuple[CoordsL0, int]]) -> Rows:
    """Column and row (N, 2) of each tile of a bag; slides are side by side, SLIDE_GAP apart.

    Args:
        slides: for each slide the tiles' corners, and the edge of a tile in level-0 pixels.
    """
    parts = []
    left = 0
    for coords_l0, edge in slides:
        cells = (coords_l0 - coords_l0.min(0)) // edge + np.array([left, 0])
        left = int(cells[:, 0].max()) + SLIDE_GAP
        parts.append(cells)
    return np.concatenate(parts).astype(np.int64)
