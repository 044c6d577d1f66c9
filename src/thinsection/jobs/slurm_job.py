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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import ClusterError, StoreError
from thinsection.files.atomic import write_json, write_text
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.request import JobRequest
from thinsection.jobs.slurm_queue import TaskState, accounted_states, sbatch, task_states
from thinsection.jobs.slurm_script import ArrayScript
from thinsection.jobs.task import Report
from thinsection.pipeline.process import RunEvent
from thinsection.pipeline.results import SlideResult
from thinsection.pipeline.task import RunTask
from thinsection.slide.cohort import SlideEntry
from thinsection.usage.analysis import Request

FOLDER = "slurm"


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A written (and perhaps submitted) array job.

    Attributes:
        folder: OUT/slurm/<name>.
        task: what every array task does.
        chunks: slides of array index 1, 2, ...
        request: resources of each array task.
        alone: whether its slides are those of tasks that died, for the second and last time.
    """

    folder: Path
    task: RunTask
    chunks: tuple[tuple[SlideEntry, ...], ...]
    request: Request
    alone: bool = False

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
        # asked first: a task reports before it leaves
        queued = {i: s.state for i, s in self._listed(number).items() if not s.ended}
        return {
            index: "DONE" if self.report_path(index).is_file() else queued.get(index, "LOST")
            for index in range(1, len(self.chunks) + 1)
        }

    def ends(self, indices: Collection[int]) -> dict[int, TaskState]:
        """How array indices that are lost ended, as far as Slurm still knows."""
        number = self.job_id
        if number is None or not indices:
            return dict.fromkeys(indices, TaskState())
        found = self._listed(number)
        if any(index not in found for index in indices):
            found = accounted_states(number) | found
        return {index: found.get(index, TaskState()) for index in indices}

    def _listed(self, number: int) -> dict[int, TaskState]:
        return task_states(number, len(self.chunks))

    def report_path(self, index: int) -> Path:
        """Where array index `index` reports."""
        return self.folder / "results" / f"{index}.json"

    def report(self, index: int) -> Report[SlideResult]:
        """What array index `index` reported."""
        document = json.loads(self.report_path(index).read_text(encoding="utf-8"))
        results = tuple(SlideResult(**result) for result in document.pop("results"))
        return Report(results=results, **document)

    def log_path(self, index: int) -> Path:
        """Where array index `index` logs."""
        return self.folder / "logs" / f"{self.job_id}_{index}.log"

    def lost_report(
        self, index: int, end: TaskState, *, without: Collection[str] = ()
    ) -> Report[SlideResult]:
        """The report of an array task that ended without one: killed, cancelled, out of time.

        A slide that it finished before stays done; the others are recorded as failed.

        Args:
            index: of the array.
            end: what Slurm says of it.
            without: slides that are not its business any more, because another job has them.
        """
        reason = f"array task {self.job_id}_{index} ended without a report"
        reason += f" ({end.describe()})"
        reason += ", the second time, alone" if self.alone else ""
        reason += f"; see {self.log_path(index)}"
        chunk = self.chunks[index - 1]
        return Report(
            results=tuple(self.task.lost(e, reason) for e in chunk if e.slide_id not in without)
        )

    def run_index(self, index: int, *, on_event: Callable[[RunEvent], None]) -> None:
        """Works on the slides of one array index, in this process, and writes its report."""
        if not 1 <= index <= len(self.chunks):
            raise ClusterError(f"index must be in [1, {len(self.chunks)}], got {index}")
        report = self.task(self.chunks[index - 1], on_event=on_event)
        write_json(self.report_path(index), asdict(report))


def new_job_folder(out: Path) -> Path:
    """A free OUT/slurm/<name>; it is not made yet."""
    return out / FOLDER / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def write_job(
    chunks: Sequence[Sequence[SlideEntry]],
    task: RunTask,
    config: ExecutorConfig,
    *,
    request: JobRequest,
    alone: bool = False,
) -> SlurmJob:
    """Writes the folder of a new array job; its tasks take the request's CPUs and are monitored.

    Args:
        chunks: slides of each array task.
        task: what is done with them.
        config: of the executor.
        request: resources of an array task.
        alone: see `SlurmJob.alone`.

    Memory: job.json, about 200 bytes per slide.
    """
    folder = new_job_folder(task.out)
    task = task.on_worker(threads=request.request.cpus, monitored=True)
    job = SlurmJob(
        folder=folder,
        task=task,
        chunks=tuple(tuple(chunk) for chunk in chunks),
        request=request.request,
        alone=alone,
    )
    script = ArrayScript(
        folder=folder,
        num_tasks=len(job.chunks),
        request=request.request,
        config=config,
        notes=request.origins,
    ).text()
    (folder / "logs").mkdir(parents=True)
    write_text(job.script, script)
    document: dict[str, Any] = {"task": as_mapping(task), "alone": alone}
    document["request"] = asdict(request.request)
    document["chunks"] = [[asdict(entry) for entry in chunk] for chunk in job.chunks]
    write_json(folder / "job.json", document)
    return job


def load_job(folder: Path) -> SlurmJob:
    """The job of a folder.

    Raises:
        StoreError: there is none, or another version wrote it.
    """
    try:
        document = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        return SlurmJob(
            folder=folder,
            task=from_mapping(RunTask, document["task"]),
            chunks=tuple(tuple(_entry(e) for e in chunk) for chunk in document["chunks"]),
            request=Request(**document["request"]),
            alone=document["alone"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"job folder must hold job.json of this version, got {error!r} in {str(folder)!r}"
        ) from None


def load_jobs(out: Path) -> list[SlurmJob]:
    """All jobs of an output folder, oldest first."""
    return [load_job(path.parent) for path in sorted((out / FOLDER).glob("*/job.json"))]


def _entry(document: dict[str, Any]) -> SlideEntry:
    mpp = document["slide_mpp"]
    return SlideEntry(**{**document, "slide_mpp": (mpp[0], mpp[1]) if mpp else None})
