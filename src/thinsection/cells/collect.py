"""Collects cells one at a time, and hands them on as batches."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from thinsection.cells.batch import MAX_CELLS, MAX_POINTS, CellBatch
from thinsection.cells.outlines import Outlines
from thinsection.types import Floats, Json

NOT_NUMBERS = "with coordinates that are no numbers"


class Rings:
    """Rings of x, y that a file gives as lists, one after another."""

    def __init__(self) -> None:
        self._values = array("d")
        self._counts = array("q")

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def num_points(self) -> int:
        """Number of points of all rings."""
        return len(self._values) // 2

    def add(self, ring: Sequence[Json]) -> None:
        """Takes a ring of [x, y, ...].

        Raises:
            TypeError or ValueError: a coordinate is no number.
        """
        num_before = len(self._values)
        try:
            self._values.extend(chain.from_iterable(ring))
            if len(self._values) - num_before != 2 * len(ring):
                del self._values[num_before:]
                for point in ring:  # a third coordinate is not used
                    x, y = point[:2]
                    self._values.append(x)
                    self._values.append(y)
        except (TypeError, ValueError):
            del self._values[num_before:]
            raise
        self._counts.append(len(ring))

    def add_none(self) -> None:
        """Takes the place of a cell without a ring."""
        self._counts.append(0)

    def take(self) -> Outlines:
        """Returns the rings and begins anew."""
        points = np.array(self._values, dtype=np.float64).reshape(-1, 2)
        counts = np.array(self._counts, dtype=np.int64)
        self._values = array("d")
        self._counts = array("q")
        return Outlines.of_counts(points, counts)


class CellCollector:
    """Cells that were read since the last batch.

    Memory: some 40 MiB.
    """

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self._outlines = Rings()
        self._nuclei = Rings()
        self._has_nuclei = False
        self._centers: list[tuple[float, float]] = []
        self._has_centers = False
        self._ids: list[str | None] = []
        self._classes: list[str | None] = []
        self._probability: list[float] = []
        self._measurements: list[Mapping[str, Json]] = []

    @property
    def is_full(self) -> bool:
        """True when the cells should be handed on."""
        num_points = self._outlines.num_points + self._nuclei.num_points
        return len(self._ids) >= MAX_CELLS or num_points >= MAX_POINTS

    def add(
        self,
        ring: Sequence[Json] | None,
        *,
        cell_id: str | None = None,
        class_name: str | None = None,
        center: tuple[float, float] | None = None,
        nucleus: Sequence[Json] | None = None,
        probability: float = np.nan,
        measurements: Mapping[str, Json] | None = None,
    ) -> None:
        """Takes a cell; counts it where its coordinates are no numbers."""
        try:
            if ring:
                self._outlines.add(ring)
            elif center is not None:
                self._centers.append((float(center[0]), float(center[1])))
                self._outlines.add_none()
            else:
                self._outlines.add_none()
        except (TypeError, ValueError):
            self.refused[NOT_NUMBERS] += 1
            return
        if ring or center is None:
            self._centers.append((np.nan, np.nan))
        else:
            self._has_centers = True
        try:
            if nucleus:
                self._nuclei.add(nucleus)
                self._has_nuclei = True
            else:
                self._nuclei.add_none()
        except (TypeError, ValueError):
            self._nuclei.add_none()
            self.changed["without a nucleus whose coordinates are numbers"] += 1
        self._ids.append(cell_id)
        self._classes.append(class_name or None)
        self._probability.append(probability)
        self._measurements.append(measurements or {})

    def take(self) -> CellBatch:
        """Returns the cells as a batch and begins anew."""
        outlines = self._outlines.take()
        nuclei = self._nuclei.take()
        batch = CellBatch(
            ids=self._ids,
            outlines=outlines,
            centers=np.array(self._centers) if self._has_centers else None,
            classes=self._classes,
            probability=np.array(self._probability, dtype=np.float32),
            nuclei=nuclei if self._has_nuclei else None,
            measurements=_columns(self._measurements),
            refused=self.refused,
            changed=self.changed,
        )
        self.refused = Counter()
        self.changed = Counter()
        self._centers = []
        self._has_centers = False
        self._has_nuclei = False
        self._ids = []
        self._classes = []
        self._probability = []
        self._measurements = []
        return batch


def _columns(rows: Sequence[Mapping[str, Json]]) -> dict[str, Floats]:
    """Columns of measurements; NaN where a cell has none, or no number."""
    names: dict[str, None] = {}
    last: Mapping[str, Json] = {}
    for row in rows:
        if row.keys() != last.keys():
            names |= dict.fromkeys(row)
            last = row
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: Sequence[Json]) -> Floats:
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        return np.array([number_or_nan(value) for value in values], dtype=np.float64)


def number_or_nan(value: Json) -> float:
    """A number as float; NaN for a text that is none, and for lists and tables."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
