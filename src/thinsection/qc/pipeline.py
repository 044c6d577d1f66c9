"""A pipeline is a list of checks with their parameters: a preset, or a TOML file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from thinsection.config import coerce, from_mapping, nearest, read_toml, toml_value
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc.checks import artefacts, by_example, masking, measures
from thinsection.qc.checks.check import QcCheck, Statistics
from thinsection.registry import Entry, Registry

WorkFrom = Literal["objective_power", "mpp"]
_BUILT_IN: tuple[type[QcCheck], ...] = (
    *(by_example.ByExample, masking.Intensity, masking.Otsu, masking.BrightestCluster),
    *(masking.LocalMinimum, masking.Flat, masking.Blurry, measures.Equalised, masking.Fat),
    *(masking.FillHoles, masking.DropSpecks, masking.Spurs, masking.Fragments),
    *(measures.CountPieces, measures.Contrast, measures.Brightness, measures.Stains),
    *(measures.Histogram, measures.Texture, artefacts.Focus, artefacts.Folds),
)
_PRESETS = Path(__file__).parent / "presets"
_RESERVED_NAMES = ("mask_use", "overlay", "thumbnail")  # of files that are no check's
_KINDS = {"name": str, "work_mpp": float, "work_from": WorkFrom, "statistics": Statistics}
_VERSION = 3  # of the checks: raise it when one answers differently
CHECKS: Registry[type[QcCheck]] = Registry(
    "qc check",
    "thinsection.qc_checks",
    [Entry(name=c.kind, help=str(c.__doc__).splitlines()[0], target=c) for c in _BUILT_IN],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Checks in the order in which they narrow the mask."""

    name: str  # of the preset or the file's own
    work_mpp: float = 8.0  # of the work image, µm/px; HistoQC's "1.25x" is 8 nominal µm/px
    # the nominal mpp of the objective power (10 / power), as HistoQC takes it, or the slide's mpp;
    # where a slide lacks the one, the other is taken and a warning says so
    work_from: WorkFrom = "objective_power"
    statistics: Statistics = "relative2mask"  # how a check's share is written
    checks: tuple[QcCheck, ...] = ()  # in order; names are unique

    @property
    def image_mpps(self) -> list[float]:
        """Nominal µm/px of the images that checks look at as a whole, the work image's first."""
        wanted = {mpp for check in self.checks for mpp in check.image_mpps}
        return [self.work_mpp, *sorted(wanted - {self.work_mpp})]

    def as_mapping(self) -> dict[str, Any]:
        """Plain values, as the TOML file would hold them."""
        checks = [{"kind": c.kind, **asdict(c)} for c in self.checks]
        return {**{key: getattr(self, key) for key in _KINDS}, "check": checks}


def preset_names() -> tuple[str, ...]:
    """The pipelines that come with the package."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.toml")))


def load_pipeline(source: str | Path) -> Pipeline:
    """A preset by name, or the pipeline of a TOML file.

    Raises:
        ConfigError: no such preset or file, an unknown key, or a value that is not allowed.
    """
    known = preset_names()
    path = _PRESETS / f"{source}.toml" if str(source) in known else Path(source)
    if path.suffix != ".toml":
        got = f"{str(source)!r}{nearest(str(source), known)}"
        raise ConfigError(f"qc pipeline must be a preset or a .toml file, got {got}")
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
    known, checks = (*_KINDS, "check"), data.get("check")
    if unknown := [key for key in data if key not in known]:
        raise ConfigError(f"unknown qc key {unknown[0]!r}{nearest(unknown[0], known)}")
    values = {key: coerce(data[key], kind, key) for key, kind in _KINDS.items() if key in data}
    if "name" not in values or not isinstance(checks, list) or not checks:
        raise ConfigError("qc pipeline must have a name and at least one [[check]] table")
    pipeline = Pipeline(**values, checks=tuple(check_from_mapping(c) for c in checks))
    if not pipeline.work_mpp > 0:
        raise ConfigError(f"work_mpp must be > 0, got {pipeline.work_mpp!r}")
    names = [check.name for check in pipeline.checks]
    if taken := sorted(set(names) & set(_RESERVED_NAMES)):
        raise ConfigError(f"check names must not be {', '.join(_RESERVED_NAMES)}, got {taken[0]!r}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"check names must be unique, got {twice[0]!r} twice; set its `name`")
    return pipeline


def check_from_mapping(data: Mapping[str, Any]) -> QcCheck:
    """One [[check]] table as a check.

    Raises:
        ConfigError: no such kind, an unknown key, or a value that is not allowed.
        InvalidInputError: another package's check is none.
        MissingDependencyError: a package that the check needs is not installed.
    """
    kind = str(data.get("kind"))
    cls = CHECKS.load(kind)
    if not (isinstance(cls, type) and issubclass(cls, QcCheck) and cls.kind == kind):
        rule = f"qc check {kind!r} must be a QcCheck of that kind, got {cls!r}"
        raise InvalidInputError(f"{rule}; mend or remove the package that brings it")
    settings = {key: value for key, value in data.items() if key != "kind"}
    return from_mapping(cls, settings, where=f"{kind}.")


def pipeline_identity(pipeline: Pipeline) -> dict[str, Any]:
    """Plain values that decide what a pipeline says of a slide: settings, pictures, version.

    Pictures that checks read count by size and modification time.
    """
    files = [Path(name) for check in pipeline.checks for name in check.files]
    stats = [path.stat() if path.is_file() else None for path in files]  # the run says what is gone
    pictures = [[stat.st_size, stat.st_mtime_ns] if stat else [] for stat in stats]
    return {"version": _VERSION, "pipeline": pipeline.as_mapping(), "pictures": pictures}
