"""`thinsection slurm`: arrays of any kind of task written, submitted, looked at and collected."""

import json
import sys
from collections import Counter
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinsection.cli.main import build_app
from thinsection.registry import Entry, Registry

app = typer.Typer()
group = typer.Typer(no_args_is_help=True, help="Work as job arrays of Slurm.")
app.add_typer(group, name="slurm")
FolderArgument = Annotated[Path, typer.Argument(help="Output folder of the arrays.")]
RETRY = typer.Option(help="Submit what died once more, each entry alone, with more.")
_CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

# kind of a task -> its class: the rooms of pipelines and probes are below that of jobs
_TASKS = (
    Entry(name="run", help="Slides.", target="thinsection.pipeline.task:RunTask"),
    Entry(
        name="aggregate",
        help="Embeddings.",
        target="thinsection.pipeline.pooling:PoolingTask",
    ),
    Entry(name="probe", help="Probes.", target="thinsection.probe.grid:ProbeTask"),
)
TASKS: Registry[Any] = Registry("kind of task", "thinsection.tasks", _TASKS)
_COMMANDS = ("run", "tissue", "tile", "embed", "qc", "aggregate", "probe")


@group.command("script", context_settings=_CONTEXT)
def _script(context: typer.Context) -> None:
    """Write the array of what is missing, and show its batch script.

    Takes what the command takes: thinsection slurm script qc slides/ --out QC --pipeline light

    Without a command it is 'run': thinsection slurm script cohort.csv --out OUT --gres gpu:1
    """
    if (array := _hand_over(context.args, "script")) is not None:
        typer.echo(array.script.read_text(), nl=False)
        typer.echo(
            f"# written to {array.script}; submit it with: sbatch --parsable", err=True
        )


@group.command("submit", context_settings=_CONTEXT)
def _submit(context: typer.Context) -> None:
    """Write and submit the array of what is missing, and return.

    Takes what the command takes: thinsection slurm submit aggregate OUT --slide-encoder titan

    Without a command it is 'run': thinsection slurm submit cohort.csv --out OUT --workers 8
    """
    if (array := _hand_over(context.args, "submit")) is not None:
        count, out = len(array.attempt.entries), array.folder.parents[1]
        typer.echo(
            f"slurm job {array.job_id}: {count} entries in {len(array.chunks)} array tasks"
        )
        typer.echo(
            f"logs: {array.folder / 'logs'}; next: thinsection slurm status {out}"
        )


def _hand_over(arguments: list[str], queue: str) -> Any:
    """Runs the command up to where it hands its work to Slurm; None where nothing is missing."""
    from thinsection.errors import ConfigError
    from thinsection.files.sources import is_url
    from thinsection.jobs.slurm import Submitted

    if any(a == "--out" and is_url(b) for a, b in pairwise(arguments)):
        raise ConfigError("out must be a folder that all nodes see, got a URL")
    command = (
        arguments if arguments and arguments[0] in _COMMANDS else ["run", *arguments]
    )
    handing = [*command, "--executor", "slurm", "--queue", queue]
    try:
        with redirect_stdout(
            sys.stderr
        ):  # what is printed here is the script, or its number
            build_app(command)(handing, standalone_mode=False)
    except Submitted as submitted:
        return submitted.array
    typer.echo("nothing is missing", err=True)
    return None


@group.command("status")
def _status(out: FolderArgument) -> None:
    """Show the state of every array of a folder."""
    from thinsection.jobs.slurm import array_status
    from thinsection.jobs.slurm_array import array_folders, load_array

    table = Table("array", "kind", "id", "array tasks", "entries")
    for folder in array_folders(out):
        counts = map(_counts, array_status(array := load_array(folder, TASKS)))
        number = str(array.job_id or "not submitted")
        table.add_row(folder.name, array.attempt.task.kind, number, *counts)
    Console().print(table)


@group.command("collect")
def _collect(out: FolderArgument, retry: Annotated[bool, RETRY] = True) -> None:
    """Merge what the array tasks reported; of a run into its tables and its efficiency page.

    By design it writes the tables of runs only (summary.csv, failed.csv): those of qc, aggregate
    and probe are written by the same command again, without 'slurm', which keeps what is done.

    Exit code 0: all is done; 3: some failed, were lost or are not done yet.
    """
    from thinsection.jobs.slurm import collect

    bad = False
    found: Any
    for found in collect(out, TASKS, retry=retry, on_message=typer.echo):
        counts = Counter(map(_status_of, found.results.values()))
        typer.echo(f"{found.task.kind}: {_counts(counts) or 'no result yet'}")
        output = getattr(getattr(found.task, "config", None), "output", None)
        empty = counts["empty"] and not getattr(output, "allow_empty", False)
        bad = bad or bool(found.waiting or counts["failed"] or empty)
        if found.waiting:
            typer.echo(
                f"{found.waiting} array tasks still wait or run: collect again later"
            )
        if found.task.kind == "run":
            from thinsection.jobs.contract import Report
            from thinsection.pipeline.ending import finish_run

            ended = tuple(found.results[n] for n in found.entries if n in found.results)
            told = {"stage_seconds": found.stage_seconds, "facts": found.facts}
            finish_run(
                found.task, [*found.entries.values()], Report(results=ended, **told)
            )
            typer.echo(f"-> {out / 'summary.csv'}, {out / 'failed.csv'}")
        elif not found.waiting:
            typer.echo("its tables: the same command again, which keeps what is done")
    raise typer.Exit(3 if bad else 0)


@group.command("array-task", hidden=True)
def _array_task(
    folder: Annotated[Path, typer.Argument(help="Folder of the array.")],
    index: Annotated[int, typer.Option(help="Array index, from 1.")],
) -> None:
    """Work on the entries of one array index (what the batch script calls)."""
    from thinsection.config import as_mapping
    from thinsection.jobs.slurm_array import load_array

    found: list[Any] = []

    def show(report: Any) -> None:
        for result in report.results:
            typer.echo(json.dumps(as_mapping(result), ensure_ascii=False))
            found.append(_status_of(result))

    load_array(folder, TASKS).run_index(index, on_report=show)
    if "failed" in found:
        raise typer.Exit(3)


def _status_of(result: Any) -> str:
    return getattr(result, "status", "done")


def _counts(counted: dict[str, int]) -> str:
    return ", ".join(
        f"{count} {name.lower()}" for name, count in sorted(counted.items())
    )
