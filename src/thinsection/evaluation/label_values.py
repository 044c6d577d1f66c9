"""Labels of the rows of a table: their kind, the value of each row, and how each value was read."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from thinsection.config import nearest, option
from thinsection.errors import ConfigError
from thinsection.evaluation.cell_values import (
    Cell,
    ColumnValues,
    Meaning,
    Numbers,
    ValueReading,
    class_name,
    event_of,
    flag_of,
    is_bound,
    is_code,
    ordered_classes,
    parse_overrides,
    read_cells,
    shown_readings,
)
from thinsection.evaluation.follow_up import MISSING_TIME, TIMES_SIGN, read_follow_up
from thinsection.evaluation.tables import LabelTable
from thinsection.evaluation.target import FAR, Kind, Target, TaskName, outliers
from thinsection.files.missing_cells import plain_text
from thinsection.types import counted

MOST_CLASSES = 10  # different numbers that are taken for classes
MANY_CLASSES = 20  # that are asked back where there are nearly as many as cases
_MOST_VALUES = 5  # that a message names
_MOST_KNOWN = 40  # values among which the nearest is searched


LabelCell = str | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelsConfig:
    """Settings that say what is learnt, and from which embeddings."""

    labels: Path | None = option(
        None,
        "Table (CSV, TSV, Excel or Parquet) with the column slide_id or case_id, and the "
        "target. [required]",
        daily=True,
    )
    target: tuple[str, ...] = option(
        (),
        "Column to predict; repeat the option for several labels. [required]",
        daily=True,
    )
    time: str | tuple[str, ...] | None = option(
        None,
        "Survival: column with the time to event or end of follow-up. Repeat the option if "
        "the times are in two columns. --target is the event.",
        daily=True,
    )
    read: tuple[str, ...] = option(
        (),
        "How to read a value of the target or time, as VALUE=READING. READING is missing, class, "
        "number, event or censored, or another class or number. Examples: NA=class, 2=event, "
        "pos=positive. Repeat the option for several.",
    )
    drop_unusable: bool = option(
        False,
        "Leave out rows with a missing or negative time, or with a limit such as <5 in place of a "
        "number. Without it they are an error that names the rows.",
    )
    task: TaskName = option(
        "auto",
        "Kind of target. ordinal: ordered classes; cox, discrete: survival.",
        daily=True,
    )
    positive: str | None = option(
        None,
        "Class that counts as positive. [default: the rarer of two classes]",
        daily=True,
    )
    site: str | None = option(
        None,
        "Column with the hospital or centre. [default: the site in TCGA barcodes]",
        daily=True,
    )
    subgroup: tuple[str, ...] = option(
        (),
        "Column for whose values the page has separate scores; repeat the option for "
        "several.",
    )
    covariate: tuple[str, ...] = option(
        (),
        "Column of numbers that enters the model beside the tiles, such as age, or "
        "cells_cellvit:per_mm2 of summary.csv; repeat the option for several.",
    )
    features: str | None = option(
        None,
        "Embeddings to use, if the folder has several: 256px_0.5mpp/features_uni2_h, or a "
        "unique part of this name, such as uni2_h.",
        daily=True,
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table that are learnt: the target, and the time."""
        if self.times:
            return (*self.target, TIMES_SIGN.join(self.times))
        return self.target

    @property
    def times(self) -> tuple[str, ...]:
        """Columns of the times."""
        return (self.time,) if isinstance(self.time, str) else self.time or ()


@dataclass(frozen=True, kw_only=True)
class LabelValues:
    """Labels of rows.

    Attributes:
        kind: kind of the target.
        rows: requested rows with a label that can be used.
        cells: label of each of `rows`, by kind of target. Classes: (class,); multilabel: 0, 1 or
            None (blank) for each label; regression: (number,); survival: (event, time).
        labelled: all rows of the table with a label, or with at least one of several labels.
        readings: how each value of the requested rows is read.
        problems: problems that must be corrected before the labels are used.
        questions: questions that must be answered before a model is trained.
        warnings: labels that are used although they may spoil a score.
        notes: decisions that were made, and rows that were left out.
    """

    kind: Kind
    rows: tuple[int, ...]
    cells: tuple[tuple[LabelCell, ...], ...]
    readings: tuple[ValueReading, ...]
    labelled: frozenset[int] = frozenset()
    problems: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_values(
    table: LabelTable,
    rows: Sequence[int],
    columns: LabelsConfig,
    trained: Target | None = None,
) -> LabelValues:
    """Reads the labels of some rows of a table.

    Raises ConfigError: columns that do not fit the kind of the target.
    """
    overrides = parse_overrides(columns.read)
    classes = trained.names if trained is not None and trained.exclusive else ()
    readers = {}
    for name in columns.target:
        texts = (row[name] for row in table.rows)
        readers[name] = ColumnValues(texts, overrides, classes)
    values = [
        [readers[name].value(row[name]) for name in columns.target]
        for row in table.rows
    ]
    # a blank cell masks one of several labels; else the row has no label
    enough = any if len(columns.target) > 1 and not columns.times else all
    labelled = frozenset(
        i for i, row in enumerate(values) if enough(value is not None for value in row)
    )
    used = [i for i in rows if i in labelled]
    first = [values[i][0] or "" for i in used]
    kind = _kind(first, columns) if columns.task == "auto" else columns.task
    survival = kind in ("cox", "discrete")
    one_target = len(columns.target) == 1 or kind == "multilabel"
    if not one_target or survival != bool(columns.times):
        needs = "one target and a time" if survival else "one target, no time"
        raise ConfigError(
            f"{kind} must have {needs}, got {(*columns.target, *columns.times)}"
        )
    _check_overrides(overrides, table, columns)
    reading = _Reading(table, rows, used, columns, values)
    if survival:
        result = reading.of_survival(kind)
    elif kind == "multilabel":
        result = reading.of_flags(kind)
    elif kind == "regression":
        result = reading.of_numbers(kind)
    else:
        result = reading.of_classes(kind)
        if kind == "ordinal" and trained is None:
            names = [str(name) for (name,) in result.cells]
            unordered = _order_problems(columns.target[0], names)
            result = replace(result, problems=(*result.problems, *unordered))
    return replace(result, labelled=labelled)


def _kind(texts: Sequence[str], columns: LabelsConfig) -> Kind:
    """The kind by the columns and the values: two are classes, many numbers are a measure."""
    if columns.times:
        return "cox"
    if len(columns.target) > 1:
        return "multilabel"
    classes = {class_name(text) for text in texts}
    numbers = Numbers(classes)
    like_numbers = []
    for text in classes:
        digits = sum(sign.isdigit() for sign in text)
        has_form = digits and all(s.isdigit() or s in ".,+- '%" for s in text)
        if numbers.read(text) is not None or is_bound(text) or has_form:
            like_numbers.append(text)
    read = [number for number in map(numbers.read, classes) if number is not None]
    if len(like_numbers) > MOST_CLASSES and len(like_numbers) * 2 >= len(classes):
        return "regression"
    if len(read) == len(classes) and any(number % 1 for number in read):
        return "regression"
    return "binary" if len(classes) == 2 else "multiclass"


def _check_overrides(
    overrides: Mapping[str, str], table: LabelTable, columns: LabelsConfig
) -> None:
    """Refuses a `--read` for a value that no column of the target has."""
    texts = set()
    for row in table.rows:
        texts |= {plain_text(row[name]) for name in (*columns.target, *columns.times)}
    folded = {text.casefold() for text in texts} | {class_name(text) for text in texts}
    for value in overrides:
        if value not in folded:
            raise ConfigError(
                f"read must name a value of {', '.join((*columns.target, *columns.times))}, got "
                f"{value!r}{nearest(value, folded) if len(folded) < _MOST_KNOWN else ''}"
            )


class _Reading:
    """Rows of a table with the values of their targets; makes `LabelValues` from them."""

    def __init__(
        self,
        table: LabelTable,
        rows: Sequence[int],
        used: Sequence[int],
        columns: LabelsConfig,
        values: Sequence[Sequence[str | None]],
    ):
        self._table = table
        self._rows = rows
        self._used = used
        self._columns = columns
        self._values = values

    def _cells(
        self, place: int, read: Callable[[str], tuple[Meaning, str]]
    ) -> tuple[Cell, ...]:
        """Readings of the cells of a target, see `read_cells`."""
        column = self._columns.target[place]
        texts = (self._table.rows[i][column] for i in self._rows)
        return read_cells(texts, (self._values[i][place] for i in self._rows), read)

    def of_classes(self, kind: Kind) -> LabelValues:
        (column,) = self._columns.target
        cells = self._cells(0, lambda value: ("class", class_name(value)))
        names = [class_name(self._values[i][0] or "") for i in self._used]
        numbers = Numbers(names)
        values = {name: numbers.read(name) for name in names}
        problems = []
        if all(value is not None for value in values.values()):
            problems = self._codes(column, [values[name] or 0.0 for name in names])
        return LabelValues(
            kind=kind,
            rows=tuple(self._used),
            cells=tuple((name,) for name in names),
            readings=tuple(shown_readings(column, cells)),
            problems=tuple(problems),
            questions=tuple(self._class_questions(column, names)),
        )

    def _class_questions(self, column: str, names: Sequence[str]) -> list[str]:
        counts = Counter(names)
        single = [
            i for i, name in zip(self._used, names, strict=True) if counts[name] == 1
        ]
        if len(counts) > max(MANY_CLASSES, len(names) // 3):
            shown = ", ".join(repr(name) for name in [*counts][:_MOST_VALUES])
            return [
                f"{column} must have fewer classes, got {len(counts)} in "
                f"{counted(len(names), 'row')} ({shown}, ...); choose another column, or, if the "
                'values are numbers in words, pass read="VALUE=READING"'
            ]
        questions = []
        for i in single[:_MOST_VALUES]:
            name = class_name(self._values[i][0] or "")
            questions.append(
                f"each class of {column} must have two cases, got 1 of {name!r} in "
                f'{self._table.words([i])}; read="{name}=missing" leaves it out, '
                f'read="{name}=OTHER" makes it another class'
            )
        return questions

    def of_numbers(self, kind: Kind) -> LabelValues:
        (column,) = self._columns.target
        texts = {i: self._values[i][0] for i in self._rows}
        numbers = Numbers([text for text in texts.values() if text is not None])

        def reading(value: str) -> tuple[Meaning, str]:
            is_unread_limit = is_bound(value) and numbers.read(value) is None
            return ("limit", "") if is_unread_limit else numbers.reading(value)

        cells = self._cells(0, reading)
        number_by_row: dict[int, float] = {}
        faults: dict[str, list[int]] = {}
        for i, text in texts.items():
            number = None if text is None else numbers.read(text)
            if number is not None:
                number_by_row[i] = number
            elif text is not None:
                faults.setdefault(numbers.fault(text), []).append(i)
        problems, notes = self._unusable(
            f"{column} must be a number",
            (column,),
            faults,
            'pass read="VALUE=NUMBER" or =missing',
        )
        problems += self._codes(
            column, list(number_by_row.values()), list(number_by_row)
        )
        return LabelValues(
            kind=kind,
            rows=tuple(number_by_row),
            cells=tuple((number,) for number in number_by_row.values()),
            readings=tuple(shown_readings(column, cells)),
            problems=tuple(problems),
            warnings=tuple(self._outlier_warnings(column, number_by_row)),
            notes=tuple(notes),
        )

    def _outlier_warnings(self, column: str, kept: Mapping[int, float]) -> list[str]:
        """A sentence that names the values far from all others."""
        rows = [*kept]
        is_far = outliers(np.array([*kept.values()]))
        far = [row for row, flag in zip(rows, is_far, strict=True) if flag]
        if not far:
            return []
        middle = float(np.median([*kept.values()]))
        verb = "lies" if len(far) == 1 else "lie"
        pronoun = "it is" if len(far) == 1 else "they are"
        return [
            f"{counted(len(far), 'value')} of {column} {verb} more than {FAR:g} robust standard "
            f"deviations (1.4826 MAD) from the median {middle:g}: {self._texts(column, far)} in "
            f"{self._place(far)}; {pronoun} used, and a correlation, R² and mean error may "
            "depend on little else; --read VALUE=missing leaves a value out"
        ]

    def of_flags(self, kind: Kind) -> LabelValues:
        readings: list[ValueReading] = []
        problems: list[str] = []
        flags: dict[int, list[float | None]] = {i: [] for i in self._used}
        for place, column in enumerate(self._columns.target):
            cells = self._cells(place, _flag_reading)
            unclear = []
            for i, (_, meaning, becomes) in zip(self._rows, cells, strict=True):
                if meaning == "unclear":
                    unclear.append(i)
                if i in flags:
                    flags[i].append(
                        None if meaning == "missing" else float(becomes == "1")
                    )
            readings += shown_readings(column, cells)
            if unclear:
                problems.append(
                    f"{column} must be 0 or 1, got {self._texts(column, unclear)} in "
                    f'{self._place(unclear)}; pass read="VALUE=1", =0 or =missing'
                )
        return LabelValues(
            kind=kind,
            rows=tuple(self._used),
            cells=tuple(tuple(flags[i]) for i in self._used),
            readings=tuple(readings),
            problems=tuple(problems),
        )

    def of_survival(self, kind: Kind) -> LabelValues:
        (event_column,) = self._columns.target
        times = self._columns.times
        follow_up = read_follow_up(
            [self._table.rows[i] for i in self._rows],
            event_column,
            times,
            parse_overrides(self._columns.read),
        )
        readings = shown_readings(event_column, follow_up.event_cells)
        for column in times:
            readings += shown_readings(column, follow_up.time_cells[column])
        problems: list[str] = []
        unclear = [
            row
            for row, cell in zip(self._rows, follow_up.event_cells, strict=True)
            if cell[1] == "unclear"
        ]
        if unclear:
            problems.append(self._unclear_events(event_column, unclear))
        faults: dict[str, list[int]] = {}
        for i, reason in follow_up.unusable.items():
            faults.setdefault(reason, []).append(self._rows[i])
        name = TIMES_SIGN.join(times)
        remedy = "correct them"
        censored = [i for i, event in enumerate(follow_up.events) if event is False]
        if censored and all(
            follow_up.unusable.get(i) == MISSING_TIME for i in censored
        ):
            remedy = (
                "no censored case has a time: pass time=... again for the column with the end of "
                "their follow-up"
            )
        more, notes = self._unusable(f"{name} must be >= 0", times, faults, remedy)
        problems += more
        event_and_time_by_row: dict[int, tuple[float, float]] = {}
        for i, (event, time) in enumerate(
            zip(follow_up.events, follow_up.times, strict=True)
        ):
            if event is not None and time is not None and i not in follow_up.unusable:
                event_and_time_by_row[self._rows[i]] = (float(event), time)
        times_of_rows = [time for _, time in event_and_time_by_row.values()]
        problems += self._codes(name, times_of_rows, list(event_and_time_by_row))
        return LabelValues(
            kind=kind,
            rows=tuple(event_and_time_by_row),
            cells=tuple(event_and_time_by_row.values()),
            readings=tuple(readings),
            problems=tuple(problems),
            notes=(*follow_up.notes, *notes),
        )

    def _unclear_events(self, column: str, rows: Sequence[int]) -> str:
        """A sentence on values that do not say whether the event happened."""
        shown = self._texts(column, rows)
        others = {
            class_name(plain_text(self._table.rows[i][column])) for i in self._rows
        }
        hint = 'pass read="VALUE=event", =censored or =missing'
        if {"1", "2"} <= others and "0" not in others:
            hint = 'where 2 is the event, pass read="2=event" and read="1=censored"'
        return (
            f"{column} must say whether the event happened, got {shown} in "
            f"{self._place(rows)}; {hint}"
        )

    def _unusable(
        self,
        rule: str,
        columns: Sequence[str],
        faults: dict[str, list[int]],
        remedy: str,
    ) -> tuple[list[str], list[str]]:
        """Problems of rows that cannot be used, or notes if the rows are left out."""
        problems = []
        notes = []
        for reason, rows in faults.items():
            shown = self._texts(columns[0], rows)
            if len(columns) > 1:
                texts = [f"{name} {self._texts(name, rows)}" for name in columns]
                shown = " and ".join(texts)
            if self._columns.drop_unusable and "comma" not in reason:
                notes.append(
                    f"left out by --drop-unusable, {reason} ({shown}): "
                    f"{self._table.words(rows)}"
                )
            else:
                problems.append(
                    f"{rule}, got {reason}, {shown}, in {self._place(rows)}; {remedy}, or pass "
                    "drop_unusable=True to leave these rows out"
                )
        return problems, notes

    def _codes(
        self, column: str, values: Sequence[float], rows: Sequence[int] | None = None
    ) -> list[str]:
        """A sentence for each number that may be a code for a missing value, such as 999."""
        rows = self._used if rows is None else rows
        confirmed = parse_overrides(self._columns.read)
        problems = []
        for value in sorted(set(values)):
            others = [other for other in values if other != value]
            name = f"{value:g}"
            if name in confirmed or not is_code(value, others):
                continue
            places = [i for i, v in zip(rows, values, strict=True) if v == value]
            problems.append(
                f"{column} must be a measured value, got {name} among {min(others):g} to "
                f"{max(others):g} in {self._place(places)}; if it stands for no value, pass "
                f'read="{name}=missing", else read="{name}=number"'
            )
        return problems

    def _texts(self, column: str, rows: Iterable[int]) -> str:
        """Values of rows with their counts: 'maybe' (3), 'x' (1)."""
        counts = Counter(self._table.rows[i][column] for i in rows)
        shown = [
            f"{text!r} ({count})" for text, count in counts.most_common(_MOST_VALUES)
        ]
        return ", ".join(shown) + (", ..." if len(counts) > _MOST_VALUES else "")

    def _place(self, rows: Sequence[int]) -> str:
        return f"{self._table.words(rows)} of {str(self._table.path)!r}"


def _order_problems(column: str, names: Sequence[str]) -> list[str]:
    """A sentence if the order of the classes is unknown."""
    classes = [*dict.fromkeys(names)]
    if ordered_classes(classes) is not None:
        return []
    shown = ", ".join(repr(name) for name in classes[:_MOST_VALUES])
    more = ", ..." if len(classes) > _MOST_VALUES else ""
    example = " ".join(
        f'read="{name}={place} {name}"'
        for place, name in enumerate(classes[:2], start=1)
    )
    return [
        f"classes of {column} must have an order, by a number in each name, got {shown}{more}; "
        f"number them from the lowest to the highest, such as {example}"
    ]


def _flag_reading(text: str) -> tuple[Meaning, str]:
    flag = flag_of(text)
    if flag is None:
        flag = event_of(text)
    return ("unclear", "") if flag is None else ("number", str(int(flag)))
