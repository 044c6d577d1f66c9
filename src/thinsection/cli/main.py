"""The `thinsection` command: finds the subcommand, makes its flags, turns our errors into a line.

Modules are imported only when their command is called, so that `thinsection --help` is quick. Flags
derive from configuration dataclasses, so that a default is written once.
"""

import contextlib
import importlib
import logging
import sys
import typing
from collections.abc import Callable, Sequence
from functools import cache
from inspect import Parameter, Signature, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from thinsection import errors
from thinsection.config import flat_fields, from_mapping, read_toml, replace_flat
from thinsection.errors import require, stopping
from thinsection.files.atomic import writing

Command = TypeVar("Command", bound=Callable[..., Any])
_LISTED = 12  # names of a registry that a line of `--help` lists; of more it lists none
# command -> (module of this package whose `app` has it, its line in `thinsection --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Everything: tissue, tiles, tile embeddings, slide embedding."),
    "qc": (
        "run",
        "Quality control: masks, scores, a contact sheet; HistoQC's checks and more.",
    ),
    "tissue": ("run", "Find the tissue of each slide."),
    "segment": (
        "run",
        "Name what each px of a slide is, by a network: epithelium, stroma, ...",
    ),
    "tile": ("run", "Lay the tile grid of each slide."),
    "embed": ("run", "Embed the tiles of each slide."),
    "aggregate": ("run", "Pool tile embeddings into slide embeddings."),
    "train": ("predict", "Train a head on stored embeddings, with scores that hold."),
    "predict": ("predict", "Predict slides and cases by a trained model."),
    "heatmap": (
        "predict",
        "Draw where a prediction comes from; top tiles; GeoJSON for QuPath.",
    ),
    "model": ("predict", "Show what a model was trained on, its figures and limits."),
    "view": (
        "results",
        "Look at slides and results in the browser: deep zoom, layers.",
    ),
    "ls": ("results", "Show what a results folder holds."),
    "probe": (
        "probe",
        "Evaluate frozen encoders: linear, kNN, few-shot, slide level, ...",
    ),
    "bench": ("probe", "A suite of encoders x tasks: one JSON and one page."),
    "cache": ("results", "Feature caches: list, verify, remove."),
    "frames": (
        "convert",
        "Token frames of structure files (mmCIF), as AlphaFold 3 defines them.",
    ),
    "models": ("machine", "List tile encoders; check whether one would load here."),
    "config": ("run", "Show every setting of a run as TOML."),
    "export": ("results", "Write results in other tools' formats."),
    "import": (
        "results",
        "Take over coordinates, features and lists of TRIDENT, CLAM, ...",
    ),
    "convert": (
        "convert",
        "Write slides as pyramidal OME-TIFF; what can be is copied.",
    ),
    "deid": ("convert", "Write slides without label, macro and identifying tags."),
    "plan": ("run", "Predict memory and time from headers and thumbnails."),
    "slurm": ("slurm", "A run as a Slurm job array: script, submit, status, collect."),
    "verify": ("results", "Read every file of results against its checksum."),
    "efficiency": (
        "results",
        "What a run used of what it held, and what to ask for next.",
    ),
    "doctor": ("machine", "Show what was found here, and what is missing."),
    "demo": ("run", "Run the main job on one slide and show the results."),
}

EXIT_USAGE = 2  # our own errors, as for a wrong flag
EXIT_OUTPUT = 4  # the output cannot be written any more; what is done stays


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The application with the called command, or with the list of all for `--help`."""
    app = typer.Typer(
        name="thinsection",
        help="Whole-slide images to embeddings and predictions, in the memory you have.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: to draw its boxes took half of the CPU time
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version."),
    ) -> None:
        if version:
            from thinsection import __version__

            print(__version__)
            raise typer.Exit

    called = next((a for a in arguments if not a.startswith("-")), None)
    if called in COMMANDS:
        rest = arguments[arguments.index(called) + 1 :]
        module = importlib.import_module(f"thinsection.cli.{COMMANDS[called][0]}")
        found = module.build(called, rest) if hasattr(module, "build") else module.app
        # the others of the module would each be built with their dozens of flags
        app.registered_commands = [
            c for c in found.registered_commands if c.name == called
        ]
        app.registered_groups = [
            group for group in found.registered_groups if group.name == called
        ]
    else:
        for name, (_, summary) in COMMANDS.items():
            app.command(name, help=summary)(lambda: None)
    by_section(app)
    return app


def main() -> None:
    """Entry point of the console script."""
    # tifffile logs what it also raises, and Python prints the log where nobody listens
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    try:
        with stopping(), writing("standard output"):
            build_app(sys.argv[1:])()
    except errors.ThinsectionError as error:
        _say("error: ", error)
        sys.exit(EXIT_OUTPUT if isinstance(error, errors.OutputError) else EXIT_USAGE)
    except errors.Stopped as stop:
        _say("", stop)
        sys.exit(stop.exit_code)


def _say(start: str, error: BaseException) -> None:
    """Writes the error and what was noted on it, each on a line."""
    from rich.console import Console

    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    with contextlib.suppress(OSError):  # nobody reads it any more
        console = Console(stderr=True)
        console.print(
            f"{start}{message}", style="bold red", markup=False, soft_wrap=True
        )


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
        p.replace(
            annotation=hints.get(p.name, p.annotation), kind=Parameter.KEYWORD_ONLY
        )
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
                require(
                    given[setting] is None,
                    both,
                    given[setting],
                    error=errors.ConfigError,
                )
                given[setting], said = mean(text)
                print(said, file=sys.stderr)
        overrides = {k: v for k, v in given.items() if v is not None and v != []}
        base = from_mapping(cls, read_toml(path)) if path else cls()
        return command(**values, config=replace_flat(base, overrides))

    file = typer.Option("--config", help="TOML file with settings; flags win over it.")
    config_file = _optional("config_file", Annotated[Path | None, file])
    parameters = [
        *own,
        config_file,
        *flags.values(),
        *(word[2] for word in words.values()),
    ]
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
                sections.setdefault(
                    getattr(param, "rich_help_panel", None) or kind, []
                ).append(row)
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl(rows)


def by_section(app: typer.Typer) -> None:
    """Gives the commands of an application, and of its groups, their flags, listed by section."""
    for command in app.registered_commands:
        if (
            settings := getattr(command.callback, "settings", None)
        ) and command.callback:
            cls = resolve_name(settings) if isinstance(settings, str) else settings
            command.callback = _with_flags(command.callback, cls)
        command.cls = _BySection
        command.context_settings = {"max_content_width": 100} | (
            command.context_settings or {}
        )
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
    option = typer.Option(
        *declared, help=text, rich_help_panel=panel, show_default=False
    )
    return _optional(name, Annotated[kind, option])


def _other_words(
    cls: type,
) -> dict[str, tuple[str, Callable[[str], tuple[Any, str]], Parameter]]:
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
