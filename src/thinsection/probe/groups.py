"""Whose a row is: its patient, else its slide. What is split and resampled as one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError, require

CASE_COLUMNS = ("case_id", "patient_id")  # of a table of labels; the first that it has
# project, site and patient of a slide's name: TCGA-3C-AALI-01Z-00-DX1.F6E9A5DF -> TCGA-3C-AALI
_BARCODE = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}(?![A-Z0-9])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of each of N rows."""

    unit: Literal["patients", "slides"]  # what a group is: named beside each interval
    of_row: tuple[str, ...]  # (N,)
    slide_ids: tuple[str, ...] = ()  # (N,), '' where unknown

    def take(self, rows: npt.NDArray[np.int64]) -> "Groups":
        """Those of some rows."""
        kept = (tuple(names[i] for i in rows if names) for names in (self.of_row, self.slide_ids))
        return Groups(self.unit, *kept)

    def shared(self, other: "Groups") -> dict[str, list[str]]:
        """Groups, and slides, that occur in both."""
        slides = {*self.slide_ids} & {*other.slide_ids} - {""}
        return {self.unit: sorted({*self.of_row} & {*other.of_row}), "slides": sorted(slides)}

    @property
    def codes(self) -> npt.NDArray[np.int64]:
        """(N,) ranks 0..G-1 of the groups' names."""
        return np.unique(self.of_row, return_inverse=True)[1].astype(np.int64)


def group_rows(slide_ids: Sequence[str], case_ids: Sequence[str] = (), *, where: str) -> Groups:
    """The group of each row: its case_id, else the patient of a TCGA barcode, else its slide_id.

    '' is an unknown slide, or no case: the slide decides. () is a column that is not there. Raises
    DatasetError: a row without case and slide, or one slide under two cases.
    """
    slides = tuple(slide_ids) or ("",) * len(case_ids)
    cases = tuple(case_ids) or ("",) * len(slides)
    found = f"{len(slides)} and {len(cases)} in {where}"
    require(len(slides) == len(cases), "slide_ids and case_ids must be one a row", found)
    of_row = tuple(case or patient_of(slide) for slide, case in zip(slides, cases, strict=True))
    for i, group in enumerate(of_row):
        found = f"neither in row {i} of {where}"
        require(group, "each row must have a case_id or a slide_id", found, error=DatasetError)
    case_of: dict[str, str] = {}
    for slide, group in zip(slides, of_row, strict=True):
        other = case_of.setdefault(slide, group) if slide else group
        rule, found = "a slide must be of one case", f"{other!r} and {group!r} for {slide!r}"
        require(other == group, rule, f"{found} in {where}", error=DatasetError)
    return Groups("slides" if of_row == slides else "patients", of_row, slides)


def patient_of(slide_id: str) -> str:
    """The patient that a TCGA barcode names, in capitals; of any other slide its own id."""
    found = _BARCODE.match(slide_id)
    return found[0].upper() if found else slide_id


def table_groups(rows: Sequence[Mapping[str, str]], where: str) -> Groups | None:
    """The groups of a table's rows; None where it has neither case_id nor slide_id."""
    column = next((name for name in CASE_COLUMNS if rows and name in rows[0]), "")
    if not column and not (rows and "slide_id" in rows[0]):
        return None
    slides, cases = ([row.get(name, "") for row in rows] for name in ("slide_id", column))
    return group_rows(slides, cases, where=where)
