"""This process, one job after the other."""

from collections.abc import Sequence
from typing import Any, ClassVar

from thinsection.jobs.backend import Backend, Ended, Job
from thinsection.jobs.executor import chunked
from thinsection.jobs.task import Want


class InlineBackend(Backend):
    """See `Backend`: works when it is polled; an error of a task is the caller's.

    Tasks find out by themselves what is finished, better than files alone could tell.
    """

    asks_finished: ClassVar[bool] = False
    climbs: tuple[Want, ...] = ()
    _job: Job | None = None

    def open(self) -> None:
        """See `Backend.open`: it is open."""

    def chunks(self, entries: Sequence[Any]) -> list[tuple[Any, ...]]:
        """See `Backend.chunks`: one stream without a pause, or entry by entry."""
        return chunked(entries, len(entries) if self.site.attempt.task.streams else 1)

    def room(self) -> int:
        """See `Backend.room`."""
        return 1 if self._job is None else 0

    def send(self, jobs: Sequence[Job]) -> None:
        """See `Backend.send`."""
        (self._job,) = jobs

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        """See `Backend.poll`."""
        job, self._job = self._job, None
        if job is None:
            return ()
        report = job.task(job.entries, on_event=self.site.on_event)
        return (Ended(job=job, how="reported", report=report),)
