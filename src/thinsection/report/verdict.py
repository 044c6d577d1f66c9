"""Verdicts on a slide's quality control in words, by built-in rules or those of a TOML file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import from_mapping, read_toml
from thinsection.errors import ConfigError, naming_file
from thinsection.qc.checks.check import EMPTY_SCORE, Score
from thinsection.qc.rules import parse_rule

GOOD = "good"
# from best to worst
_VERDICTS = (GOOD, "look", "exclude")
# columns whose outliers mean an unusual stain -> text for that
STAIN = {
    "chan1_brightness": "red",
    "chan2_brightness": "green",
    "chan3_brightness": "blue",
    "deconv_c0_mean": "hematoxylin",
    "deconv_c1_mean": "eosin",
}
# group of columns -> prefixes of their names, the most informative first
GROUPS: dict[str, tuple[str, ...]] = {
    "usable": ("pixels_to_use", "usable_mm2", "tissue_pieces"),
    "artefacts": (
        "pen",
        "ink",
        "folds",
        "focus",
        "blurry",
        "bubble",
        "coverslip",
        "dust",
        "dirt",
        "edge",
    ),
    "light and stain": ("bright", "dark", "glass", "grayscale", "chan", "deconv"),
    "measures of tiles": ("measures", "px_", "macenko"),
    "contrast": ("tenenGrad", "michelson", "rms"),
    "file": ("base_mag", "levels", "height", "width", "mpp"),
}
OTHER = "other"


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
    if any(row.get(name) == EMPTY_SCORE for name in STAIN):
        verdicts.append("look")
        words.append("nothing was measured, because no tissue is left")
    unusual = [STAIN[name] for name in outliers if name in STAIN]
    if unusual:
        verdicts.append("look")
        words.append(f"unusual stain ({', '.join(unusual)})")
    worst = max(verdicts, key=_VERDICTS.index)
    return worst, ", ".join(dict.fromkeys(words))


def group_of(column: str) -> str:
    """Group of a column."""
    for group, prefixes in GROUPS.items():
        if column.startswith(prefixes):
            return group
    return OTHER


def column_order(columns: Sequence[str]) -> list[str]:
    """Columns by group, the most informative first; within a prefix the order stays."""
    prefixes: list[str] = []
    for group_prefixes in GROUPS.values():
        prefixes += group_prefixes

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
