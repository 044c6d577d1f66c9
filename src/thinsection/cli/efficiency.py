"""`thinsection efficiency`: what a run used of what it held."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command("efficiency")
    def efficiency_command(
        out: Annotated[Path, typer.Argument(help="Output folder of a run.")],
    ) -> None:
        """Requested against used, the bottleneck, and what to ask for next time.

        Example: thinsection efficiency OUT
        """
        from rich.console import Console
        from rich.table import Table

        from thinsection.pipeline.efficiency import PAGE_NAME, write_efficiency

        analysis = write_efficiency(out)
        console = Console()
        table = Table("resource", "requested", "used", "share")
        for share in analysis.shares:
            part = "" if share.fraction is None else f"{share.fraction:.0%}"
            table.add_row(share.name, share.requested, share.used, part)
        console.print(table)
        for warning in analysis.warnings:
            console.print(f"warning: {warning}", style="bold red", markup=False)
        console.print(analysis.bottleneck, markup=False)
        console.print("ask for this next time:")
        for line in analysis.next_request.sbatch_lines():
            console.print(f"  {line}", markup=False)
        console.print(f"page: {out / PAGE_NAME}", markup=False)
