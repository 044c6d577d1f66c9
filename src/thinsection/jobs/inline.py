"""Backend in this process: it works when it is polled, and errors of a task reach the caller."""

from collections.abc import Sequence
from typing import ClassVar

from thinsection.jobs.backend import Backend, Ended, Job
from thinsection.jobs.executor import Resource


class InlineBackend(Backend):
    """See `Backend`; the key of a job is its number."""

    # the task itself knows better than the files which entries are done
    skips_finished_entries: ClassVar[bool] = False
    growable_resources: tuple[Resource, ...] = ()

    def open(self) -> None:
        """See `Backend.open`; there is nothing to open."""

    def chunks(self, entries: Sequence[object]) -> Sequence[Sequence[object]]:
        """See `Backend.chunks`: one continuous stream, or one chunk per entry."""
        return self.context.attempt.task.parts(entries)

    def send(self, jobs: Sequence[Job]) -> None:
        self.sent = dict(enumerate(jobs))

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        jobs = list(self.sent.values())
        self.sent = {}
        ended = []
        for job in jobs:
            report = job.task(job.entries, on_event=self.context.on_event)
            ended.append(Ended(job=job, kind="reported", report=report))
        return ended
