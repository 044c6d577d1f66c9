"""A Slurm array of tasks of any kind: its folder, its tasks, what they said and how they ended.

FOLDER/slurm/<name>/tasks.json       the task, the entries of each array index, what was asked for
                    array.sh         what sbatch takes
                    job_id           the number that Slurm gave it
                    logs/A_a.log     one per array task
                    results/<i>.json reports of index i: of all its entries, or of the first ones,
                                     rewritten as each one ends
                    results/<i>.error  the error by which index i ended itself
"""

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import ClusterError, StoreError, ThinsectionError
from thinsection.files.atomic import write_json, write_text
from thinsection.jobs.backend import Ended, Job, Try
from thinsection.jobs.executor import ExecutorConfig, Rung
from thinsection.jobs.slurm_queue import TaskState, accounted_states, sbatch, task_states
from thinsection.jobs.task import Report, Task, merged
from thinsection.usage.analysis import Request

FOLDER, DOCUMENT_NAME = "slurm", "tasks.json"
# below the folder that a person names: of an output folder, and of the records of its invocations
_PLACES = (f"{FOLDER}/*/{DOCUMENT_NAME}", f"records/*/{FOLDER}/*/{DOCUMENT_NAME}")


class Kinds(Protocol):
    """Finds the class of a task by its kind: a `Registry`, handed in by who knows all rooms."""

    def load(self, name: str) -> type[Task[Any, Any]]:
        """The class; an error of ours for an unknown name."""
        ...


@dataclass(frozen=True, kw_only=True)
class Array:
    """A written (and perhaps submitted) array.

    Attributes:
        folder: of the array.
        task: what each array task does.
        chunks: the entries of array index 1, 2, ...
        request: resources of each array task.
        config: of the executor, with all rungs.
        number, alone, rung: of the try, see `Try`.
    """

    folder: Path
    task: Task[Any, Any]
    chunks: tuple[tuple[Any, ...], ...]
    request: Request
    config: ExecutorConfig
    number: int = 1
    alone: bool = False
    rung: Rung = Rung()

    @property
    def attempt(self) -> Try:
        """What it tries."""
        return Try(
            entries=tuple(entry for chunk in self.chunks for entry in chunk),
            task=self.task,
            number=self.number,
            alone=self.alone,
            rung=self.rung,
            before=self.request,
        )

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
    def started(self) -> float:
        """When it was written, in seconds since 1970."""
        return (self.folder / DOCUMENT_NAME).stat().st_mtime

    def save(self) -> None:
        """Writes tasks.json.

        Memory: the document, some 200 bytes an entry.
        """
        document = {
            "kind": self.task.kind,
            "task": as_mapping(self.task),
            "request": as_mapping(self.request),
            "config": as_mapping(self.config),
            "number": self.number,
            "alone": self.alone,
            "rung": as_mapping(self.rung),
            "chunks": [[as_mapping(entry) for entry in chunk] for chunk in self.chunks],
        }
        write_json(self.folder / DOCUMENT_NAME, document)

    def submit(self) -> int:
        """Hands the script to sbatch and keeps the number."""
        if self.job_id is not None:
            raise ClusterError(f"array must not be submitted yet, got job {self.job_id}")
        number = sbatch(self.script)
        write_text(self.folder / "job_id", f"{number}\n")
        return number

    def run_index(
        self,
        index: int,
        *,
        on_report: Callable[[Report[Any]], None],
        on_event: Callable[[Any], None] = lambda event: None,
    ) -> None:
        """Works on the entries of one array index, in this process, and keeps what came of them."""
        if not 1 <= index <= len(self.chunks):
            raise ClusterError(f"index must be in [1, {len(self.chunks)}], got {index}")
        chunk = self.chunks[index - 1]
        reports = []
        try:
            for part in [chunk] if self.task.streams else [(entry,) for entry in chunk]:
                report = self.task(part, on_event=on_event)
                reports.append(as_mapping(report))
                write_json(self.results(index), reports)
                on_report(report)
        except Exception as error:  # kept for who collects, who does not read logs
            write_text(self._error(index), f"{type(error).__name__}: {error}\n")
            raise

    def reports(self, index: int) -> list[Report[Any]]:
        """What array index `index` has said so far, of its first entries."""
        try:
            documents = json.loads(self.results(index).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        return [self._report(document) for document in documents]

    def states(self, *, among: Collection[int] | None = None) -> dict[int, str]:
        """Array index -> 'DONE' (it reported), Slurm's state while it is there, or 'LOST'.

        Args:
            among: only these indices; None for all.
        """
        indices = range(1, len(self.chunks) + 1) if among is None else among
        number = self.job_id
        if number is None:
            return dict.fromkeys(indices, "WRITTEN")
        listed = task_states(number, len(self.chunks))  # asked first: a task reports, then leaves
        queued = {index: state.state for index, state in listed.items() if not state.ended}
        return {i: "DONE" if self._whole(i) else queued.get(i, "LOST") for i in indices}

    def ended(self, *, among: Collection[int] | None = None) -> dict[int, Ended]:
        """The array tasks that ended, and how; the accounting knows what squeue has forgotten."""
        states = self.states(among=among)
        found = {
            index: Ended(job=self._job(index), how="reported", report=merged(self.reports(index)))
            for index, state in states.items()
            if state == "DONE"
        }
        lost = [index for index, state in states.items() if state == "LOST"]
        number = self.job_id
        if lost and number is not None:
            known = task_states(number, len(self.chunks))
            if any(index not in known for index in lost):
                known = accounted_states(number) | known
            found |= {i: self._end(i, known.get(i, TaskState())) for i in lost}
        return found

    def results(self, index: int) -> Path:
        """Where array index `index` reports."""
        return self.folder / "results" / f"{index}.json"

    def _end(self, index: int, state: TaskState) -> Ended:
        """How an array task ended that has not reported everything.

        Not worth another try: what the user cancelled, what ended by its own error, and an entry
        that ran out of time alone. What Slurm has forgotten is, where it had begun.
        """
        log = self.folder / "logs" / f"{self.job_id}_{index}.log"
        died, want = state.died, state.want
        if not state.state and log.exists() and not self._error(index).exists():
            died, want = True, "memory"
        if state.state == "TIMEOUT" and len(self.chunks[index - 1]) == 1:
            died = False
        reason = f"array task {self.job_id}_{index} ended without a report ({state.describe()})"
        if self._error(index).exists():
            reason += f": {self._error(index).read_text(encoding='utf-8').strip()}"
        return Ended(
            job=self._job(index),
            how="died" if died else "over",
            report=merged(self.reports(index)),
            reason=f"{reason}; see {log}",
            want=want,
            granted=self.request,
        )

    def _job(self, index: int) -> Job:
        return Job(entries=self.chunks[index - 1], task=self.task)

    def _whole(self, index: int) -> bool:
        reported = sum(len(report.results) for report in self.reports(index))
        return reported == len(self.chunks[index - 1])

    def _report(self, document: Mapping[str, Any]) -> Report[Any]:
        results = [from_mapping(self.task.result_type, r) for r in document["results"]]
        return Report(**{**document, "results": tuple(results)})

    def _error(self, index: int) -> Path:
        return self.folder / "results" / f"{index}.error"


def new_array_folder(folder: Path) -> Path:
    """A free FOLDER/slurm/<name>, named by the time; it is not made yet."""
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return folder / FOLDER / f"{stamp}-{int(now % 1 * 1000):03d}-{secrets.token_hex(2)}"


def load_array(folder: Path, kinds: Kinds) -> Array:
    """The array of a folder.

    Raises:
        StoreError: there is none, of a kind that is not known here, or another version wrote it.
    """
    try:
        document = json.loads((folder / DOCUMENT_NAME).read_text(encoding="utf-8"))
        kind = kinds.load(document["kind"])
        chunks = [[from_mapping(kind.entry_type, e) for e in c] for c in document["chunks"]]
        return Array(
            folder=folder,
            task=from_mapping(kind, document["task"]),
            chunks=tuple(tuple(chunk) for chunk in chunks),
            request=Request(**document["request"]),
            config=from_mapping(ExecutorConfig, document["config"]),
            number=document["number"],
            alone=document["alone"],
            rung=Rung(**document["rung"]),
        )
    except (OSError, ValueError, KeyError, TypeError, ThinsectionError) as error:
        raise StoreError(
            f"array folder must hold {DOCUMENT_NAME} of this version, got {error!r} "
            f"in {str(folder)!r}"
        ) from None


def array_folders(out: Path) -> list[Path]:
    """The folders of all arrays of an output folder and of its records, oldest first."""
    found = [path.parent for place in _PLACES for path in out.glob(place)]
    return sorted(found, key=lambda folder: folder.name)
