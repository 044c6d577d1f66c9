"""This process as a backend: it works when it is polled, and an error of a task is the caller's."""

from collections.abc import Sequence
from typing import ClassVar

from thinsection.jobs.backend import Backend, Ended, Job
from thinsection.jobs.executor import Want


class InlineBackend(Backend):
    """See `Backend`; a job is known by its number."""

    # a task finds out by itself what is done, better than by files
    asks_finished: ClassVar[bool] = False
    climbs: tuple[Want, ...] = ()

    def open(self) -> None:
        """See `Backend.open`: it is open."""

    def chunks(self, entries: Sequence[object]) -> Sequence[Sequence[object]]:
        """See `Backend.chunks`: one stream without a pause, or entry by entry."""
        return self.site.attempt.task.parts(entries)

    def send(self, jobs: Sequence[Job]) -> None:
        self.sent = dict(enumerate(jobs))

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        jobs = list(self.sent.values())
        self.sent = {}
        ended = []
        for job in jobs:
            report = job.task(job.entries, on_event=self.site.on_event)
            ended.append(Ended(job=job, how="reported", report=report))
        return ended
