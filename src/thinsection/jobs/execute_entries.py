"""Independent entries of any kind (slides, tiles files, probes) through the chosen executor."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinsection.errors import ConfigError
from thinsection.jobs.executor import (
    ChunkReport,
    Entry,
    Executor,
    ExecutorConfig,
    InlineExecutor,
    Result,
)
from thinsection.jobs.task_document import ArrayTask

if TYPE_CHECKING:
    from thinsection.jobs.slurm_request import JobRequest


def execute_entries(
    entries: Sequence[Entry],
    task: ArrayTask[Entry, Result],
    config: ExecutorConfig,
    *,
    out: Path,
    on_report: Callable[[ChunkReport[Result]], None],
    on_message: Callable[[str], None],
    request: "JobRequest | None" = None,
) -> None:
    """Returns when every entry was reported once, in any order.

    Args:
        entries: in this process they are worked on one by one; elsewhere those that are done
            already are not sent at all.
        task: what is done with them.
        config: which executor, and its settings.
        out: absolute; gets logs/ of Dask's workers and slurm/ of arrays.
        on_report: called in this thread.
        on_message: lines for the person who waits.
        request: resources of an array task of Slurm; None takes flags and defaults.

    Raises:
        ConfigError: several workers, but no executor that has any.
        ThinsectionError: settings, weights or the cluster; a bad entry does not raise.
    """
    if config.executor == "inline":
        if config.workers > 1:
            raise ConfigError(
                f"executor.workers must be 0 or 1 with executor 'inline', got {config.workers}; "
                "pass --executor dask"
            )
        ones = [(entry,) for entry in entries]
        InlineExecutor().execute(ones, task, on_report=on_report, on_event=_no_event)
        return
    missing = []
    for entry in entries:
        done = tuple(task.skipped(entry))
        if done:
            on_report(ChunkReport(results=done))
        else:
            missing.append(entry)
    if missing:
        executor, chunks = _make(missing, config, out, on_message, request)
        executor.execute(chunks, task, on_report=on_report, on_event=_no_event)


def _make(
    entries: Sequence[Entry],
    config: ExecutorConfig,
    out: Path,
    on_message: Callable[[str], None],
    request: "JobRequest | None",
) -> tuple[Executor[Any], list[tuple[Entry, ...]]]:
    if config.executor == "dask":
        from thinsection.jobs.dask_executor import dask_work

        return dask_work(entries, config, out=out, on_message=on_message)
    from thinsection.jobs.slurm_request import array_chunks
    from thinsection.jobs.task_array import ArrayExecutor

    array = ArrayExecutor(config, out=out, on_message=on_message, request=request)
    return array, array_chunks(entries, config)


def _no_event(event: Any) -> None:
    """These tasks say nothing on the way."""
