"""Rules such as `pixels_to_use<1000`: which slides a run leaves out."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from thinsection.config import nearest
from thinsection.errors import ConfigError
from thinsection.qc.checks.check import Score

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    **{"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt},
    **{"==": operator.eq, "!=": operator.ne},
}
_PATTERN = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|!=|<|>)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class QcRule:
    """A slide fails where `column symbol limit` holds.

    Attributes:
        column: of the slide's row.
        symbol: one of <, <=, >, >=, ==, !=.
        limit: the number it is compared with.
    """

    column: str
    symbol: str
    limit: float

    def __str__(self) -> str:
        return f"{self.column}{self.symbol}{self.limit:g}"


def parse_rule(text: str) -> QcRule:
    """The rule of a text such as 'pixels_to_use<1000'.

    Raises:
        ConfigError: the text is no such comparison.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"qc rule must read like 'pixels_to_use<1000', got {text!r}")
    return QcRule(column=match.group(1), symbol=match.group(2), limit=float(match.group(3)))


def qc_fail(row: Mapping[str, Score], rule: QcRule | str) -> bool:
    """Whether the rule holds for the row, i.e. the slide fails.

    Args:
        row: of a `QcResult`.
        rule: a rule or its text.

    Raises:
        ConfigError: no such column, or it holds no number.
    """
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    if rule.column not in row:
        raise ConfigError(
            f"qc rule must name a column, got {rule.column!r}{nearest(rule.column, row)}"
        )
    value = row[rule.column]
    if isinstance(value, str):
        raise ConfigError(f"qc rule must name a column of numbers, got {rule.column!r} = {value!r}")
    return _OPERATORS[rule.symbol](value, rule.limit)
