"""Verdicts on a slide's quality control in words, and the heads of table columns in plain words.

Verdicts follow the built-in rules or those of a TOML file. Data files keep the identifiers of
columns. Fractions are parts of 1. Pixels are those of the work image.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal

from thinsection.config import from_mapping, read_toml
from thinsection.errors import ConfigError, naming_file
from thinsection.qc.checks.check import EMPTY_SCORE, Score
from thinsection.qc.rules import parse_rule
from thinsection.types import Document

GOOD = "good"
# from best to worst
_VERDICTS = (GOOD, "look", "exclude")


@cache
def _columns() -> Document:
    """Words of columns, and their groups; the file says what each table is."""
    return read_toml(Path(__file__).with_name("columns.toml"))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRule:
    """Verdict with its text, for slides to which a rule applies; not without the rule's column."""

    words: str
    # such as 'pixels_to_use<1000'
    rule: str
    verdict: Literal["look", "exclude"] = "look"

    def holds(self, row: Mapping[str, Score]) -> bool:
        """True if the rule applies to a slide's row."""
        rule = parse_rule(self.rule)
        value = row.get(rule.column)
        return isinstance(value, int | float) and rule.holds(value)


def load_rules(path: Path | None) -> tuple[VerdictRule, ...]:
    """Rules from a file's tables `[[verdict]]` (words, rule, verdict), or the built-in rules.

    Raises:
        ConfigError: an unknown key, or an invalid rule.
    """
    path = path or Path(__file__).with_name("verdicts.toml")
    tables = read_toml(path).get("verdict", [])
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"qc_rules must have tables [[verdict]], got {str(path)!r}")
    with naming_file(path):
        rules = [from_mapping(VerdictRule, table, where="verdict.") for table in tables]
        for rule in rules:
            parse_rule(rule.rule)
    return tuple(rules)


def verdict(
    row: Mapping[str, Score], rules: Sequence[VerdictRule], outliers: Sequence[str] = ()
) -> tuple[str, str]:
    """Verdict ('good', 'look', 'exclude' or 'failed') for a slide's row, with the reason."""
    if row["status"] == "failed":
        return "failed", ""
    verdicts = [GOOD]
    words = []
    for rule in rules:
        if rule.holds(row):
            verdicts.append(rule.verdict)
            words.append(rule.words)
    stain = _columns()["stain"]
    if any(row.get(name) == EMPTY_SCORE for name in stain):
        verdicts.append("look")
        words.append("nothing was measured, because no tissue is left")
    unusual = [stain[name] for name in outliers if name in stain]
    if unusual:
        verdicts.append("look")
        words.append(f"unusual stain ({', '.join(unusual)})")
    worst = max(verdicts, key=_VERDICTS.index)
    return worst, ", ".join(dict.fromkeys(words))


def group_of(column: str) -> str:
    """Group of a column."""
    for group, prefixes in _columns()["groups"].items():
        if column.startswith(tuple(prefixes)):
            return str(group)
    return "other"


def column_order(columns: Sequence[str]) -> list[str]:
    """Columns by group, the most informative first; within a prefix the order stays."""
    prefixes = [*chain.from_iterable(_columns()["groups"].values())]

    def rank(column: str) -> list[bool]:
        return [not column.startswith(prefix) for prefix in prefixes]

    return sorted(columns, key=rank)


def natural_key(text: str) -> list[tuple[bool, int, str]]:
    """Sort key by which 's2' comes before 's10'."""
    key = []
    for part in re.split(r"(\d+)", text.lower()):
        is_number = part.isdigit()
        key.append((is_number, int(part) if is_number else 0, part))
    return key


def column_words(column: str) -> str:
    """Returns the head of a column for a page, such as 'folds: fraction'."""
    tables = _columns()
    if column in tables["exact"]:
        return str(tables["exact"][column])
    if column.startswith("qc_"):
        check = column.removeprefix("qc_")
        words = tables["checks"].get(check)
        words = words or column_words(check).removesuffix(", fraction")
        return f"{words}, fraction"
    deviation = re.fullmatch(r"(.+)_std(_YUV)?", column)
    if deviation and not column.startswith("px_"):
        measure = deviation[1] + (deviation[2] or "")
        return f"{column_words(measure)}, standard deviation"
    for prefix, words in (("background_", "background"), ("final_", "tissue")):
        if column.startswith(prefix):
            inner = column.removeprefix(prefix)
            is_texture = inner in tables["texture"]
            return f"{words}: {'texture ' * is_texture}{column_words(inner)}"
    for suffix, words in tables["statistics"].items():
        if column.endswith(f"_{suffix}"):
            stem = column.removesuffix(f"_{suffix}")
            return f"{tables['stems'].get(stem, _spaced(stem))}: {words}"
    for pattern, words in tables["patterns"]:
        match = re.fullmatch(pattern, column)
        if match:
            return match.expand(words)
    return _spaced(column)


def _spaced(column: str) -> str:
    """The identifier with spaces in place of underscores, split before capital letters."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column)
    return words.replace("_", " ")
