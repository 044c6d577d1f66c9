"""Flags derived from configuration dataclasses, so that a default is written once."""

import sys
import typing
from collections.abc import Callable
from functools import cache
from inspect import Parameter, Signature, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from thinsection.config import flat_fields, from_mapping, read_toml, replace_flat
from thinsection.errors import ConfigError, require

Command = TypeVar("Command", bound=Callable[..., Any])
_LISTED = 12  # names of a registry that a line of `--help` lists; of more it lists none


def with_config(settings: type | str) -> Callable[[Command], Command]:
    """Marks a typer command: it has a flag per setting and `--config`, and takes one `config`.

    `settings` is the class, or 'module:Class' that is imported when the command is called.
    Precedence: flag, then the TOML file, then the dataclass default.
    """

    def mark(command: Command) -> Command:
        command.__dict__["settings"] = settings
        return command

    return mark


def _with_flags(command: Callable[..., Any], cls: type) -> Callable[..., Any]:
    """What typer makes the flags of a marked command from."""
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        p.replace(annotation=hints.get(p.name, p.annotation), kind=Parameter.KEYWORD_ONLY)
        for p in signature(command).parameters.values()
        if p.name != "config"
    ]
    flags, words = _flag_parameters(cls), _other_words(cls)

    def wrapper(**values: Any) -> Any:
        path = values.pop("config_file")
        given = {k: values.pop(k) for k in flags}
        for name, (setting, mean, _) in words.items():
            if (text := values.pop(name)) is not None:
                both = f"--{name} must go without --{setting.replace('_', '-')}"
                require(given[setting] is None, both, given[setting], error=ConfigError)
                given[setting], said = mean(text)
                print(said, file=sys.stderr)
        overrides = {k: v for k, v in given.items() if v is not None and v != []}
        base = from_mapping(cls, read_toml(path)) if path else cls()
        return command(**values, config=replace_flat(base, overrides))

    file = typer.Option("--config", help="TOML file with settings; flags win over it.")
    config_file = _optional("config_file", Annotated[Path | None, file])
    parameters = [*own, config_file, *flags.values(), *(word[2] for word in words.values())]
    wrapper.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


class _BySection(TyperCommand):
    """A command whose `--help` lists its flags by the section of the settings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append(row)
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl(rows)


def by_section(app: typer.Typer) -> None:
    """Gives the commands of an application, and of its groups, their flags, listed by section."""
    for command in app.registered_commands:
        if (settings := getattr(command.callback, "settings", None)) and command.callback:
            cls = resolve_name(settings) if isinstance(settings, str) else settings
            command.callback = _with_flags(command.callback, cls)
        command.cls = _BySection
        command.context_settings = {"max_content_width": 100} | (command.context_settings or {})
    for group in app.registered_groups:
        if group.typer_instance is not None:
            by_section(group.typer_instance)


def _optional(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@cache
def _flag_parameters(cls: type) -> dict[str, Parameter]:
    defaults = cls()
    parameters = {}
    for name, (section, f, kind) in flat_fields(cls).items():
        if f.metadata.get("hidden"):
            continue
        default = getattr(getattr(defaults, section), name)
        flag = f.metadata.get("flag") or "--" + name.replace("_", "-")
        flags = (flag,) if isinstance(flag, str) else flag
        declared = [f"{flag}/--no-{flag.removeprefix('--')}"] if kind is bool else flags
        shown = ",".join(default) if isinstance(default, tuple) else default
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        if f.metadata.get("choices"):
            names = tuple(f.metadata["choices"]())
            choices = names if len(names) <= _LISTED else ()
        listed = f" [{'|'.join(map(str, choices))}]" if choices else ""
        suffix = "" if default is None or shown == "" else f" [default: {shown}]"
        text = f"{f.metadata.get('help', '')}{listed}{suffix}"
        parameters[name] = _flag(name, _flag_type(kind), section, text, *declared)
    return parameters


def _flag(name: str, kind: Any, section: str, text: str, *declared: str) -> Parameter:
    panel = section.replace("_", " ").capitalize()
    option = typer.Option(*declared, help=text, rich_help_panel=panel, show_default=False)
    return _optional(name, Annotated[kind, option])


def _other_words(cls: type) -> dict[str, tuple[str, Callable[[str], tuple[Any, str]], Parameter]]:
    """Flags that say a setting in other words: its name, what a text means, the parameter."""
    found = {}
    for setting, (section, f, _) in flat_fields(cls).items():
        for flag, mean in (f.metadata.get("also") or {}).items():
            name = flag.removeprefix("--").replace("-", "_")
            text = f"{mean.__doc__} In place of --{setting.replace('_', '-')}."
            found[name] = (setting, mean, _flag(name, str | None, section, text, flag))
    return found


def _flag_type(kind: Any) -> Any:
    """The type that typer parses; None means 'not given'."""
    if get_origin(kind) is tuple:
        return list[str] | None
    if get_origin(kind) is Literal:
        return str | None
    members = [k for k in get_args(kind) if k is not type(None)]
    return (members[0] if members else kind) | None
