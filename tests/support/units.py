"""Units of rows in tests."""

from collections.abc import Iterable

from thinsection.evaluation.cases import Groups, Unit


def units(rows: int | Iterable[object], unit: Unit = "rows") -> Groups:
    """Groups of as many rows that are their own unit, or by the names of the rows' units."""
    if isinstance(rows, Groups):
        return rows
    if isinstance(rows, int):
        return Groups.each([f"{row:06d}" for row in range(rows)], unit)
    return Groups.each(map(str, rows), unit)
