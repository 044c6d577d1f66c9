"""Event and time of each row of a survival table, from one column of times or several."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinsection.evaluation.cell_values import (
    Cell,
    ColumnValues,
    Meaning,
    Numbers,
    event_of,
    read_cells,
)
from thinsection.files.missing_cells import plain_text
from thinsection.types import counted

MISSING_TIME = "no time"
TIMES_SIGN = " + "  # between several columns of times, in the name of what is learnt
_DAYS = {
    "day": 1.0,
    "week": 7.0,
    "month": 30.4375,
    "mo": 30.4375,
    "year": 365.25,
    "yr": 365.25,
}
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """Events and times (n,) of rows; None for a row without a usable one.

    Attributes:
        events: whether the event happened; None if that is missing or not clear.
        times: in the unit of the first column.
        event_cells: how each cell of the event was read.
        time_cells: how each cell of a time was read, by column.
        unusable: rows whose event is known but whose time is not, with the reason.
        notes: sentences on which column a time is from, and on units.
    """

    events: tuple[bool | None, ...]
    times: tuple[float | None, ...]
    event_cells: tuple[Cell, ...]
    time_cells: dict[str, tuple[Cell, ...]]
    unusable: dict[int, str]
    notes: tuple[str, ...]


def read_follow_up(
    rows: Sequence[Mapping[str, str]],
    event_column: str,
    time_columns: Sequence[str],
    overrides: Mapping[str, str],
) -> FollowUp:
    """Reads events and times.

    If a row has several times, the column that the fewest censored rows fill is used: of GDC's
    columns days_to_death, else days_to_last_follow_up. Units follow from the names of the columns.
    Times in other units are converted to the unit of the first column.
    """
    texts = [row[event_column] for row in rows]
    event_values = ColumnValues(texts, overrides)
    event_cells = read_cells(texts, map(event_values.value, texts), _event_reading)
    events = [
        None if cell[1] not in ("event", "censored") else cell[1] == "event"
        for cell in event_cells
    ]
    cells = {}
    values = {}
    for column in time_columns:
        texts = [row[column] for row in rows]
        time_values = ColumnValues(texts, overrides)
        read = [time_values.value(text) for text in texts]
        numbers = Numbers([value for value in read if value is not None])
        cells[column] = read_cells(texts, read, numbers.reading)
        values[column] = [
            float(cell[2]) if cell[1] == "number" else None for cell in cells[column]
        ]
    factors, notes = _factors(time_columns)
    # first the column that the fewest censored rows fill
    censored = [i for i, event in enumerate(events) if event is False]
    filled = {
        column: sum(values[column][i] is not None for i in censored)
        for column in time_columns
    }
    order = sorted(time_columns, key=lambda column: filled[column])
    times: list[float | None] = []
    unusable: dict[int, str] = {}
    num_used: dict[str, list[int]] = {column: [0, 0] for column in order}
    for i, event in enumerate(events):
        used = next((name for name in order if values[name][i] is not None), None)
        time = None
        if used is not None:
            number = values[used][i]
            assert number is not None
            time = number * factors[used]
        times.append(time)
        if event is None:
            continue
        if used is None:
            is_missing = all(cells[name][i][1] == "missing" for name in time_columns)
            unusable[i] = MISSING_TIME if is_missing else "a time that is no number"
        elif time is not None and time < 0:
            unusable[i] = "a negative time"
        else:
            num_used[used][event] += 1
    if len(order) > 1:
        parts = [
            f"{column} is the time of {counted(num_events, 'event')} and "
            f"{counted(num_censored, 'censored case')}"
            for column, (num_censored, num_events) in num_used.items()
        ]
        notes.append("; ".join(parts))
    return FollowUp(
        events=tuple(events),
        times=tuple(times),
        event_cells=event_cells,
        time_cells=cells,
        unusable=unusable,
        notes=tuple(notes),
    )


def _event_reading(value: str) -> tuple[Meaning, str]:
    event = event_of(value)
    if event is None:
        return "unclear", ""
    return "event" if event else "censored", str(int(event))


def _factors(columns: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Factor from the unit of each column to that of the first, and a note where one is not 1."""
    units = {column: _days_of(column) for column in columns}
    first = units[columns[0]]
    factors = {}
    notes = []
    for column, days in units.items():
        factors[column] = 1.0
        if days and first and days != first:
            factors[column] = days / first
            notes.append(
                f"times of {column} are multiplied by {days / first:.6g}, to have the unit of "
                f"{columns[0]}"
            )
    return factors, notes


def _days_of(column: str) -> float | None:
    """Days of the unit that a column's name names; None where it names none."""
    for word in _WORDS.findall(plain_text(column)):
        name = word.casefold().removesuffix("s")
        if name in _DAYS:
            return _DAYS[name]
    return None
