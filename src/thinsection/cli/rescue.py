"""Commands for other programs: `rescue` a tool with our attention, `skill` for coding agents."""

import sys
from importlib.resources import files
from typing import Annotated

import typer
from rich.console import Console

from thinsection.errors import ConfigError, NothingRescuedError

RESCUES = ("titan", "gigapath", "stamp")
EXIT_NOTHING_RESCUED = 5
GUIDE = "SKILL.md"
# options after the command's name belong to that command
_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer()


@app.command("rescue", no_args_is_help=True, context_settings=_PASS_ON)
def rescue(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"Model or tool: {', '.join(RESCUES)}."),
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="Script, `python -m` module or console script of another tool, with its options.",
        ),
    ],
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="End the command if the version of a model is unknown. Without it such a model "
            "stays as it is, and a warning says so.",
        ),
    ] = False,
) -> None:
    """Run another tool's command with less memory for its slide encoder.

    The command runs in this process, with its own options, and writes its own files. Models that
    it loads compute attention with Thinsection's code, after a check that both give the same
    numbers. A line names each model that was rescued.

    Exit code: that of the command; 5 if it succeeded, but no model used Thinsection's attention.

    \b
    Example:
      thinsection rescue titan -- python run_batch_of_slides.py --task feat --slide_encoder titan
    """
    if name not in RESCUES:
        raise ConfigError(f"rescue must be one of: {', '.join(RESCUES)}; got {name!r}")
    from thinsection import rescue as rescues
    from thinsection.rescue.command import run_command
    from thinsection.rescue.loading import Conduct

    conduct = Conduct(strict=strict, tell=_LinePrinter())
    block = getattr(rescues, name)(conduct=conduct)
    try:
        with block:
            exit_code = run_command(command)
            if exit_code:
                # the command has said why; an unused rescue would only hide it
                raise typer.Exit(exit_code)
    except NothingRescuedError as error:
        conduct.tell(f"nothing was rescued: {error}")
        raise typer.Exit(EXIT_NOTHING_RESCUED) from error
    finally:
        sys.stdout.flush()


class _LinePrinter:
    """Prints each line about a model once."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._printed: set[str] = set()

    def __call__(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            self._console.print(f"thinsection: {line}", soft_wrap=True)


@app.command("skill")
def print_skill() -> None:
    """Print a guide to these commands for AI coding agents (SKILL.md).

    It says what each command does, which one to use when, and how to read the JSON documents. Save
    it where your agent looks for skills.

    \b
    Example:
      thinsection skill > SKILL.md
    """
    text = files("thinsection.cli").joinpath(GUIDE).read_text(encoding="utf-8")
    typer.echo(text, nl=False)
