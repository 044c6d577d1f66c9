"""Application of the `thinsection` command: its subcommands, and the module of each.

Modules are imported only if their command is called, so that `thinsection --help` is quick.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from thinsection import __version__
from thinsection.cli.flags import HELP_WIDTH, add_flags
from thinsection.errors import ConfigError
from thinsection.extras import check_slides


@dataclass(frozen=True)
class Command:
    """Line of a command in `thinsection --help`, and the module of this package that has it."""

    heading: str
    module: str
    summary: str
    # whether it asks for the packages of the extra `slides`
    needs_slides: bool = True


DAILY = "Daily work"
SLIDES = "Slides"
FOLDERS = "Results folders"
EVALUATION = "Evaluation"
CLUSTERS = "Clusters"
OTHER = "Other"

# in the order of `thinsection --help`, which is the order of work
COMMANDS = {
    "doctor": Command(
        DAILY,
        "machine",
        "Check what works on this machine, and what is missing.",
        needs_slides=False,
    ),
    "models": Command(
        DAILY, "machine", "List the tile encoders; check that one can be loaded."
    ),
    "plan": Command(DAILY, "plan", "Predict the memory and time of a run."),
    "run": Command(
        DAILY, "run", "Turn slides into tissue masks, tiles and embeddings."
    ),
    "qc": Command(DAILY, "run", "Check slides for pen, blur, folds, bubbles and dirt."),
    "aggregate": Command(
        DAILY, "run", "Make slide embeddings from tile embeddings that exist already."
    ),
    "ls": Command(DAILY, "results", "List what a results folder holds."),
    "view": Command(DAILY, "results", "Look at slides and results in the browser."),
    "train": Command(
        DAILY, "predict", "Train a model on stored embeddings, with cross-validation."
    ),
    "predict": Command(
        DAILY, "predict", "Predict new slides and cases with a trained model."
    ),
    "heatmap": Command(DAILY, "predict", "Show which tiles a prediction depends on."),
    "export": Command(
        DAILY, "results", "Write results for QuPath, AnnData, TRIDENT and other tools."
    ),
    "info": Command(
        SLIDES, "info", "Show the images, levels and resolution of slide files."
    ),
    "convert": Command(SLIDES, "convert", "Convert slides to pyramidal OME-TIFF."),
    "deid": Command(
        SLIDES,
        "convert",
        "Copy slides without label, macro image and identifying tags.",
    ),
    "segment": Command(SLIDES, "run", "Assign a class to every pixel with a network."),
    "cells": Command(SLIDES, "cells", "Check the cells that another tool segmented."),
    "import": Command(
        FOLDERS, "results", "Read coordinates and features of TRIDENT, CLAM or STAMP."
    ),
    "zeroshot": Command(
        FOLDERS, "predict", "Score tiles and slides for classes described in words."
    ),
    "relink": Command(
        FOLDERS, "results", "Find slides that moved, by their names and contents."
    ),
    "merge": Command(FOLDERS, "results", "Join results folders into one, with checks."),
    "verify": Command(
        FOLDERS, "results", "Check every result file against its checksum."
    ),
    "cite": Command(
        FOLDERS, "results", "Print what to cite for results, and a methods paragraph."
    ),
    "efficiency": Command(
        FOLDERS, "results", "Compare the requested and the used CPU, memory and time."
    ),
    "config": Command(FOLDERS, "run", "Print every setting of a run as a TOML file."),
    "cache": Command(FOLDERS, "results", "List, verify and remove feature caches."),
    "labels": Command(
        EVALUATION, "labels", "Show how a table of labels is read, before training."
    ),
    "probe": Command(
        EVALUATION,
        "probe",
        "Evaluate an encoder on one task, by a linear probe, kNN or another probe.",
    ),
    "bench": Command(
        EVALUATION, "probe", "Evaluate several encoders on a suite of tasks."
    ),
    "audit": Command(EVALUATION, "labels", "Check a cohort for leaks before training."),
    "model": Command(
        EVALUATION,
        "predict",
        "Show the card of a trained model: data, scores and limitations.",
    ),
    "slurm": Command(
        CLUSTERS, "slurm", "Submit work as Slurm job arrays and collect the results."
    ),
    "rescue": Command(
        OTHER,
        "rescue",
        "Run another tool's command with less memory for its slide encoder.",
        needs_slides=False,
    ),
    "demo": Command(OTHER, "run", "Run everything on one synthetic slide."),
    "skill": Command(
        OTHER,
        "rescue",
        "Print a guide to these commands for AI coding agents.",
        needs_slides=False,
    ),
    "frames": Command(
        OTHER,
        "convert",
        "Compute AlphaFold 3's frames of protein structures (no slides).",
        needs_slides=False,
    ),
}
# earlier command -> command of today
REPLACED = {
    "tissue": "run --until tissue",
    "tile": "run --until tiles",
    "embed": "run --until embeddings",
}
# command -> earlier option -> option of today
REPLACED_OPTIONS = {
    "qc": {"--pipeline": "--qc", "--device": "--qc-device"},
    "aggregate": {"--memory": "--aggregate-memory"},
    "train": {"--grid": "--search"},
}

_HELP = """Turn whole-slide images into embeddings and predictions.

Start with `thinsection doctor`, then `thinsection run slides/ --out results`.
`thinsection COMMAND --help` explains a command.
"""


class _CommandsByHeading(TyperGroup):
    """`thinsection` itself, whose `--help` lists the commands under their headings."""

    # typer has its own copy of click, whose classes have no public name
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows_by_heading: dict[str, list[tuple[str, str]]] = {}
        for name, command in COMMANDS.items():
            rows = rows_by_heading.setdefault(command.heading, [])
            rows.append((name, command.summary))
        for heading, rows in rows_by_heading.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Application with the called command, or with the list of all commands for `--help`."""
    app = typer.Typer(
        name="thinsection",
        cls=_CommandsByHeading,
        help=_HELP,
        context_settings={"max_content_width": HELP_WIDTH},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # plain help, since drawing boxes took half of the CPU time
        rich_markup_mode=None,
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version."),
    ) -> None:
        if version:
            print(__version__)
            raise typer.Exit

    name = called_name(arguments)
    if name in REPLACED:
        raise ConfigError(
            f"thinsection {name} is now thinsection {REPLACED[name]}; "
            "the other options are the same"
        )
    for argument in arguments:
        option = argument.partition("=")[0]
        today = REPLACED_OPTIONS.get(name or "", {}).get(option)
        if today is not None:
            raise ConfigError(f"unknown option {option}; did you mean {today}?")
    if name in COMMANDS:
        _add_command(app, name, arguments[arguments.index(name) + 1 :])
    else:
        for listed, command in COMMANDS.items():
            app.command(listed, help=command.summary)(do_nothing)
    add_flags(app)
    return app


def called_name(arguments: Sequence[str]) -> str | None:
    """First argument that is not a flag."""
    names = (argument for argument in arguments if not argument.startswith("-"))
    return next(names, None)


def do_nothing() -> None:
    """Placeholder for a command that is listed but not called."""


def _add_command(app: typer.Typer, name: str, arguments: Sequence[str]) -> None:
    """Imports the module of a command and adds that command alone.

    The other commands of the module would each be built with dozens of flags.

    Raises MissingDependencyError: the command reads slides, and their packages are not installed.
    """
    if COMMANDS[name].needs_slides:
        check_slides()
    module = importlib.import_module(f"thinsection.cli.{COMMANDS[name].module}")
    has_builder = hasattr(module, "build")
    built = module.build(name, arguments) if has_builder else module.app
    app.registered_commands = [
        command for command in built.registered_commands if command.name == name
    ]
    app.registered_groups = [
        group for group in built.registered_groups if group.name == name
    ]
