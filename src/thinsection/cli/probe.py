"""`thinsection probe`: how good are these embeddings? One subcommand per probe of the registry."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.main import with_config
from thinsection.errors import ThinsectionError
from thinsection.probe.data.sets import TileSet
from thinsection.probe.registry import PROBES, Probe, load_probe
from thinsection.probe.result import ProbeResult, selection_words

Out = Annotated[Path, typer.Option("--out", help="Folder for JSON, CSV, HTML, PNG.")]
_FOLDERS = typer.Argument(
    metavar="A B...", help="Folders of results, one an encoder, or a grid's."
)
Folders = Annotated[list[Path], _FOLDERS]
Metric = Annotated[
    str | None, typer.Option("--metric", help="Instead of each probe's own.")
]
SUITE = typer.Argument(
    metavar="SUITE.toml", help="Encoders and tasks (docs/probes.md)."
)
DATA = typer.Argument(
    metavar="DATA...", help="Manifests, folders, tile embeddings, case tables."
)
GridOut = Annotated[
    Path, typer.Option("--out", help="Folder for probes.csv and a folder per job.")
]


def build(wanted: str, arguments: Sequence[str]) -> typer.Typer:
    """`bench`, or the group `probe` with flags and what they need for the one that is called."""
    root = typer.Typer()
    if wanted == "bench":
        root.command("bench")(_bench)
        return root
    app = typer.Typer(
        no_args_is_help=True, help="Evaluate embeddings of tiles and slides."
    )
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    called = next((a for a in arguments if not a.startswith("-")), None)
    for name in PROBES.names():
        try:
            probe = load_probe(name)
        except (
            ThinsectionError
        ) as error:  # said when it is called: the others are unharmed
            why = f"Cannot be loaded: {error}"
            app.command(name, help=why, context_settings=anything)(_broken(error))
        else:
            command = (
                _command(probe) if not arguments or name == called else lambda: None
            )
            app.command(name, help=probe.function.__doc__)(command)
    grid = _grid if not arguments or called == "grid" else lambda: None
    app.command("grid", help=_grid.__doc__)(grid)
    app.command("compare", help=_compare.__doc__)(_compare)
    root.add_typer(app, name="probe")
    return root


def _command(probe: Probe) -> Callable[..., None]:
    """The subcommand of a probe, with a flag per setting."""
    place = typer.Argument(metavar=probe.kind.metavar, help=probe.kind.help)

    def command(path: Path, out: Path, config: Any) -> None:
        data = probe.kind.load(path, config)
        if isinstance(data, TileSet):
            typer.echo(f"split: {data.facts['split_rule']}")
        for result in probe.run(data, config):
            _finish(result, out)

    command.__annotations__ |= {"path": Annotated[Path, place], "out": Out}
    return with_config(probe.config_type)(command)


def _broken(error: ThinsectionError) -> Callable[[], None]:
    """The subcommand of a probe that is not there: it only says why."""

    def command() -> None:
        raise error

    return command


def _finish(result: ProbeResult, out: Path) -> None:
    """Writes the report and prints the score and where to look."""
    from thinsection.probe.page import interval_words, write_probe_report

    page = write_probe_report(result, out)
    typer.echo(
        f"{result.probe} on {result.dataset}: {result.metric_words} {result.score:.4f}"
    )
    told = (interval_words(result), f"settings: {selection_words(result)}")
    for line in (*told, *result.remarks, page):
        typer.echo(f"  {line}")


def _compare(folders: Folders, out: Out, metric: Metric = None) -> None:
    """Encoders beside each other: differences with interval and test, ranks, one page.

    Of results of the same rows, folds and protocol; every encoder sees the same resamples.

    Example: thinsection probe compare probes/uni probes/conch --out compared/
    """
    from thinsection.probe.compare import compare

    typer.echo(compare(folders, out, metric=metric))


@with_config("thinsection.probe.grid:ProbeGridConfig")
def _grid(data: Annotated[list[Path], DATA], out: GridOut, config: Any) -> None:
    """Every combination of DATA, encoders, seeds and probes, each a job of an executor.

    Exit code 0: all are done; 3: some failed.

    Examples:

      thinsection probe grid a.csv b.csv --probe linear --probe knn --out probes/

      thinsection probe grid BRACS_RoI/ --layout bracs --encoders uni --encoders conch_v15
      --seeds 0 --seeds 1 --executor dask --workers 4 --out probes/
    """
    from thinsection.probe.grid import TABLE_NAME, run_probes

    _told(
        run_probes(data, out=out, config=config, on_message=typer.echo),
        out / TABLE_NAME,
    )


@with_config("thinsection.probe.grid:BenchConfig")
def _bench(suite: Annotated[Path, SUITE], out: GridOut, config: Any) -> None:
    """Every encoder of a suite on every task, as jobs of an executor: resumed where it stopped.

    Writes suite.json and comparison.html. Exit code 0: all are done; 3: some failed.

    Example: thinsection bench SUITE.toml --executor slurm --workers 8 --out bench/
    """
    from thinsection.probe.grid import run_suite

    _told(run_suite(suite, out, config, on_message=typer.echo), out / "suite.json")


def _told(rows: Sequence[Any], file: Path) -> None:
    """Prints a line per score and where they all are."""
    for row in rows:
        score = f"{row.metric} {row.score:.4f}" if row.score is not None else row.error
        typer.echo(f"{row.job}: {row.status}, {row.probe}: {score}")
    typer.echo(file)
    raise typer.Exit(3 if any(row.status == "failed" for row in rows) else 0)
