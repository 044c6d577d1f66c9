"""HistoQC's config.ini as a pipeline: every key is carried over or refused by name."""

import configparser
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinsection.config import nearest, read_toml
from thinsection.errors import ConfigError
from thinsection.qc.checks.by_example import check_features
from thinsection.qc.pipeline import Pipeline, pipeline_from_mapping
from thinsection.slide.geometry import nominal_mpp

Texts = Mapping[str, str]  # a section: key -> text
_BASE = "BaseImage.BaseImage"
# pictures that come with HistoQC: not ours to ship, our generated ones stand in for them
_OWN_MODELS = {"pen/": "pen", "models/coverslip": "coverslip"}
_NO_STEP: dict[str, Any] = {"kind": "", "keys": {}, "fixed": {}, "ignored": [], "name": ""}
_LETTERS = {"y": True, "t": True, "n": False, "f": False}
_TRUTHS = {**configparser.ConfigParser.BOOLEAN_STATES, **_LETTERS}


@cache
def _steps() -> dict[str, dict[str, Any]]:
    """HistoQC's function -> how it becomes a check; the file's first lines say what a table has."""
    tables = read_toml(Path(__file__).with_name("histoqc_steps.toml"))
    return {function: _NO_STEP | table for function, table in tables.items()}


def _truth(text: str) -> bool:
    if (truth := _TRUTHS.get(text.strip().lower())) is None:
        raise ValueError(f"not a truth value: {text!r}")
    return truth


def _mpp(text: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+[xX]", text):
        raise ValueError(f"must be a magnification such as 1.25x, got {text!r}")
    return nominal_mpp(float(text[:-1]))


_READ: dict[str, Callable[[str], Any]] = {
    **{"px": lambda text: f"{float(text):g} px", "truth": _truth, "magnification": _mpp},
    **{"float": float, "int": int, "text": str, "words": str.split},
}


def pipeline_from_ini(path: Path) -> tuple[Pipeline, list[str]]:
    """The pipeline of HistoQC's config file, and what differs from it, in words.

    Relative pictures are looked for beside the file, and in an installed HistoQC. Examples that
    come with HistoQC and are not there are replaced by our generated ones, templates left out;
    the notes say so.

    Raises:
        ConfigError: no such file, or a step, key or value that cannot be carried over, by name.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"config must be an existing file, got {str(path)!r}") from None
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"config must be an .ini file, got {str(path)!r}: {error}") from None
    if not parser.has_option("pipeline", "steps"):
        raise ConfigError(f"config must have [pipeline] steps, got none in {str(path)!r}")
    sections = {name: dict(parser[name]) for name in parser.sections()}
    notes: list[str] = []
    checks: dict[str, dict[str, Any]] = {}
    for step in parser.get("pipeline", "steps").split():
        if (check := _check(step, sections.get(step, {}), path.parent, notes)) is not None:
            while check["name"] in checks:
                check["name"] += "_again"
            checks[check["name"]] = check
    base = _settings(_BASE, sections.get(_BASE, {}), _steps()[_BASE])
    whole = {"name": path.stem, "work_from": "objective_power", **base}
    return pipeline_from_mapping({**whole, "check": list(checks.values())}), notes


def _check(step: str, section: Texts, folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """One step as a [[check]] table, or None if there is nothing to check."""
    function, _, label = step.partition(":")
    if function not in _steps():
        raise ConfigError(f"unknown step {step!r}{nearest(function, _steps())}")
    table = _steps()[function]
    values = _settings(step, section, table)
    if not table["kind"]:
        return None
    values.setdefault("name", f"{table['name']}_{label}" if label else table["name"])
    if table["kind"] == "by_example":
        values |= _examples(values.pop("examples"), values, folder, notes)
    if "templates" in values:
        values["templates"] = _templates(values["templates"], folder, notes)
    return {"kind": table["kind"], **values}


def _settings(step: str, section: Texts, table: Mapping[str, Any]) -> dict[str, Any]:
    """What a section sets, by our names; a key or value that cannot be carried over is refused."""
    keys, fixed = table["keys"], table["fixed"]
    known = (*keys, *fixed, *table["ignored"])
    for key, text in section.items():
        if key in fixed and not _same(text, fixed[key]):
            raise ConfigError(f"{step}.{key} must be {fixed[key]} to be carried over, got {text!r}")
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in [{step}]{nearest(key, known)}")
    values: dict[str, Any] = {}
    for key, (ours, reading, *default) in keys.items():
        if (set_to := section.get(key, *default)) is not None:
            try:
                values.setdefault(ours, _READ[reading](set_to))
            except ValueError as error:
                rule = f"{step}.{key} must be as HistoQC takes it"
                raise ConfigError(f"{rule}, got {set_to!r}: {error}") from None
    return values


def _same(text: str, wanted: str) -> bool:
    """Whether two values mean the same: numbers and truths by value, else the letters."""
    try:
        return float(text) == float(wanted)
    except ValueError:
        one, other = ("".join(value.split()).lower() for value in (text, wanted))
        return _TRUTHS.get(one, one) == _TRUTHS.get(other, other)


def _examples(
    texts: list[str], values: Mapping[str, Any], folder: Path, notes: list[str]
) -> dict[str, Any]:
    """Settings for HistoQC's examples (image:mask): our two lists, or those of a built-in model."""
    check_features(values["features"])
    pairs = [re.split(r"(?<!\W[A-Za-z]):", text) for text in texts]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{values['name']} must have examples as image:mask, got {pairs}")
    found = {text: _find(text, folder) for pair in pairs for text in pair}
    missing = [text for text, path in found.items() if path is None]
    if not missing:
        images, masks = ([str(found[text]) for text in side] for side in zip(*pairs, strict=True))
        return {"model": "own", "example_images": images, "example_masks": masks}
    first = pairs[0][0].removeprefix("./")
    model = next((m for start, m in _OWN_MODELS.items() if first.startswith(start)), None)
    if model is None:
        got = f"{missing[0]!r} for {values['name']!r}"
        raise ConfigError(f"example must be an existing file, got {got}")
    ours = f"the built-in model {model!r}, trained on generated pictures, takes their place"
    notes.append(f"{values['name']}: HistoQC's example pictures are not here; {ours}")
    limits = {"threshold": 0.8, "min_elongation": 8.0} if model == "coverslip" else {}
    return {"model": model, "features": [], **limits}  # its own, whatever HistoQC's were


def _templates(paths: list[str], folder: Path, notes: list[str]) -> list[str]:
    found = [path for text in paths if (path := _find(text, folder)) is not None]
    if missing := len(paths) - len(found):
        what = f"templates: {missing} of {len(paths)} template pictures are not here"
        notes.append(f"{what}; their columns are NA. Name your own, or install HistoQC")
    return [str(path) for path in found]


def _find(text: str, folder: Path) -> Path | None:
    """The file beside the config, or in an installed HistoQC."""
    roots = [folder]
    if (spec := find_spec("histoqc")) is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        roots += [package / "data", package]
    return next((root / text for root in roots if (root / text).is_file()), None)
