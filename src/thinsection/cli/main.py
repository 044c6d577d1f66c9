"""The `thinsection` command: loads the subcommand, and prints our errors as one line.

Modules are imported only if their command is called, so that `thinsection --help` is quick.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Sequence

import typer

from thinsection import errors
from thinsection.cli.flags import add_flags
from thinsection.errors import stopping
from thinsection.files.atomic import output_errors

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
    "plan": ("plan", "Predict memory and time from headers and thumbnails."),
    "slurm": ("slurm", "A run as a Slurm job array: script, submit, status, collect."),
    "verify": ("results", "Read every file of results against its checksum."),
    "efficiency": (
        "results",
        "What a run used of what it held, and what to ask for next.",
    ),
    "doctor": ("machine", "Show what was found here, and what is missing."),
    "demo": ("run", "Run the main job on one slide and show the results."),
}

# the same code as for a wrong flag
EXIT_USAGE = 2
# code if the output is not writable; finished results stay
EXIT_OUTPUT = 4


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Application with the called command, or with the list of all commands for `--help`."""
    app = typer.Typer(
        name="thinsection",
        help="Whole-slide images to embeddings and predictions, in the memory you have.",
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
            from thinsection import __version__

            print(__version__)
            raise typer.Exit

    name = called_name(arguments)
    if name in COMMANDS:
        _add_command(app, name, arguments[arguments.index(name) + 1 :])
    else:
        for listed, (_, summary) in COMMANDS.items():
            app.command(listed, help=summary)(do_nothing)
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
    """
    module = importlib.import_module(f"thinsection.cli.{COMMANDS[name][0]}")
    has_builder = hasattr(module, "build")
    built = module.build(name, arguments) if has_builder else module.app
    app.registered_commands = [
        command for command in built.registered_commands if command.name == name
    ]
    app.registered_groups = [
        group for group in built.registered_groups if group.name == name
    ]


def main() -> None:
    """Entry point of the console script."""
    # tifffile logs errors that it also raises; without a handler Python would print the log
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    try:
        with stopping(), output_errors("standard output"):
            build_app(sys.argv[1:])()
    except errors.ThinsectionError as error:
        _print_error("error: ", error)
        sys.exit(EXIT_OUTPUT if isinstance(error, errors.OutputError) else EXIT_USAGE)
    except errors.Stopped as stop:
        _print_error("", stop)
        sys.exit(stop.exit_code)


def _print_error(start: str, error: BaseException) -> None:
    """Prints the error and its notes, one per line."""
    from rich.console import Console

    lines = [f"{start}{error}", *getattr(error, "__notes__", [])]
    with contextlib.suppress(OSError):  # the reader of the output may have closed it
        console = Console(stderr=True)
        text = "\n".join(lines)
        console.print(text, style="bold red", markup=False, soft_wrap=True)
