"""`thinsection probe` and `bench`. Each probe of the registry is a subcommand."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinsection.cli.app import called_name, do_nothing
from thinsection.cli.flags import EXIT_SOME_LEFT_OUT, with_config
from thinsection.errors import ThinsectionError
from thinsection.extras import require_packages
from thinsection.probe.data.sets import TileSet
from thinsection.probe.registry import PROBES, Probe, load_probe
from thinsection.probe.result import selection_words

if TYPE_CHECKING:
    from thinsection.probe.grid import ProbeRow

Out = Annotated[
    Path,
    typer.Option(
        "--out", help="Folder for the page, the pictures and the scores (JSON, CSV)."
    ),
]
GridOut = Annotated[
    Path,
    typer.Option(
        "--out", help="Folder for the table of all scores, and a folder per job."
    ),
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
        no_args_is_help=True,
        help="Evaluate encoders on labelled tiles, slides or cases.",
    )
    called = called_name(arguments)
    for probe_name in PROBES.names():
        _add_probe(app, probe_name, with_flags=not arguments or probe_name == called)
    grid = _grid if not arguments or called == "grid" else do_nothing
    app.command("grid", help=_grid.__doc__)(grid)
    app.command("compare")(_compare)
    app.command("scores")(_scores)
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
        from thinsection.probe.page import interval_words, write_probe_report
        from thinsection.report.index import refresh_index

        require_packages(f"probe {probe.name!r}", *PROBES.entry(probe.name).needs)
        data = probe.kind.load(path, config)
        if isinstance(data, TileSet):
            typer.echo(f"split: {data.facts['split_rule']}")
        left_out: dict[str, str] = {}
        for result in probe.run(data, config):
            page = write_probe_report(result, out)
            score = f"{result.metric_words} {result.score:.4f}"
            typer.echo(f"{result.probe} on {result.dataset}: {score}")
            settings = f"settings: {selection_words(result)}"
            for line in (interval_words(result), settings, *result.remarks, page):
                typer.echo(f"  {line}")
            left_out |= result.left_out
        refresh_index(out)
        _print_left_out_and_exit(left_out)

    command.__annotations__["path"] = Annotated[Path, data_argument]
    command.__annotations__["out"] = Out
    return with_config(probe.config_type, without=probe.kind.unused)(command)


def _raising(error: ThinsectionError) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def _compare(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B...",
            help="Results of `thinsection probe`: a folder per encoder, or the folder of a grid.",
        ),
    ],
    out: Out,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", help="Metric to compare. [default: the metric of each probe]"
        ),
    ] = None,
) -> None:
    """Compare encoders on one page.

    The page has the differences with confidence intervals and p-values, and the ranks. The results
    must come from the same rows, folds and protocol. All encoders are compared on the same
    bootstrap samples.

    \b
    Example:
      thinsection probe compare probes/uni probes/conch --out compared
    """
    from thinsection.probe.compare import compare

    typer.echo(compare(folders, out, metric=metric, on_message=typer.echo))


def _scores(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B...",
            help="Folders of `thinsection bench`, or folders 'scores' of others.",
        ),
    ],
) -> None:
    """Print the scores of several benches as one table, in Markdown.

    A row is a task and a probe, a column an encoder. Results with other rows, seeds or protocols
    have rows of their own.

    \b
    Example:
      thinsection probe scores bench/uni bench/conch > table.md
    """
    from thinsection.probe.scores import read_scores, score_table

    typer.echo(score_table(read_scores(folders)), nl=False)


# the options --encoder and --seed of a grid are lists
@with_config("thinsection.probe.grid:ProbeGridConfig", without=("encoder", "seed"))
def _grid(
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="DATA...",
            help="Manifests, folders of images, tile embeddings, or tables of cases.",
        ),
    ],
    out: GridOut,
    config: Any,
) -> None:
    """Run every combination of data, encoders, seeds and probes.

    Each combination is a job of the executor. The same command again runs only the missing jobs.

    Exit code: 0 all jobs done, 3 some failed, or left out slides with damaged or missing files.

    \b
    Examples:
      thinsection probe grid a.csv b.csv --probe linear --probe knn --out probes
      thinsection probe grid BRACS_RoI/ --layout bracs --encoder uni --encoder conch_v15 \\
          --workers 4 --out probes
    """
    from thinsection.probe.grid import TABLE_NAME, run_probes

    rows = run_probes(data, out=out, config=config, on_message=typer.echo)
    _print_rows_and_exit(rows, out / TABLE_NAME)


@with_config("thinsection.probe.grid:BenchConfig")
def _bench(
    suite: Annotated[
        Path,
        typer.Argument(
            metavar="SUITE.toml",
            help="File with the encoders and tasks. The page 'Evaluate encoders' of the docs "
            "has an example.",
        ),
    ],
    out: GridOut,
    config: Any,
) -> None:
    """Run every encoder of a suite on every task, and compare them.

    OUT gets all scores (suite.json; a small file of each in scores/) and the comparison
    (comparison.html). The same command again
    runs only the missing jobs.

    Exit code: 0 all jobs done, 3 some failed, or left out slides with damaged or missing files.

    \b
    Example:
      thinsection bench suite.toml --out bench
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
    left_out = {name: why for row in rows for name, why in row.left_out.items()}
    has_failed = any(row.status == "failed" for row in rows)
    _print_left_out_and_exit(left_out, has_failed=has_failed)


def _print_left_out_and_exit(
    left_out: Mapping[str, str], *, has_failed: bool = False
) -> None:
    """Prints the slides left out; exit code 3 if there are any, or if a job failed."""
    for name, reason in left_out.items():
        typer.echo(f"{name}: left out: {reason}")
    raise typer.Exit(EXIT_SOME_LEFT_OUT if left_out or has_failed else 0)
