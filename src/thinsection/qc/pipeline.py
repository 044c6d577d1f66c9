"""A pipeline is a list of checks with their parameters: a preset, a TOML file, HistoQC's config."""

import configparser
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from thinsection.config import (
    coerce,
    field_types,
    from_mapping,
    nearest,
    read_toml,
    toml_value,
)
from thinsection.errors import ConfigError, InvalidInputError, require, rewording
from thinsection.qc.checks import artefacts, by_example, masking, measures, tissue
from thinsection.qc.checks.check import QcCheck, Statistics
from thinsection.registry import Entry, Registry
from thinsection.slide.geometry import nominal_mpp

Texts = Mapping[str, str]  # a section of HistoQC's config: key -> text
Table = dict[str, Any]  # of a TOML file
WorkFrom = Literal["objective_power", "mpp"]
Usable = Literal["absolute", "relative2image"]
_BUILT_IN: tuple[type[QcCheck], ...] = (
    *(by_example.ByExample, masking.Intensity, masking.Otsu, masking.BrightestCluster),
    *(
        masking.LocalMinimum,
        masking.Flat,
        masking.Blurry,
        measures.Equalised,
        masking.Fat,
    ),
    *(masking.FillHoles, masking.DropSpecks, masking.Spurs, masking.Fragments),
    *(measures.CountPieces, measures.Contrast, measures.Brightness, measures.Stains),
    *(measures.Histogram, measures.Texture, measures.SavedMask, measures.SavedMacro),
    *(artefacts.Focus, artefacts.Folds, tissue.Tissue),
    *(artefacts.Ink, artefacts.Bubbles, artefacts.Dirt),
)
_HISTOQC = "histoqc-"  # before HistoQC's own names of its pipelines
_PRESETS = Path(__file__).parent / "presets"
# of files that are no check's
_RESERVED_NAMES = ("mask_use", "mask_kept", "overlay", "thumbnail", "qc")
_VERSION = 11  # of the checks: raise it when one answers differently
_ENTRIES = [
    Entry(name=c.kind, help=str(c.__doc__).splitlines()[0], target=c) for c in _BUILT_IN
]
CHECKS: Registry[type[QcCheck]] = Registry(
    "qc check", "thinsection.qc_checks", _ENTRIES
)
_BASE, _FINAL = "BaseImage.BaseImage", "BasicModule.finalComputations"
_STATISTICS = {
    "mask_statistics": ["statistics", "text"]
}  # a key of every step's section
_MASKS = {  # HistoQC's name -> the check that makes it (two of its names are swapped)
    **{
        "img_mask_use": "",
        "img_mask_flat": "flat_areas",
        "img_mask_fatlike": "fatlike",
    },
    **{
        "img_mask_small_filled": "small_removed",
        "img_mask_small_removed": "small_filled",
    },
    "img_mask_blurry": "blurry",
}
# pictures that come with HistoQC: not ours to ship, our generated ones stand in for them
_OWN_MODELS = {"pen/": "pen", "models/coverslip": "coverslip"}
_NO_STEP: Table = {"kind": "", "keys": {}, "fixed": {}, "ignored": [], "name": ""}
_NO_STEP |= {"sets": {}, "refused": {}, "because": ""}
_LETTERS = {"y": True, "t": True, "n": False, "f": False}
_TRUTHS = {**configparser.ConfigParser.BOOLEAN_STATES, **_LETTERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Checks in the order in which they narrow the mask."""

    name: str  # of the preset or the file's own
    work_mpp: float = (
        8.0  # of the work image, µm/px; HistoQC's "1.25x" is 8 nominal µm/px
    )
    # the nominal mpp of the objective power (10 / power), as HistoQC takes it, or the slide's mpp;
    # where a slide lacks the one, the other is taken and a warning says so
    work_from: WorkFrom = "objective_power"
    statistics: Statistics = "relative2mask"  # how a check's share is written
    pixels_to_use: Usable = (
        "absolute"  # how that column is written: px, or a share of the image
    )
    # checks after one that would take most of the tissue see that tissue again; HistoQC's do not
    guard: bool = True
    checks: tuple[QcCheck, ...] = ()  # in order; names are unique
    # measured stain -> name of a check after it -> settings that are other for that stain
    variants: Mapping[str, Mapping[str, Table]] = field(default_factory=dict)

    @property
    def image_mpps(self) -> list[float]:
        """Nominal µm/px of the images that checks look at as a whole, the work image's first."""
        wanted = {mpp for check in self.checks for mpp in check.image_mpps}
        return [self.work_mpp, *sorted(wanted - {self.work_mpp})]

    @property
    def asks_nets(self) -> bool:
        """Whether a check looks at `artefact_maps`."""
        return any(
            check.kind in ("bubbles", "dirt", "folds", "ink") for check in self.checks
        )

    def variant(self, check: QcCheck, stain: str) -> QcCheck:
        """The check with its settings for a stain."""
        return replace(check, **self.variants.get(stain, {}).get(check.name, {}))

    def as_mapping(self) -> dict[str, Any]:
        """Plain values, as the TOML file would hold them."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        del plain["checks"], plain["variants"]
        plain["check"] = [{"kind": c.kind, **asdict(c)} for c in self.checks]
        variants = {stain: dict(tables) for stain, tables in self.variants.items()}
        return plain | ({"variant": variants} if variants else {})


def preset_names() -> tuple[str, ...]:
    """The pipelines that come with the package."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.toml")))


def load_pipeline(source: str | Path) -> Pipeline:
    """A preset by name, or the pipeline of a TOML file.

    Raises ConfigError: no such preset or file, an unknown key, or a value that is not allowed.
    """
    known, histoqcs = preset_names(), f"{_HISTOQC}{source}"
    path = _PRESETS / f"{source}.toml" if str(source) in known else Path(source)
    now = f"; HistoQC's is {histoqcs!r} now, and 'auto' is recommended"
    hint = now if histoqcs in known else nearest(str(source), known)
    rule, got = "qc pipeline must be a preset or a .toml file", f"{str(source)!r}{hint}"
    require(path.suffix == ".toml", rule, got, error=ConfigError)
    return pipeline_from_mapping(read_toml(path))


def dump_pipeline(pipeline: Pipeline) -> str:
    """The pipeline as TOML that `load_pipeline` reads; settings at their default are left out."""
    plain = pipeline.as_mapping()
    lines = [f"{key} = {toml_value(plain[key])}" for key in plain if key != "check"]
    for check in pipeline.checks:
        default = type(check)()
        lines += ["", "[[check]]", f"kind = {toml_value(check.kind)}"]
        for name, value in asdict(check).items():
            if name == "name" or value != getattr(default, name):
                lines.append(f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def pipeline_from_mapping(data: Mapping[str, Any]) -> Pipeline:
    """The pipeline of a TOML file's tables; ConfigError as of `load_pipeline`."""
    kinds, checks = dict(field_types(Pipeline)), data.get("check")
    del kinds["checks"], kinds["variants"]
    known = (*kinds, "check", "variant")
    if unknown := [key for key in data if key not in known]:
        raise ConfigError(f"unknown qc key {unknown[0]!r}{nearest(unknown[0], known)}")
    values = {
        key: coerce(data[key], kind, key) for key, kind in kinds.items() if key in data
    }
    if "name" not in values or not isinstance(checks, list) or not checks:
        raise ConfigError(
            "qc pipeline must have a name and at least one [[check]] table"
        )
    variants = coerce(data.get("variant", {}), dict[str, dict[str, Table]], "variant")
    built = tuple(check_from_mapping(c) for c in checks)
    pipeline = Pipeline(**values, checks=built, variants=variants)
    require(
        pipeline.work_mpp > 0,
        "work_mpp must be > 0",
        pipeline.work_mpp,
        error=ConfigError,
    )
    names, by_name = (
        [check.name for check in built],
        {check.name: check for check in built},
    )
    for stain, name in [
        (stain, name) for stain, tables in variants.items() for name in tables
    ]:
        where, check = f"variant.{stain}.{name}", by_name.get(name)
        if check is None or isinstance(check, by_example.ByExample):
            allowed = "one of the pipeline's that is not by example"
            raise ConfigError(
                f"{where} must be {allowed}, got {name!r}{nearest(name, by_name)}"
            )
        from_mapping(
            type(check), asdict(check) | variants[stain][name], where=f"{where}."
        )
    if taken := sorted(set(names) & set(_RESERVED_NAMES)):
        raise ConfigError(
            f"check names must not be {', '.join(_RESERVED_NAMES)}, got {taken[0]!r}"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"check names must be unique, got {twice[0]!r} twice; set its `name`"
        )
    return pipeline


def check_from_mapping(data: Mapping[str, Any]) -> QcCheck:
    """One [[check]] table as a check; InvalidInputError where another package's check is none."""
    kind = str(data.get("kind"))
    cls = CHECKS.load(kind)
    if not (isinstance(cls, type) and issubclass(cls, QcCheck) and cls.kind == kind):
        rule = f"qc check {kind!r} must be a QcCheck of that kind, got {cls!r}"
        raise InvalidInputError(f"{rule}; mend or remove the package that brings it")
    settings = {key: value for key, value in data.items() if key != "kind"}
    return from_mapping(cls, settings, where=f"{kind}.")


def pipeline_identity(pipeline: Pipeline) -> dict[str, Any]:
    """Plain values that decide what it says of a slide; pictures by size and modification time."""
    files = [Path(name) for check in pipeline.checks for name in check.files]
    stats = [
        [path.stat()] if path.is_file() else [] for path in files
    ]  # the run says what is gone
    pictures = [[n for s in stat for n in (s.st_size, s.st_mtime_ns)] for stat in stats]
    return {
        "version": _VERSION,
        "pipeline": pipeline.as_mapping(),
        "pictures": pictures,
    }


@cache
def _steps() -> dict[str, Table]:
    """HistoQC's function -> how it becomes a check; the file's first lines say what a table has."""
    tables = read_toml(Path(__file__).with_name("histoqc_steps.toml"))
    return {function: _NO_STEP | table for function, table in tables.items()}


def _read(text: str, reading: str) -> Any:
    """A value of HistoQC's config as our setting; ValueError where it is none."""
    match reading:
        case "truth" if (letters := text.strip().lower()) in _TRUTHS:
            return _TRUTHS[letters]
        case "truth":
            raise ValueError(f"not a truth value: {text!r}")
        case "magnification" if re.fullmatch(r"\d*\.?\d+[xX]", text):
            return nominal_mpp(float(text[:-1]))
        case "magnification":
            raise ValueError(f"must be a magnification such as 1.25x, got {text!r}")
        case "mask" if text not in _MASKS:
            raise ValueError(f"must be one of {', '.join(_MASKS)}")
        case "px":
            return f"{float(text):g} px"
    plain: Any = {
        "float": float,
        "int": int,
        "text": str,
        "words": str.split,
        "mask": _MASKS.get,
    }
    return plain[reading](text)


def pipeline_from_ini(path: Path) -> tuple[Pipeline, list[str]]:
    """The pipeline of HistoQC's config file, and what differs from it, in words.

    Relative pictures are looked for beside the file, and in an installed HistoQC. Examples that
    come with HistoQC and are not there are replaced by our generated ones, templates left out;
    the notes say so.

    Raises ConfigError: no such file, or a step, key or value that cannot be carried over, by name.
    """
    parser, got = configparser.ConfigParser(interpolation=None), repr(str(path))
    require(path.exists(), "config must be an existing file", got, error=ConfigError)
    not_ini = (configparser.Error, UnicodeDecodeError)
    with rewording("config must be an .ini file", path, *not_ini, error=ConfigError):
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    there = parser.has_option("pipeline", "steps")
    require(
        there, "config must have [pipeline] steps", f"none in {got}", error=ConfigError
    )
    sections = {name: dict(parser[name]) for name in parser.sections()}
    notes: list[str] = []
    checks: dict[str, Table] = {}
    for step in parser.get("pipeline", "steps").split():
        if (
            check := _check(step, sections.get(step, {}), path.parent, notes)
        ) is not None:
            while check["name"] in checks:
                check["name"] += "_again"
            checks[check["name"]] = check
    base, final = (
        _settings(s, sections.get(s, {}), _steps()[s]) for s in (_BASE, _FINAL)
    )
    if (
        final["pixels_to_use"] == "relative2mask"
    ):  # HistoQC takes px in its place, and says so
        final["pixels_to_use"] = "absolute"
    base |= final | {"name": path.stem, "work_from": "objective_power", "guard": False}
    return pipeline_from_mapping(base | {"check": list(checks.values())}), notes


def _check(step: str, section: Texts, folder: Path, notes: list[str]) -> Table | None:
    """One step as a [[check]] table, or None if there is nothing to check."""
    function, _, label = step.partition(":")
    if function not in _steps():
        raise ConfigError(f"unknown step {step!r}{nearest(function, _steps())}")
    table = _steps()[function]
    if table["because"]:
        raise ConfigError(f"step {step!r} must be left out: {table['because']}")
    values = _settings(step, section, table)
    if not table["kind"]:
        return None
    values |= table["sets"]
    label = label.replace(":", "_")  # of a check's name, which names files
    values.setdefault("name", f"{table['name']}_{label}" if label else table["name"])
    if table["kind"] == "by_example":
        values |= _examples(values.pop("examples"), values, folder, notes)
    if paths := {text: _find(text, folder) for text in values.get("templates", ())}:
        values["templates"] = [str(path) for path in paths.values() if path is not None]
        values["absent"] = [
            Path(text).stem for text, path in paths.items() if path is None
        ]
        if missing := len(values["absent"]):
            what = (
                f"templates: {missing} of {len(paths)} template pictures are not here"
            )
            notes.append(
                f"{what}; their columns are NA. Name your own, or install HistoQC"
            )
    return {"kind": table["kind"], **values}


def _settings(step: str, section: Texts, table: Table) -> Table:
    """What a section sets, by our names; a key or value that cannot be carried over is refused."""
    keys, fixed, refused = table["keys"], table["fixed"], table["refused"]
    keys = _STATISTICS | keys if table["kind"] else keys
    known = (*keys, *fixed, *table["ignored"])
    for key, text in section.items():
        if key in fixed and not _same(text, fixed[key]):
            raise ConfigError(
                f"{step}.{key} must be {fixed[key]} to be carried over, got {text!r}"
            )
        if key in refused:
            raise ConfigError(
                f"{step}.{key} must be left out, got {text!r}: {refused[key]}"
            )
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in [{step}]{nearest(key, known)}")
    values: Table = {}
    for key, (ours, reading, *default) in keys.items():
        if (set_to := section.get(key, *default)) is not None:
            try:
                values.setdefault(ours, _read(set_to, reading))
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


def _examples(texts: list[str], values: Table, folder: Path, notes: list[str]) -> Table:
    """Settings for HistoQC's examples (image:mask): our two lists, or those of a built-in model."""
    by_example.check_features(values["features"])
    pairs = [re.split(r"(?<!\W[A-Za-z]):", text) for text in texts]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(
            f"{values['name']} must have examples as image:mask, got {pairs}"
        )
    found = {text: _find(text, folder) for pair in pairs for text in pair}
    missing = [text for text, path in found.items() if path is None]
    if not missing:
        images, masks = (
            [str(found[text]) for text in side] for side in zip(*pairs, strict=True)
        )
        return {"model": "own", "example_images": images, "example_masks": masks}
    first = pairs[0][0].removeprefix("./")
    model = next((m for start, m in _OWN_MODELS.items() if first.startswith(start)), "")
    got = f"{missing[0]!r} for {values['name']!r}"
    require(model, "example must be an existing file", got, error=ConfigError)
    ours = f"the built-in model {model!r}, trained on generated pictures, takes their place"
    notes.append(f"{values['name']}: HistoQC's example pictures are not here; {ours}")
    limits = {"threshold": 0.8, "min_elongation": 8.0} if model == "coverslip" else {}
    return {
        "model": model,
        "features": [],
        **limits,
    }  # its own, whatever HistoQC's were


def _find(text: str, folder: Path) -> Path | None:
    """The file beside the config, or in an installed HistoQC."""
    roots = [folder]
    if origin := getattr(find_spec("histoqc"), "origin", None):
        roots += [Path(origin).parent / "data", Path(origin).parent]
    return next((root / text for root in roots if (root / text).is_file()), None)
