"""The public names of the package, with their parameters: for the page of the docs, and for a test.

`python -m tests.support.surface` writes `tests/public_names.txt`, which is a promise to users: a
name or a parameter that is in it may go only after a release in which it warned.
"""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import thinsection

PROMISED = Path(__file__).parents[1] / "public_names.txt"
# modules that are imported by name; their `__all__` is public, and so are all errors
MODULES = (
    "attention",
    "citation",
    "deid",
    "encode",
    "errors",
    "frames",
    "plot",
    "pool",
    "probe",
    "qc",
    "rescue",
    "results",
    "segment",
    "slide",
    "store.cache",
    "testing",
    "tiles",
    "tiles.graph",
)
# where a module of this face lies
_HOMES = {"plot": "results.plot"}
# classes of what public functions return or take, whose methods are public
RETURNED = (
    "citation.Citation",
    "evaluation.audit.Audit",
    "evaluation.own_folds.FoldRows",
    "evaluation.own_folds.Folds",
    "evaluation.own_scores.Comparison",
    "evaluation.own_scores.MetricInterval",
    "qc.QcResult",
    "qc.TissueMask",
    "results.folder.Results",
    "results.indexed_tiles.IndexedTiles",
    "results.tile_dataset.TileDataset",
    "results.tile_loader.TileLoader",
    "slide.Slide",
    "slide.resize.TilePictures",
    "store.tiles_h5.TilesFile",
    "tiles.TileBatch",
    "tiles.TileTable",
)


@dataclass(frozen=True, order=True)
class Public:
    """A public name."""

    name: str  # 'thinsection.folds', 'Results.tiles'
    parameters: tuple[
        str, ...
    ]  # 'labels', '*', 'patients='; () for a property or constant
    words: str  # first sentence of its docstring

    @property
    def line(self) -> str:
        """The name and its parameters, as PROMISED holds them."""
        return f"{self.name}({', '.join(self.parameters)})"


def public_names() -> list[Public]:
    """Every public name, once, in order."""
    found: dict[str, Public] = {}
    for name in thinsection.__all__:
        value = getattr(thinsection, name)
        if not isinstance(value, ModuleType):
            found[f"thinsection.{name}"] = _public(f"thinsection.{name}", value)
    for module_name in MODULES:
        module = module_of(module_name)
        for name in names_of(module):
            value = getattr(module, name)
            full_name = f"thinsection.{module_name}.{name}"
            if not isinstance(value, ModuleType):
                found[full_name] = _public(full_name, value)
    for place in RETURNED:
        for public in _members(class_of(place)):
            found[public.name] = public
    return sorted(found.values())


def module_of(name: str) -> ModuleType:
    """A module that is imported by name."""
    return import_module(f"thinsection.{_HOMES.get(name, name)}")


def names_of(module: ModuleType) -> list[str]:
    """Its `__all__`; of the errors all their classes."""
    if module is thinsection.errors:
        return [
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
    listed: list[str] = module.__all__
    return listed


def class_of(place: str) -> type:
    """A class by module and name, below `thinsection`."""
    module, _, name = place.rpartition(".")
    found: type = getattr(import_module(f"thinsection.{module}"), name)
    return found


def members_of(kind: type) -> list[str]:
    """Names of its own public methods and properties."""
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isroutine(value) or _is_property(value))
    ]


def _is_property(value: object) -> bool:
    return isinstance(value, property) or type(value).__name__ == "cached_property"


def _members(kind: type) -> Iterator[Public]:
    for name in members_of(kind):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        yield _public(f"{kind.__name__}.{name}", value)


def _public(name: str, value: object) -> Public:
    parameters: tuple[str, ...] = ()
    if inspect.isclass(value) or inspect.isroutine(value):
        try:
            parameters = tuple(_parameters(value))
        except (TypeError, ValueError):  # a class without a signature of its own
            parameters = ()
    documented = (
        inspect.isclass(value) or inspect.isroutine(value) or _is_property(value)
    )
    text = inspect.getdoc(value) if documented else ""
    first = (text or "").partition("\n\n")[0]
    return Public(name, parameters, " ".join(first.split()))


def _parameters(value: object) -> Iterator[str]:
    """Parameters without types: 'labels', '*', 'patients='."""
    listed = [*inspect.signature(value).parameters.values()]  # type: ignore[arg-type]
    if listed and listed[0].name in ("self", "cls"):
        listed = listed[1:]
    has_star = False
    for parameter in listed:
        kind = parameter.kind
        if kind == parameter.VAR_POSITIONAL:
            has_star = True
            yield f"*{parameter.name}"
        elif kind == parameter.VAR_KEYWORD:
            yield f"**{parameter.name}"
        else:
            if kind == parameter.KEYWORD_ONLY and not has_star:
                has_star = True
                yield "*"
            optional = parameter.default is not parameter.empty
            yield f"{parameter.name}{'=' * optional}"


def lost(promised: list[str], now: list[Public]) -> list[str]:
    """What a program that uses the promised names could not do any more, one sentence each.

    A former name that still works and warns is not lost.
    """
    by_name = {public.name: public.parameters for public in now}
    sentences = []
    for line in promised:
        name, _, listed = line.removesuffix(")").partition("(")
        if name not in by_name:
            if not is_deprecated(name):
                sentences.append(f"{name} is gone")
            continue
        before = tuple(part for part in listed.split(", ") if part)
        sentences += [f"{name}: {why}" for why in _changes(before, by_name[name])]
    return sentences


def is_deprecated(name: str) -> bool:
    """True if a name still works with a DeprecationWarning."""
    module_name, _, last = name.rpartition(".")
    try:
        module = import_module(module_name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(module, last)
    except (ImportError, AttributeError, ValueError):
        return False
    return any(issubclass(one.category, DeprecationWarning) for one in caught)


def _changes(before: tuple[str, ...], now: tuple[str, ...]) -> Iterator[str]:
    """How calls that fitted the parameters before do not fit those of now."""
    positional, by_keyword = _split(before)
    positional_now, by_keyword_now = _split(now)
    takes_any = any(one.startswith("**") for one in now)
    names_now = {one.removesuffix("=") for one in (*positional_now, *by_keyword_now)}
    for place, one in enumerate(positional):
        name = one.removesuffix("=")
        if name not in names_now:
            if not takes_any:
                yield f"{name} is gone"
        elif place >= len(positional_now) or (
            positional_now[place].removesuffix("=") != name
        ):
            yield f"{name} is no longer argument {place + 1}"
    for one in by_keyword:
        name = one.removesuffix("=")
        if not name.startswith("*") and name not in names_now and not takes_any:
            yield f"{name} is gone"
    optional = {one[:-1] for one in before if one.endswith("=")}
    known = {one.removesuffix("=") for one in before}
    for one in (*positional_now, *by_keyword_now):
        is_required = not one.endswith("=") and not one.startswith("*")
        if is_required and (one in optional or one not in known):
            yield f"{one} must be given"


def _split(parameters: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Parameters by place, and those by keyword alone."""
    by_place = []
    by_keyword = []
    after_star = False
    for one in parameters:
        if one.startswith("*"):
            after_star = True
        elif after_star:
            by_keyword.append(one)
        else:
            by_place.append(one)
    return by_place, by_keyword


def page() -> str:
    """The page of the docs: every public name with its parameters and its first sentence."""
    groups: dict[str, list[Public]] = {}
    for public in public_names():
        groups.setdefault(public.name.rpartition(".")[0], []).append(public)
    parts = [
        "# Public names",
        "These names are the public surface of the package. They are made from `__all__`, and a "
        "test keeps them: a name or a parameter goes only after a release in which it warned. "
        "`=` marks a parameter that has a default, and those after `*` are passed by name. "
        "[Python](python.md) has their documentation. All that is not here may change.",
    ]
    order = sorted(
        groups, key=lambda name: (name != "thinsection", "." not in name, name)
    )
    for group in order:
        head = ["| name | what it is | parameters |", "|---|---|---|"]
        parts += [f"## {group}", "", *head]
        for public in groups[group]:
            name = public.name.rpartition(".")[2]
            words = public.words.replace("|", r"\|").replace("<", "&lt;")
            parameters = ""
            if public.parameters:
                parameters = f"`{', '.join(public.parameters)}`"
            parts.append(f"| `{name}` | {words} | {parameters} |")
        parts.append("")
    blocks = "\n".join(parts)
    return blocks.replace("# Public names\n", "# Public names\n\n").replace(
        "may change.\n## ", "may change.\n\n## "
    )


def write() -> None:
    """Writes the promised names."""
    lines = [public.line for public in public_names()]
    PROMISED.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
