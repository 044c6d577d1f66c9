"""HistoQC's config.ini as a pipeline: every key is carried over or refused by name."""

import configparser
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinsection.config import nearest, read_toml
from thinsection.errors import ConfigError
from thinsection.qc.checks.pixel_features import check_features
from thinsection.qc.pipeline import Pipeline, pipeline_from_mapping
from thinsection.slide.geometry import nominal_mpp

_BASE = "BaseImage.BaseImage"
_BASE_KEYS = ("image_work_size", "mask_statistics", "confirm_base_mag", "in_memory_compression")
# pictures that come with HistoQC: not ours to ship, our generated ones stand in for them
_OWN_MODELS = {"pen/": "pen", "models/coverslip": "coverslip"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """How one of HistoQC's functions becomes a check: a table of histoqc_steps.toml.

    Attributes:
        kind: of the check; '' for what we always write, or that has nothing to do.
        keys: HistoQC's key -> our setting, how its text is read, and, where the key may be absent,
            HistoQC's default.
        fixed: HistoQC's key -> the only value that we can carry over.
        ignored: keys that change nothing.
        name: of the check where HistoQC's function has no `name`.
    """

    kind: str = ""
    keys: Mapping[str, list[str]] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    name: str = ""


@cache
def _steps() -> dict[str, _Step]:
    with resources.as_file(resources.files("thinsection.qc") / "histoqc_steps.toml") as path:
        return {function: _Step(**table) for function, table in read_toml(path).items()}


def _px(text: str) -> str:
    return f"{float(text):g} px"


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "y", "on", "t"):
        return True
    if word in ("0", "false", "no", "n", "off", "f"):
        return False
    raise ValueError(f"not a truth value: {text!r}")


def _mpp(text: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+[xX]", text):
        raise ValueError(f"must be a magnification such as 1.25x, got {text!r}")
    return nominal_mpp(float(text[:-1]))


_READ: dict[str, Callable[[str], Any]] = {
    **{"px": _px, "truth": _truth, "magnification": _mpp},
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
        with path.open(encoding="utf-8") as file:
            parser.read_file(file)
    except FileNotFoundError:
        raise ConfigError(f"config must be an existing file, got {str(path)!r}") from None
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"config must be an .ini file, got {str(path)!r}: {error}") from None
    if not parser.has_option("pipeline", "steps"):
        raise ConfigError(f"config must have [pipeline] steps, got none in {str(path)!r}")
    notes: list[str] = []
    checks: list[dict[str, Any]] = []
    for step in parser.get("pipeline", "steps").split():
        section = dict(parser[step]) if parser.has_section(step) else {}
        check = _check(step, section, path.parent, notes)
        if check is not None:
            names = {c["name"] for c in checks}
            while check["name"] in names:
                check["name"] += "_again"
            checks.append(check)
    base = _base(dict(parser[_BASE]) if parser.has_section(_BASE) else {})
    return pipeline_from_mapping({"name": path.stem, **base, "check": checks}), notes


def _base(section: Mapping[str, str]) -> dict[str, Any]:
    for key, value in section.items():
        if key == "enable_bounding_box" and not _truth(value):
            continue
        if key not in _BASE_KEYS:
            raise ConfigError(f"unknown key {key!r} in [{_BASE}]{nearest(key, _BASE_KEYS)}")
    size = section.get("image_work_size", "1.25x")
    statistics = section.get("mask_statistics", "relative2mask")
    return {
        "work_mpp": _converted("magnification", size, f"{_BASE}.image_work_size"),
        "work_from": "objective_power",
        "statistics": statistics,
    }


def _check(
    step: str, section: dict[str, str], folder: Path, notes: list[str]
) -> dict[str, Any] | None:
    """One step as a [[check]] table, or None if there is nothing to check."""
    function, _, label = step.partition(":")
    if function not in _steps():
        raise ConfigError(f"unknown step {step!r}{nearest(function, _steps())}")
    rule = _steps()[function]
    values: dict[str, Any] = {}
    for key, (ours, kind, *default) in rule.keys.items():
        if (text := section.get(key, *default)) is not None:
            values.setdefault(ours, _converted(kind, text, f"{step}.{key}"))
    for key, text in section.items():
        if key in rule.fixed:
            if not _same(text, rule.fixed[key]):
                raise ConfigError(
                    f"{step}.{key} must be {rule.fixed[key]} to be carried over, got {text!r}"
                )
        elif key not in rule.keys and key not in rule.ignored:
            known = (*rule.keys, *rule.fixed, *rule.ignored)
            raise ConfigError(f"unknown key {key!r} in [{step}]{nearest(key, known)}")
    if not rule.kind:
        return None
    values.setdefault("name", f"{rule.name}_{label}" if label else rule.name)
    if rule.kind == "by_example":
        _take_examples(values, folder, notes)
    if "templates" in values:
        values["templates"] = _templates(values["templates"], folder, notes)
    return {"kind": rule.kind, **values}


def _converted(kind: str, text: str, key: str) -> Any:
    try:
        return _READ[kind](text)
    except ValueError as error:
        raise ConfigError(f"{key} must be as HistoQC takes it, got {text!r}: {error}") from None


def _same(text: str, wanted: str) -> bool:
    """Whether two values mean the same: numbers by value, the rest without spaces and case."""
    try:
        return float(text) == float(wanted)
    except ValueError:
        return "".join(text.split()).lower() == "".join(wanted.split()).lower()


def _take_examples(values: dict[str, Any], folder: Path, notes: list[str]) -> None:
    """Replaces HistoQC's `examples` (image:mask) by our two lists, or by a built-in model."""
    check_features(tuple(values["features"]))
    pairs = [re.split(r"(?<!\W[A-Za-z]):", text) for text in values.pop("examples")]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{values['name']} must have examples as image:mask, got {pairs}")
    found = [[_find(text, folder) for text in pair] for pair in pairs]
    if all(path is not None for pair in found for path in pair):
        values["model"] = "own"
        values["example_images"] = [str(pair[0]) for pair in found]
        values["example_masks"] = [str(pair[1]) for pair in found]
        return
    first = pairs[0][0].removeprefix("./")
    model = next((m for start, m in _OWN_MODELS.items() if first.startswith(start)), None)
    if model is None:
        missing = next(t for p, f in zip(pairs, found) for t, q in zip(p, f) if q is None)
        raise ConfigError(
            f"example must be an existing file, got {missing!r} for {values['name']!r}"
        )
    values |= {"model": model, "features": []}  # its own, whatever HistoQC's were
    if model == "coverslip":
        values |= {"threshold": 0.8, "min_elongation": 8.0}
    notes.append(
        f"{values['name']}: HistoQC's example pictures are not here; the built-in model {model!r}, "
        "trained on generated pictures, takes their place"
    )


def _templates(paths: list[str], folder: Path, notes: list[str]) -> list[str]:
    found = [path for text in paths if (path := _find(text, folder)) is not None]
    if len(found) < len(paths):
        notes.append(
            f"templates: {len(paths) - len(found)} of {len(paths)} template pictures are not here; "
            "their columns are NA. Name your own, or install HistoQC"
        )
    return [str(path) for path in found]


def _find(text: str, folder: Path) -> Path | None:
    """The file beside the config, or in an installed HistoQC."""
    roots = [folder]
    spec = find_spec("histoqc")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        roots += [package / "data", package]
    return next((root / text for root in roots if (root / text).is_file()), None)
