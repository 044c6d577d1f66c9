"""What a slide's quality control means, in words: by ready rules, or those of a TOML file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import from_mapping, read_toml
from thinsection.errors import ConfigError, require
from thinsection.qc.checks.check import EMPTY_SCORE, Score
from thinsection.qc.engine import parse_rule

Said = Literal["look", "exclude"]
GOOD, _WORSE = "good", ("good", "look", "exclude")
STAIN = {  # columns of which an outlier is an unusual stain, and what each is
    **{
        "chan1_brightness": "red",
        "chan2_brightness": "green",
        "chan3_brightness": "blue",
    },
    **{"deconv_c0_mean": "hematoxylin", "deconv_c1_mean": "eosin"},
}
# a group of columns and how their names begin, the telling ones first
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("usable", ("pixels_to_use", "tissue_pieces")),
    (
        "artefacts",
        ("pen", "folds", "focus", "blurry", "bubble", "coverslip", "dust", "edge"),
    ),
    ("light and stain", ("bright", "dark", "glass", "grayscale", "chan", "deconv")),
    ("measures of tiles", ("measures", "px_", "macenko")),
    ("contrast", ("tenenGrad", "michelson", "rms")),
    ("file", ("base_mag", "levels", "height", "width", "mpp")),
)
OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRule:
    """Where `rule` holds, the verdict is said with these words; never without the column."""

    words: str
    rule: str  # 'pixels_to_use<1000'
    verdict: Said = "look"


def load_rules(path: Path | None) -> tuple[VerdictRule, ...]:
    """The rules of a file's tables `[[verdict]]` (words, rule, verdict), or our ready ones.

    Raises ConfigError: an unknown key, or a rule that is none.
    """
    path = path or Path(__file__).with_name("verdicts.toml")
    tables = read_toml(path).get("verdict", [])
    some = isinstance(tables, list) and len(tables) > 0
    require(
        some,
        "qc_rules must have tables [[verdict]]",
        repr(str(path)),
        error=ConfigError,
    )
    rules = tuple(
        from_mapping(VerdictRule, table, where="verdict.") for table in tables
    )
    return rules if all(parse_rule(rule.rule) for rule in rules) else ()


def verdict(
    row: Mapping[str, Score], rules: Sequence[VerdictRule], outliers: Sequence[str] = ()
) -> tuple[str, str]:
    """The verdict ('good', 'look', 'exclude' or 'failed') of a slide's row and why, in words."""
    if row["status"] == "failed":
        return "failed", ""
    both = [(rule, parse_rule(rule.rule)) for rule in rules]
    held = [
        r
        for r, by in both
        if isinstance(v := row.get(by.column), int | float) and by.holds(v)
    ]
    found = max((rule.verdict for rule in held), key=_WORSE.index, default=GOOD)
    words = [rule.words for rule in held]
    if any(row.get(name) == EMPTY_SCORE for name in STAIN):
        found = max(found, "look", key=_WORSE.index)
        words.append("nothing was measured: no tissue is left")
    if unusual := [STAIN[name] for name in outliers if name in STAIN]:
        found = max(found, "look", key=_WORSE.index)
        words.append(f"unusual stain ({', '.join(unusual)})")
    return found, ", ".join(dict.fromkeys(words))


def group_of(column: str) -> str:
    """The group of columns that a column belongs to."""
    return next((group for group, begins in GROUPS if column.startswith(begins)), OTHER)


def column_order(columns: Sequence[str]) -> list[str]:
    """Columns by groups, the telling ones first, equal beginnings as they come."""
    begins = [begin for _, of in GROUPS for begin in of]
    return sorted(
        columns, key=lambda column: [not column.startswith(b) for b in begins]
    )


def natural_key(text: str) -> list[tuple[bool, int, str]]:
    """A key by which 's2' comes before 's10'."""
    parts = re.split(r"(\d+)", text.lower())
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts
    ]
