"""`thinsection slurm`: writes, submits, shows and collects arrays of any kind of task."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinsection.cli.app import build_app
from thinsection.registry import Entry, Registry

if TYPE_CHECKING:
    from thinsection.jobs.slurm_array import Array
    from thinsection.jobs.task import AnyReport

app = typer.Typer()
group = typer.Typer(
    no_args_is_help=True,
    help="Submit work as Slurm job arrays and collect the results.",
)
app.add_typer(group, name="slurm")
FolderArgument = Annotated[Path, typer.Argument(help="Results folder of the arrays.")]
_CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
_ARGUMENTS = "[COMMAND] ARGUMENTS..."

# kind of task -> its class; imported by name, since jobs may not import the rooms above it
_TASKS = (
    Entry(name="run", help="Slides.", target="thinsection.run.task:RunTask"),
    Entry(
        name="aggregate",
        help="Embeddings.",
        target="thinsection.run.pooling:PoolingTask",
    ),
    Entry(name="probe", help="Probes.", target="thinsection.probe.grid:ProbeTask"),
)
TASKS: Registry[Any] = Registry("kind of task", "thinsection.tasks", _TASKS)
# commands that run as arrays
_COMMANDS = ("run", "segment", "qc", "aggregate", "probe", "bench")


@group.command("script", context_settings=_CONTEXT, options_metavar=_ARGUMENTS)
def show_script(context: typer.Context) -> None:
    """Write the job array of a command and print its batch script; nothing is submitted.

    The arguments are those of run, segment, qc, aggregate, probe or bench; without the name of a
    command they are those of run. The array covers only what is missing.

    \b
    Examples:
      thinsection slurm script cohort.csv --out results --gres gpu:1
      thinsection slurm script qc slides/ --out results --qc histoqc-light
    """
    _answer_help(context)
    array = _write_array(context.args, queue="script")
    if array is not None:
        typer.echo(array.script.read_text(), nl=False)
        typer.echo(
            f"# written to {array.script}; submit it with: sbatch --parsable", err=True
        )


@group.command("submit", context_settings=_CONTEXT, options_metavar=_ARGUMENTS)
def submit(context: typer.Context) -> None:
    """Submit the job array of a command and return at once.

    The arguments are those of run, segment, qc, aggregate, probe or bench; without the name of a
    command they are those of run. The array covers only what is missing.

    \b
    Examples:
      thinsection slurm submit cohort.csv --out results --workers 8
      thinsection slurm submit aggregate results --slide-encoder titan
    """
    _answer_help(context)
    array = _write_array(context.args, queue="submit")
    if array is not None:
        num_entries = len(array.attempt.entries)
        num_tasks = len(array.chunks)
        typer.echo(
            f"slurm job {array.job_id}: {num_entries} entries in {num_tasks} array tasks"
        )
        out = array.folder.parents[1]
        typer.echo(
            f"logs: {array.folder / 'logs'}; next: thinsection slurm status {out}"
        )


def _answer_help(context: typer.Context) -> None:
    """Prints the help of this command, or of the command among its arguments, and ends."""
    arguments = context.args
    if not {"--help", "--help-all"}.intersection(arguments):
        return
    if arguments[0] in _COMMANDS:
        build_app(arguments)(arguments, prog_name="thinsection")
    typer.echo(context.get_help())
    raise typer.Exit


def _write_array(arguments: list[str], *, queue: str) -> "Array | None":
    """Runs the command until it would submit its work to Slurm; None if nothing is missing."""
    from thinsection.errors import ConfigError
    from thinsection.files.urls import is_url, keep_for_jobs
    from thinsection.jobs.backend import Submitted

    if any(flag == "--out" and is_url(value) for flag, value in pairwise(arguments)):
        raise ConfigError("out must be a folder that all nodes see, got a URL")
    command = list(arguments)
    if not command or command[0] not in _COMMANDS:
        command = ["run", *arguments]
    app = build_app(command)
    try:
        # standard output is only for the script, or the job's number
        with redirect_stdout(sys.stderr):
            app(
                [*command, "--executor", "slurm", "--queue", queue],
                standalone_mode=False,
            )
    except Submitted as submitted:
        keep_for_jobs()
        array: Array = submitted.array
        return array
    typer.echo("nothing is missing", err=True)
    return None


@group.command("status")
def show_status(out: FolderArgument) -> None:
    """Show how many jobs and slides of each array wait, run, are done or failed.

    \b
    Example:
      thinsection slurm status results
    """
    from thinsection.jobs.slurm import array_status
    from thinsection.jobs.slurm_array import array_folders, load_array

    table = Table("array", "kind", "id", "array tasks", "entries")
    reasons = []
    for folder in array_folders(out):
        array = load_array(folder, TASKS)
        tasks, entries = array_status(array)
        table.add_row(
            folder.name,
            array.attempt.task.kind,
            str(array.job_id or "not submitted"),
            _counts_text(tasks),
            _counts_text(entries),
        )
        for reason, count in sorted(array.waiting_reasons().items()):
            reasons.append(waiting_line(array, reason, count))
    Console().print(table)
    for line in reasons:
        typer.echo(line)


def waiting_line(array: "Array", reason: str, count: int) -> str:
    """Slurm's reason for which array tasks wait, with what they ask for and what nodes have."""
    from thinsection.jobs.request import shortages
    from thinsection.jobs.slurm_array import node_list
    from thinsection.types import counted, format_bytes
    from thinsection.usage.analysis import format_walltime

    request = array.request
    line = (
        f"job {array.job_id}: {counted(count, 'array task')} "
        f"{'waits' if count == 1 else 'wait'}, and Slurm's reason is {reason}; each asks for "
        f"{counted(request.cpus, 'CPU')}, {format_bytes(request.memory_bytes)} and "
        f"{format_walltime(request.walltime_s)}"
    )
    lacking = shortages(request, node_list(), array.config.partition)
    if not lacking:
        return line
    words = ", ".join(words for _, words in lacking.values())
    return (
        f"{line}, but {words}; run `scancel {array.job_id}` and submit again with less "
        "(--job-cpus, --job-memory, --walltime) or with another --partition"
    )


@group.command("collect")
def collect_arrays(
    out: FolderArgument,
    retry: Annotated[
        bool,
        typer.Option(
            help="Submit again the slides whose job died, each in its own job with more memory."
        ),
    ] = True,
) -> None:
    """Collect the results of finished job arrays.

    The array of a run gets its tables (summary.csv, failed.csv) and its efficiency page. For qc,
    aggregate, probe and bench, run the same command again without `slurm submit`: it keeps what is
    done and writes the tables.

    Exit code: 0 all is done; 3 some failed, were lost or are not done yet.

    \b
    Example:
      thinsection slurm collect results
    """
    from thinsection.jobs.slurm import collect

    all_done = True
    for collected in collect(out, TASKS, retry=retry, on_message=typer.echo):
        counts = Counter(_status(result) for result in collected.results.values())
        kind = collected.task.kind
        typer.echo(f"{kind}: {_counts_text(counts) or 'no result yet'}")
        output = getattr(getattr(collected.task, "config", None), "output", None)
        has_bad_empty = counts["empty"] and not getattr(output, "allow_empty", False)
        if collected.waiting or counts["failed"] or has_bad_empty:
            all_done = False
        if collected.waiting:
            typer.echo(
                f"{collected.waiting} array tasks still wait or run: collect again later"
            )
        if kind == "run":
            from thinsection.run.ending import finish_arrays

            finish_arrays(collected)
            typer.echo(f"-> {out / 'summary.csv'}, {out / 'failed.csv'}")
        elif not collected.waiting:
            typer.echo(
                "for its tables, run the same command again; finished work is kept"
            )
    raise typer.Exit(0 if all_done else 3)


@group.command("array-task", hidden=True)
def run_array_task(
    folder: Annotated[Path, typer.Argument(help="Folder of the array.")],
    index: Annotated[int, typer.Option(help="Array index, from 1.")],
) -> None:
    """Work on the entries of one array index (what the batch script calls)."""
    from thinsection.config import as_mapping
    from thinsection.jobs.slurm_array import load_array

    statuses: set[str] = set()

    def print_results(report: "AnyReport") -> None:
        for result in report.results:
            typer.echo(json.dumps(as_mapping(result), ensure_ascii=False))
            statuses.add(_status(result))

    load_array(folder, TASKS).run_index(index, on_report=print_results)
    if "failed" in statuses:
        raise typer.Exit(3)


def _status(result: object) -> str:
    return getattr(result, "status", "done")


def _counts_text(counts: Mapping[str, int]) -> str:
    """Formats counts such as '3 done, 1 failed'."""
    rows = sorted(counts.items())
    return ", ".join(f"{count} {name.lower()}" for name, count in rows)
