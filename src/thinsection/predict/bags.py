"""Bags: the tile embeddings of a case, rows of which are read from the stored files by need.

A bag that fits the budget whole is kept from its first use on and never thrown out: in a cycle
through all bags, which training is, no other rule has more hits. Of the others the drawn rows are
read from their places in the file (`EmbeddingRows`): 2,048 of 20,000 tiles are a tenth of it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError, require
from thinsection.evaluation.embeddings import check_finite, open_embeddings
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import (
    TilesFile,
    check_numbers,
    open_h5,
    stored_dataset,
)
from thinsection.types import Closing, CoordsL0

PREFETCH = 1  # bags that are read ahead
_INDEX = 8192  # bytes of what is kept of a slide that is not

Rows = npt.NDArray[np.int64]
Stored = EmbeddingRows | npt.NDArray[Any]  # of one slide: on disk, or in memory


class Bag(NamedTuple):
    """Tiles of a case, slide after slide."""

    features: npt.NDArray[np.float32]  # (N, D)
    cells: Rows | None  # (N, 2), see `grid_cells`; None where they were not asked for


class Bags(Closing):
    """The bags of cases; several slides of a case are one bag.

    Args:
        files: of each case, an embeddings file a slide.
        budget_bytes: of bags that are kept whole, in the type in which they are stored.
        cells: whether bags have the places of their tiles.

    Memory: budget_bytes, 8 KiB a slide, and PREFETCH + 1 bags as they are asked for (twice where
    float16 is stored, or a case has several slides). Packed files, and no HDF5, are read whole.
    """

    def __init__(
        self,
        files: Sequence[Sequence[Path]],
        *,
        budget_bytes: int = 0,
        cells: bool = False,
    ) -> None:
        self._files, self._left, self.cells = files, budget_bytes, cells
        self._kept: dict[int, Sequence[Stored]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bags")

    def __len__(self) -> int:
        return len(self._files)

    def read(
        self, case: int, *, most: int = 0, rng: np.random.Generator | None = None
    ) -> Bag:
        """The bag of a case: all tiles, or with `rng` a draw of at most `most`, in their order.

        Raises DatasetError: no tiles, slides of several encoders, values that are not finite.
        """
        paths = self._files[case]
        slides = self._kept.get(case) or self._opened(case)
        names = ", ".join(repr(str(path)) for path in paths)
        total, widths = (
            sum(len(s) for s in slides),
            sorted({s.shape[1] for s in slides}),
        )
        require(total, "a bag must hold tiles", f"none in {names}", error=DatasetError)
        rule = "slides of a case must have embeddings of one encoder"
        require(len(widths) == 1, rule, f"D of {widths} in {names}", error=DatasetError)
        rows = None
        if rng is not None and 0 < most < total:
            rows = np.sort(rng.choice(total, most, replace=False))
        edges = np.cumsum(
            [0, *(len(slide) for slide in slides)]
        )  # rows count through all slides
        parts = [
            slide[:]
            if rows is None
            else slide[rows[(rows >= first) & (rows < last)] - first]
            for slide, first, last in zip(slides, edges, edges[1:], strict=False)
        ]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        features = np.ascontiguousarray(joined, dtype=np.float32)
        if not np.isfinite(
            features.sum()
        ):  # in float32 also where the sum alone overflows
            check_finite(
                features, [f"row {i} of {paths[0].name}" for i in range(len(features))]
            )
        cells = (
            _cells(paths)[slice(None) if rows is None else rows] if self.cells else None
        )
        return Bag(features, cells)

    def count(self, case: int) -> int:
        """Number of tiles of a case."""
        return sum(len(slide) for slide in self._kept.get(case) or self._opened(case))

    def _opened(self, case: int) -> Sequence[Stored]:
        slides: list[Stored] = [open_embeddings(p) for p in self._files[case]]
        size = sum(len(s) * s.shape[1] * s.dtype.itemsize for s in slides)
        if size <= self._left:
            self._left -= size
            self._kept[case] = slides = [s[:] for s in slides]
        elif all(getattr(s, "index_bytes", _INDEX + 1) <= _INDEX for s in slides):
            self._kept[case] = slides  # open, so to say: where their rows lie
        return slides

    def stream(
        self, cases: Sequence[int], *, most: int = 0, seed: Sequence[int] = ()
    ) -> Iterator[tuple[int, Bag]]:
        """Each case with its bag, read ahead; `most` draws tiles by the seed and the case alone."""
        todo, waiting = iter(cases), deque[Any]()
        while True:
            for case in islice(todo, PREFETCH + 1 - len(waiting)):
                rng = np.random.default_rng([*seed, case]) if most else None
                waiting.append(
                    (case, self._thread.submit(self.read, case, most=most, rng=rng))
                )
            if not waiting:
                return
            case, future = waiting.popleft()
            yield case, future.result()

    def close(self) -> None:
        """Ends the thread and lets the bags go."""
        self._thread.shutdown(cancel_futures=True)
        self._kept.clear()


def _cells(paths: Sequence[Path]) -> Rows:
    """The cells of all tiles of a case. Memory: 32 N bytes."""
    found = []
    for path in paths:
        with open_h5(path) as file:
            coords = stored_dataset(file, "coords", path)
            said = dict(file.attrs) | dict(coords.attrs)
            at = np.asarray(coords[...], np.int64).reshape(-1, 2)
        check_numbers(said, path)
        edge = TilesFile(coords_l0=at, features=None, attributes=said).tile_px_l0
        rule, got = "coords must say their patch_size_level0", f"none in {str(path)!r}"
        require(edge, rule, f"{got}; take a head without places", error=DatasetError)
        found.append((at, int(edge or 1)))
    return grid_cells(found)


def grid_cells(slides: Sequence[tuple[CoordsL0, int]]) -> Rows:
    """Column and row (N, 2) of each tile of a bag; its slides lie side by side, 1,024 cells apart.

    Of each slide it takes the tiles' corners and a tile's edge, level-0 px.
    """
    parts, left = [], 0
    for coords_l0, edge in slides:
        cells = (coords_l0 - coords_l0.min(0)) // edge + np.array([left, 0])
        left = int(cells[:, 0].max()) + 1024
        parts.append(cells)
    return np.concatenate(parts).astype(np.int64)
