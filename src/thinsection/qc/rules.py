"""Rules that compare a column with a number: `pixels_to_use<1000`."""

import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinsection.config import nearest
from thinsection.errors import ConfigError
from thinsection.qc.checks.check import UNJUDGED, QcCheck, Score
from thinsection.qc.edits import EDITED_AREAS

_OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}
_RULE = re.compile(
    r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|!=|<|>)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QcRule:
    """A rule on a column; a slide fails where it holds."""

    column: str
    symbol: str  # <, <=, >, >=, == or !=
    limit: float

    def __str__(self) -> str:
        return f"{self.column}{self.symbol}{self.limit:g}"

    def holds(self, value: Any) -> Any:
        """True if it holds for a value of the column; an array of bool for an array."""
        return _OPERATORS[self.symbol](value, self.limit)


def parse_rule(text: str) -> QcRule:
    """The rule of a text such as 'pixels_to_use<1000', or ConfigError."""
    match = _RULE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"qc rule must have the form 'pixels_to_use<1000', got {text!r}"
        )
    return QcRule(column=match[1], symbol=match[2], limit=float(match[3]))


def qc_fail(
    row: Mapping[str, Score], rule: QcRule | str, *, checks: Sequence[QcCheck] = ()
) -> bool:
    """True if the rule holds for the row of a `QcResult`.

    Args:
        row: values of the slide by column.
        rule: the rule, or its text.
        checks: checks of the pipeline. Their columns are known also if the slide has none: tissue
            not judged and corrected areas are then 0, and a rule on a column of a check that did
            not judge the slide does not hold.

    Raises:
        ConfigError: there is no such column of numbers.
    """
    if isinstance(rule, str):
        rule = parse_rule(rule)
    name = rule.column
    if name not in row:
        if name in _columns_of_others(checks):
            return bool(rule.holds(0.0))
        if unjudging_check(row, name, checks):
            return False
        raise ConfigError(
            f"qc rule must name a column, got {name!r}{nearest(name, row)}"
        )
    value = row[name]
    if isinstance(value, str):
        raise ConfigError(
            f"qc rule must name a column of numbers, got {name!r} = {value!r}"
        )
    return bool(rule.holds(value))


def is_known_column(
    row: Mapping[str, Score], column: str, checks: Sequence[QcCheck]
) -> bool:
    """True for a column of the slide, and for one that only other slides have."""
    if column in row or column in _columns_of_others(checks):
        return True
    return bool(unjudging_check(row, column, checks))


def notes_on_rules(
    columns: Collection[str], rules: Iterable[str], checks: Sequence[QcCheck]
) -> list[str]:
    """Sentences on the rules that were applied to no slide, because none has their column.

    A check that judged no slide leaves it open whether it would have had the column.

    Args:
        columns: columns of all slides.
        rules: texts of the rules.
        checks: checks of the pipeline; a rule on the share that one removes is not named.
    """
    shares = [check.share_column for check in checks]
    known = {*columns, *_columns_of_others(checks), *shares}
    notes = []
    for rule in rules:
        column = parse_rule(rule).column
        if column not in known:
            notes.append(
                f"rule {rule!r} was applied to no slide, because none has the column "
                f"{column!r}{nearest(column, sorted(known))}"
            )
    return notes


def _columns_of_others(checks: Sequence[QcCheck]) -> list[str]:
    """Columns that are 0 for the slides that do not have them."""
    if not checks:
        return []
    names = [_unjudged_column(check) for check in checks]
    return [EDITED_AREAS, f"{UNJUDGED}_percent", *names]


def _unjudged_column(check: QcCheck) -> str:
    return f"{check.name}_{UNJUDGED}_percent"


def unjudging_check(
    row: Mapping[str, Score], column: str, checks: Sequence[QcCheck]
) -> str:
    """Name of the check that would fill a column, if it did not judge the slide; '' if none is."""
    if column in row:
        return ""
    for check in checks:
        start = f"{check.name}_"
        share_columns = (check.share_column, _unjudged_column(check))
        may_abstain = _unjudged_column(check) in row
        is_its_own = column == check.share_column or column.startswith(start)
        if not (may_abstain and is_its_own):
            continue
        # a correction gives a share to a check that did not judge the slide
        has_share = check.share_column in row and not row.get(EDITED_AREAS)
        has_more = any(
            name.startswith(start) and name not in share_columns for name in row
        )
        if not (has_share or has_more):
            return check.name
    return ""
