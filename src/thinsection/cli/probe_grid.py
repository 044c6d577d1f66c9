"""`thinsection probe grid`: many probes as jobs of an executor."""

from pathlib import Path
from typing import Annotated

import typer

from thinsection.cli.options import with_config
from thinsection.probe.grid import ProbeGridConfig

Data = Annotated[
    list[Path],
    typer.Argument(metavar="DATA...", help="Manifests, folders, tile embeddings, case tables."),
]
Out = Annotated[Path, typer.Option("--out", help="Folder for probes.csv and a folder per job.")]


def add_to(app: typer.Typer) -> None:
    """Adds the subcommands to the group `probe`."""
    app.command("grid")(grid)


@with_config(ProbeGridConfig)
def grid(data: Data, out: Out, config: ProbeGridConfig) -> None:
    """Every combination of DATA, encoders, seeds and probes, each a job of an executor.

    Exit code 0: all are done; 3: some failed.

    Examples:

      thinsection probe grid a.csv b.csv --probe linear --probe knn --out probes/

      thinsection probe grid BRACS_RoI/ --layout bracs --encoders uni --encoders conch_v15
      --seeds 0 --seeds 1 --executor dask --workers 4 --out probes/
    """
    from thinsection.probe.grid import TABLE_NAME, run_probes

    rows = run_probes(data, out=out, config=config, on_message=typer.echo)
    for row in rows:
        score = f"{row.metric} {row.score:.4f}" if row.score is not None else row.error
        typer.echo(f"{row.job}: {row.status}, {row.probe}: {score}")
    typer.echo(f"{out / TABLE_NAME}")
    raise typer.Exit(3 if any(row.status == "failed" for row in rows) else 0)
