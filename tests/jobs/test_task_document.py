"""What an array task reads and writes: back as it was, and nothing that is not known here."""

import json
from pathlib import Path
from typing import Any

import pytest

from thinsection.errors import ClusterError, StoreError
from thinsection.jobs.task import Report
from thinsection.jobs.task_document import (
    DOCUMENT_NAME,
    TASKS,
    TaskDocument,
    load_tasks,
    task_class,
)
from thinsection.probe.config import ProbeConfig
from thinsection.probe.grid import ProbeTask, probe_jobs


def document(folder: Path) -> TaskDocument:
    """Two probe jobs whose data is not there, for one array index."""
    data = [folder / "a.csv", folder / "b.csv"]
    jobs = probe_jobs(data, ProbeConfig(), probes=["knn"], seeds=[7])
    task = ProbeTask(out=folder / "out", threads=3, resume=False)
    return TaskDocument(folder=folder, task=task, chunks=(tuple(jobs),))


def change(folder: Path, **values: Any) -> None:
    path = folder / DOCUMENT_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_every_known_kind_names_its_class_and_is_named_by_it(kind: str) -> None:
    assert task_class(kind).kind == kind


def test_tasks_come_back_as_they_were_saved(tmp_path: Path) -> None:
    saved = document(tmp_path)
    saved.save()
    assert load_tasks(tmp_path) == saved


def test_a_kind_that_is_not_known_is_refused(tmp_path: Path) -> None:
    document(tmp_path).save()
    change(tmp_path, kind="os.system")
    with pytest.raises(StoreError, match=r"kind must be one of .*probe.*, got 'os\.system' in"):
        load_tasks(tmp_path)


def test_settings_that_are_not_known_are_refused(tmp_path: Path) -> None:
    document(tmp_path).save()
    change(tmp_path, task={"out": "x", "thraeds": 2})
    with pytest.raises(StoreError, match="unknown config key 'thraeds'; did you mean 'threads'"):
        load_tasks(tmp_path)


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"must hold tasks\.json of this version"):
        load_tasks(tmp_path)


def test_an_index_reports_entry_by_entry_and_another_one_is_refused(tmp_path: Path) -> None:
    tasks = document(tmp_path)
    told: list[Report[Any]] = []
    seen: list[int] = []

    def take(report: Report[Any]) -> None:
        told.append(report)
        seen.append(len(tasks.reports(1)))

    assert tasks.reports(1) == []
    tasks.run_index(1, on_report=take)
    assert seen == [1, 2]  # what a death in the middle leaves
    assert tasks.reports(1) == told
    assert [r.results[0].status for r in told] == ["failed", "failed"]
    with pytest.raises(ClusterError, match=r"index must be in \[1, 1\], got 2"):
        tasks.run_index(2, on_report=take)
