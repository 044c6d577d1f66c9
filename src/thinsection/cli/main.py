"""The `thinsection` command: collects the subcommands and turns our errors into one line each."""

import importlib
import sys

import typer
from rich.console import Console

from thinsection.errors import ThinsectionError

# modules of this package that define `register(app)`, in the order of `thinsection --help`
COMMANDS: tuple[str, ...] = ("probe",)

EXIT_USAGE = 2  # our own errors, as for a wrong flag


def build_app() -> typer.Typer:
    """The application with every subcommand."""
    app = typer.Typer(
        name="thinsection",
        help="Whole-slide images to embeddings and predictions, in the memory you have.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
        if version:
            from thinsection import __version__

            print(__version__)
            raise typer.Exit

    for name in COMMANDS:
        importlib.import_module(f"thinsection.cli.{name}").register(app)
    return app


def main() -> None:
    """Entry point of the console script."""
    try:
        build_app()()
    except ThinsectionError as error:
        message = "\n".join([str(error), *getattr(error, "__notes__", [])])
        Console(stderr=True).print(f"error: {message}", style="bold red", markup=False)
        sys.exit(EXIT_USAGE)
