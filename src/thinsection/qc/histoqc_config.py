"""HistoQC's config files as pipelines: each step becomes a check, or is refused by name.

`histoqc_steps.toml` maps HistoQC's functions and keys to checks and settings.
"""

import configparser
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from thinsection.config import nearest, read_toml
from thinsection.errors import ConfigError, rewording
from thinsection.qc.checks.pixel_model import check_features
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
# Pictures that come with HistoQC are not ours to ship: generated ones stand in for them.
_OWN_MODELS = {"pen/": "pen", "models/coverslip": "coverslip"}
# Limits of our model of the coverslip, in place of HistoQC's.
_COVERSLIP_LIMITS = {"threshold": 0.8, "min_elongation": 8.0}
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


def pipeline_from_ini(path: Path) -> tuple[Pipeline, list[str]]:
    """Converts HistoQC's config file; returns notes of what differs from it.

    Relative pictures are looked for beside the file, and in an installed HistoQC.
    Examples that come with HistoQC and are not there are replaced by our generated ones,
    templates left out; the notes say so.

    Raises:
        ConfigError: no such file, or a step, key or value that cannot be carried over, by
            name.
    """
    parser = _read_ini(path)
    sections = {name: dict(parser[name]) for name in parser.sections()}
    notes: list[str] = []
    checks: dict[str, Document] = {}
    for step in parser.get("pipeline", "steps").split():
        check = _convert_step(step, sections.get(step, {}), path.parent, notes)
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
    return pipeline, notes


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


def _convert_step(
    step: str, section: Section, folder: Path, notes: list[str]
) -> Document | None:
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
        values |= _convert_examples(values.pop("examples"), values, folder, notes)
    if values.get("templates"):
        values |= _find_templates(values["templates"], folder, notes)
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


def _find_templates(texts: list[str], folder: Path, notes: list[str]) -> Document:
    """Settings of template pictures: those that are here, and the stems of the others."""
    paths = {text: _find_file(text, folder) for text in texts}
    absent = [Path(text).stem for text, path in paths.items() if path is None]
    if absent:
        notes.append(
            f"templates: {len(absent)} of {len(paths)} template pictures are missing, so their "
            "columns are NA. Name your own pictures, or install HistoQC"
        )
    present = [str(path) for path in paths.values() if path is not None]
    return {"templates": present, "absent": absent}


def _convert_examples(
    texts: list[str], values: Document, folder: Path, notes: list[str]
) -> Document:
    """Settings for HistoQC's examples (image:mask).

    Either our two lists of pictures, or a built-in model in place of HistoQC's.
    """
    check_features(values["features"])
    # a colon after a drive's letter does not part image and mask
    pairs = [re.split(r"(?<!\W[A-Za-z]):", text) for text in texts]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(
            f"{values['name']} must have examples as image:mask, got {pairs}"
        )
    images = []
    masks = []
    missing = []
    for image_text, mask_text in pairs:
        image = _find_file(image_text, folder)
        mask = _find_file(mask_text, folder)
        images.append(str(image))
        masks.append(str(mask))
        if image is None:
            missing.append(image_text)
        if mask is None:
            missing.append(mask_text)
    if not missing:
        return {"model": "own", "example_images": images, "example_masks": masks}
    first_image = pairs[0][0].removeprefix("./")
    starts = [start for start in _OWN_MODELS if first_image.startswith(start)]
    if not starts:
        raise ConfigError(
            f"example must be an existing file, got {missing[0]!r} "
            f"for {values['name']!r}"
        )
    model = _OWN_MODELS[starts[0]]
    notes.append(
        f"{values['name']}: HistoQC's example pictures are missing; the built-in model "
        f"{model!r}, trained on generated pictures, is used instead"
    )
    # the model has features of its own, whatever HistoQC's were
    settings: Document = {"model": model, "features": []}
    if model == "coverslip":
        settings |= _COVERSLIP_LIMITS
    return settings


def _find_file(text: str, folder: Path) -> Path | None:
    """The file beside the config, or in an installed HistoQC."""
    roots = [folder]
    origin = getattr(find_spec("histoqc"), "origin", None)
    if origin:
        roots += [Path(origin).parent / "data", Path(origin).parent]
    for root in roots:
        if (root / text).is_file():
            return root / text
    return None
