"""Array jobs of a run: what is missing goes in, what was reported comes out."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from thinsection.run.api import RunSummary, check_folder, check_settings, write_run
from thinsection.run.cohort import load_cohort, parse_mpp
from thinsection.run.config import RunConfig
from thinsection.run.efficiency import write_efficiency
from thinsection.run.executor_choice import (
    DEFAULT_REQUEST,
    SLURM_TASKS,
    check_encoder_name,
    make_chunks,
    make_task,
)
from thinsection.run.monitor import read_usage
from thinsection.run.slurm_executor import collect, missing_entries
from thinsection.run.slurm_job import SlurmJob, write_job
from thinsection.run.slurm_script import with_settings


def write_missing(
    slides: Sequence[str | Path], *, out: Path, config: RunConfig, stage: str = "aggregate"
) -> tuple[SlurmJob | None, int]:
    """Writes an array job for the slides that are not done.

    Returns:
        The job, None where nothing is missing; and the number of slides that were left out.
    """
    given = config.slides.slide_mpp
    mpp = parse_mpp(given, where="slides.slide_mpp") if given else None
    entries = load_cohort(slides, slide_mpp=mpp)
    check_settings(config)
    check_encoder_name(config.encode.encoder)
    task = make_task(check_folder(Path(out)), config, stage)
    missing = missing_entries(entries, task)
    if not missing:
        return None, len(entries)
    settings = config.executor
    chunks = make_chunks(missing, settings, workers=settings.workers or SLURM_TASKS)
    request = with_settings(DEFAULT_REQUEST, settings)
    return write_job(chunks, task, settings, request=request), len(entries) - len(missing)


def collect_run(out: Path) -> tuple[RunSummary, int]:
    """Merges the jobs of a folder into summary.csv, failed.csv, run.json and efficiency.html.

    Returns:
        The summary, and the number of array tasks that still wait or run.
    """
    merged = collect(out)
    seconds = (datetime.datetime.now(datetime.UTC) - merged.started).total_seconds()
    summary = RunSummary(
        out=out, results=merged.results, stage_seconds=merged.stage_seconds, seconds=seconds
    )
    write_run(
        summary,
        merged.entries,
        merged.task.config,
        stage=merged.task.stage,
        identities=merged.identities,
        started=merged.started,
    )
    if read_usage(out):  # none where every array task was lost before it began
        write_efficiency(out)
    return summary, merged.waiting
