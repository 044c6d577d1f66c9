"""Flags of a command, derived from a configuration dataclass, so that each default is in one place.

A command that is marked by `with_config` has one flag per setting, and `--config` for a TOML file.
A flag takes precedence over the file, and the file over the dataclass default.
"""

import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from inspect import Parameter, Signature, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from thinsection.config import (
    Settings,
    config_of_file,
    flag_of,
    flat_fields,
    keywords_in_errors,
    replace_flat,
)
from thinsection.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])
# columns of `--help`
HELP_WIDTH = 100
# key in click's context
_HELP_ALL = "thinsection.help_all"
# setting, and the function that makes of a text its value and a line of explanation
_Synonym = tuple[str, Callable[[str], tuple[Any, str]]]
# largest number of registry names in a line of `--help`; a longer list is left out
_LISTED = 12
# most characters of a list of choices without spaces
_LONGEST_WORD = 70

# exit code of a command that left out slides
EXIT_SOME_LEFT_OUT = 3

AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON document; progress and messages go to standard error.",
        show_default=False,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", help="Print only warnings and failures.", show_default=False
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Print a line for every slide, also for skipped ones.",
        show_default=False,
    ),
]
SlidesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Slide files, folders, URLs, or cohort tables (CSV).", show_default=False
    ),
]
Reader = Annotated[
    str,
    typer.Option(
        help="Library that reads the slides, as in `thinsection run --help-all`."
    ),
]
# names of these options, for commands whose `--help` leaves them to `--help-all`
_RARE_OPTIONS = ("as_json", "quiet", "verbose", "command")

Level = Literal["quiet", "usual", "verbose"]


def with_config(
    settings: type | str, *, without: tuple[str, ...] = (), works: bool = True
) -> Callable[[Command], Command]:
    """Marks a typer command: it gets a flag per setting and `--config`, and receives one `config`.

    Args:
        settings: the class, or 'module:Class', which is imported when the command is called.
        without: sections and settings that the command decides itself, so that they have no flag.
        works: False if the command does not do the work of the settings; else their packages must
            be there before it begins.
    """

    def mark(command: Command) -> Command:
        command.__dict__["settings"] = settings
        command.__dict__["without"] = without
        command.__dict__["works"] = works
        return command

    return mark


def add_flags(app: typer.Typer) -> None:
    """Adds the flags, sorted by section, to the commands of an application and of its groups."""
    for command in app.registered_commands:
        settings = getattr(command.callback, "settings", None)
        if settings is not None and command.callback is not None:
            cls = resolve_name(settings) if isinstance(settings, str) else settings
            without = command.callback.__dict__["without"]
            command.callback = _with_flags(command.callback, cls, without)
        command.cls = _CommandBySection
        own_settings = command.context_settings or {}
        command.context_settings = {"max_content_width": HELP_WIDTH, **own_settings}
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_flags(group.typer_instance)


class _CommandBySection(TyperCommand):
    """Command whose `--help` lists the daily options, and `--help-all` all, by group."""

    # typer has its own copy of click, whose classes have no public name
    def format_options(self, ctx: Any, formatter: Any) -> None:
        rare: set[str] = set()
        if not ctx.meta.get(_HELP_ALL):
            rare = getattr(self.callback, "rare_options", rare)
        rows_by_group: dict[str, list[tuple[str, str]]] = {}
        num_options = 0
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is None:
                continue
            is_argument = param.param_type_name == "argument"
            num_options += not is_argument
            if param.name in rare:
                continue
            # typer names the type of a list '<list[str]>'
            name = re.sub(r"<list\[(\w+)\]>", lambda m: f"<{m[1].lower()}>", row[0])
            kind = "Arguments" if is_argument else "Options"
            group = getattr(param, "rich_help_panel", None) or kind
            rows_by_group.setdefault(group, []).append((name, row[1]))
        for group, rows in rows_by_group.items():
            with formatter.section(group):
                formatter.write_dl(rows)
        if rare:
            formatter.write_paragraph()
            command = f"`{ctx.command_path} --help-all`"
            formatter.write_text(f"{command} lists all {num_options} options.")


def _print_all_options(ctx: typer.Context, is_asked: bool) -> None:
    """Prints the help with every option, and ends the command."""
    if is_asked:
        ctx.meta[_HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _with_flags(
    command: Callable[..., Any], cls: type, without: tuple[str, ...]
) -> Callable[..., Any]:
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
    flags, synonyms = _flag_parameters(cls, without)
    settings_of_class = flat_fields(cls)
    rare = {
        name
        for name, (_, field, _) in settings_of_class.items()
        if not field.metadata.get("daily")
    }
    has_daily_settings = len(rare) < len(settings_of_class)

    def wrapper(**values: Any) -> Any:
        path = values.pop("config_file")
        # typer passes also what click's callback has handled
        values.pop("help_all", None)
        settings = {name: values.pop(name) for name in flags}
        for name, (setting, translate) in synonyms.items():
            text = settings.pop(name)
            if text is None:
                continue
            current = settings[setting]
            if current not in (None, []):
                flag = setting.replace("_", "-")
                shown = " ".join(current) if isinstance(current, list) else current
                raise ConfigError(
                    f"--{name} must not be combined with --{flag}, got {shown}"
                )
            settings[setting], note = translate(text)
            print(note, file=sys.stderr)
        overrides = {
            name: value for name, value in settings.items() if value not in (None, [])
        }
        # a file's settings are named as in the file
        base = config_of_file(cls, path) if path else cls()
        with keywords_in_errors(cls, flags=True):
            config = replace_flat(base, overrides)
            if command.__dict__["works"] and isinstance(config, Settings):
                config.check_packages()
            return command(**values, config=config)

    file = typer.Option(
        "--config",
        help="Settings file (TOML). Options on the command line override it.",
    )
    all_options = typer.Option(
        "--help-all",
        help="Show all options and exit.",
        is_eager=True,
        callback=_print_all_options,
        show_default=False,
    )
    parameters = [
        *own,
        _optional("config_file", Annotated[Path | None, file]),
        *flags.values(),
    ]
    if has_daily_settings:
        rare |= {*synonyms, *_RARE_OPTIONS, "help_all"}
        annotation = Annotated[bool, all_options]
        parameters.append(
            Parameter(
                "help_all",
                Parameter.KEYWORD_ONLY,
                default=False,
                annotation=annotation,
            )
        )
    wrapper.__dict__["rare_options"] = rare if has_daily_settings else set()
    wrapper.__dict__["__signature__"] = Signature(parameters)
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapper.__name__ = command.__name__
    wrapper.__doc__ = command.__doc__
    return wrapper


@cache
def _flag_parameters(
    cls: type, without: tuple[str, ...]
) -> tuple[dict[str, Parameter], dict[str, _Synonym]]:
    """Parameter of each flag by name, and the flags that give another setting's value."""
    defaults = cls()
    titles = {}
    for section in fields(cls):
        plain = section.name.replace("_", " ").capitalize()
        titles[section.name] = section.metadata.get("title") or plain
    parameters = {}
    synonym_parameters = {}
    synonyms = {}
    for name, (section_name, field, kind) in flat_fields(cls).items():
        if name in without or section_name in without:
            continue
        title = titles[section_name]
        flags = flag_of(name, field)
        if kind is bool:
            flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
        text = field.metadata.get("help", "")
        choices = _choices(field.metadata.get("choices"), kind)
        if choices:
            separator = "|"
            # click breaks a longer word inside a name
            if len("|".join(choices)) > _LONGEST_WORD:
                separator = " | "
            text += f" [{separator.join(choices)}]"
        default = getattr(getattr(defaults, section_name), name)
        if default not in (None, (), ""):
            text += f" [default: {_default_text(default)}]"
        parameters[name] = _flag(name, _flag_type(kind), title, text, flags)
        for flag, translate in (field.metadata.get("also") or {}).items():
            synonym = flag.removeprefix("--").replace("-", "_")
            text = f"{translate.__doc__} In place of --{name.replace('_', '-')}."
            synonyms[synonym] = (name, translate)
            synonym_parameters[synonym] = _flag(
                synonym, str | None, title, text, (flag,)
            )
    return parameters | synonym_parameters, synonyms


def _default_text(default: Any) -> str:
    """Default of a setting as a flag's help states it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, float):
        return f"{default:g}"
    return str(default)


def _choices(names: Callable[[], Any] | None, kind: Any) -> list[str]:
    """Values that a flag's help lists; empty if there are too many."""
    if names is None:
        literals = get_args(kind) if get_origin(kind) is Literal else ()
        return [str(value) for value in literals]
    choices = list(names())
    return choices if len(choices) <= _LISTED else []


def _flag(
    name: str, kind: Any, group: str, text: str, flags: tuple[str, ...]
) -> Parameter:
    option = typer.Option(
        *flags,
        help=text,
        rich_help_panel=group,
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
    if any(get_origin(member) is tuple for member in members):
        return list[str] | None
    return (members[0] if members else kind) | None


def chosen_level(*, quiet: bool, verbose: bool) -> Level:
    """How much is printed. Raises ConfigError: both options are given."""
    if quiet and verbose:
        raise ConfigError("--quiet must not be combined with --verbose, got both")
    if quiet:
        return "quiet"
    return "verbose" if verbose else "usual"


def message_console(*, as_json: bool) -> "Console":
    """Console for progress and messages: standard output, which `--json` keeps free."""
    from rich.console import Console

    return Console(file=sys.stderr if as_json else None, highlight=False)


def count_words(counts: Mapping[str, int]) -> str:
    """Counts in words, without those of 0: '3 done, 1 failed'."""
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)
