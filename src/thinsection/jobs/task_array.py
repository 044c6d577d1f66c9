"""Any task of `TASKS` as a Slurm job array that is waited for.

OUT/slurm/<name>/tasks.json    see `task_document`
                 array.sh      what sbatch takes
                 logs/A_a.log  one per array task
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinsection.files.atomic import write_text
from thinsection.jobs.executor import ExecutorConfig, make_chunks
from thinsection.jobs.request import JobRequest, job_request
from thinsection.jobs.slurm_job import new_job_folder
from thinsection.jobs.slurm_queue import TaskState, accounted_states, sbatch, task_states
from thinsection.jobs.slurm_script import ArrayScript
from thinsection.jobs.task import Report, Task
from thinsection.jobs.task_document import TaskDocument

_POLL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class _Lost:
    """The entries of which an array task has not reported, when it ended."""

    entries: tuple[Any, ...]
    reason: str
    again: bool


class ArrayExecutor:
    """See `Executor`: submits an array and waits for it.

    CPUs, memory and time are those of the request, else of the flags, or defaults. Where an
    array task dies that had several entries, those of which it has not reported are sent once more,
    each alone; all others that are lost are recorded. An interrupted wait leaves the array in the
    queue.

    Args:
        config: of the executor.
        out: folder that all nodes see.
        on_message: lines for the person who waits.
        poll_s: seconds between two looks at the queue.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        *,
        out: Path,
        on_message: Callable[[str], None],
        poll_s: float = _POLL_S,
    ) -> None:
        self._config, self._out, self._say, self._poll_s = config, out, on_message, poll_s

    def execute(
        self,
        chunks: Sequence[Sequence[Any]],
        task: Task[Any, Any],
        *,
        on_report: Callable[[Report[Any]], None],
        on_event: Callable[[Any], None],
    ) -> None:
        """See `Executor.execute`; there are no events."""
        request = task.request(chunks, self._config) or job_request(self._config)
        for line in request.lines():
            self._say(line)
        task = task.on_worker(threads=request.request.cpus, monitored=True)
        again: list[Any] = []
        for lost in self._run(chunks, task, request, on_report):
            if lost.again:
                again += lost.entries
            else:
                on_report(_lost_report(task, lost, ""))
        if not again:
            return
        self._say(f"an array task died: what it left is tried once more, each alone: {len(again)}")
        alone = make_chunks(again, replace(self._config, chunk_slides=1), workers=1)
        task = task.smaller()
        for lost in self._run(alone, task, request, on_report):
            on_report(_lost_report(task, lost, ", the second time, alone"))

    def _run(
        self,
        chunks: Sequence[Sequence[Any]],
        task: Task[Any, Any],
        request: JobRequest,
        on_report: Callable[[Report[Any]], None],
    ) -> list[_Lost]:
        """Submits one array, passes its reports on as its tasks end, returns what they left."""
        folder = new_job_folder(self._out)
        tasks = TaskDocument(folder=folder, task=task, chunks=tuple(tuple(c) for c in chunks))
        script = ArrayScript(
            folder=folder,
            num_tasks=len(chunks),
            request=request.request,
            config=self._config,
            notes=request.origins,
            command=("slurm", "array-task"),
        )
        (folder / "logs").mkdir(parents=True)
        write_text(folder / "array.sh", script.text())
        tasks.save()
        number = sbatch(folder / "array.sh")
        self._say(f"slurm job {number}: {len(chunks)} array tasks, logs in {folder}/logs")
        lost = []
        for index, end in self._ends(number, len(chunks)):
            reports = tasks.reports(index)
            for report in reports:
                on_report(report)
            chunk = tasks.chunks[index - 1]
            left = chunk[len(reports) :]
            log = folder / "logs" / f"{number}_{index}.log"
            reason = f"array task {log.stem} ended without a report ({end.describe()}); see {log}"
            if left:
                lost.append(_Lost(entries=left, reason=reason, again=end.died and len(chunk) > 1))
        return lost

    def _ends(self, number: int, num_tasks: int) -> Iterator[tuple[int, TaskState]]:
        """The array indices as they end, and how; Slurm forgets a task some minutes later."""
        waiting = set(range(1, num_tasks + 1))
        while True:
            states = task_states(number, num_tasks)
            ended = [i for i in sorted(waiting) if i not in states or states[i].ended]
            if any(index not in states for index in ended):
                states = accounted_states(number) | states
            yield from ((index, states.get(index, TaskState())) for index in ended)
            waiting.difference_update(ended)
            if not waiting:
                return
            threading.Event().wait(self._poll_s)


def _lost_report(task: Task[Any, Any], lost: _Lost, note: str) -> Report[Any]:
    reason = lost.reason + note
    return Report(results=tuple(task.lost(entry, reason) for entry in lost.entries))
