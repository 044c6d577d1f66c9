"""Quality control of many slides: results per slide, resume, workers; a bad slide stays alone."""

import gc
import json
import multiprocessing
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from thinsection.config import user_cache_dir
from thinsection.errors import ThinsectionError
from thinsection.files.atomic import write_text
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.qc import (
    Pipeline,
    QcRule,
    prepare_models,
    qc_fail,
    qc_key,
    run_qc,
)
from thinsection.qc.checks.check import Score
from thinsection.report.histoqc_files import write_histoqc
from thinsection.report.qc_files import QC_FORMAT, QC_JSON, write_qc, write_qc_csv
from thinsection.report.qc_sheet import write_qc_sheet
from thinsection.slide import open_slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.geometry import mean_mpp

ERROR_FILE = "qc-error.txt"
Status = Literal["done", "skipped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QcSettings:
    """How slides are looked at.

    Attributes:
        pipeline: of `load_pipeline`.
        device: 'cpu' or 'cuda[:index]'.
        workers: processes; 1 works in this one.
        reader: of `open_slide`.
        resume: True keeps the results of slides that are done with the same file and pipeline.
        cache_dir: of the pixel models.
    """

    pipeline: Pipeline
    device: str = "cpu"
    workers: int = 1
    reader: str = "auto"
    resume: bool = True
    cache_dir: Path = field(default_factory=user_cache_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class QcReport:
    """What became of one slide.

    Attributes:
        slide_id: of the slide.
        status: 'done' now, 'skipped' because it was done before, or 'failed'.
        row: its line of qc.csv.
        error: one line, for a failed slide.
    """

    slide_id: str
    status: Status
    row: dict[str, Score]
    error: str = ""


def qc_slides(entries: Sequence[SlideEntry], out: Path, settings: QcSettings) -> Iterator[QcReport]:
    """Runs QC on every slide and yields a report as each one ends, in no order.

    Results lie in `out/<slide_id>/`. A slide that cannot be read, or whose worker dies, is
    reported as failed (its traceback is in `qc-error.txt`); the others go on.

    Memory: that of `run_qc`, for each worker.
    """
    prepare_models(settings.pipeline, cache_dir=settings.cache_dir)
    if settings.workers <= 1 or len(entries) <= 1:
        yield from (qc_slide(entry, out, settings) for entry in entries)
        return
    left = {entry.slide_id: entry for entry in entries}
    try:
        for report in _in_pool(list(left.values()), out, settings, settings.workers):
            del left[report.slide_id]
            yield report
    except BrokenProcessPool:  # one slide killed its worker, and with it the pool: find out which
        for entry in list(left.values()):
            yield _alone(entry, out, settings)


def qc_slide(entry: SlideEntry, out: Path, settings: QcSettings) -> QcReport:
    """Quality control of one slide, with every error kept in its report.

    Another process that is at the same slide is waited for; what it finished is not done again.

    Raises:
        StoreError: the output folder cannot be written.
    """
    key = slide_key(entry, settings.pipeline)  # of the file as it is before it is read
    done = _finished(entry, out, settings, key)
    if done is not None:
        return done
    with hold(out / entry.slide_id / LOCK_NAME):
        return _finished(entry, out, settings, key) or _look_at(entry, out, settings, key)


def _look_at(entry: SlideEntry, out: Path, settings: QcSettings, key: str) -> QcReport:
    folder = out / entry.slide_id
    try:
        with open_slide(
            entry.slide_path, reader=settings.reader, slide_mpp=entry.slide_mpp
        ) as slide:
            result = run_qc(
                slide,
                settings.pipeline,
                device=settings.device,
                cache_dir=settings.cache_dir,
                slide_mpp=mean_mpp(entry.slide_mpp),
            )
        write_qc(result, folder, key=key)
    except Exception as error:  # noqa: BLE001 - the per-slide boundary: recorded, the run goes on
        error.add_note(f"slide_id {entry.slide_id!r}, stage 'qc'")
        message = str(error) if isinstance(error, ThinsectionError) else repr(error)
        return _failure(entry, out, message, traceback.format_exc())
    (folder / ERROR_FILE).unlink(missing_ok=True)
    return QcReport(slide_id=entry.slide_id, status="done", row=slide_row(entry, result.row))


def finished_report(entry: SlideEntry, out: Path, settings: QcSettings) -> QcReport | None:
    """The report of a slide that is done; None where it is not, or where that does not count."""
    return _finished(entry, out, settings, slide_key(entry, settings.pipeline))


def _finished(entry: SlideEntry, out: Path, settings: QcSettings, key: str) -> QcReport | None:
    done = finished_row(out / entry.slide_id, key) if settings.resume else None
    if done is None:
        return None
    return QcReport(slide_id=entry.slide_id, status="skipped", row=slide_row(entry, done))


def lost_report(entry: SlideEntry, out: Path, reason: str) -> QcReport:
    """Records a slide that no worker survives."""
    return _failure(entry, out, reason, reason)


def finished_row(folder: Path, key: str) -> dict[str, Score] | None:
    """The row of a slide whose `qc.json` has this key; None if there is none, or it is another."""
    try:
        document: dict[str, Any] = json.loads((folder / QC_JSON).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if document.get("format") != QC_FORMAT or document.get("key") != key:
        return None
    warnings = "|".join(document["warnings"])
    return {**document["facts"], **document["scores"], "warnings": warnings}


def write_tables(
    rows: Sequence[dict[str, Score]],
    out: Path,
    *,
    rules: Sequence[QcRule] = (),
    histoqc_headers: Mapping[str, str] | None = None,
) -> list[tuple[str, QcRule]]:
    """Writes qc.csv, qc.html and, on request, HistoQC's files; returns who fails which rule.

    Args:
        rows: of all slides of the run.
        out: folder of the run.
        rules: each adds to the column `fails` of the slides for which it holds.
        histoqc_headers: of `write_histoqc_tsv`; None leaves HistoQC's files out.
    """
    done = [row for row in rows if row["status"] != "failed"]
    failing = [(str(row["slide_id"]), rule) for row in done for rule in rules if qc_fail(row, rule)]
    for row in rows:
        row["fails"] = "|".join(str(rule) for slide, rule in failing if slide == row["slide_id"])
    write_qc_csv(out / "qc.csv", rows)
    write_qc_sheet(out / "qc.html", rows, title="Quality control")
    if histoqc_headers is not None:
        write_histoqc(out, rows, histoqc_headers)
    return failing


def _in_pool(
    entries: Sequence[SlideEntry], out: Path, settings: QcSettings, workers: int
) -> Iterator[QcReport]:
    context = _worker_context()
    with ProcessPoolExecutor(
        min(workers, len(entries)), mp_context=context, initializer=_one_thread
    ) as pool:
        futures: list[Future[QcReport]] = [
            pool.submit(qc_slide, entry, out, settings) for entry in entries
        ]
        for future in as_completed(futures):
            yield future.result()


def _alone(entry: SlideEntry, out: Path, settings: QcSettings) -> QcReport:
    """The slide in a process of its own, so that a death is surely this slide's."""
    try:
        return next(_in_pool([entry], out, settings, 1))
    except BrokenProcessPool:
        return lost_report(entry, out, "the worker process was killed (out of memory?)")


def slide_key(entry: SlideEntry, pipeline: Pipeline) -> str:
    """`qc_key` of a slide of a cohort."""
    return qc_key(pipeline, entry.slide_path, slide_mpp=mean_mpp(entry.slide_mpp))


def slide_row(entry: SlideEntry, found: Mapping[str, Score]) -> dict[str, Score]:
    """The line of qc.csv of a slide that is done."""
    first = {"slide_id": entry.slide_id, "slide_path": entry.slide_path, "status": "done"}
    return {**first, **found}


def _failure(entry: SlideEntry, out: Path, message: str, details: str) -> QcReport:
    write_text(out / entry.slide_id / ERROR_FILE, details + "\n")
    row: dict[str, Score] = {
        "slide_id": entry.slide_id,
        "slide_path": entry.slide_path,
        "status": "failed",
        "warnings": message,
    }
    return QcReport(slide_id=entry.slide_id, status="failed", row=row, error=message)


def _worker_context() -> multiprocessing.context.BaseContext:
    """Fresh processes, so that no thread or lock of this one is copied.

    Where the system can, one of them imports this module and is forked for each worker: half a
    second once, not once per worker.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _one_thread() -> None:
    """Workers are the parallelism: matrix products keep to one core each."""
    import threadpoolctl

    gc.freeze()  # what was there before the fork is shared, and stays out of collections
    threadpoolctl.threadpool_limits(1)
