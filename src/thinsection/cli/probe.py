"""`thinsection probe`: how good are these embeddings? One subcommand per probe of the registry."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinsection.cli.flags import with_config
from thinsection.cli.main import called_name, do_nothing
from thinsection.errors import ThinsectionError
from thinsection.probe.data.sets import TileSet
from thinsection.probe.registry import PROBES, Probe, load_probe
from thinsection.probe.result import ProbeResult, selection_words

if TYPE_CHECKING:
    from thinsection.probe.grid import ProbeRow

Out = Annotated[Path, typer.Option("--out", help="Folder for JSON, CSV, HTML, PNG.")]
GridOut = Annotated[
    Path, typer.Option("--out", help="Folder for probes.csv and a folder per job.")
]


def build(name: str, arguments: Sequence[str]) -> typer.Typer:
    """Builds `bench`, or the group `probe` with the flags of the called subcommand.

    Args:
        name: 'bench' or 'probe'.
        arguments: arguments after the name; without any, every subcommand gets its flags.
    """
    root = typer.Typer()
    if name == "bench":
        root.command("bench")(_bench)
        return root
    app = typer.Typer(
        no_args_is_help=True, help="Evaluate embeddings of tiles and slides."
    )
    called = called_name(arguments)
    for probe_name in PROBES.names():
        _add_probe(app, probe_name, with_flags=not arguments or probe_name == called)
    grid = _grid if not arguments or called == "grid" else do_nothing
    app.command("grid", help=_grid.__doc__)(grid)
    app.command("compare")(_compare)
    root.add_typer(app, name="probe")
    return root


def _add_probe(app: typer.Typer, name: str, *, with_flags: bool) -> None:
    """Adds the subcommand of a probe; if it cannot be loaded, the subcommand reports why."""
    try:
        probe = load_probe(name)
    except (
        ThinsectionError
    ) as error:  # raised only if this subcommand is called, so that the others work
        app.command(
            name,
            help=f"Cannot be loaded: {error}",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_raising(error))
        return
    command = _probe_command(probe) if with_flags else do_nothing
    app.command(name, help=probe.function.__doc__)(command)


def _probe_command(probe: Probe) -> Callable[..., None]:
    """Subcommand of a probe, with a flag per setting."""
    data_argument = typer.Argument(metavar=probe.kind.metavar, help=probe.kind.help)

    def command(path: Path, out: Path, config: Any) -> None:
        data = probe.kind.load(path, config)
        if isinstance(data, TileSet):
            typer.echo(f"split: {data.facts['split_rule']}")
        for result in probe.run(data, config):
            _write_and_print(result, out)

    command.__annotations__["path"] = Annotated[Path, data_argument]
    command.__annotations__["out"] = Out
    return with_config(probe.config_type)(command)


def _raising(error: ThinsectionError) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def _write_and_print(result: ProbeResult, out: Path) -> None:
    """Writes the report and prints the score and the path."""
    from thinsection.probe.page import interval_words, write_probe_report

    page = write_probe_report(result, out)
    score = f"{result.metric_words} {result.score:.4f}"
    typer.echo(f"{result.probe} on {result.dataset}: {score}")
    typer.echo(f"  {interval_words(result)}")
    typer.echo(f"  settings: {selection_words(result)}")
    for remark in result.remarks:
        typer.echo(f"  {remark}")
    typer.echo(f"  {page}")


def _compare(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B...", help="Folders of results, one an encoder, or a grid's."
        ),
    ],
    out: Out,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Instead of each probe's own.")
    ] = None,
) -> None:
    """Encoders beside each other: differences with interval and test, ranks, one page.

    Of results of the same rows, folds and protocol; every encoder sees the same resamples.

    Example: thinsection probe compare probes/uni probes/conch --out compared/
    """
    from thinsection.probe.compare import compare

    typer.echo(compare(folders, out, metric=metric))


# the options --encoder and --seed of a grid are lists
@with_config("thinsection.probe.grid:ProbeGridConfig", without=("encoder", "seed"))
def _grid(
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="DATA...",
            help="Manifests, folders, tile embeddings, case tables.",
        ),
    ],
    out: GridOut,
    config: Any,
) -> None:
    """Every combination of DATA, encoders, seeds and probes, each a job of an executor.

    Exit code 0: all are done; 3: some failed.

    Examples:

      thinsection probe grid a.csv b.csv --probe linear --probe knn --out probes/

      thinsection probe grid BRACS_RoI/ --layout bracs --encoder uni --encoder conch_v15
      --seed 0 --seed 1 --executor dask --workers 4 --out probes/
    """
    from thinsection.probe.grid import TABLE_NAME, run_probes

    rows = run_probes(data, out=out, config=config, on_message=typer.echo)
    _print_rows_and_exit(rows, out / TABLE_NAME)


@with_config("thinsection.probe.grid:BenchConfig")
def _bench(
    suite: Annotated[
        Path,
        typer.Argument(
            metavar="SUITE.toml", help="Encoders and tasks (docs/probes.md)."
        ),
    ],
    out: GridOut,
    config: Any,
) -> None:
    """Every encoder of a suite on every task, as jobs of an executor: resumed where it stopped.

    Writes suite.json and comparison.html. Exit code 0: all are done; 3: some failed.

    Example: thinsection bench SUITE.toml --executor slurm --workers 8 --out bench/
    """
    from thinsection.probe.grid import run_suite

    rows = run_suite(suite, out, config, on_message=typer.echo)
    _print_rows_and_exit(rows, out / "suite.json")


def _print_rows_and_exit(rows: Sequence["ProbeRow"], file: Path) -> None:
    """Prints a line per score and their folder; exit code 3 if a job failed."""
    for row in rows:
        score = row.error if row.score is None else f"{row.metric} {row.score:.4f}"
        typer.echo(f"{row.job}: {row.status}, {row.probe}: {score}")
    typer.echo(file)
    raise typer.Exit(3 if any(row.status == "failed" for row in rows) else 0)
