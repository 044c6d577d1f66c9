"""`run`: slides in, results out; every invocation leaves a record of its own."""

import contextlib
import html
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import thinsection
from thinsection.errors import DiskSpaceError, StoreError, ThinsectionError, require
from thinsection.files.atomic import atomic_path, writing
from thinsection.files.lock import sweep_old
from thinsection.files.sources import is_url
from thinsection.jobs.contract import Report, merged
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import chosen_executor
from thinsection.jobs.slurm import Submitted
from thinsection.pipeline import records
from thinsection.pipeline import results as tables
from thinsection.pipeline.events import OnEvent, RunEvent
from thinsection.pipeline.folder import open_results
from thinsection.pipeline.models import recorded_models
from thinsection.pipeline.prepare import skipped_result
from thinsection.pipeline.records import RECORDS, Record, log
from thinsection.pipeline.results import SlideResult, Status
from thinsection.pipeline.task import ENDS, RunTask, ended_slides, filesystem_now
from thinsection.report.index import write_index
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import ENCODING, RunConfig
from thinsection.stages.request import check_run, cohort_of
from thinsection.stages.spec import RunSpec, resolve
from thinsection.store.claims import claim_ids
from thinsection.store.ledger import SLIDES
from thinsection.types import MIB, format_bytes
from thinsection.usage.monitor import resource_monitor

MIN_FREE_BYTES = 256 * MIB
_SHOWN_GROUPS = 5  # of slides of equal content that are named in full
EXIT_OK, EXIT_SOME_FAILED = 0, 3


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run left."""

    out: Path | str  # the results folder, or its URL
    record: Path  # folder of the invocation's record
    results: tuple[SlideResult, ...]  # one per slide, in the order of the cohort
    stage_seconds: dict[str, float]  # busy and waiting seconds by stage
    seconds: float  # wall-clock time
    allow_empty: bool = False  # a slide without any tile is no failure
    # slides of the folder whose files have the same content, each group by slide id
    equal_slides: tuple[tuple[str, ...], ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of slides by status: done, skipped, empty, excluded, failed."""
        counted = Counter(result.status for result in self.results)
        return {status: counted[status] for status in get_args(Status)}

    @property
    def exit_code(self) -> int:
        """0 where every slide has its result, 3 where some failed or have no tile."""
        counts = self.counts
        bad = counts["failed"] or (counts["empty"] and not self.allow_empty)
        return EXIT_SOME_FAILED if bad else EXIT_OK

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items() if n)
        return f"<RunSummary {str(self.out)!r}: {counts or 'no slides'} in {self.seconds:.1f} s>"

    def _repr_html_(self) -> str:
        here = "" if is_url(str(self.out)) else open_results(self.out)._repr_html_()
        return f"<p>{html.escape(repr(self))}</p>{here}"


def run(
    slides: Sequence[str | Path],
    *,
    out: str | Path,
    config: RunConfig | None = None,
    stage: str = "aggregate",
    executor: Any = None,
    on_event: OnEvent = lambda event: None,
    on_message: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> RunSummary:
    """Takes slides from files to embeddings, resuming what earlier runs left.

    Under `out`: `slides/ID/` with tissue mask, thumbnail and the ledger; a folder per tile grid
    (`256px_0.5mpp/`) with `tiles/ID.h5`, `features_ENCODER/ID.h5`, `slide_features_NAME/ID.h5`,
    `overviews/ID.png` and what else was asked for; `summary.csv`, `failed.csv`, `records/`. Other
    settings make other folders beside those: nothing is replaced unless `output.overwrite` is on.

    Args:
        slides: files, folders, URLs or cohort CSVs.
        out: results folder, made if absent; or a URL (s3://, ...), for one run at a time.
        config: all settings.
        stage: the last stage: 'tissue', 'qc', 'tile', 'embed' or 'aggregate'.
        executor: a Dask client or cluster to work on, in place of what the settings name.
        on_event: progress, from any thread.
        on_message: lines of the executor: the dashboard's address, a worker's death.
        settings: single settings by name, over those of `config`: tile_px=512, encoders=["uni"].

    Memory: `config.stream.memory` for tiles, whatever the slides' size, beside the encoders.

    Raises:
        ThinsectionError: bad settings, no slides, unknown encoder, unwritable or full folder; all
            before work starts. A bad slide does not raise.
    """
    spec = resolve(config or RunConfig(), stage, settings)
    entries = cohort_of(slides, spec.slides, spec.regions, on_message)
    check_run(spec)
    tables.check_reference(spec)
    if not is_url(str(out)):
        with writing(str(out)):
            folder = check_folder(Path(out))
            return _run_in_folder(
                claim_ids(folder, entries, on_message),
                out=folder,
                spec=spec,
                executor=executor,
                on_event=on_event,
                on_message=on_message,
            )
    from thinsection.pipeline.remote_out import uploads_to

    with uploads_to(str(out), spec, executor) as uploads:
        entries = claim_ids(uploads.folder, entries, on_message)
        uploads.expect(entries)
        try:
            summary = _run_in_folder(
                entries,
                out=uploads.folder,
                spec=spec,
                on_event=uploads.watch(on_event),
                on_message=on_message,
                settle=uploads.settle,
            )
        except BaseException:
            with contextlib.suppress(
                StoreError
            ):  # the tables, where the target takes them
                uploads.put_rest("")
            raise
        uploads.put_rest(summary.record.name)
    return replace(summary, out=str(out))


def _run_in_folder(
    entries: Sequence[SlideEntry],
    *,
    out: Path,
    spec: RunSpec,
    executor: Any = None,
    on_event: OnEvent,
    on_message: Callable[[str], None],
    settle: Callable[[SlideResult], SlideResult] = lambda result: result,
) -> RunSummary:
    """`run` on checked settings and a folder that exists; `settle` has the last word on a slide."""
    task = make_task(out, spec)
    on_event, on_message = _logged(task.record, on_event, on_message)
    reports, facts, begun = list[Report[SlideResult]](), dict[str, Any](), False
    told: dict[str, Any] = {"on_event": on_event, "on_message": on_message}
    told |= {"on_report": reports.append, "cluster": executor, "folder": task.record}
    try:
        with writing(out):
            finished = finished_report(out, Record.read(task.record), entries, spec)
            if finished is None and executor is None and spec.executor.in_process:
                if spec.encoding.encoders:
                    on_message(f"loading {', '.join(spec.encoding.encoders)}")
                facts = task.facts(
                    task.models()
                )  # errors of settings and weights come first
            begun = True
            if finished is None:

                def spent() -> Mapping[str, float]:
                    return merged(reports).stage_seconds

                with resource_monitor(task.record, facts=facts, stage_seconds=spent):
                    execute(entries, task, spec.executor, **told)
            else:
                reports.append(finished)
                for result in finished.results:
                    on_event(task.ended(result))
            report = merged(reports)
            ended = {result.slide_id: settle(result) for result in report.results}
            results = tuple(ended[entry.slide_id] for entry in entries)
            summary = finish_run(task, entries, replace(report, results=results))
            for line in _equal_lines(summary.equal_slides):
                on_message(line)
            return summary
    except Submitted:  # no end: the work goes on elsewhere
        raise
    except BaseException as error:
        if begun or not isinstance(error, ThinsectionError):
            end_early(task, entries, merged(reports), error)
        raise


def finished_report(
    out: Path, record: Record, entries: Sequence[SlideEntry], spec: RunSpec
) -> Report[SlideResult] | None:
    """Report of a run that has nothing to do; None where there is something, or may be.

    Asks what a worker asks, without its encoders: whether each stage has its result, by the keys
    that follow from recorded identities.
    """
    if not spec.encoding.encoders or spec.output.overwrite:
        return None
    for earlier in records.same_settings(out, record):
        document = earlier.document.get("models", {})
        models = recorded_models(document, spec.encoding)
        if models is not None:
            results = []
            for entry in entries:
                result = skipped_result(entry, out=out, spec=spec, models=models)
                if result is None:
                    return None
                results.append(result)
            return Report(results=tuple(results), facts=document)
    return None


def _equal_lines(groups: Sequence[Sequence[str]]) -> list[str]:
    """A line for each of the first groups of slides of equal content, and how many follow."""
    lines = []
    for ids in groups[:_SHOWN_GROUPS]:
        names = ", ".join(map(repr, ids))
        lines.append(f"warning: {names} have the same content: is it one slide?")
    if len(groups) > _SHOWN_GROUPS:
        rest = len(groups) - _SHOWN_GROUPS
        lines.append(f"warning: {rest} more groups of slides have the same content")
    return lines


def _logged(
    record: Path, on_event: OnEvent, on_message: Callable[[str], None]
) -> tuple[OnEvent, Callable[[str], None]]:
    """The listeners of a run, which also note what they hear in its log."""

    def event(one: RunEvent) -> None:
        if one.result is not None:
            log(record, tables.describe(one.result))
        elif one.kind in ("opening", "waiting"):
            then = ", then " if one.kind == "opening" and one.text else " "
            log(record, f"{one.slide_id}: {one.kind}{then}{one.text}".rstrip())
        on_event(one)

    def message(text: str) -> None:
        log(record, text)
        on_message(text)

    return event, message


def make_task(out: Path, spec: RunSpec) -> RunTask:
    """The task of an invocation that begins now, and its record."""
    folder = out.resolve()
    # each goal is a subcommand
    command = "run" if spec.goal == "aggregate" else spec.goal
    record = records.begin_record(folder, command, spec.settings)
    log(
        record.folder, f"thinsection {thinsection.__version__}: {command} into {folder}"
    )
    kept: tuple[Path, ...] = ()
    if chosen_executor(spec.executor) == "slurm":
        kept = tuple(one.folder for one in records.same_settings(folder, record))
    return RunTask(
        out=folder,
        record=record.folder,
        spec=spec,
        threads=spec.executor.threads,
        started=filesystem_now(folder),
        kept=kept,
    )


def finish_run(
    task: RunTask, entries: Sequence[SlideEntry], report: Report[SlideResult]
) -> RunSummary:
    """Writes the tables, the record, its efficiency page, and the QC page where there was QC.

    The report is of all chunks, merged; of a batch job not yet of all entries.
    """
    record = Record.read(task.record)
    spent = datetime.now(UTC) - datetime.fromisoformat(record.document["started"])
    output, busy = task.spec.output, dict(sorted(report.stage_seconds.items()))
    told: dict[str, Any] = {
        "seconds": spent.total_seconds(),
        "allow_empty": output.allow_empty,
    }
    told |= {"results": report.results, "stage_seconds": busy}
    slides = tables.known_slides(task.out)
    equal = tables.write_tables(task.out, slides, _not_ended(entries, report.results))
    told |= {"equal_slides": tuple(equal)}
    summary = RunSummary(out=task.out, record=task.record, **told)
    if output.measures and task.spec.goal in ("tile", *ENCODING):
        tables.write_measures(task.out, slides, task.spec)
    if task.spec.qc.qc != "off":
        tables.write_qc_tables(task.out, slides, task.spec)
    facts = {"seconds": round(summary.seconds, 3), "counts": summary.counts}
    rounded = {name: round(seconds, 3) for name, seconds in busy.items()}
    records.end_record(
        record, facts | {"models": dict(report.facts), "stage_seconds": rounded}
    )
    if summary.counts["done"]:
        records.write_efficiency(task.record)
    log(task.record, f"ended: {summary!r}")
    write_index(task.out)
    return summary


def end_early(
    task: RunTask,
    entries: Sequence[SlideEntry],
    report: Report[SlideResult],
    error: BaseException,
) -> None:
    """Writes the tables of what is done, where there is room, and notes on the error how to go on.

    Slides that nobody has reported are known by what their processes noted in the record.
    """
    ended = ended_slides(task.record) | {r.slide_id: r for r in report.results}
    results = tuple(ended[e.slide_id] for e in entries if e.slide_id in ended)
    done = sum(result.status in ENDS for result in results)
    told = f"tables are in {task.out}"
    try:
        with writing(task.out):
            slides = tables.known_slides(task.out)
            tables.write_tables(task.out, slides, _not_ended(entries, results))
            why = str(error) or type(error).__name__
            records.end_record(Record.read(task.record), {"ended_by": why})
            log(task.record, f"ended early: {why}; {done} slides are done")
            write_index(task.out, draw_thumbnails=False)
    except OSError as full:
        told = f"the tables could not be written ({full})"
    go_on = "what is done stays: run the same command again to go on"
    error.add_note(f"{done} of {len(entries)} slides are done, {told}; {go_on}")


def _not_ended(
    entries: Sequence[SlideEntry], results: Sequence[SlideResult]
) -> list[SlideEntry]:
    """The slides of an invocation that have no result yet."""
    ended = {result.slide_id for result in results}
    return [entry for entry in entries if entry.slide_id not in ended]


def check_folder(out: Path) -> Path:
    """The results folder, made and proved writable and with room.

    Raises StoreError: it cannot be made or written, holds an earlier layout, or has no 256 MiB.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with atomic_path(out / "writable") as tmp:
            tmp.write_bytes(b"\0")
        (out / "writable").unlink(missing_ok=True)  # another run may have taken it
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise StoreError(
            f"out must be a writable folder, got {str(out)!r}: {error}"
        ) from None
    got = (
        f"{format_bytes(free)} in {str(out)!r}; free some space or choose another disk"
    )
    rule = f"out must have {format_bytes(MIN_FREE_BYTES)} free"
    require(free >= MIN_FREE_BYTES, rule, got, error=DiskSpaceError)
    for folder in (out, *out.glob(f"{RECORDS}/*")):
        sweep_old(folder)
    ours = (out / SLIDES).is_dir() or (out / RECORDS).is_dir()
    earlier = (out / "run.json").is_file() or any(out.glob("*/slide.json"))
    got = f"{str(out)!r} with results of an earlier version (<slide_id>/tiles.h5); "
    got += "choose another --out: nothing was changed"
    rule = "out must be a new folder or one of this layout"
    require(ours or not earlier, rule, got, error=StoreError)
    return out
