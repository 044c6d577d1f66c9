"""Verdicts on a slide's quality control in words, by the built-in rules or those of a TOML file.

Fractions are parts of 1. Pixels are those of the work image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import from_mapping, read_toml
from thinsection.errors import ConfigError, naming_file
from thinsection.qc.checks.check import EMPTY_SCORE, Score
from thinsection.qc.edits import EDITED_AREAS
from thinsection.qc.rules import parse_rule
from thinsection.report.values import columns_table
from thinsection.types import counted

GOOD = "good"
# from best to worst
_VERDICTS = (GOOD, "look", "exclude")


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
    stain = columns_table()["stain"]
    if any(row.get(name) == EMPTY_SCORE for name in stain):
        verdicts.append("look")
        words.append("nothing was measured, because no tissue is left")
    unusual = [stain[name] for name in outliers if name in stain]
    if unusual:
        verdicts.append("look")
        words.append(f"unusual stain ({', '.join(unusual)})")
    num_edited = row.get(EDITED_AREAS)
    if isinstance(num_edited, int | float) and num_edited:
        words.append(f"{counted(int(num_edited), 'area')} corrected by hand")
    worst = max(verdicts, key=_VERDICTS.index)
    return worst, ", ".join(dict.fromkeys(words))
