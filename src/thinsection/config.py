"""Configuration: frozen dataclasses hold the defaults; TOML and flags derive from them.

A section is a frozen, keyword-only dataclass whose fields are made with `option`. A whole
configuration is a dataclass of sections. Field names are unique across the sections of one
configuration, so that `tiles.overlap` in TOML is `--overlap` on the command line.
"""

import contextlib
import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import tomli_w

from thinsection.errors import ConfigError

T = TypeVar("T")


def user_cache_dir() -> Path:
    """$XDG_CACHE_HOME/thinsection, or ~/.cache/thinsection."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "thinsection"


def option(
    default: Any,
    help: str,
    *,
    flag: str | tuple[str, ...] | None = None,
    hidden: bool = False,
    choices: Callable[[], Iterable[str]] | None = None,
) -> Any:
    """A dataclass field with what the command line and the documentation say of it.

    Args:
        default: the one default of this setting.
        help: a line for `--help` and for the written TOML; names its unit.
        flag: long flag where it is not the field's name with dashes; or several.
        hidden: True keeps it off the command line (TOML only).
        choices: the allowed names (of a registry, for example), asked for when they are needed;
            of a tuple each item must be one.
    """
    metadata = {"help": help, "flag": flag, "hidden": hidden, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type[T]) -> T:
    """A field that holds one section, at its defaults."""
    return dataclasses.field(default_factory=cls)


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' for the nearest known name, else the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"


def field_types(cls: type) -> dict[str, Any]:
    """Resolved type of each field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def flat_fields(cls: type) -> dict[str, tuple[str, dataclasses.Field[Any], Any]]:
    """Every setting of a configuration: field name -> (section, field, type).

    Raises:
        ConfigError: two sections share a field name (a mistake in the code, found by a test).
    """
    flat: dict[str, tuple[str, dataclasses.Field[Any], Any]] = {}
    for name, kind in field_types(cls).items():
        if not dataclasses.is_dataclass(kind):
            continue
        hints = field_types(cast(type, kind))
        for f in dataclasses.fields(kind):
            if f.name in flat:
                raise ConfigError(f"config field {f.name!r} must be unique, got it in two sections")
            flat[f.name] = (name, f, hints[f.name])
    return flat


def checked(value: Any, f: dataclasses.Field[Any], kind: Any, key: str) -> Any:
    """The value of a field as its declared type, of its choices where it has any.

    Raises:
        ConfigError: naming the key, the rule and the value.
    """
    found = coerce(value, kind, key)
    choices = f.metadata.get("choices")
    if choices is not None and found is not None:
        known = tuple(choices())
        for name in found if isinstance(found, tuple) else (found,):
            if name not in known:
                raise ConfigError(f"{key} must be a known name, got {name!r}{nearest(name, known)}")
    return found


def coerce(value: Any, kind: Any, key: str) -> Any:
    """The value as its declared type.

    Raises:
        ConfigError: naming the key, the rule and the value.
    """
    origin = get_origin(kind)
    if origin is Literal:
        if value not in (allowed := get_args(kind)):
            raise ConfigError(f"{key} must be one of {', '.join(map(str, allowed))}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        for member in get_args(kind):
            with contextlib.suppress(ConfigError):
                return coerce(value, member, key)
        raise ConfigError(f"{key} must be {kind}, got {value!r}")
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ConfigError(f"{key} must be a list, got {value!r}")
        return tuple(coerce(v, get_args(kind)[0], key) for v in value)
    if origin is dict or dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a table, got {value!r}")
        return dict(value) if origin is dict else from_mapping(kind, value, where=f"{key}.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{key} must be {kind.__name__}, got {value!r}")
    return value


def from_mapping(cls: type[T], data: Mapping[str, Any], *, where: str = "") -> T:
    """A configuration from nested mappings; what is absent keeps its default.

    Raises:
        ConfigError: unknown key (with the nearest known one) or a value of the wrong type.
    """
    kinds = field_types(cls)
    fields = {f.name: f for f in dataclasses.fields(cast(type, cls))}
    values: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{where}{name}"
        if name not in kinds:
            known = [f"{where}{k}" for k in kinds]
            raise ConfigError(f"unknown config key {key!r}{nearest(key, known)}")
        values[name] = checked(value, fields[name], kinds[name], key)
    return cls(**values)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config must be an existing file, got {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config must be TOML, got {str(path)!r}: {error}") from None


def replace_flat(config: T, overrides: Mapping[str, Any]) -> T:
    """The configuration with settings replaced by field name, whatever their section.

    Raises:
        ConfigError: no such setting, with the nearest one, or a wrong value.
    """
    flat = flat_fields(type(config))
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in overrides.items():
        if name not in flat:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, flat)}")
        owner, f, kind = flat[name]
        by_section.setdefault(owner, {})[name] = checked(value, f, kind, f"{owner}.{name}")
    sections = {n: dataclasses.replace(getattr(config, n), **v) for n, v in by_section.items()}
    return dataclasses.replace(cast(Any, config), **sections)  # type: ignore[no-any-return]


def as_mapping(config: Any) -> dict[str, Any]:
    """Nested plain values (str, int, float, bool, list, None) of a configuration."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return cast(dict[str, Any], plain(config))


def dump_toml(config: Any) -> str:
    """The configuration as commented TOML; a setting that is None is left commented out."""
    lines: list[str] = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if not dataclasses.is_dataclass(value):
            continue
        lines += ["", f"[{f.name}]"]
        for g in dataclasses.fields(value):
            item = as_mapping(value)[g.name]
            if g.metadata.get("help"):
                lines.append(f"# {g.metadata['help']}")
            lines.append(f"# {g.name} =" if item is None else f"{g.name} = {toml_value(item)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def toml_value(value: Any) -> str:
    """A str, bool, number, list or table as TOML on one line."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def toml_key(name: str) -> str:
    """The name as a TOML key: quoted where it must be."""
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")
