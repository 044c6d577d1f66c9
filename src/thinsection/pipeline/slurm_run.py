"""What the arrays of a run have reported, merged into the results folder's tables."""

from typing import cast

from thinsection.jobs.slurm import Collected
from thinsection.pipeline.run import RunSummary, finish_run
from thinsection.pipeline.task import RunTask


def finish_collected(found: Collected) -> RunSummary:
    """Writes the tables, the record and its efficiency page from the arrays of the kind 'run'."""
    return finish_run(
        cast(RunTask, found.task),
        list(found.entries.values()),
        tuple(found.results[name] for name in found.entries if name in found.results),
        clock=dict(found.stage_seconds),
        identities=found.facts,
    )
