"""Named things that other packages may add to: readers, encoders, checks, formats, probes, ...

A room declares its own entries in one tuple and makes one `Registry` of them. Another package adds
one by an entry point of the registry's group that names an `Entry`, or a class or function whose
attributes `help`, `suffixes`, `needs` and `folders` say the same. Choices of the command
line, `thinsection doctor`, the tables of the docs and every "did you mean" derive from it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module, metadata
from typing import Generic, Protocol, TypeVar, cast

from thinsection.config import nearest
from thinsection.errors import ConfigError, InvalidInputError, ThinsectionError
from thinsection.extras import check_slides, missing_of, remedy_for, require_packages

T = TypeVar("T")


class _EntryPoints(Protocol):
    """Entry points of all groups; the library's class differs between versions of Python."""

    def select(self, *, group: str) -> metadata.EntryPoints: ...


@cache
def _entry_points(path: tuple[str, ...]) -> _EntryPoints:
    """Entry points of every group: a look through all packages takes 20 ms, so there is one."""
    return metadata.entry_points()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One named thing of a registry, before it is imported."""

    name: str  # as a person types it
    help: str  # one line
    target: object  # 'module:attribute', imported on first use; or the object itself
    suffixes: tuple[str, ...] = ()  # of files it opens or writes, lower case: '.svs'
    needs: tuple[str, ...] = ()  # packages that it imports, by import name
    # whether what it opens is a folder, named with one of the suffixes
    folders: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages of `needs` that are not installed; nothing is imported."""
        return missing_of(self.needs)

    @property
    def remedy(self) -> str:
        """Command that installs what is missing."""
        return remedy_for(self.missing)

    def load(self) -> object:
        """The object. Raises MissingDependencyError: a package that it needs is not installed."""
        require_packages(repr(self.name), *self.needs)
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        return getattr(import_module(module), attribute)


def _remedy_for(error: Exception) -> str:
    """What to do about an error of another package's import."""
    if "torchvision::" in str(error):
        return (
            "torchvision does not fit this PyTorch: call "
            "thinsection.encode.importable_torchvision() in that module, before the import"
        )
    return "repair or remove the package that provides it"


class Registry(Generic[T]):
    """Entries of one kind: those declared here, then those of other packages.

    Args:
        kind: what an entry is, as messages say it: 'reader', 'tile encoder'.
        group: entry point group of other packages.
        built_in: our own entries, or what makes them when they are first asked for.
        error: class of the error for an unknown name.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Iterable[Entry] | Callable[[], Iterable[Entry]],
        *,
        error: type[ThinsectionError] = ConfigError,
    ) -> None:
        self.kind = kind
        self.group = group
        self._built_in = built_in
        self._error = error

    def __iter__(self) -> Iterator[Entry]:
        """Every entry; those of other packages are imported for their help."""
        return (self.entry(name) for name in self.names())

    def importable(self) -> Iterator[Entry]:
        """Every entry, without those of other packages that cannot be imported."""
        for name in self.names():
            try:
                entry = self.entry(name)
            except InvalidInputError:  # named where the entry itself is asked for
                continue
            yield entry

    def __contains__(self, name: object) -> bool:
        return name in self._declared or name in self._points

    def names(self) -> tuple[str, ...]:
        """Every name, ours first; nothing is imported."""
        return tuple(dict.fromkeys([*self._declared, *self._points]))

    def entry(self, name: str) -> Entry:
        """The entry of a name; an error of the class `error` names the nearest ones.

        Raises InvalidInputError: another package's entry cannot be imported.
        """
        if name in self._declared:
            return self._declared[name]
        if name not in self._points:
            hint = nearest(name, self.names())
            raise self._error(f"{self.kind} must be a known name, got {name!r}{hint}")
        return self._from_point(self._points[name])

    def load(self, name: str) -> T:
        """The object of a name; ThinsectionError: as of `entry`, or a package is missing."""
        return cast(T, self.entry(name).load())

    def packages(self) -> frozenset[str]:
        """Top-level packages of other packages' entry points; nothing is imported."""
        return frozenset(
            point.value.partition(":")[0].partition(".")[0]
            for point in self._points.values()
        )

    @cached_property
    def _declared(self) -> dict[str, Entry]:
        entries = self._built_in() if callable(self._built_in) else self._built_in
        return {entry.name: entry for entry in entries}

    @cached_property
    def _points(self) -> dict[str, metadata.EntryPoint]:
        points = _entry_points(tuple(sys.path)).select(group=self.group)
        return {point.name: point for point in points}

    def _from_point(self, point: metadata.EntryPoint) -> Entry:
        """Entry of another package's entry point, which may name an `Entry` or the object."""
        try:
            target = point.load()
        # another package's code: whatever it raises names the package
        except Exception as error:
            raise InvalidInputError(
                f"{self.kind} {point.name!r} must be importable, got {error!r} from "
                f"{point.value!r}; {_remedy_for(error)}"
            ) from error
        if isinstance(target, Entry):
            return replace(target, name=point.name)
        text = getattr(target, "help", None) or target.__doc__ or ""
        lines = text.strip().splitlines()
        return Entry(
            name=point.name,
            help=lines[0] if lines else f"from {point.value}",
            target=target,
            suffixes=tuple(getattr(target, "suffixes", ())),
            needs=tuple(getattr(target, "needs", ())),
            folders=getattr(target, "folders", False),
        )


def lazy_names(package: str, names_of: Mapping[str, str]) -> Callable[[str], object]:
    """A package's `__getattr__`: names of its modules, which are imported at a name's first use.

    There MissingDependencyError is raised if the module needs the extra `slides` and it is missing.
    """
    module_of = {}
    for module, names in names_of.items():
        for name in names.split():
            module_of[name] = module

    def get_name(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(f"{package}.{module_of[name]}")
        except ImportError:
            check_slides()  # says which packages of the extra are missing
            raise
        return getattr(module, name)

    return get_name


def listed_names(names_of: Mapping[str, str]) -> list[str]:
    """A package's `__all__` for the names of `lazy_names`, sorted."""
    return sorted(name for names in names_of.values() for name in names.split())
