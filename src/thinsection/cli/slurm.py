"""`thinsection slurm`: array jobs written, submitted, looked at and collected."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.options import with_config
from thinsection.cli.run import SlidesArgument

OutOption = Annotated[
    str, typer.Option("--out", help="Output folder, that all nodes see.", show_default=False)
]
JobsArgument = Annotated[Path, typer.Argument(help="Output folder of the jobs.")]


def register(app: typer.Typer) -> None:
    """Adds the group of commands."""
    from thinsection.stages.config import RunConfig

    group = typer.Typer(no_args_is_help=True, help="A run as a Slurm job array.")
    group.command("script")(with_config(RunConfig)(_script))
    group.command("submit")(with_config(RunConfig)(_submit))
    group.command("status")(_status)
    group.command("collect")(_collect)
    group.command("task", hidden=True)(_task)
    group.command("array-task", hidden=True)(_array_task)
    app.add_typer(group, name="slurm")


def _script(slides: SlidesArgument, out: OutOption, config: Any = None) -> None:
    """Write the array job of what is missing, and show its batch script.

    Example: thinsection slurm script cohort.csv --out OUT --partition gpu --gres gpu:1
    """
    job = _write(slides, out, config)
    if job is not None:
        typer.echo(job.script.read_text(), nl=False)
        typer.echo(f"# written to {job.script}; submit it with: sbatch --parsable", err=True)


def _submit(slides: SlidesArgument, out: OutOption, config: Any = None) -> None:
    """Write and submit the array job; again on the same folder: only what is missing.

    Example: thinsection slurm submit cohort.csv --out OUT --array-limit 8
    """
    job = _write(slides, out, config)
    if job is None:
        return
    number = job.submit()
    count = sum(len(chunk) for chunk in job.chunks)
    typer.echo(f"slurm job {number}: {count} slides in {len(job.chunks)} array tasks")
    typer.echo(f"logs: {job.folder / 'logs'}; next: thinsection slurm status {out}")


def _write(slides: list[str], out: str, config: Any) -> Any:
    from thinsection.errors import ConfigError
    from thinsection.files.sources import is_url
    from thinsection.pipeline.slurm_run import write_missing

    if is_url(out):
        raise ConfigError(f"out must be a folder that all nodes see, got {out!r}")
    written = write_missing(slides, out=Path(out), config=config)
    if written.left_out:
        typer.echo(f"{written.left_out} slides are done and left out", err=True)
    if written.request is None:
        typer.echo("nothing is missing", err=True)
    else:
        typer.echo("\n".join(written.request.lines()), err=True)
    return written.job


def _status(out: JobsArgument) -> None:
    """Show the state of every array job of a folder."""
    from rich.console import Console
    from rich.table import Table

    from thinsection.jobs.slurm_executor import job_status
    from thinsection.jobs.slurm_job import load_jobs

    table = Table("job", "id", "array tasks", "slides")
    for job in load_jobs(out):
        status = job_status(job)
        number = str(job.job_id or "not submitted")
        table.add_row(job.folder.name, number, _counts(status.tasks), _counts(status.slides))
    Console().print(table)


def _collect(
    out: JobsArgument,
    retry: Annotated[
        bool, typer.Option(help="Submit slides whose array task died once more, alone.")
    ] = True,
) -> None:
    """Merge what the array tasks reported: summary.csv, failed.csv, run.json, efficiency.html.

    Exit code 0: all slides are done; 3: some failed, were lost or are not done yet.
    """
    from thinsection.pipeline.slurm_run import collect_run

    summary, waiting = collect_run(out, retry=retry, on_message=typer.echo)
    line = ", ".join(f"{count} {status}" for status, count in summary.counts.items() if count)
    typer.echo(f"{line or 'no result yet'} -> {out / 'summary.csv'}")
    if waiting:
        typer.echo(f"{waiting} array tasks still wait or run: collect again later")
    if summary.counts["failed"]:
        typer.echo(f"see {out / 'failed.csv'}; the same 'slurm submit' takes up what is missing")
    raise typer.Exit(3 if waiting else summary.exit_code)


def _task(
    folder: Annotated[Path, typer.Argument(help="Folder of the job.")],
    index: Annotated[int, typer.Option(help="Array index, from 1.")],
) -> None:
    """Work on the slides of one array index (what the batch script calls)."""
    from thinsection.cli.progress import describe
    from thinsection.jobs.slurm_job import load_job

    def show(event: Any) -> None:
        if event.kind == "ended" and event.result is not None:
            typer.echo(describe(event.result))

    job = load_job(folder)
    job.run_index(index, on_event=show)
    if any(result.status == "failed" for result in job.report(index).results):
        raise typer.Exit(3)


def _array_task(
    folder: Annotated[Path, typer.Argument(help="Folder of the array.")],
    index: Annotated[int, typer.Option(help="Array index, from 1.")],
) -> None:
    """Work on the entries of one array index: probes, quality control, aggregation."""
    from thinsection.config import as_mapping
    from thinsection.jobs.task_document import load_tasks

    failed = False

    def show(report: Any) -> None:
        nonlocal failed
        for result in report.results:
            typer.echo(json.dumps(as_mapping(result), ensure_ascii=False))
            failed = failed or result.status == "failed"

    load_tasks(folder).run_index(index, on_report=show)
    if failed:
        raise typer.Exit(3)


def _counts(counted: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.lower()}" for name, count in sorted(counted.items()))
