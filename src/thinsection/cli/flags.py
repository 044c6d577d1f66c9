"""Flags of a command, derived from a configuration dataclass, so that each default is in one place.

A command that is marked by `with_config` has one flag per setting, and `--config` for a TOML file.
A flag takes precedence over the file, and the file over the dataclass default.
"""

import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from thinsection.config import flat_fields, from_mapping, read_toml, replace_flat
from thinsection.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])
# largest number of registry names in a line of `--help`; a longer list is left out
_LISTED = 12


def with_config(settings: type | str) -> Callable[[Command], Command]:
    """Marks a typer command: it gets a flag per setting and `--config`, and receives one `config`.

    Args:
        settings: the class, or 'module:Class', which is imported when the command is called.
    """

    def mark(command: Command) -> Command:
        command.__dict__["settings"] = settings
        return command

    return mark


def add_flags(app: typer.Typer) -> None:
    """Adds the flags, sorted by section, to the commands of an application and of its groups."""
    for command in app.registered_commands:
        settings = getattr(command.callback, "settings", None)
        if settings is not None and command.callback is not None:
            cls = resolve_name(settings) if isinstance(settings, str) else settings
            command.callback = _with_flags(command.callback, cls)
        command.cls = _CommandBySection
        own_settings = command.context_settings or {}
        command.context_settings = {"max_content_width": 100, **own_settings}
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_flags(group.typer_instance)


class _CommandBySection(TyperCommand):
    """Command whose `--help` lists its flags by section of the settings."""

    # typer has its own copy of click, whose classes have no public name
    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is None:
                continue
            kind = "Arguments" if param.param_type_name == "argument" else "Options"
            section = getattr(param, "rich_help_panel", None) or kind
            sections.setdefault(section, []).append(row)
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl(rows)


@dataclass(frozen=True)
class _Synonym:
    """Flag that gives the value of another setting in a different form."""

    setting: str
    # converts its text into a value and a line of explanation
    translate: Callable[[str], tuple[Any, str]]
    parameter: Parameter


def _with_flags(command: Callable[..., Any], cls: type) -> Callable[..., Any]:
    """Function from which typer derives the flags of a marked command."""
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(
            annotation=hints.get(parameter.name, parameter.annotation),
            kind=Parameter.KEYWORD_ONLY,
        )
        for parameter in signature(command).parameters.values()
        if parameter.name != "config"
    ]
    flags = _flag_parameters(cls)
    synonyms = _synonyms(cls)

    def wrapper(**values: Any) -> Any:
        path = values.pop("config_file")
        settings = {name: values.pop(name) for name in flags}
        for name, synonym in synonyms.items():
            text = values.pop(name)
            if text is None:
                continue
            current = settings[synonym.setting]
            if current is not None:
                flag = synonym.setting.replace("_", "-")
                raise ConfigError(f"--{name} must go without --{flag}, got {current}")
            settings[synonym.setting], note = synonym.translate(text)
            print(note, file=sys.stderr)
        overrides = {
            name: value for name, value in settings.items() if value not in (None, [])
        }
        base = from_mapping(cls, read_toml(path)) if path else cls()
        return command(**values, config=replace_flat(base, overrides))

    file = typer.Option("--config", help="TOML file with settings; flags win over it.")
    parameters = [
        *own,
        _optional("config_file", Annotated[Path | None, file]),
        *flags.values(),
        *(synonym.parameter for synonym in synonyms.values()),
    ]
    wrapper.__dict__["__signature__"] = Signature(parameters)
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapper.__name__ = command.__name__
    wrapper.__doc__ = command.__doc__
    return wrapper


@cache
def _flag_parameters(cls: type) -> dict[str, Parameter]:
    """Parameter for each setting, by its name."""
    defaults = cls()
    parameters = {}
    for name, (section, field, kind) in flat_fields(cls).items():
        if field.metadata.get("hidden"):
            continue
        declared = field.metadata.get("flag") or "--" + name.replace("_", "-")
        flags = (declared,) if isinstance(declared, str) else declared
        if kind is bool:
            flags = (f"{declared}/--no-{declared.removeprefix('--')}",)
        text = field.metadata.get("help", "")
        choices = _choices(field.metadata.get("choices"), kind)
        if choices:
            text += f" [{'|'.join(choices)}]"
        default = getattr(getattr(defaults, section), name)
        shown = ",".join(default) if isinstance(default, tuple) else default
        if shown is not None and shown != "":
            text += f" [default: {shown}]"
        parameters[name] = _flag(name, _flag_type(kind), section, text, flags)
    return parameters


def _choices(names: Callable[[], Any] | None, kind: Any) -> list[str]:
    """Values that a flag's help lists; empty if there are too many."""
    if names is None:
        literals = get_args(kind) if get_origin(kind) is Literal else ()
        return [str(value) for value in literals]
    choices = list(names())
    return choices if len(choices) <= _LISTED else []


def _synonyms(cls: type) -> dict[str, _Synonym]:
    """Flags in the settings' `also`, by their names."""
    synonyms = {}
    for setting, (section, field, _) in flat_fields(cls).items():
        for flag, translate in (field.metadata.get("also") or {}).items():
            name = flag.removeprefix("--").replace("-", "_")
            instead = setting.replace("_", "-")
            text = f"{translate.__doc__} In place of --{instead}."
            parameter = _flag(name, str | None, section, text, (flag,))
            synonyms[name] = _Synonym(setting, translate, parameter)
    return synonyms


def _flag(
    name: str, kind: Any, section: str, text: str, flags: tuple[str, ...]
) -> Parameter:
    option = typer.Option(
        *flags,
        help=text,
        rich_help_panel=section.replace("_", " ").capitalize(),
        show_default=False,
    )
    return _optional(name, Annotated[kind, option])


def _optional(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag_type(kind: Any) -> Any:
    """Type that typer parses; None means that the flag was not given."""
    if get_origin(kind) is tuple:
        return list[str] | None
    if get_origin(kind) is Literal:
        return str | None
    members = [member for member in get_args(kind) if member is not type(None)]
    return (members[0] if members else kind) | None
