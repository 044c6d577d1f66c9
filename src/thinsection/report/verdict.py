"""Verdicts on a slide's quality control in words, and the heads of table columns in plain words.

Verdicts follow the built-in rules or those of a TOML file. Data files keep the identifiers of
columns. Fractions are parts of 1. Pixels are those of the work image.
"""

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
_EXACT = {
    "base_mag": "objective power",
    "type": "vendor",
    "levels": "pyramid levels",
    "height": "height, pixels",
    "width": "width, pixels",
    "mpp_x": "resolution along x, µm/px",
    "mpp_y": "resolution along y, µm/px",
    "stain": "stain",
    "tissue_fraction": "tissue fraction",
    "fails": "failed rules",
    "pixels_to_use": "usable tissue, pixels",
    "usable_mm2": "usable tissue, mm²",
    "glass": "glass, fraction",
    "focus_median_ratio": "median sharpness of the tissue, relative",
    "spur_pixels": "removed thin lines, fraction",
    "pen_markings": "pen, fraction",
    "nonwhite": "not white, fraction",
    "brightestPixels": "brightest pixels, fraction",
    "areaThresh": "removed small areas, fraction",
    "rms_contrast": "contrast (root mean square)",
    "tenenGrad_contrast": "contrast (Tenengrad)",
    "michelson_contrast": "contrast (Michelson)",
    "grayscale_brightness": "brightness",
    "measures_distance": "distance from the usual measures",
    "measures_stain_distance": "distance from the usual stains",
    "px_focus": "sharpness",
    "px_dab": "DAB",
}
_STEMS = {
    "focus_removed": "out of focus",
    "blurry_removed": "blurry",
    "folds_removed": "folds (experimental)",
    "unsure": "artefact network unsure",
    "small_tissue_removed": "small pieces removed",
    "small_tissue_filled": "small holes filled",
    "fatlike_tissue_removed": "fat-like tissue removed",
}
# check -> what a tile's column `qc_CHECK` gives the fraction of
_CHECKS = {
    "focus": "out of focus",
    "folds": "folds (experimental)",
    "spur": "thin lines removed",
    "small_removed": "small pieces removed",
}
_STATISTICS = {
    "num_regions": "number of areas",
    "mean_area": "mean area, mm²",
    "max_area": "largest area, mm²",
    "percent": "fraction",
}
_STAINS = {"c0": "hematoxylin", "c1": "eosin", "c2": "residual"}
_RGB = {"1": "red", "2": "green", "3": "blue"}
_YUV = {"1": "luma (Y)", "2": "chroma (U)", "3": "chroma (V)"}
_TEXTURE = ("contrast", "dissimilarity", "homogeneity", "ASM", "energy", "correlation")
_SHARES = (
    "bubbles",
    "coverslip_edge",
    "dust",
    "slide_edge",
    "dark",
    "bright",
    "flat_areas",
)
_TILE_STATISTICS = {
    "mean": "mean",
    "std": "standard deviation",
    "min": "lowest",
    "max": "highest",
}


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


def column_words(column: str) -> str:
    """Returns the head of a column for a page, such as 'folds: fraction'."""
    if column in _EXACT:
        return _EXACT[column]
    if column.startswith("qc_"):
        check = column.removeprefix("qc_")
        words = _CHECKS.get(check) or column_words(check).removesuffix(", fraction")
        return f"{words}, fraction"
    if column in _SHARES:
        return f"{_spaced(column)}, fraction"
    deviation, without_deviation = _without_deviation(column)
    if deviation:
        return f"{column_words(without_deviation)}, standard deviation"
    for prefix, words in (("background_", "background"), ("final_", "tissue")):
        if column.startswith(prefix):
            inner = column.removeprefix(prefix)
            is_texture = inner in _TEXTURE
            return f"{words}: {'texture ' * is_texture}{column_words(inner)}"
    for suffix, words in _STATISTICS.items():
        if column.endswith(f"_{suffix}"):
            stem = column.removesuffix(f"_{suffix}")
            return f"{_STEMS.get(stem, _spaced(stem))}: {words}"
    return _by_pattern(column)


def _by_pattern(column: str) -> str:
    """Head of a column whose name follows a pattern; other names lose their underscores."""
    pen = re.fullmatch(r"pen_(\w+)", column)
    if pen:
        return f"{pen[1]} pen, fraction"
    channel = re.fullmatch(r"chan([123])_brightness(_YUV)?", column)
    if channel:
        names = _YUV if channel[2] else _RGB
        return f"brightness, {names[channel[1]]}"
    stain = re.fullmatch(r"deconv_(c[012])_mean", column)
    if stain:
        return _STAINS[stain[1]]
    template = re.fullmatch(r"(.+)_MSE_hist", column)
    if template:
        return f"difference from the colours of {template[1]}"
    tiles = re.fullmatch(r"px_(mean|std|min|max)_(\w+)", column)
    if tiles:
        return f"{tiles[2]}, {_TILE_STATISTICS[tiles[1]]}"
    stain_of_tiles = re.fullmatch(r"px_(hematoxylin|eosin)", column)
    if stain_of_tiles:
        return stain_of_tiles[1]
    macenko = re.fullmatch(r"macenko_(hematoxylin|eosin)_(\w+)", column)
    if macenko:
        return f"{macenko[1]} vector, {macenko[2]}"
    return _spaced(column)


def _without_deviation(column: str) -> tuple[bool, str]:
    """True and the column of the mean, if a column is a standard deviation."""
    stain = re.fullmatch(r"(deconv_c[012])_std", column)
    if stain:
        return True, f"{stain[1]}_mean"
    other = re.fullmatch(r"(.+)_std(_YUV)?", column)
    if other and not column.startswith("px_"):
        return True, other[1] + (other[2] or "")
    return False, column


def _spaced(column: str) -> str:
    """The identifier with spaces in place of underscores, split before capital letters."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column)
    return words.replace("_", " ")
