"""Case, patient and site of a row. A patient is split and resampled whole."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError, InvalidInputError
from thinsection.types import counted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ValueT = TypeVar("ValueT", bound="DataclassInstance")
CellT = TypeVar("CellT")
Unit = Literal["patients", "slides", "cases", "images", "rows"]
CASE_COLUMNS = ("case_id", "patient_id")
# largest number of slides with the same beginning of their names that may be of one patient
MAX_ALIKE = 10
# (?i) project, site and patient of TCGA: TCGA-3C-AALI-01Z-00-DX1.F6E9A5DF -> TCGA-3C-AALI;
# case of CPTAC: C3L-00081-21 -> C3L-00081, 01BR001-6e8ec -> 01BR001;
# donor of GTEx: GTEX-1117F-0126 -> GTEX-1117F
_BARCODE = re.compile(
    r"(?<![A-Z0-9])(?:TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}|C3[LN]-\d{5}|\d{2}(?:BR|CO|OV)\d{3}"
    r"|GTEX-[A-Z0-9]{4,5})(?![A-Z0-9])",
    re.IGNORECASE,
)
_TCGA_SITE = re.compile(r"(?<![A-Z0-9])TCGA-[A-Z0-9]{2}(?=-[A-Z0-9]{4})", re.IGNORECASE)
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
# the last part of P001_A, P001-2, P001_HE, P001B
_LAST_PART = re.compile(r"(?:[_\-. ][A-Za-z]*\d{0,2}|(?<=\d)[A-Za-z])$")


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of N rows, such as patients. A group is split and resampled as a whole."""

    unit: Unit  # kind of the groups, which is shown beside each interval
    of_row: tuple[str, ...]  # (N,), group of each row
    slide_ids: tuple[str, ...] = ()  # (N,), '' where unknown

    @classmethod
    def each(cls, ids: Iterable[str], unit: Unit) -> "Groups":
        """Groups for unknown patients: rows with the same id are one group."""
        return cls(unit, tuple(ids))

    @property
    def total(self) -> int:
        """Number of groups."""
        return len(set(self.of_row))

    @property
    def words(self) -> str:
        """Number and kind of the groups: '12 patients'; says so if patients are unknown."""
        if self.unit == "patients":
            return f"{self.total} {self.unit}"
        one = self.unit.removesuffix("s")
        return f"{self.total} {self.unit} (patients unknown: each {one} counts as one patient)"

    def of_cases(self, cases: int) -> str:
        """Numbers of cases and of groups: '70 cases of 40 patients'."""
        if self.unit == "cases" and cases == self.total:
            return self.words
        return f"{counted(cases, 'case')} of {self.words}"

    def take(self, rows: npt.NDArray[np.int64] | Sequence[int]) -> "Groups":
        """Groups of some rows."""
        slide_ids = tuple(self.slide_ids[i] for i in rows) if self.slide_ids else ()
        return Groups(self.unit, tuple(self.of_row[i] for i in rows), slide_ids)

    def shared(self, other: "Groups") -> dict[str, list[str]]:
        """Groups and slides that occur in both, by kind."""
        slides = {*self.slide_ids} & {*other.slide_ids} - {""}
        return {
            self.unit: sorted({*self.of_row} & {*other.of_row}),
            "slides": sorted(slides),
        }

    @property
    def codes(self) -> npt.NDArray[np.int64]:
        """(N,), number 0..G-1 of each row's group, in the order of the sorted names."""
        return np.unique(self.of_row, return_inverse=True)[1].astype(np.int64)


def take_rows(
    value: ValueT,
    rows: npt.NDArray[np.int64] | Sequence[int],
    names: Iterable[str],
    **others: object,
) -> ValueT:
    """The value with some of its rows.

    Args:
        value: a dataclass.
        rows: numbers of the rows.
        names: fields with one entry per row: arrays, tuples, groups; None and () are not changed.
        others: further fields that change.
    """
    fields = dict(others)
    for name in names:
        column = getattr(value, name)
        if isinstance(column, tuple):
            fields[name] = tuple(column[row] for row in rows) if column else ()
        elif isinstance(column, Groups):
            fields[name] = column.take(rows)
        elif column is not None:
            fields[name] = column[rows]
    return replace(value, **fields)


def plain_id(text: str) -> str:
    """An id without outer spaces, capitals and leading zeros: 'pat1' for 'Pat01 ' and 'pat1'."""
    return _LEADING_ZEROS.sub("", text.strip().casefold())


def one_spelling(ids: Iterable[str]) -> tuple[str, ...]:
    """Each id in the spelling that came first; see `plain_id`."""
    first: dict[str, str] = {}
    return tuple(first.setdefault(plain_id(text), text) for text in ids)


def spelling_notes(*columns: Iterable[str]) -> list[str]:
    """A sentence if a column of a table writes the same id in several ways."""
    differing: dict[str, str] = {}
    for ids in columns:
        texts = [text for text in ids if text]
        pairs = zip(texts, one_spelling(texts), strict=True)
        differing |= {text: first for text, first in pairs if text != first}
    if not differing:
        return []
    shown = [f"{text!r} as {first!r}" for text, first in differing.items()]
    return [
        "the ids are compared without spaces, capital letters and leading zeros: "
        f"{len(differing)} matched an id that is written differently, {listed_names(shown)}"
    ]


def listed_names(names: Sequence[str]) -> str:
    """The first three names, and dots if there are more."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def patient_of(slide_id: str) -> str:
    """The patient in a TCGA, CPTAC or GTEx barcode, in capitals; else the id itself."""
    barcode = _BARCODE.search(slide_id)
    return barcode[0].upper() if barcode else slide_id


def site_of(slide_id: str) -> str:
    """The tissue source site of a TCGA barcode, 'TCGA-3C'; '' of any other id."""
    site = _TCGA_SITE.search(slide_id)
    return site[0].upper() if site else ""


def alike_names(slide_ids: Iterable[str]) -> list[list[str]]:
    """Groups of slides whose names differ only in the last part, as slides of a patient often do.

    It is a guess for a warning. P001_A and P001_B are such a group; slide_1 and slide_2 are not, as
    their common part has no number.
    """
    by_start = defaultdict[str, list[str]](list)
    for name in dict.fromkeys(slide_ids):
        start = _LAST_PART.sub("", name)
        if start != name and any(c.isdigit() for c in start):
            by_start[plain_id(start)].append(name)
    return [alike for alike in by_start.values() if 2 <= len(alike) <= MAX_ALIKE]


def case_rows(slide_ids: Sequence[str], case_ids: Sequence[str]) -> tuple[str, ...]:
    """The case of each row: its case_id, else the patient of its slide's barcode, else its slide.

    Cases are spelled as they were first. () is a column that is not there.
    """
    slides = tuple(slide_ids) or ("",) * len(case_ids)
    cases = tuple(case_ids) or ("",) * len(slides)
    pairs = zip(slides, cases, strict=True)
    return one_spelling(case or patient_of(slide) for slide, case in pairs)


def group_rows(
    slide_ids: Sequence[str],
    case_ids: Sequence[str] = (),
    patient_ids: Sequence[str] = (),
    *,
    where: str,
) -> Groups:
    """The patient of each row: patient_id, else case_id, else that of a barcode, else slide_id.

    '' is an unknown id; () stands for a missing column. Ids that differ only in spaces, capitals
    and leading zeros are the same.

    Raises DatasetError: a row without any id, or one slide under two patients.
    """
    n = max(len(slide_ids), len(case_ids), len(patient_ids))
    columns = [tuple(ids) or ("",) * n for ids in (slide_ids, case_ids, patient_ids)]
    lengths = [len(ids) for ids in columns]
    if lengths != [n, n, n]:
        raise InvalidInputError(
            f"slide_ids, case_ids and patient_ids must have one entry per row, got {lengths} in "
            f"{where}"
        )
    names = []
    for row, (slide, case, patient) in enumerate(zip(*columns, strict=True)):
        name = patient or patient_of(case or slide)
        if not name:
            raise DatasetError(
                f"each row must have a case_id or a slide_id, got neither in row {row} of "
                f"{where}"
            )
        names.append(name)
    of_row = one_spelling(names)
    patient_by_slide: dict[str, str] = {}
    for slide, patient in zip(columns[0], of_row, strict=True):
        other = patient_by_slide.setdefault(slide, patient) if slide else patient
        if other != patient:
            raise DatasetError(
                f"a slide must belong to one case, got {other!r} and {patient!r} for {slide!r} "
                f"in {where}"
            )
    if of_row == columns[0]:
        return Groups("slides", of_row, columns[0])
    return Groups("patients", of_row, columns[0])


def table_groups(rows: Sequence[Mapping[str, str]], where: str) -> Groups | None:
    """The patients of a table's rows; None if it has no column of slides, cases or patients."""
    if not rows or not {"slide_id", *CASE_COLUMNS} & rows[0].keys():
        return None
    slides = [row.get("slide_id", "") for row in rows]
    cases = [row.get("case_id", "") for row in rows]
    patients = [row.get("patient_id", "") for row in rows]
    return group_rows(slides, cases, patients, where=where)


def one_per_case(
    cells_of_rows: Sequence[Sequence[CellT]],
    cases: Sequence[str],
    columns: Sequence[str],
    where: str,
    remedy: str = "",
) -> dict[str, list[CellT]]:
    """Case -> its cells in some columns; all rows of a case must have the same cells.

    A blank cell (None) is taken from another row of the case.

    Raises DatasetError: cells of a case differ.
    """
    cells_by_case: dict[str, list[CellT]] = {}
    for row, case in zip(cells_of_rows, cases, strict=True):
        first = cells_by_case.setdefault(case, list(row))
        for number, (column, cell) in enumerate(zip(columns, row, strict=True)):
            if first[number] is None:
                first[number] = cell
            elif cell is not None and cell != first[number]:
                raise DatasetError(
                    f"{column} must be the same in all rows of a case, got {first[number]!r} and "
                    f"{cell!r} for {case!r} in {where!r}{remedy}"
                )
    return cells_by_case


def slides_and_patients(
    slides: Sequence[str], cases: Sequence[str], groups: Groups, where: str
) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Case -> the slides of its rows, and the patient of each case.

    Where only slides are known, a case counts as the patient of its first slide.

    Raises DatasetError: a case of two patients.
    """
    slides_by_case = defaultdict[str, list[str]](list)
    patient_by_case: dict[str, str] = {}
    for slide, case, patient in zip(slides, cases, groups.of_row, strict=True):
        slides_by_case[case].append(slide)
        first = patient_by_case.setdefault(case, patient)
        if first != patient and groups.unit == "patients":
            raise DatasetError(
                f"a case must belong to one patient, got {first!r} and {patient!r} for {case!r} "
                f"in {where!r}"
            )
    return slides_by_case, tuple(patient_by_case.values())
