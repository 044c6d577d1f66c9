"""A pipeline is a list of checks with their parameters: a preset, or a TOML file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from thinsection.config import coerce, field_types, nearest, read_toml
from thinsection.errors import ConfigError
from thinsection.qc import by_example, focus, folds, light, measures, shape, texture
from thinsection.qc.pixel_features import check_features
from thinsection.qc.sizes import area_px, length_px
from thinsection.qc.view import Outcome, QcView, Statistics

WorkFrom = Literal["objective_power", "mpp"]
CheckFunction = Callable[[QcView, Any], Outcome]

# kind in a TOML file -> (parameters, function)
CHECKS: dict[str, tuple[type, CheckFunction]] = {
    "by_example": (by_example.ByExample, by_example.by_example),
    "intensity": (light.Intensity, light.intensity),
    "otsu": (light.Otsu, light.otsu),
    "brightest_cluster": (light.BrightestCluster, light.brightest_cluster),
    "local_minimum": (light.LocalMinimum, light.local_minimum),
    "flat": (light.Flat, light.flat),
    "blurry": (light.Blurry, light.blurry),
    "equalised": (light.Equalised, light.equalised),
    "fat": (shape.Fat, shape.fat),
    "fill_holes": (shape.FillHoles, shape.fill_holes),
    "drop_specks": (shape.DropSpecks, shape.drop_specks),
    "spurs": (shape.Spurs, shape.spurs),
    "fragments": (shape.Fragments, shape.fragments),
    "count_pieces": (shape.CountPieces, shape.count_pieces),
    "contrast": (measures.Contrast, measures.contrast),
    "brightness": (measures.Brightness, measures.brightness),
    "stains": (measures.Stains, measures.stains),
    "histogram": (measures.Histogram, measures.histogram),
    "texture": (texture.Texture, texture.texture),
    "focus": (focus.Focus, focus.focus),
    "folds": (folds.Folds, folds.folds),
}
_LENGTHS = {"radius", "kernel", "dilate", "width", "block"}
_AREAS = {"min_area", "max_cell", "min_cell"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check with its parameters.

    Attributes:
        kind: key of `CHECKS`.
        params: an instance of that kind's parameters.
    """

    kind: str
    params: Any

    @property
    def name(self) -> str:
        """Unique within a pipeline; names the check's mask and picture."""
        return str(self.params.name)

    def __call__(self, view: QcView) -> Outcome:
        """What the check answers for a slide."""
        return CHECKS[self.kind][1](view, self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Checks in the order in which they narrow the mask.

    Attributes:
        name: of the preset or the file's own.
        work_mpp: resolution of the work image, µm/px; HistoQC's "1.25x" is 8 nominal µm/px.
        work_from: 'objective_power' takes the nominal mpp of the objective power (10 / power), as
            HistoQC does; 'mpp' takes the slide's mpp. Where a slide lacks the one, the other is
            taken and a warning says so.
        statistics: how a check's share is written.
        checks: in order; names are unique.
    """

    name: str
    work_mpp: float = 8.0
    work_from: WorkFrom = "objective_power"
    statistics: Statistics = "relative2mask"
    checks: tuple[Check, ...] = ()

    def as_mapping(self) -> dict[str, Any]:
        """Plain values, as the TOML file would hold them."""
        checks = [{"kind": c.kind, **asdict(c.params)} for c in self.checks]
        plain = {"name": self.name, "work_mpp": self.work_mpp, "work_from": self.work_from}
        return {**plain, "statistics": self.statistics, "check": checks}


def preset_names() -> tuple[str, ...]:
    """The pipelines that come with the package."""
    folder = resources.files("thinsection.qc") / "presets"
    names = (item.name for item in folder.iterdir())
    return tuple(sorted(n.removesuffix(".toml") for n in names if n.endswith(".toml")))


def load_pipeline(source: str | Path) -> Pipeline:
    """A preset by name, or the pipeline of a TOML file.

    Raises:
        ConfigError: no such preset or file, an unknown key, or a value that is not allowed.
    """
    if str(source) in preset_names():
        folder = resources.files("thinsection.qc") / "presets"
        with resources.as_file(folder / f"{source}.toml") as path:
            return pipeline_from_mapping(read_toml(path))
    if not str(source).endswith(".toml"):
        hint = nearest(str(source), preset_names())
        raise ConfigError(
            f"qc pipeline must be a preset or a .toml file, got {str(source)!r}{hint}"
        )
    return pipeline_from_mapping(read_toml(Path(source)))


def dump_pipeline(pipeline: Pipeline) -> str:
    """The pipeline as TOML that `load_pipeline` reads; settings at their default are left out."""
    plain = pipeline.as_mapping()
    lines = [f"{key} = {toml_value(plain[key])}" for key in plain if key != "check"]
    for check in pipeline.checks:
        default = type(check.params)()
        lines += ["", "[[check]]", f"kind = {toml_value(check.kind)}"]
        for name, value in asdict(check.params).items():
            if name == "name" or value != getattr(default, name):
                lines.append(f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """One value in TOML: JSON's strings, numbers, truth values and lists are TOML's as well."""
    return json.dumps(value)


def pipeline_from_mapping(data: Mapping[str, Any]) -> Pipeline:
    """The pipeline of a TOML file's tables.

    Raises:
        ConfigError: an unknown key or kind, a wrong value, or two checks of one name.
    """
    known = {"name": str, "work_mpp": float, "work_from": WorkFrom, "statistics": Statistics}
    for key in data:
        if key not in known and key != "check":
            raise ConfigError(f"unknown qc key {key!r}{nearest(key, [*known, 'check'])}")
    values = {k: coerce(data[k], kind, k) for k, kind in known.items() if k in data}
    checks = data.get("check", [])
    if "name" not in values or not isinstance(checks, list) or not checks:
        raise ConfigError("qc pipeline must have a name and at least one [[check]] table")
    pipeline = Pipeline(**values, checks=tuple(check_from_mapping(c) for c in checks))
    if not pipeline.work_mpp > 0:
        raise ConfigError(f"work_mpp must be > 0, got {pipeline.work_mpp!r}")
    names = [check.name for check in pipeline.checks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"check names must be unique, got {twice[0]!r} twice; set its `name`")
    return pipeline


def check_from_mapping(data: Mapping[str, Any]) -> Check:
    """One [[check]] table as a check; lengths and areas are parsed here once, to fail early."""
    kind = data.get("kind")
    if kind not in CHECKS:
        raise ConfigError(f"unknown qc check {kind!r}{nearest(str(kind), CHECKS)}")
    kinds = field_types(CHECKS[kind][0])
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key == "kind":
            continue
        if key not in kinds:
            raise ConfigError(f"unknown qc key '{kind}.{key}'{nearest(key, kinds)}")
        values[key] = coerce(value, kinds[key], f"{kind}.{key}")
    params = CHECKS[kind][0](**values)
    for key in kinds:
        parse = length_px if key in _LENGTHS else area_px if key in _AREAS else None
        if parse is not None:
            parse(getattr(params, key), 1.0, key=f"{kind}.{key}")
    if isinstance(params, by_example.ByExample):
        check_features(params.features)
    if not params.name or "/" in params.name:
        raise ConfigError(f"{kind}.name must be a file name, got {params.name!r}")
    return Check(kind=kind, params=params)
