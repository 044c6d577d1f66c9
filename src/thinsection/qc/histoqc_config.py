"""HistoQC's config files as pipelines: each step becomes a check, or is refused by name.

`histoqc_steps.toml` maps HistoQC's functions and keys to checks and settings.
"""

import configparser
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from thinsection.config import nearest, read_toml
from thinsection.errors import ConfigError, rewording
from thinsection.qc.checks.by_example import ExampleCheck
from thinsection.qc.histoqc_pictures import (
    installed_folders,
    refuse_folder_without_pictures,
    with_pictures,
)
from thinsection.qc.pipeline import Pipeline, pipeline_from_mapping
from thinsection.slide.geometry import nominal_mpp
from thinsection.types import Document, Json

Section = Mapping[str, str]  # of HistoQC's config: key -> text

_BASE = "BaseImage.BaseImage"
_FINAL = "BasicModule.finalComputations"
# A key of every step's section.
_STATISTICS = {"mask_statistics": ["statistics", "text"]}
# HistoQC's name -> the check that makes it (two of its names are swapped).
_MASKS = {
    "img_mask_use": "",
    "img_mask_flat": "flat_areas",
    "img_mask_fatlike": "fatlike",
    "img_mask_small_filled": "small_removed",
    "img_mask_small_removed": "small_filled",
    "img_mask_blurry": "blurry",
}
# Folders of the example pictures that come with HistoQC.
_HISTOQC_EXAMPLES = ("pen/", "models/")
_EMPTY_STEP: Document = {
    "kind": "",
    "keys": {},
    "fixed": {},
    "ignored": [],
    "name": "",
    "sets": {},
    "refused": {},
    "because": "",
}
_TRUTHS = {
    **configparser.ConfigParser.BOOLEAN_STATES,
    "y": True,
    "t": True,
    "n": False,
    "f": False,
}


@cache
def _steps() -> dict[str, Document]:
    """HistoQC's function -> its check; the file's first lines explain a table."""
    tables = read_toml(Path(__file__).with_name("histoqc_steps.toml"))
    return {function: {**_EMPTY_STEP, **table} for function, table in tables.items()}


def pipeline_from_ini(path: Path, data: Path | None = None) -> Pipeline:
    """Converts HistoQC's config file.

    Relative pictures are looked for in `data`, beside the file, in `../data` as in HistoQC's
    source, in the current folder, and in an installed HistoQC. A check by example is left out if
    pictures that come with HistoQC are in none of them; its column is NA, and so are those of
    missing templates.

    Raises:
        ConfigError: no such file, or a step, key or value that cannot be carried over, by
            name; or `data` has none of the pictures.
    """
    parser = _read_ini(path)
    sections = {name: dict(parser[name]) for name in parser.sections()}
    checks: dict[str, Document] = {}
    for step in parser.get("pipeline", "steps").split():
        check = _convert_step(step, sections.get(step, {}))
        if check is None:
            continue
        while check["name"] in checks:
            check["name"] += "_again"
        checks[check["name"]] = check
    base = _settings(_BASE, sections.get(_BASE, {}))
    final = _settings(_FINAL, sections.get(_FINAL, {}))
    # HistoQC takes px in its place, and says so
    if final["pixels_to_use"] == "relative2mask":
        final["pixels_to_use"] = "absolute"
    pipeline = pipeline_from_mapping(
        {
            **base,
            **final,
            "name": path.stem,
            "work_from": "objective_power",
            "guard": False,
            "check": list(checks.values()),
        }
    )
    folders = []
    if data is not None:
        refuse_folder_without_pictures(pipeline.checks, data)
        folders.append(data)
    folders += [path.parent, path.absolute().parent.parent / "data"]
    folders += [Path(), *installed_folders()]
    resolved = with_pictures(pipeline.checks, folders)
    for resolved_check in resolved:
        if isinstance(resolved_check, ExampleCheck):
            _refuse_missing(resolved_check)
    return replace(pipeline, checks=resolved)


def _read_ini(path: Path) -> configparser.ConfigParser:
    if not path.exists():
        raise ConfigError(f"config must be an existing file, got {str(path)!r}")
    parser = configparser.ConfigParser(interpolation=None)
    with rewording(
        "config must be an .ini file",
        path,
        configparser.Error,
        UnicodeDecodeError,
        error=ConfigError,
    ):
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    if not parser.has_option("pipeline", "steps"):
        raise ConfigError(
            f"config must have [pipeline] steps, got none in {str(path)!r}"
        )
    return parser


def _convert_step(step: str, section: Section) -> Document | None:
    """One step as a [[check]] table; None if there is nothing to check."""
    function, _, label = step.partition(":")
    if function not in _steps():
        raise ConfigError(f"unknown step {step!r}{nearest(function, _steps())}")
    table = _steps()[function]
    if table["because"]:
        raise ConfigError(f"step {step!r} must be removed: {table['because']}")
    values = _settings(function, section, step)
    if not table["kind"]:
        return None
    values |= table["sets"]
    # a check's name becomes the name of files
    label = label.replace(":", "_")
    values.setdefault("name", f"{table['name']}_{label}" if label else table["name"])
    if table["kind"] == "by_example":
        values |= _convert_examples(values.pop("examples"), values["name"])
    if "templates" in values:
        values["templates"] = [name.removeprefix("./") for name in values["templates"]]
    return {"kind": table["kind"], **values}


def _settings(function: str, section: Section, step: str = "") -> Document:
    """Our settings of a section; a key or value that cannot be carried over is refused."""
    step = step or function
    table = _steps()[function]
    keys = table["keys"]
    if table["kind"]:
        keys = {**_STATISTICS, **keys}
    _refuse_other_keys(step, section, table, keys)
    values: Document = {}
    for key, (setting, reading, *default) in keys.items():
        text = section.get(key, *default)
        if text is None:
            continue
        try:
            values.setdefault(setting, _read_value(text, reading))
        except ValueError as error:
            raise ConfigError(
                f"{step}.{key} must have a value that HistoQC accepts, got {text!r}: {error}"
            ) from None
    return values


def _refuse_other_keys(
    step: str, section: Section, table: Document, keys: Document
) -> None:
    fixed = table["fixed"]
    known = (*keys, *fixed, *table["ignored"])
    for key, text in section.items():
        if key in fixed and not _same_value(text, fixed[key]):
            raise ConfigError(
                f"{step}.{key} must be {fixed[key]} to be converted, got {text!r}"
            )
        if key in table["refused"]:
            raise ConfigError(
                f"{step}.{key} must be removed, got {text!r}: {table['refused'][key]}"
            )
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in [{step}]{nearest(key, known)}")


def _read_value(text: str, reading: str) -> Json:
    """A value of HistoQC's config as our setting; ValueError where it is none."""
    match reading:
        case "truth":
            truth = _TRUTHS.get(text.strip().lower())
            if truth is None:
                raise ValueError(f"not a truth value: {text!r}")
            return truth
        case "magnification":
            if not re.fullmatch(r"\d*\.?\d+[xX]", text):
                raise ValueError(f"must be a magnification such as 1.25x, got {text!r}")
            return nominal_mpp(float(text[:-1]))
        case "mask":
            if text not in _MASKS:
                raise ValueError(f"must be one of {', '.join(_MASKS)}")
            return _MASKS[text]
        case "px":
            return f"{float(text):g} px"
        case "float":
            return float(text)
        case "int":
            return int(text)
        case "samples":
            # HistoQC writes -1 for all px
            return max(0.0, float(text))
        case "words":
            return text.split()
        case "text":
            return text
        case _:
            raise AssertionError(f"histoqc_steps.toml names no reading {reading!r}")


def _same_value(text: str, wanted: str) -> bool:
    """True if two values are equal: numbers and truths by value, else the letters."""
    try:
        return float(text) == float(wanted)
    except ValueError:
        pass
    letters = "".join(text.split()).lower()
    wanted_letters = "".join(wanted.split()).lower()
    return _TRUTHS.get(letters, letters) == _TRUTHS.get(wanted_letters, wanted_letters)


def _convert_examples(texts: list[str], name: str) -> Document:
    """Our two lists of pictures for HistoQC's examples (image:mask)."""
    # a colon after a drive's letter does not part image and mask
    pairs = [re.split(r"(?<!\W[A-Za-z]):", text) for text in texts]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{name} must have examples as image:mask, got {pairs}")
    return {
        "example_images": [image.removeprefix("./") for image, _ in pairs],
        "example_masks": [mask.removeprefix("./") for _, mask in pairs],
    }


def _refuse_missing(check: ExampleCheck) -> None:
    """Raises ConfigError: a picture is missing that does not come with HistoQC."""
    for name in check.absent:
        if not name.startswith(_HISTOQC_EXAMPLES):
            raise ConfigError(
                f"example must be an existing file, got {name!r} for {check.name!r}"
            )
