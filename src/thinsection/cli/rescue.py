"""`thinsection rescue`: another tool's command with our bounded-memory attention in its models."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated

import typer
from rich.console import Console

from thinsection.errors import ConfigError

RESCUES = ("titan", "gigapath", "stamp")
# options after the command's name belong to that command
_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer()


@app.command("rescue", no_args_is_help=True, context_settings=_PASS_ON)
def rescue(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{', '.join(RESCUES)}.")],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="Script, `python -m` module or console script of another tool, with its options.",
        ),
    ],
) -> None:
    """Run another tool's command with less memory for its slide encoder.

    The command runs in this process, with its own options, and writes its own files. Models that
    it loads get our attention, after a check that both give the same numbers. It is an error if
    the command never uses our attention.

    Exit code: that of the command.

    \b
    Example:
      thinsection rescue titan -- python run_batch_of_slides.py --task feat --slide_encoder titan
    """
    if name not in RESCUES:
        raise ConfigError(f"rescue must be one of: {', '.join(RESCUES)}; got {name!r}")
    from thinsection import rescue as rescues
    from thinsection.rescue.command import run_command

    block: Callable[[], AbstractContextManager[object]] = getattr(rescues, name)
    try:
        with block():
            exit_code = run_command(command)
            if exit_code:
                # the command has said why; an unused rescue would only hide it
                raise typer.Exit(exit_code)
    finally:
        sys.stdout.flush()
    done = f"thinsection: the attention of {name} was ours"
    Console(stderr=True, highlight=False).print(done)
