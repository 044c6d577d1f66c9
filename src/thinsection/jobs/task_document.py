"""What each index of a task array works on, as JSON, and what it has to say of it.

FOLDER/tasks.json        kind and settings of the task, and the entries of each array index
       results/<i>.json  the reports of index i, one per entry, rewritten as each one ends
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import ClusterError, StoreError
from thinsection.files.atomic import write_json
from thinsection.jobs.task import Report, Task

DOCUMENT_NAME = "tasks.json"

# kind -> module of this room and class; imported when asked for: quality control needs no torch
TASKS = {
    "aggregate": ("pipeline.pooling", "PoolingTask"),
    "probe": ("probe.grid", "ProbeTask"),
}


@dataclass(frozen=True, kw_only=True)
class TaskDocument:
    """What an array works on.

    Attributes:
        folder: of the array.
        task: what is done.
        chunks: the entries of array index 1, 2, ...
    """

    folder: Path
    task: Task[Any, Any]
    chunks: tuple[tuple[Any, ...], ...]

    def save(self) -> None:
        """Writes tasks.json.

        Memory: the document, some 100 bytes an entry.
        """
        chunks = [[as_mapping(entry) for entry in chunk] for chunk in self.chunks]
        document = {"kind": self.task.kind, "task": as_mapping(self.task), "chunks": chunks}
        write_json(self.folder / DOCUMENT_NAME, document)

    def run_index(self, index: int, *, on_report: Callable[[Report[Any]], None]) -> None:
        """Works on the entries of one array index, in this process, and keeps what came of each."""
        if not 1 <= index <= len(self.chunks):
            raise ClusterError(f"index must be in [1, {len(self.chunks)}], got {index}")
        reports = []
        for entry in self.chunks[index - 1]:
            report = self.task([entry], on_event=lambda event: None)
            reports.append(as_mapping(report))
            write_json(self._results(index), reports)
            on_report(report)

    def reports(self, index: int) -> list[Report[Any]]:
        """What array index `index` has said so far: a report for each of its first entries."""
        try:
            documents = json.loads(self._results(index).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        return [self._report(document) for document in documents]

    def _report(self, document: dict[str, Any]) -> Report[Any]:
        results = [from_mapping(self.task.result_type, r) for r in document.pop("results")]
        return Report(results=tuple(results), **document)

    def _results(self, index: int) -> Path:
        return self.folder / "results" / f"{index}.json"


def load_tasks(folder: Path) -> TaskDocument:
    """The tasks of an array's folder.

    Raises:
        StoreError: there are none, or of a kind that is not known here.
    """
    path = folder / DOCUMENT_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        kind = document["kind"]
        if kind not in TASKS:
            known = ", ".join(sorted(TASKS))
            raise StoreError(f"kind must be one of {known}, got {kind!r} in {str(path)!r}")
        task_type = task_class(kind)
        chunks = [[from_mapping(task_type.entry_type, e) for e in c] for c in document["chunks"]]
        return TaskDocument(
            folder=folder,
            task=from_mapping(task_type, document["task"]),
            chunks=tuple(tuple(chunk) for chunk in chunks),
        )
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"array folder must hold {DOCUMENT_NAME} of this version, got {error!r} "
            f"in {str(folder)!r}"
        ) from None


def task_class(kind: str) -> Any:
    """The class of a kind of `TASKS`."""
    module, name = TASKS[kind]
    return getattr(import_module(f"thinsection.{module}"), name)
