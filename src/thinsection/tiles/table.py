"""The tile table: which tiles of a slide are read, and what is known of each before reading."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.files.pages import notebook_html
from thinsection.slide.geometry import ReadPlan
from thinsection.types import CoordsL0
from thinsection.units import format_mpp


@dataclass(frozen=True, kw_only=True)
class TileTable:
    """Tiles of one slide, in the order in which they are read and stored.

    Attributes:
        coords_l0: int64 (N, 2), x and y of top-left corners in level-0 px.
        plan: how each of them is read.
        columns: name -> (N,) array, what is known per tile ('tissue_fraction', QC checks).

    Memory: 16 bytes per tile and the columns' items.
    """

    coords_l0: CoordsL0
    plan: ReadPlan
    columns: Mapping[str, npt.NDArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_coords(self.coords_l0)
        for name, column in self.columns.items():
            if column.shape != (len(self),):
                raise InvalidInputError(
                    f"column {name!r} must have shape ({len(self)},), got {column.shape}"
                )

    def __len__(self) -> int:
        return int(self.coords_l0.shape[0])

    def __repr__(self) -> str:
        return f"TileTable({', '.join(self._facts())})"

    def _repr_html_(self) -> str:
        return notebook_html(None, "TileTable", self._facts())

    def _facts(self) -> list[str]:
        mpp = self.plan.tile_mpp
        size = f"{self.plan.tile_px} px at {format_mpp(None if mpp is None else (mpp, mpp))}"
        facts = [f"{len(self)} tiles of {size}"]
        if len(self):
            low, high = self.coords_l0.min(axis=0), self.coords_l0.max(axis=0) + self.plan.size_l0
            spans = [f"{a} to {b}" for a, b in zip(low.tolist(), high.tolist())]
            facts.append(f"x {spans[0]} and y {spans[1]} in level-0 px")
        return [*facts, f"columns: {', '.join(self.columns) or 'none'}"]

    def select(self, keep: npt.NDArray) -> "TileTable":
        """The table of the tiles that a boolean mask (N,) or index array picks."""
        columns = {name: column[keep] for name, column in self.columns.items()}
        return replace(self, coords_l0=self.coords_l0[keep], columns=columns)

    def with_columns(self, columns: Mapping[str, npt.NDArray]) -> "TileTable":
        """The table with further columns."""
        return replace(self, columns={**self.columns, **columns})


def check_coords(coords_l0: npt.NDArray) -> None:
    """Refuses what is not int64 (N, 2).

    Raises:
        InvalidInputError: with the dtype and shape that came.
    """
    if coords_l0.dtype != np.int64 or coords_l0.ndim != 2 or coords_l0.shape[1] != 2:
        raise InvalidInputError(
            "coords_l0 must be int64 of shape (N, 2), "
            f"got {coords_l0.dtype} {tuple(coords_l0.shape)}"
        )
