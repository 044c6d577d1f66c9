"""`thinsection probe`: how good are these embeddings? One subcommand per probe of the registry."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.options import with_config
from thinsection.errors import ThinsectionError
from thinsection.probe.data.sets import TileSet
from thinsection.probe.grid import TABLE_NAME, ProbeGridConfig, run_probes
from thinsection.probe.page import write_probe_report
from thinsection.probe.registry import PROBES, Probe, load_probe
from thinsection.probe.result import ProbeResult

Out = Annotated[Path, typer.Option("--out", help="Folder for JSON, CSV, Markdown, HTML, PNG.")]
DATA = typer.Argument(metavar="DATA...", help="Manifests, folders, tile embeddings, case tables.")
GridOut = Annotated[Path, typer.Option("--out", help="Folder for probes.csv and a folder per job.")]


def register(root: typer.Typer) -> None:
    """Adds the group `probe`."""
    app = typer.Typer(no_args_is_help=True, help="Evaluate embeddings of tiles and slides.")
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name in PROBES.names():
        try:
            probe = load_probe(name)
        except ThinsectionError as error:  # said when it is called: the others are unharmed
            why = f"Cannot be loaded: {error}"
            app.command(name, help=why, context_settings=anything)(_broken(error))
        else:
            app.command(name, help=probe.function.__doc__)(_command(probe))
    app.command()(grid)
    root.add_typer(app, name="probe")


def _command(probe: Probe) -> Callable[..., None]:
    """The subcommand of a probe, with a flag per setting."""
    place = typer.Argument(metavar=probe.kind.metavar, help=probe.kind.help)

    def command(path: Path, out: Path, config: Any) -> None:
        data = probe.kind.load(path, config)
        tiles = data if isinstance(data, TileSet) else None
        if tiles is not None:
            typer.echo(f"split: {tiles.facts['split_rule']}")
        for result in probe.run(data, config):
            _finish(result, out, tiles)

    command.__annotations__ |= {"path": Annotated[Path, place], "out": Out}
    return with_config(probe.config_type)(command)  # type: ignore[no-any-return]


def _broken(error: ThinsectionError) -> Callable[[], None]:
    """The subcommand of a probe that is not there: it only says why."""

    def command() -> None:
        raise error

    return command


def _finish(result: ProbeResult, out: Path, tiles: TileSet | None) -> None:
    """Writes the report and prints the score and where to look."""
    page, interval = write_probe_report(result, out, tiles=tiles), result.interval
    span = "" if interval is None else f" [{interval.low:.4f}, {interval.high:.4f}]"
    score = f"{result.metric_words} {result.score:.4f}{span}"
    typer.echo(f"{result.probe} on {result.dataset}: {score}")
    for line in (*result.remarks, page):
        typer.echo(f"  {line}")


@with_config(ProbeGridConfig)
def grid(data: Annotated[list[Path], DATA], out: GridOut, config: ProbeGridConfig) -> None:
    """Every combination of DATA, encoders, seeds and probes, each a job of an executor.

    Exit code 0: all are done; 3: some failed.

    Examples:

      thinsection probe grid a.csv b.csv --probe linear --probe knn --out probes/

      thinsection probe grid BRACS_RoI/ --layout bracs --encoders uni --encoders conch_v15
      --seeds 0 --seeds 1 --executor dask --workers 4 --out probes/
    """
    rows = run_probes(data, out=out, config=config, on_message=typer.echo)
    for row in rows:
        score = f"{row.metric} {row.score:.4f}" if row.score is not None else row.error
        typer.echo(f"{row.job}: {row.status}, {row.probe}: {score}")
    typer.echo(out / TABLE_NAME)
    raise typer.Exit(3 if any(row.status == "failed" for row in rows) else 0)
