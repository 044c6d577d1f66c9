"""Options that commands share for what they print: `--json`, `--quiet` and `--verbose`."""

import sys
from typing import Annotated, Literal

import typer
from rich.console import Console

from thinsection.errors import ConfigError

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
# names of these options, for commands whose `--help` leaves them to `--help-all`
NAMES = ("as_json", "quiet", "verbose")

Level = Literal["quiet", "usual", "verbose"]


def chosen_level(*, quiet: bool, verbose: bool) -> Level:
    """How much is printed. Raises ConfigError: both options are given."""
    if quiet and verbose:
        raise ConfigError("--quiet must go without --verbose, got both")
    if quiet:
        return "quiet"
    return "verbose" if verbose else "usual"


def message_console(*, as_json: bool) -> Console:
    """Console for progress and messages: standard output, which `--json` keeps free."""
    return Console(file=sys.stderr if as_json else None, highlight=False)
