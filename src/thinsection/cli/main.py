"""The `thinsection` command: finds the subcommand's module and turns our errors into one line.

Modules are imported only when their command is called, so that `thinsection --help` is quick.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Sequence

import typer

from thinsection.cli.options import by_section
from thinsection.errors import OutputError, Stopped, ThinsectionError, stopping
from thinsection.files.atomic import writing

# command -> (module of this package whose `app` has it, its line in `thinsection --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Everything: tissue, tiles, tile embeddings, slide embedding."),
    "qc": ("run", "Quality control: masks, scores, a contact sheet; HistoQC's checks and more."),
    "tissue": ("run", "Find the tissue of each slide."),
    "segment": ("run", "Name what each px of a slide is, by a network: epithelium, stroma, ..."),
    "tile": ("run", "Lay the tile grid of each slide."),
    "embed": ("run", "Embed the tiles of each slide."),
    "aggregate": ("run", "Pool tile embeddings into slide embeddings."),
    "train": ("predict", "Train a head on stored embeddings, with scores that hold."),
    "predict": ("predict", "Predict slides and cases by a trained model."),
    "heatmap": ("predict", "Draw where a prediction comes from; top tiles; GeoJSON for QuPath."),
    "model": ("predict", "Show what a model was trained on, its figures and limits."),
    "view": ("results", "Look at slides and results in the browser: deep zoom, layers."),
    "ls": ("results", "Show what a results folder holds."),
    "probe": ("probe", "Evaluate frozen encoders: linear, kNN, few-shot, slide level, ..."),
    "bench": ("probe", "A suite of encoders x tasks: one JSON and one page."),
    "cache": ("results", "Feature caches: list, verify, remove."),
    "frames": ("convert", "Token frames of structure files (mmCIF), as AlphaFold 3 defines them."),
    "models": ("machine", "List tile encoders; check whether one would load here."),
    "config": ("run", "Show every setting of a run as TOML."),
    "export": ("results", "Write results in other tools' formats."),
    "import": ("results", "Take over coordinates, features and lists of TRIDENT, CLAM, ..."),
    "convert": ("convert", "Write slides as pyramidal OME-TIFF; what can be is copied."),
    "deid": ("convert", "Write slides without label, macro and identifying tags."),
    "plan": ("run", "Predict memory and time from headers and thumbnails."),
    "slurm": ("slurm", "A run as a Slurm job array: script, submit, status, collect."),
    "verify": ("results", "Read every file of results against its checksum."),
    "efficiency": ("results", "What a run used of what it held, and what to ask for next."),
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
    def root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
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
        app.registered_commands = [c for c in found.registered_commands if c.name == called]
        app.registered_groups = [group for group in found.registered_groups if group.name == called]
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
    except ThinsectionError as error:
        _say("error: ", error)
        sys.exit(EXIT_OUTPUT if isinstance(error, OutputError) else EXIT_USAGE)
    except Stopped as stop:
        _say("", stop)
        sys.exit(stop.exit_code)


def _say(start: str, error: BaseException) -> None:
    """Writes the error and what was noted on it, each on a line."""
    from rich.console import Console

    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    with contextlib.suppress(OSError):  # nobody reads it any more
        console = Console(stderr=True)
        console.print(f"{start}{message}", style="bold red", markup=False, soft_wrap=True)
