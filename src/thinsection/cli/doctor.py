"""`thinsection doctor`: what was found here, what is missing, how to install it."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(doctor)


def doctor(
    out: Annotated[Path | None, typer.Option(help="Look at this folder's disk.")] = None,
) -> None:
    """Show devices, readers, packages, caches and free space.

    Example: thinsection doctor --out /data/results
    """
    from rich.console import Console
    from rich.table import Table

    from thinsection.pipeline.doctor import examine

    table = Table("", "area", "name", "detail")
    for finding in examine(out):
        mark = "[green]ok[/]" if finding.ok else "[yellow]--[/]"
        table.add_row(mark, finding.area, finding.name, finding.detail)
    Console().print(table)
