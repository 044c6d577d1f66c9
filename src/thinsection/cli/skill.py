"""`thinsection skill`: prints the guide for coding agents, which is part of the package."""

from importlib.resources import files

import typer

app = typer.Typer()
GUIDE = "SKILL.md"


@app.command("skill")
def print_skill() -> None:
    """Print a guide to these commands for coding agents (SKILL.md).

    It says what each command does, which one to use when, and how to read the JSON documents. Save
    it where your agent looks for skills.

    \b
    Example:
      thinsection skill > SKILL.md
    """
    text = files("thinsection.cli").joinpath(GUIDE).read_text(encoding="utf-8")
    typer.echo(text, nl=False)
