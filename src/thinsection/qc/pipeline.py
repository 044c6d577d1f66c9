"""A pipeline: a list of checks with their parameters, from a preset or a TOML file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from thinsection.config import (
    coerce,
    from_mapping,
    nearest,
    read_toml,
    toml_value,
)
from thinsection.errors import ConfigError, InvalidInputError, naming_file
from thinsection.qc.checks.artefacts import Bubbles, Dirt, Folds, Ink, Unsure
from thinsection.qc.checks.by_example import ExampleCheck
from thinsection.qc.checks.check import UNJUDGED, QcCheck, Statistics
from thinsection.qc.checks.focus import Focus
from thinsection.qc.checks.masking import (
    Blurry,
    BrightestCluster,
    DropSpecks,
    Fat,
    FillHoles,
    Flat,
    Fragments,
    Intensity,
    LocalMinimum,
    Otsu,
    Spurs,
)
from thinsection.qc.checks.measures import (
    Brightness,
    Contrast,
    CountPieces,
    Equalised,
    Histogram,
    SavedMacro,
    SavedMask,
    Stains,
    Texture,
)
from thinsection.qc.checks.tissue import Tissue
from thinsection.qc.histoqc_pictures import (
    installed_folders,
    refuse_folder_without_pictures,
    uses_pictures,
    with_pictures,
)
from thinsection.qc.segmenter_classes import ClassCheck, SegmenterClasses, beside
from thinsection.registry import Entry, Registry
from thinsection.types import Document, PlainValues

WorkFrom = Literal["objective_power", "mpp"]
Usable = Literal["absolute", "relative2image"]

_BUILT_IN: tuple[type[QcCheck], ...] = (
    ExampleCheck,
    Intensity,
    Otsu,
    BrightestCluster,
    LocalMinimum,
    Flat,
    Blurry,
    Equalised,
    Fat,
    FillHoles,
    DropSpecks,
    Spurs,
    Fragments,
    CountPieces,
    Contrast,
    Brightness,
    Stains,
    Histogram,
    Texture,
    SavedMask,
    SavedMacro,
    Focus,
    Folds,
    Tissue,
    Ink,
    Bubbles,
    Dirt,
    Unsure,
    ClassCheck,
)
# Begins names of HistoQC's own pipelines.
_HISTOQC = "histoqc-"
_PRESETS = Path(__file__).parent / "presets"
# Names of files and columns that belong to no check.
_RESERVED_NAMES = (
    "mask_use",
    "mask_kept",
    "edited_mask_use",
    "edited_mask_kept",
    "overlay",
    "thumbnail",
    "thumbnail_small",
    "qc",
    UNJUDGED,
)
# Checks by which `[segmenter.classes]` says that the guard follows a class.
_SURE_CLASSES = ("ink", "focus")
# Of the checks: raise it when one answers differently.
_VERSION = 44

# Settings of a pipeline that are plain values.
_SETTINGS = (
    "name",
    "work_mpp",
    "work_from",
    "statistics",
    "pixels_to_use",
    "guard",
)

CHECKS: Registry[type[QcCheck]] = Registry(
    "qc check",
    "thinsection.qc_checks",
    [
        Entry(name=cls.kind, help=str(cls.__doc__).splitlines()[0], target=cls)
        for cls in _BUILT_IN
    ],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Checks in the order in which they narrow the mask."""

    name: str  # of the preset or the file's own
    # of the work image, µm/px; HistoQC's "1.25x" is 8 nominal µm/px
    work_mpp: float = 8.0
    # the nominal mpp of the objective power (10 / power), as HistoQC takes it, or the
    # slide's mpp; where a slide lacks the one, the other is taken and a warning says so
    work_from: WorkFrom = "objective_power"
    # form in which a check's share is written
    statistics: Statistics = "relative2mask"
    # form in which that column is written: px, or a share of the image
    pixels_to_use: Usable = "absolute"
    # checks after one that would take most of the tissue see that tissue again; HistoQC's
    # do not
    guard: bool = True
    # in order; names are unique
    checks: tuple[QcCheck, ...] = ()
    # measured stain -> name of a check after it -> settings that are other for that stain
    variants: Mapping[str, Mapping[str, Document]] = field(default_factory=dict)
    # whose classes checks of kind 'class' take; None: there is no such check
    segmenter: SegmenterClasses | None = None

    @property
    def image_mpps(self) -> list[float]:
        """Nominal µm/px of the images that checks look at, the work image's first."""
        others: set[float] = set()
        for check in self.checks:
            others.update(check.image_mpps)
        others.discard(self.work_mpp)
        return [self.work_mpp, *sorted(others)]

    @property
    def editable_checks(self) -> list[str]:
        """Names of the checks that a person can correct: those that mark areas to remove."""
        return [check.name for check in self.checks if check.marks and not check.fills]

    @property
    def asks_network(self) -> bool:
        """True if a check asks the artefact network."""
        return any(check.asks_network for check in self.checks)

    def variant(self, check: QcCheck, stain: str) -> QcCheck:
        """The check with its settings for a stain."""
        return replace(check, **self.variants.get(stain, {}).get(check.name, {}))

    def removing(self, names: Sequence[str]) -> "Pipeline":
        """The pipeline in which checks that only show what they find remove it.

        Raises ConfigError: there is no such check, or it removes what it finds anyway.
        """
        shown = [check.name for check in self.checks if not check.removes]
        if not names:
            return self
        for name in names:
            if name not in shown:
                if not shown:
                    raise ConfigError(
                        f"qc_remove must be left out, because all checks of {self.name!r} "
                        f"remove, got {name!r}"
                    )
                raise ConfigError(
                    "qc_remove must be a check that only shows what it finds "
                    f"({', '.join(shown)}), got {name!r}{nearest(name, shown)}"
                )
        checks = [
            check.removing() if check.name in names else check for check in self.checks
        ]
        return replace(self, checks=tuple(checks))

    def as_mapping(self) -> Document:
        """Plain values, as the TOML file would hold them."""
        plain: Document = {name: getattr(self, name) for name in _SETTINGS}
        if self.segmenter is not None:
            plain["segmenter"] = self.segmenter.as_mapping()
        plain["check"] = [{"kind": c.kind, **asdict(c)} for c in self.checks]
        if self.variants:
            variants = {stain: dict(tables) for stain, tables in self.variants.items()}
            plain["variant"] = variants
        return plain


def preset_names() -> tuple[str, ...]:
    """The pipelines that come with the package."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.toml")))


def load_pipeline(
    source: str | Path,
    *,
    remove: Sequence[str] = (),
    histoqc_data: Path | None = None,
) -> Pipeline:
    """Loads a preset by name, or the pipeline of a TOML file.

    HistoQC's presets take each picture from `histoqc_data`, the current folder or an installed
    HistoQC: the first that has it. Pictures of your own file stay those that it names.

    Args:
        source: name of the preset, or path of the file.
        remove: checks that remove what they find, although their setting is to show it only.
        histoqc_data: folder with HistoQC's example pictures and templates.

    Raises:
        ConfigError: no such preset or file, an unknown key, a value that is not allowed, or a
            folder without HistoQC's pictures.
    """
    presets = preset_names()
    path = Path(source)
    if str(source) in presets:
        path = _PRESETS / f"{source}.toml"
    if path.suffix != ".toml":
        hint = nearest(str(source), presets)
        histoqc_name = f"{_HISTOQC}{source}"
        if histoqc_name in presets:
            hint = f"; HistoQC's preset is now called {histoqc_name!r}, and 'auto' is recommended"
        raise ConfigError(
            f"qc pipeline must be a preset or a .toml file, got {str(source)!r}{hint}"
        )
    with naming_file(path):
        pipeline = pipeline_from_mapping(read_toml(path), folder=path.parent)
    folders = [Path(), *installed_folders()]
    if histoqc_data is not None:
        has_pictures = any(map(uses_pictures, pipeline.checks))
        if not (has_pictures or str(source).startswith(_HISTOQC)):
            raise ConfigError(
                "histoqc_data must be left out for a pipeline without HistoQC's pictures, got "
                f"{str(histoqc_data)!r} for {str(source)!r}"
            )
        refuse_folder_without_pictures(pipeline.checks, histoqc_data)
        folders.insert(0, histoqc_data)
    if histoqc_data is not None or path.parent == _PRESETS:
        checks = with_pictures(pipeline.checks, folders)
        pipeline = replace(pipeline, checks=checks)
    return pipeline.removing(remove)


def dump_pipeline(pipeline: Pipeline) -> str:
    """Writes TOML that `load_pipeline` reads; settings at their default are left out."""
    plain = pipeline.as_mapping()
    lines = [f"{key} = {toml_value(plain[key])}" for key in plain if key != "check"]
    for check in pipeline.checks:
        default = type(check)()
        lines += ["", "[[check]]", f"kind = {toml_value(check.kind)}"]
        for name, value in asdict(check).items():
            if name == "name" or value != getattr(default, name):
                lines.append(f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def pipeline_from_mapping(data: Document, *, folder: Path = Path()) -> Pipeline:
    """The pipeline of a TOML file's tables; ConfigError as of `load_pipeline`.

    Paths of `[segmenter]` are relative to `folder`.
    """
    keys = (*_SETTINGS, "check", "variant", "segmenter")
    for key in data:
        if key not in keys:
            raise ConfigError(f"unknown qc key {key!r}{nearest(key, keys)}")
    tables = data.get("check")
    if "name" not in data or not isinstance(tables, list) or not tables:
        raise ConfigError(
            "qc pipeline must have a name and at least one [[check]] table"
        )
    variants = coerce(
        data.get("variant", {}), dict[str, dict[str, Document]], "variant"
    )
    checks = tuple(check_from_mapping(table) for table in tables)
    segmenter = None
    if "segmenter" in data:
        table = coerce(data["segmenter"], dict[str, object], "segmenter")
        segmenter = from_mapping(
            SegmenterClasses, beside(folder, table), where="segmenter."
        )
    checks = _with_class_checks(checks, segmenter)
    settings = {key: value for key, value in data.items() if key in _SETTINGS}
    pipeline = from_mapping(Pipeline, settings)
    pipeline = replace(pipeline, checks=checks, variants=variants, segmenter=segmenter)
    if pipeline.work_mpp <= 0:
        raise ConfigError(f"work_mpp must be > 0, got {pipeline.work_mpp}")
    _check_variants(pipeline)
    _check_names([check.name for check in checks])
    return pipeline


def _with_class_checks(
    checks: tuple[QcCheck, ...], segmenter: SegmenterClasses | None
) -> tuple[QcCheck, ...]:
    """Adds a check for each name in `[segmenter.classes]` that has no [[check]] of its own.

    They follow the last check that removes glass, because the guard compares with the tissue.
    """
    names = () if segmenter is None else segmenter.check_names
    written = []
    for check in checks:
        if isinstance(check, ClassCheck):
            written.append(check.name)
            if check.name not in names:
                raise ConfigError(
                    f"a check of kind 'class' must be named in [segmenter.classes], got "
                    f"{check.name!r}{nearest(check.name, names)}"
                )
        elif check.name in names:
            raise ConfigError(
                f"segmenter.classes must not name another check of the pipeline, got "
                f"{check.name!r} of kind {check.kind!r}; remove that [[check]] or give it "
                "another name"
            )
    added = [
        ClassCheck(name=name, sure=name in _SURE_CLASSES)
        for name in names
        if name not in written
    ]
    place = 0
    for number, check in enumerate(checks, start=1):
        if check.removes_glass:
            place = number
    return (*checks[:place], *added, *checks[place:])


def _check_variants(pipeline: Pipeline) -> None:
    checks = {check.name: check for check in pipeline.checks}
    for stain, tables in pipeline.variants.items():
        for name, table in tables.items():
            key = f"variant.{stain}.{name}"
            check = checks.get(name)
            if check is None or isinstance(check, ExampleCheck):
                raise ConfigError(
                    f"{key} must be a check of this pipeline that is not by example, got "
                    f"{name!r}{nearest(name, checks)}"
                )
            from_mapping(type(check), {**asdict(check), **table}, where=f"{key}.")


def _check_names(names: list[str]) -> None:
    for name in sorted(names):
        if name in _RESERVED_NAMES:
            raise ConfigError(
                f"check names must not be {', '.join(_RESERVED_NAMES)}, got {name!r}"
            )
        if name.endswith(f"_{UNJUDGED}"):
            raise ConfigError(
                f"check names must not end with '_{UNJUDGED}', which names the area that a "
                f"check did not judge, got {name!r}"
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"check names must be unique, got {name!r} twice; set its `name`"
            )


def check_from_mapping(data: Document) -> QcCheck:
    """One [[check]] table as a check.

    Raises:
        ConfigError: there is no such check, or a setting is wrong.
        InvalidInputError: another package's check is none.
    """
    kind = str(data.get("kind"))
    cls = CHECKS.load(kind)
    if not (isinstance(cls, type) and issubclass(cls, QcCheck)):
        raise InvalidInputError(
            f"qc check {kind!r} must be a QcCheck of that kind, got {cls!r}; repair or remove "
            "the package that provides it"
        )
    stated = getattr(cls, "kind", None)
    if stated != kind:
        raise InvalidInputError(
            f"kind of {cls.__name__} must be {kind!r}, the name of its entry point, got "
            f'{stated!r}; write kind: ClassVar[str] = "{kind}" in the class'
        )
    # a class that is no dataclass has only the settings of its base class
    if "__dataclass_fields__" not in vars(cls):
        raise InvalidInputError(
            f"{cls.__name__} must be a frozen dataclass, got a plain class; write "
            "@dataclass(frozen=True, kw_only=True) above it"
        )
    settings = {key: value for key, value in data.items() if key != "kind"}
    return from_mapping(cls, settings, where=f"{kind}.")


def pipeline_identity(pipeline: Pipeline) -> PlainValues:
    """Plain values that decide its answers; pictures by size and modification time."""
    pictures: list[list[int]] = []
    for check in pipeline.checks:
        for name in check.files:
            path = Path(name)
            # the run reports a file that is gone
            stamp: list[int] = []
            if path.is_file():
                stat = path.stat()
                stamp = [stat.st_size, stat.st_mtime_ns]
            pictures.append(stamp)
    settings = pipeline.as_mapping()
    if pipeline.segmenter is not None:
        # who runs the segmenter knows it by the content of its files, not by their paths
        settings["segmenter"] = {"classes": dict(pipeline.segmenter.classes)}
    return {
        "version": _VERSION,
        "pipeline": settings,
        "pictures": pictures,
    }
