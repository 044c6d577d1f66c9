"""Configuration: frozen dataclasses hold the defaults; TOML and flags derive from them.

A section is a frozen, keyword-only dataclass whose fields are made with `option`. A whole
configuration is a dataclass of sections. Field names are unique across the sections of one
configuration, so that `tiles.overlap` in TOML is `--overlap` on the command line.
"""

import contextlib
import difflib
import html
import inspect
import math
import os
import re
import stat
import sys
import tempfile
import textwrap
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, cast, get_args, get_origin

import tomli_w

from thinsection.errors import ConfigError, ThinsectionError, naming_file
from thinsection.extras import Need, check_needs, needs_of_path
from thinsection.types import Document

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from typing_extensions import TypeForm

T = TypeVar("T")
# a function
F = TypeVar("F", bound=Callable[..., object])
# a dataclass
D = TypeVar("D", bound="DataclassInstance")


def user_cache_dir() -> Path:
    """$XDG_CACHE_HOME/thinsection, or ~/.cache/thinsection.

    A user without a home folder, as `docker run --user` makes one, has a folder of their own below
    the folder for temporary files.

    Raises ConfigError: that folder belongs to someone else.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "thinsection"
    try:
        return Path.home() / ".cache" / "thinsection"
    except RuntimeError:  # nobody knows this user
        return _temporary_cache_dir()


def _temporary_cache_dir() -> Path:
    """A folder that this user alone can write."""
    folder = Path(tempfile.gettempdir()) / f"thinsection-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.getuid():
        raise ConfigError(
            f"cache folder must belong to this user, got {str(folder)!r} of user {owner.st_uid}; "
            "set XDG_CACHE_HOME to a folder of yours"
        )
    return folder


def option(
    default: T,
    help: str,
    *,
    daily: bool = False,
    flag: str | tuple[str, ...] | None = None,
    choices: Callable[[], Iterable[str]] | None = None,
    also: Mapping[str, Callable[[str], tuple[T, str]]] | None = None,
) -> T:
    """A dataclass field with its words on the command line and in the documentation.

    Args:
        default: the one default of this setting.
        help: a sentence for `--help` and for the written TOML, with its unit: what the setting
            does and when to change it.
        daily: True for the few settings that people change often; `--help` lists only these where
            a command has some, and `--help-all` lists all.
        flag: long flag where it is not the field's name with dashes; or several.
        choices: gives the allowed names when they are needed; of a tuple each item must be one.
        also: further flags in other words: each gives the value of its text, and says so.
    """
    metadata = {
        "help": help,
        "daily": daily,
        "flag": flag,
        "choices": choices,
        "also": also,
    }
    return field(default=default, metadata=metadata)


def section(cls: type[T], title: str = "") -> T:
    """A field that holds one section, at its defaults.

    Args:
        cls: class of the section.
        title: heading of its options in `--help`, by default the field's name; sections with the
            same title share a heading.
    """
    return field(default_factory=cls, metadata={"title": title})


# setting of an earlier version -> setting of today
_REPLACED = {"stage": "until", "decode_workers": "decode_threads"}


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' for a known name that begins so or is near, else '; known: ...'."""
    names = sorted(known)
    key = name.lower().replace("-", "_")
    if _REPLACED.get(key) in names:
        return f"; did you mean {_REPLACED[key]!r}?"
    longer = [other for other in names if key and other.lower().startswith(key)]
    close = longer or difflib.get_close_matches(key, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}"


@cache
def field_types(cls: "type[DataclassInstance]") -> dict[str, object]:
    """Resolved type of each field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def flat_fields(
    cls: "type[DataclassInstance]",
) -> dict[str, tuple[str, Field[object], object]]:
    """Every setting of a configuration: field name -> (section, field, type).

    Raises ConfigError: two sections share a field name (a mistake in the code, found by a test).
    """
    flat: dict[str, tuple[str, Field[object], object]] = {}
    for name, kind in field_types(cls).items():
        if not isinstance(kind, type) or not is_dataclass(kind):
            continue
        hints = field_types(kind)
        for f in fields(kind):
            if f.name in flat:
                raise ConfigError(
                    f"config field {f.name!r} must be unique, got it in two sections"
                )
            flat[f.name] = (name, f, hints[f.name])
    return flat


def listing_settings(cls: "type[DataclassInstance]") -> Callable[[F], F]:
    """Marks a function that takes the settings of a configuration as keywords.

    `help(function)` then lists each setting with its default and its meaning. Settings that the
    function takes as parameters of its own are left out.
    """

    def mark(function: F) -> F:
        own = inspect.signature(function).parameters
        settings = [f for _, f, _ in flat_fields(cls).values()] or fields(cls)
        lines = ["", "", "Settings, which are keywords as well:"]
        for f in settings:
            if f.name in own:
                continue
            default = f.default if f.default is not MISSING else None
            text = f"{f.name}={default!r}: {f.metadata.get('help', '')}"
            lines += textwrap.wrap(
                text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8
            )
        if function.__doc__ is not None:  # `python -OO` removes docstrings
            function.__doc__ = f"{inspect.getdoc(function)}{chr(10).join(lines)}"
        return function

    return mark


def checked(value: object, f: Field[object], kind: object, key: str) -> object:
    """The value of a field as `coerce` gives it, of its choices where it has any."""
    return _of_choices(_converter(kind)(value, key), f, key)


def _of_choices(typed: object, f: Field[object], key: str) -> object:
    """The value, if it is of the field's choices or the field has none."""
    choices = f.metadata.get("choices")
    if choices is None or typed is None:
        return typed
    known = tuple(choices())
    for name in typed if isinstance(typed, tuple) else (typed,):
        if name not in known:
            raise ConfigError(
                f"{key} must be a known name, got {name!r}{nearest(name, known)}"
            )
    return typed


def coerce(value: object, kind: "TypeForm[T]", key: str) -> T:
    """The value as its declared type; ConfigError names the key, the rule and the value."""
    # mypy does not know that a type form has a hash
    return cast(T, _converter(cast(Hashable, kind))(value, key))


# takes a value and its key, and returns the value as a type
_Converter = Callable[[object, str], object]


@cache
def _converter(kind: object) -> _Converter:
    """Function that does what `coerce` does for one type; the type is looked into once."""
    origin = get_origin(kind)
    if origin is Literal:
        return _literal_converter(get_args(kind))
    if origin in (typing.Union, types.UnionType):
        return _union_converter(kind)
    if origin is tuple:
        return _tuple_converter(_converter(get_args(kind)[0]))
    if origin in (dict, Mapping):
        return _table_converter(_converter(get_args(kind)[1]))
    if kind is typing.Any or kind is object:
        return lambda value, key: value
    if not isinstance(kind, type):
        raise TypeError(f"a setting must have a type that TOML can hold, got {kind}")
    if is_dataclass(kind):
        return _dataclass_converter(kind)
    if kind in (int, str, bool):
        return _plain_converter(kind)
    return lambda value, key: _coerce_plain(value, kind, key)


def _literal_converter(choices: tuple[object, ...]) -> _Converter:
    def convert(value: object, key: str) -> object:
        if value not in choices:
            names = ", ".join(map(str, choices))
            raise ConfigError(f"{key} must be one of {names}, got {value!r}")
        return value

    return convert


def _union_converter(kind: object) -> _Converter:
    converters = [_converter(member) for member in get_args(kind)]

    def convert(value: object, key: str) -> object:
        for converter in converters:
            with contextlib.suppress(ConfigError):
                return converter(value, key)
        raise ConfigError(f"{key} must be {kind}, got {value!r}")

    return convert


def _tuple_converter(convert_item: _Converter) -> _Converter:
    def convert(value: object, key: str) -> object:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key} must be a list, got {value!r}")
        return tuple([convert_item(item, key) for item in value])

    return convert


def _table_converter(convert_item: _Converter) -> _Converter:
    def convert(value: object, key: str) -> object:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a table, got {value!r}")
        # thousands of records have the same names, each kept once
        return {
            sys.intern(name) if type(name) is str else name: convert_item(
                item, f"{key}.{name}"
            )
            for name, item in value.items()
        }

    return convert


def _dataclass_converter(kind: "type[DataclassInstance]") -> _Converter:
    def convert(value: object, key: str) -> object:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a table, got {value!r}")
        return from_mapping(kind, value, where=f"{key}.")

    return convert


def _plain_converter(kind: type) -> _Converter:
    """Converter of values that are of the type already; a bool is no number."""

    def convert(value: object, key: str) -> object:
        if type(value) is kind:
            return value
        return _coerce_plain(value, kind, key)

    return convert


def _coerce_plain(value: object, kind: type, key: str) -> object:
    """A str, bool, number or path; a bool is no number, and a whole number is a float, too."""
    if kind is float and (type(value) is int or isinstance(value, float)):
        if not math.isfinite(value):
            raise ConfigError(f"{key} must be finite, got {value!r}")
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is str and isinstance(value, Path):
        return str(value)
    fits = type(value) is int if kind is int else isinstance(value, kind)
    if not fits:
        raise ConfigError(f"{key} must be {kind.__name__}, got {value!r}")
    return value


@cache
def _fields_by_name(
    cls: "type[DataclassInstance]",
) -> dict[str, tuple[Field[object], _Converter, bool]]:
    """Field of a dataclass, its converter, and whether it must be set, by its name."""
    kinds = field_types(cls)
    by_name = {}
    for f in fields(cls):
        must_be_set = f.default is MISSING and f.default_factory is MISSING
        by_name[f.name] = (f, _converter(kinds[f.name]), must_be_set)
    return by_name


def from_mapping(cls: type[D], data: object, *, where: str = "") -> D:
    """A configuration from nested mappings; what is absent keeps its default.

    Raises ConfigError: unknown key (with the nearest known one) or a value of the wrong type.
    """
    if not isinstance(data, Mapping):
        what = where.rstrip(".") or "config"
        raise ConfigError(f"{what} must be a table of keys, got {data!r:.60}")
    own = _fields_by_name(cls)
    values = {}
    for name, value in data.items():
        key = f"{where}{name}"
        if name not in own:
            known = [f"{where}{other}" for other in own]
            raise ConfigError(f"unknown config key {key!r}{nearest(key, known)}")
        f, convert, _ = own[name]
        values[name] = _of_choices(convert(value, key), f, key)
    for name, (_, _, must_be_set) in own.items():
        if must_be_set and name not in values:
            raise ConfigError(
                f"{where}{name} must be set, got only the keys {sorted(data)}"
            )
    return cls(**values)


def read_toml(path: Path) -> Document:
    """The tables of a TOML file. Raises ConfigError: the file is missing or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"config must be an existing file, got {str(path)!r}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"config must be TOML, got {str(path)!r}: {error}") from None


def config_of_file(cls: type[D], path: Path) -> D:
    """The configuration of a TOML file. Raises ConfigError, which names the file."""
    with naming_file(path):
        return from_mapping(cls, read_toml(path))


def replace_flat(config: D, overrides: Mapping[str, object]) -> D:
    """The configuration with settings replaced by field name, whatever their section.

    Raises ConfigError: no such setting, with the nearest one, or a wrong value.
    """
    flat = flat_fields(type(config))
    by_section: dict[str, dict[str, object]] = {}
    for name, value in overrides.items():
        if name not in flat:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, flat)}")
        owner, f, kind = flat[name]
        changes = by_section.setdefault(owner, {})
        changes[name] = checked(value, f, kind, f"{owner}.{name}")
    sections = {
        name: replace(getattr(config, name), **changes)
        for name, changes in by_section.items()
    }
    return replace(config, **sections)


def in_words_of(text: str, cls: "type[DataclassInstance]", *, flags: bool) -> str:
    """The text with each setting `section.name` as its flag, or as its keyword in Python."""
    for name, (owner, f, _) in flat_fields(cls).items():
        word = flag_of(name, f)[0] if flags else name
        text = re.sub(rf"(?<![\w.]){owner}\.{name}(?![\w.]*\w)", word, text)
    return text


def flag_of(name: str, f: Field[object]) -> tuple[str, ...]:
    """Long flags of a setting."""
    declared = f.metadata.get("flag") or "--" + name.replace("_", "-")
    return (declared,) if isinstance(declared, str) else declared


@contextlib.contextmanager
def keywords_in_errors(
    cls: "type[DataclassInstance]", *, flags: bool = False
) -> Iterator[None]:
    """Names settings in errors of the block by keywords, or by flags; see `in_words_of`."""
    try:
        yield
    except ThinsectionError as error:
        error.args = tuple(
            in_words_of(part, cls, flags=flags) if isinstance(part, str) else part
            for part in error.args
        )
        raise


_SHOWN_CHARACTERS = 240


class Settings:
    """Mixin of a whole configuration, whose repr has the settings that differ from the defaults.

    The dataclass is made with `repr=False`. A notebook shows all settings.
    """

    __slots__ = ()

    def needs(self) -> Iterator[Need]:
        """Packages that the work with these settings takes, beside those of the extra `slides`.

        A section that needs some has a method of this name.
        """
        for f in fields(cast("DataclassInstance", self)):
            own = getattr(getattr(self, f.name), "needs", None)
            if own is not None:
                yield from own()
        for _, _, value, is_default in _settings(self):
            if is_default:
                continue
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, str | Path):
                    yield from needs_of_path(str(part))

    def check_packages(self) -> None:
        """Asks for all packages of `needs` before the work begins; nothing is imported.

        Raises MissingDependencyError: one is not installed.
        """
        check_needs(self.needs())

    def __repr__(self) -> str:
        changed = []
        for owner, name, value, is_default in _settings(self):
            if not is_default:
                changed.append(f"{owner}.{name}={value!r}")
        text = ", ".join(changed) or "all defaults"
        if len(text) > _SHOWN_CHARACTERS:
            text = f"{text[:_SHOWN_CHARACTERS]}..., {len(changed)} settings"
        return f"{type(self).__name__}({text})"

    def _repr_html_(self) -> str:
        rows = ""
        for owner, name, value, is_default in _settings(self):
            cell = html.escape(repr(value))
            cell = cell if is_default else f"<b>{cell}</b>"
            rows += f"<tr><td>{owner}.{name}</td><td>{cell}</td></tr>"
        title = html.escape(repr(self))
        return f"<details><summary>{title}</summary><table>{rows}</table></details>"


def _settings(config: object) -> Iterator[tuple[str, str, object, bool]]:
    """Yields section, name and value of each setting, and whether it has its default."""
    kind = cast("type[DataclassInstance]", type(config))
    for name, (owner, f, _) in flat_fields(kind).items():
        value = getattr(getattr(config, owner), name)
        default = f.default
        if f.default_factory is not MISSING:
            default = f.default_factory()
        yield owner, name, value, value == default


def as_mapping(config: "DataclassInstance") -> Document:
    """Nested plain values (str, int, float, bool, list, None) of a configuration."""
    return {f.name: _plain(getattr(config, f.name)) for f in fields(config)}


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return as_mapping(value)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def dump_toml(config: "DataclassInstance") -> str:
    """The configuration as commented TOML; a setting that is None is left commented out."""
    lines: list[str] = []
    section_name = ""
    for name, (owner, f, _) in flat_fields(type(config)).items():
        if owner != section_name:
            section_name = owner
            lines += ["", f"[{owner}]"]
        if f.metadata.get("help"):
            lines.append(f"# {f.metadata['help']}")
        value = _plain(getattr(getattr(config, owner), name))
        if value is None:
            lines.append(f"# {name} =")
        else:
            lines.append(f"{name} = {toml_value(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def toml_value(value: object) -> str:
    """A str, bool, number, list or table as TOML on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        items = [f"{toml_key(name)} = {toml_value(v)}" for name, v in value.items()]
        return "{" + ", ".join(items) + "}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def toml_key(name: str) -> str:
    """The name as a TOML key: quoted where it must be."""
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")
