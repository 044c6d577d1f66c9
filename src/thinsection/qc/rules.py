"""Rules that compare a column with a number: `pixels_to_use<1000`."""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinsection.config import nearest
from thinsection.errors import ConfigError
from thinsection.qc.checks.check import Score

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


def qc_fail(row: Mapping[str, Score], rule: QcRule | str) -> bool:
    """True if the rule holds for the row of a `QcResult`.

    Raises:
        ConfigError: the row has no such column of numbers.
    """
    if isinstance(rule, str):
        rule = parse_rule(rule)
    name = rule.column
    if name not in row:
        raise ConfigError(
            f"qc rule must name a column, got {name!r}{nearest(name, row)}"
        )
    value = row[name]
    if isinstance(value, str):
        raise ConfigError(
            f"qc rule must name a column of numbers, got {name!r} = {value!r}"
        )
    return bool(rule.holds(value))
