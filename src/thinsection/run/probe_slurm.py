"""Probe jobs as a Slurm job array that is waited for.

OUT/slurm/<name>/probes.json   the task and the jobs of each array index
                 array.sh      what sbatch takes
                 logs/A_a.log  one per array task
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from thinsection.run.executor import ChunkReport, ExecutorConfig, chunked
from thinsection.run.probe_jobs import ProbeJob, ProbeRow, ProbeTask
from thinsection.run.slurm_job import new_job_folder
from thinsection.run.slurm_queue import TaskState, accounted_states, sbatch, task_states
from thinsection.run.slurm_request import given_or_default
from thinsection.run.slurm_script import MAX_ARRAY, ArrayScript
from thinsection.store.atomic import write_json, write_text

_POLL_S = 5.0


def execute_on_slurm(
    jobs: Sequence[ProbeJob],
    task: ProbeTask,
    config: ExecutorConfig,
    *,
    on_report: Callable[[ChunkReport[ProbeRow]], None],
    on_message: Callable[[str], None],
    poll_s: float = _POLL_S,
) -> None:
    """Submits what is missing, waits, and reports every job once.

    A probe has no plan: CPUs, memory and time are those of the flags, or defaults. A job whose
    array task dies is recorded, not sent again: the same command takes up what is missing. So does
    it after an interrupted wait; the array stays in the queue.
    """
    missing = []
    for job in jobs:
        done = task.done_rows(job) if task.resume else []
        if done:
            on_report(task([job], on_event=lambda event: None))
        else:
            missing.append(job)
    if not missing:
        return
    request = given_or_default(config)
    for line in request.lines():
        on_message(line)
    chunks = chunked(missing, -(-len(missing) // MAX_ARRAY))
    folder = new_job_folder(task.out)
    (folder / "logs").mkdir(parents=True)
    script = ArrayScript(
        folder=folder,
        num_tasks=len(chunks),
        request=request.request,
        config=config,
        notes=request.origins,
        command=("probe", "task"),
    )
    write_text(folder / "array.sh", script.text())
    document = {"out": str(task.out), "threads": request.request.cpus}
    write_json(
        folder / "probes.json", {**document, "chunks": [[asdict(j) for j in c] for c in chunks]}
    )
    number = sbatch(folder / "array.sh")
    on_message(f"slurm job {number}: {len(chunks)} array tasks, logs in {folder}/logs")
    ends = _wait(number, len(chunks), poll_s)
    for index, chunk in enumerate(chunks, start=1):
        log = folder / "logs" / f"{number}_{index}.log"
        on_report(_report(chunk, task, ends.get(index, TaskState()), log))


def run_probe_index(folder: Path, index: int) -> ChunkReport[ProbeRow]:
    """Works on the jobs of one array index, in this process; their folders hold what came of it."""
    document = json.loads((folder / "probes.json").read_text(encoding="utf-8"))
    task = ProbeTask(out=Path(document["out"]), threads=document["threads"], resume=False)
    jobs = [ProbeJob(**job) for job in document["chunks"][index - 1]]
    report = task(jobs, on_event=lambda event: None)
    write_json(folder / f"{index}.json", [asdict(row) for row in report.results])
    return report


def _wait(number: int, num_tasks: int, poll_s: float) -> dict[int, TaskState]:
    """Until no task of the array waits or runs; how they ended."""
    while True:
        states = task_states(number, num_tasks)
        if all(state.ended for state in states.values()):
            return accounted_states(number) | states
        threading.Event().wait(poll_s)


def _report(
    chunk: Sequence[ProbeJob], task: ProbeTask, end: TaskState, log: Path
) -> ChunkReport[ProbeRow]:
    try:
        index = log.stem.rpartition("_")[2]
        rows = json.loads((log.parents[1] / f"{index}.json").read_text(encoding="utf-8"))
        return ChunkReport(results=tuple(ProbeRow(**row) for row in rows))
    except FileNotFoundError:
        reason = f"array task {log.stem} ended without a report ({end.describe()}); see {log}"
        return ChunkReport(results=tuple(task.lost(job, reason) for job in chunk))
