"""Independent entries of any kind (slides, feature files, probes) through the chosen executor."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinsection.errors import ConfigError
from thinsection.jobs.executor import ExecutorConfig, array_chunks
from thinsection.jobs.task import Entry, Report, Result, Task


def execute(
    entries: Sequence[Entry],
    task: Task[Entry, Result],
    config: ExecutorConfig,
    *,
    folder: Path,
    on_report: Callable[[Report[Result]], None],
    on_event: Callable[[Any], None] = lambda event: None,
    on_message: Callable[[str], None] = lambda text: None,
    cluster: Any = None,
) -> None:
    """Returns when every entry was reported exactly once, in any order.

    Args:
        entries: in this process they are worked on one by one, or in one stream; elsewhere those
            that are finished already are not sent at all.
        task: what is done with them.
        config: which executor, and its settings.
        folder: of this invocation's records, absolute, seen by every worker; gets the workers'
            logs and the folders of arrays.
        on_report: called in this thread as chunks end.
        on_event: progress on the way, as far as the executor can carry it; from any thread.
        on_message: lines for the person who waits.
        cluster: a Dask client or cluster object to work on, instead of what the settings name.

    Raises:
        ThinsectionError: settings, weights or the cluster; a bad entry does not raise.
    """
    if config.executor == "inline":
        if config.workers > 1 and not task.streams:
            raise ConfigError(
                f"executor.workers must be 0 or 1 with executor 'inline', got {config.workers}; "
                "pass --executor dask"
            )
        chunks = [tuple(entries)] if task.streams else [(entry,) for entry in entries]
        for chunk in chunks:
            on_report(task(chunk, on_event=on_event))
        return
    missing = []
    for entry in entries:
        done = task.finished(entry)
        if done is None:
            missing.append(entry)
        else:
            on_report(Report(results=(done,)))
    if not missing:
        return
    if config.executor == "dask":
        from thinsection.jobs.dask_executor import dask_work

        dask, chunks = dask_work(missing, config, out=folder, on_message=on_message)
        dask.execute(chunks, task, on_report=on_report, on_event=on_event)
        return
    chunks = array_chunks(missing, config)
    if task.kind == "run":
        from thinsection.jobs.slurm_executor import SlurmExecutor

        slurm = SlurmExecutor(config, on_message=on_message)
        slurm.execute(chunks, task, on_report=on_report, on_event=on_event)  # type: ignore[arg-type]
        return
    from thinsection.jobs.task_array import ArrayExecutor

    array = ArrayExecutor(config, out=folder, on_message=on_message)
    array.execute(chunks, task, on_report=on_report, on_event=on_event)
