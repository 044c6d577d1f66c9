"""`thinsection bench`: a suite of encoders and tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.options import with_config

SUITE = typer.Argument(metavar="SUITE.toml", help="Encoders and tasks (docs/probes.md).")
OUT = typer.Option("--out", help="Folder for suite.json, comparison.html and a folder per job.")


def register(root: typer.Typer, arguments: Sequence[str] = ()) -> None:
    """Adds the command."""
    from thinsection.probe.suite import BenchConfig

    root.command("bench", help=_bench.__doc__)(with_config(BenchConfig)(_bench))


def _bench(suite: Annotated[Path, SUITE], out: Annotated[Path, OUT], config: Any) -> None:
    """Every encoder of a suite on every task, as jobs of an executor: resumed where it stopped.

    Exit code 0: all are done; 3: some failed.

    Example: thinsection bench SUITE.toml --executor slurm --workers 8 --out bench/
    """
    from thinsection.probe.suite import run_suite

    rows = run_suite(suite, out, config, on_message=typer.echo)
    for row in rows:
        score = f"{row.metric} {row.score:.4f}" if row.score is not None else row.error
        typer.echo(f"{row.job}: {row.status}, {row.probe}: {score}")
    typer.echo(out / "suite.json")
    raise typer.Exit(3 if any(row.status == "failed" for row in rows) else 0)
