"""Some thousand cells on their way from a reader to the table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinsection.cells.outlines import Outlines
from thinsection.types import Floats

if TYPE_CHECKING:
    import pyarrow as pa

# bounds of one batch
MAX_CELLS = 16_384
MAX_POINTS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class CellBatch:
    """Cells as a file has them, in the frame of the file.

    Attributes:
        ids: id of each cell; None where the file has none: the table then numbers them.
        outlines: their outlines; a cell without points needs a centre.
        centers: (N, 2), centres of cells without an outline, NaN for the others; None if all have
            outlines.
        classes: name of each cell's class; None where it has none.
        probability: probability of each cell, NaN where the file has none.
        nuclei: outlines of nuclei, without points where a cell has none.
        measurements: what else the file measured, by name; (N,) each.
        refused: number of objects that the reader left out, by reason.
        changed: number of cells that the reader simplified, by what it did.
    """

    ids: "Sequence[str | None] | pa.Array | None"
    outlines: Outlines
    centers: Floats | None = None
    classes: "Sequence[str | None] | pa.Array | None" = None
    probability: npt.NDArray[np.floating] | None = None
    nuclei: Outlines | None = None
    measurements: Mapping[str, npt.NDArray[np.floating]] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=Counter)
    changed: Mapping[str, int] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.outlines)
