"""Array jobs of a run: what is missing goes in, what was reported comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinsection.jobs.executor import array_chunks
from thinsection.jobs.request import JobRequest
from thinsection.jobs.slurm_executor import collect, missing_entries
from thinsection.jobs.slurm_job import SlurmJob, write_job
from thinsection.pipeline.run import (
    RunSummary,
    check_encoder_names,
    check_folder,
    check_settings,
    finish_run,
    make_task,
)
from thinsection.slide.cohort import load_cohort, parse_mpp
from thinsection.stages.config import RunConfig
from thinsection.stages.request import check_goal


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a request for an array job.

    Attributes:
        job: None where nothing is missing.
        left_out: slides that are done.
        request: of the job's tasks.
    """

    job: SlurmJob | None
    left_out: int
    request: JobRequest | None = None


def write_missing(
    slides: Sequence[str | Path], *, out: Path, config: RunConfig, stage: str = "aggregate"
) -> Written:
    """Writes an array job for the slides that are not done."""
    given = config.slides.slide_mpp
    mpp = parse_mpp(given, where="slides.slide_mpp") if given else None
    entries = load_cohort(slides, slide_mpp=mpp)
    goal = check_goal(stage)
    check_settings(config, goal)
    check_encoder_names(config, goal)
    task = make_task(check_folder(Path(out)), config, goal, command="slurm submit")
    missing = missing_entries(entries, task)
    if not missing:
        return Written(job=None, left_out=len(entries))
    chunks = array_chunks(missing, config.executor)
    request = task.request(chunks, config.executor)
    job = write_job(chunks, task, config.executor, request=request)
    return Written(job=job, left_out=len(entries) - len(missing), request=request)


def collect_run(
    out: Path, *, retry: bool = True, on_message: Callable[[str], None] = lambda text: None
) -> tuple[RunSummary, int]:
    """Merges the jobs of a folder into summary.csv, failed.csv, run.json and efficiency.html.

    Args:
        out: the output folder.
        retry: whether slides whose array task died are submitted once more, alone.
        on_message: lines for the person who waits.

    Returns:
        The summary, and the number of array tasks that still wait or run.
    """
    merged = collect(out, retry=retry, on_message=on_message)
    summary = finish_run(
        merged.task,
        merged.entries,
        merged.results,
        clock=merged.stage_seconds,
        identities=merged.identities,
    )
    return summary, merged.waiting
