"""An array job of a run: its folder, its tasks, its state, and what is merged from it.

OUT/slurm/<name>/job.json         the task and the chunk of slides of each array index
                 array.sh         what sbatch takes
                 job_id           the number that Slurm gave it
                 logs/A_a.log     one per array task
                 results/<i>.json the report of array index i, written when it ends
"""

import json
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinsection.errors import ClusterError, StoreError
from thinsection.run.cohort import SlideEntry
from thinsection.run.executor import ChunkReport, ExecutorConfig
from thinsection.run.executor_task import RunTask, task_from_document
from thinsection.run.results import SlideResult
from thinsection.run.slides import RunEvent
from thinsection.run.slurm_queue import active, sbatch, task_states
from thinsection.run.slurm_request import JobRequest
from thinsection.run.slurm_script import ArrayScript
from thinsection.store.atomic import write_json, write_text

FOLDER = "slurm"


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A written (and perhaps submitted) array job.

    Attributes:
        folder: OUT/slurm/<name>.
        task: what every array task does.
        chunks: slides of array index 1, 2, ...
    """

    folder: Path
    task: RunTask
    chunks: tuple[tuple[SlideEntry, ...], ...]

    @property
    def script(self) -> Path:
        """What sbatch takes."""
        return self.folder / "array.sh"

    @property
    def job_id(self) -> int | None:
        """Slurm's number; None where it was not submitted."""
        try:
            return int((self.folder / "job_id").read_text())
        except FileNotFoundError:
            return None

    @property
    def entries(self) -> tuple[SlideEntry, ...]:
        """All slides."""
        return tuple(entry for chunk in self.chunks for entry in chunk)

    def submit(self) -> int:
        """Hands the script to sbatch and keeps the id."""
        if self.job_id is not None:
            raise ClusterError(f"job must not be submitted yet, got {self.job_id}")
        number = sbatch(self.script)
        write_text(self.folder / "job_id", f"{number}\n")
        return number

    def states(self) -> dict[int, str]:
        """Array index -> 'DONE' (it reported), Slurm's state while it is there, or 'LOST'."""
        number = self.job_id
        if number is None:
            return dict.fromkeys(range(1, len(self.chunks) + 1), "WRITTEN")
        queued = active(task_states(number))  # asked first: a task reports before it leaves
        return {
            index: "DONE" if self.report_path(index).is_file() else queued.get(index, "LOST")
            for index in range(1, len(self.chunks) + 1)
        }

    def report_path(self, index: int) -> Path:
        """Where array index `index` reports."""
        return self.folder / "results" / f"{index}.json"

    def report(self, index: int) -> ChunkReport[SlideResult]:
        """What array index `index` reported."""
        document = json.loads(self.report_path(index).read_text(encoding="utf-8"))
        results = tuple(SlideResult(**result) for result in document.pop("results"))
        return ChunkReport(results=results, **document)

    def log_path(self, index: int) -> Path:
        """Where array index `index` logs."""
        return self.folder / "logs" / f"{self.job_id}_{index}.log"

    def lost_report(self, index: int, *, without: Collection[str] = ()) -> ChunkReport[SlideResult]:
        """The report of an array task that ended without one: killed, cancelled, out of time.

        A slide that it finished before stays done; the others are recorded as failed.

        Args:
            index: of the array.
            without: slides that are not its business any more, because a newer job has them.
        """
        reason = f"array task {self.job_id}_{index} ended without a report"
        reason += f" (killed, cancelled or out of time); see {self.log_path(index)}"
        chunk = self.chunks[index - 1]
        return ChunkReport(
            results=tuple(self.task.lost(e, reason) for e in chunk if e.slide_id not in without)
        )

    def run_index(self, index: int, *, on_event: Callable[[RunEvent], None]) -> None:
        """Works on the slides of one array index, in this process, and writes its report."""
        if not 1 <= index <= len(self.chunks):
            raise ClusterError(f"index must be in [1, {len(self.chunks)}], got {index}")
        report = self.task(self.chunks[index - 1], on_event=on_event)
        write_json(self.report_path(index), asdict(report))


def write_job(
    chunks: Sequence[Sequence[SlideEntry]],
    task: RunTask,
    config: ExecutorConfig,
    *,
    request: JobRequest,
) -> SlurmJob:
    """Writes the folder of a new array job; its tasks take the request's CPUs and are monitored.

    Memory: job.json, about 200 bytes per slide.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder = task.out / FOLDER / name
    task = replace(task.with_threads(request.request.cpus), monitored=True)
    job = SlurmJob(folder=folder, task=task, chunks=tuple(tuple(chunk) for chunk in chunks))
    script = ArrayScript(
        folder=folder,
        num_tasks=len(job.chunks),
        request=request.request,
        config=config,
        notes=request.origins,
    ).text()
    (folder / "logs").mkdir(parents=True)
    write_text(job.script, script)
    document: dict[str, Any] = {"task": task.as_document()}
    document["chunks"] = [[asdict(entry) for entry in chunk] for chunk in job.chunks]
    write_json(folder / "job.json", document)
    return job


def load_job(folder: Path) -> SlurmJob:
    """The job of a folder.

    Raises:
        StoreError: there is none.
    """
    try:
        document = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"job folder must hold job.json, got {error} in {str(folder)!r}") from None
    chunks = tuple(tuple(_entry(e) for e in chunk) for chunk in document["chunks"])
    return SlurmJob(folder=folder, task=task_from_document(document["task"]), chunks=chunks)


def load_jobs(out: Path) -> list[SlurmJob]:
    """All jobs of an output folder, oldest first."""
    return [load_job(path.parent) for path in sorted((out / FOLDER).glob("*/job.json"))]


def _entry(document: dict[str, Any]) -> SlideEntry:
    mpp = document["slide_mpp"]
    return SlideEntry(**{**document, "slide_mpp": (mpp[0], mpp[1]) if mpp else None})
