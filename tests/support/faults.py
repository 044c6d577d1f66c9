"""What clusters do to workers, on purpose: a task that kills or bloats its own process."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinsection.jobs.task import Report
from thinsection.run.pooling import FeaturesFile, PoolingTask
from thinsection.run.process import RunEvent
from thinsection.run.task import RunTask
from thinsection.slide.cohort import SlideEntry
from thinsection.store.outcome import SlideResult
from thinsection.types import MIB


@dataclass(frozen=True, kw_only=True)
class FaultyTask(RunTask):
    """A run's task that misbehaves in the middle of chosen slides.

    Attributes:
        killed_once: slides at whose start the process gets SIGKILL, the first time only.
        killed_always: the same, every time.
        bloated: slides at whose start the process takes memory until it is stopped.
        failing: raised before any slide.
    """

    killed_once: frozenset[str] = field(default_factory=frozenset)
    killed_always: frozenset[str] = field(default_factory=frozenset)
    bloated: frozenset[str] = field(default_factory=frozenset)
    failing: Exception | None = None

    def __call__(
        self, entries: Sequence[SlideEntry], *, on_event: Callable[[RunEvent], None]
    ) -> Report[SlideResult]:
        """See `RunTask.__call__`."""
        if self.failing is not None:
            raise self.failing

        def faulty(event: RunEvent) -> None:
            on_event(event)
            if event.kind == "started":
                self._misbehave(event.slide_id)

        return super().__call__(entries, on_event=faulty)

    def _misbehave(self, slide_id: str) -> None:
        if slide_id in self.killed_always or (
            slide_id in self.killed_once and _first(self.out, slide_id)
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if slide_id in self.bloated:
            hoard = []
            while True:
                hoard.append(bytearray(os.urandom(MIB)) * 16)


@dataclass(frozen=True, kw_only=True)
class KilledPoolingTask(PoolingTask):
    """Aggregation whose process gets SIGKILL whenever it comes to one of some slides.

    Attributes:
        killed_always: these slides.
    """

    killed_always: frozenset[str]

    def __call__(
        self, entries: Sequence[FeaturesFile], *, on_event: Callable[[Any], None]
    ) -> Report[SlideResult]:
        """See `PoolingTask.__call__`."""
        results: list[SlideResult] = []
        for entry in entries:
            if entry.slide_id in self.killed_always:
                os.kill(os.getpid(), signal.SIGKILL)
            results += super().__call__([entry], on_event=on_event).results
        return Report(results=tuple(results))


@dataclass(frozen=True, kw_only=True)
class KilledEntryTask(RunTask):
    """A run's task, slide by slide, whose process gets SIGKILL when it comes to one of some.

    Attributes:
        killed_once: these slides, the first time.
        killed_always: these, every time.
    """

    killed_once: frozenset[str] = field(default_factory=frozenset)
    killed_always: frozenset[str] = field(default_factory=frozenset)

    def __call__(
        self, entries: Sequence[SlideEntry], *, on_event: Callable[[Any], None]
    ) -> Report[SlideResult]:
        """See `RunTask.__call__`."""
        results: list[SlideResult] = []
        for entry in entries:
            name = entry.slide_id
            if name in self.killed_always or (
                name in self.killed_once and _first(self.out, name)
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            results += super().__call__([entry], on_event=on_event).results
        return Report(results=tuple(results))


@dataclass(frozen=True, kw_only=True)
class IdleTask(RunTask):
    """A run's task that does nothing: what is left is the executor's own cost."""

    def __call__(
        self, entries: Sequence[SlideEntry], *, on_event: Callable[[RunEvent], None]
    ) -> Report[SlideResult]:
        """Says that every slide is done."""
        results = [
            SlideResult(slide_id=e.slide_id, slide_path=e.slide_path, status="done")
            for e in entries
        ]
        return Report(results=tuple(results))


def _first(out: Path, slide_id: str) -> bool:
    """Whether nobody asked so far, in any process."""
    try:
        (out / f".killed-{slide_id}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
