"""`run`: from slides to results; every invocation writes its own record."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import thinsection
from thinsection.config import as_mapping, listing_settings
from thinsection.errors import (
    ConfigError,
    DiskSpaceError,
    OutputError,
    StoreError,
    ThinsectionError,
)
from thinsection.files.atomic import atomic_path, output_errors
from thinsection.files.lock import sweep_old
from thinsection.files.urls import hide_secret, is_url
from thinsection.jobs.backend import Submitted, ignore_event
from thinsection.jobs.execute import execute, skipped_line
from thinsection.jobs.executor import check_gpus, chosen_executor
from thinsection.jobs.task import Report, merge_reports
from thinsection.qc.edits import check_edits_exist, check_edits_source
from thinsection.results import records
from thinsection.results.records import RECORDS, Record, log
from thinsection.run.ending import RunSummary, end_early, finish_run
from thinsection.run.models import (
    check_own_encoder,
    check_weights_kept,
    recorded_models,
    settings_name,
    with_current_weights,
)
from thinsection.run.prepare import finished_work
from thinsection.run.process import OnEvent, RunEvent
from thinsection.run.progress import chosen_progress, showing
from thinsection.run.qc_device import with_chosen_qc_device
from thinsection.run.task import OwnEncoderTask, RunTask, filesystem_now
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.readers import AUTO, check_packages_for
from thinsection.stages.checks import QcStage
from thinsection.stages.config import PoolingConfig, RunConfig
from thinsection.stages.spec import (
    Slides,
    check_run,
    cohort_of,
    grid_names,
    notes_on_tiles,
    resolve,
    stages_of,
)
from thinsection.stages.stage import AnyStage
from thinsection.store.ledger import SLIDES, SlideLedger
from thinsection.store.outcome import SlideResult, describe, slides_done
from thinsection.store.slide_ids import assign_stored_ids
from thinsection.types import MIB, PlainValues, counted, format_bytes, ignore_message
from thinsection.usage.monitor import resource_monitor

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.settings_types import RunSettings

MIN_FREE_BYTES = 256 * MIB
_SHOWN_GROUPS = 5  # groups of slides with equal content that are listed in full
# command to put into the record, by the value of --until; any other value is recorded as
# 'run --until VALUE'
_COMMANDS = {"qc": "qc", "segments": "segment", "slide-embeddings": "run"}
OnMessage = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Listeners:
    """Listeners for a run's progress."""

    on_event: OnEvent  # called from any thread
    on_message: OnMessage
    # called with the slides of the run, once they have their ids
    on_entries: Callable[[Sequence[SlideEntry]], None] = lambda entries: None
    # returns the slide's result, or a failed one if its files could not be uploaded
    final_result: Callable[[SlideResult], SlideResult] = lambda result: result

    def logged(self, record: Path) -> Listeners:
        """The same listeners, which also write to the log of a record."""

        def on_event(event: RunEvent) -> None:
            if event.result is not None:
                log(record, describe(event.result))
            elif event.kind in ("opening", "waiting"):
                then = ", then " if event.kind == "opening" and event.text else " "
                line = f"{event.slide_id}: {event.kind}{then}{event.text}"
                log(record, line.rstrip())
            self.on_event(event)

        def on_message(text: str) -> None:
            log(record, text)
            self.on_message(text)

        return replace(self, on_event=on_event, on_message=on_message)


@listing_settings(RunConfig)
def run(
    slides: Slides,
    *,
    out: str | Path,
    config: RunConfig | None = None,
    encoder: str | TileEncoder | None = None,
    executor: object = None,
    on_event: OnEvent | None = None,
    on_message: OnMessage | None = None,
    **settings: Unpack[RunSettings],
) -> RunSummary:
    """Takes slides from files to embeddings, and resumes earlier runs.

    Under `out`: `slides/ID/` with tissue mask, picture and the ledger; a folder per tile grid
    (`256px_0.5mpp/`) with `tiles/ID.h5`, `features_ENCODER/ID.h5`, `slide_features_NAME/ID.h5`,
    `overviews/ID.jpg` and other requested files; `summary.csv`, `failed.csv`, `records/`. Other
    settings write to other folders; nothing is overwritten unless `output.overwrite` is on.

    Args:
        slides: files, folders, URLs or cohort CSVs; or the entries of `load_cohort`.
        out: results folder, made if absent; or a URL (s3://, ...), for one run at a time.
        config: all settings.
        encoder: name of a tile encoder, or one from `make_encoder` or `load_encoder`, in place of
            those of the settings. An encoder object works only with executor='inline'.
        executor: a word of `--executor` ('pool', 'dask', ...), or a Dask client or cluster.
        on_event: receives progress, from any thread; `thinsection.progress()` shows it. None shows
            it in a notebook, and nothing in a script.
        on_message: receives messages of the executor: the dashboard's address, a worker's death.
        settings: single settings by name, which replace those of `config`: tile_px=512,
        until="tiles", encoders=["uni"].

    Memory: `config.stream.memory` for tiles of slides of any size, and the encoders.

    Raises:
        ThinsectionError: bad settings, no slides, unknown encoder, unwritable or full folder; all
            before work starts. A bad slide does not raise.
    """
    config = config or RunConfig()
    overrides: dict[str, object] = dict(settings)
    if isinstance(executor, str):
        overrides["executor"] = executor
        executor = None
    _check_tissue_form(overrides.get("tissue"))
    # an encoder object of the caller, not one that the settings name
    own_encoder = None
    if isinstance(encoder, str):
        overrides["encoders"] = (encoder,)
    elif encoder is not None:
        # the weights may have changed since `make_encoder`
        own_encoder = with_current_weights(encoder)
    own_name = None if own_encoder is None else settings_name(own_encoder)
    spec = resolve(config, overrides, own_encoder=own_name)
    if own_encoder is not None and (executor or not spec.executor.in_process):
        raise ConfigError(
            "executor must be 'inline' with an encoder object, got "
            f"{chosen_executor(spec.executor, cluster=executor)!r}; other processes cannot "
            "load it: leave out workers and executor, or name an encoder that a package declares"
        )
    progress = chosen_progress(on_event)
    if progress is not None:
        on_event = progress
        on_message = on_message or progress.say
    listeners = Listeners(
        on_event=on_event or ignore_event, on_message=on_message or ignore_message
    )
    spec.check_packages()
    check_gpus(spec.executor)
    entries = cohort_of(slides, spec.slides, spec.regions, listeners.on_message)
    spec.cells.check(entries)
    check_edits_exist(spec.qc.qc_edits, entries)
    spec = with_chosen_qc_device(spec, entries, listeners.on_message)
    check_packages_for([out])
    if spec.slides.reader == AUTO:
        check_packages_for(entry.slide_path for entry in entries)
    stages = check_run(spec)
    if is_url(str(out)):
        with showing(progress, len(entries), "slides"):
            return _run_at_url(
                entries,
                hide_secret(str(out)),
                spec,
                stages,
                listeners,
                executor=executor,
                own_encoder=own_encoder,
            )
    with output_errors(str(out)), showing(progress, len(entries), "slides"):
        return _run_in_folder(
            entries,
            check_folder(Path(out)),
            spec,
            stages,
            listeners,
            executor=executor,
            own_encoder=own_encoder,
        )


def _check_tissue_form(tissue: object) -> None:
    """Refuses a mask or a geometry, which only `tile_grid` takes; a run needs one file per slide.

    Raises ConfigError: `tissue` is neither a path nor a name of a column.
    """
    if isinstance(tissue, str | Path | None):
        return
    raise ConfigError(
        "tissue must be a file, a folder or a column of the cohort for a run, got "
        f"{type(tissue).__name__}; write a folder of SLIDE_ID.geojson or SLIDE_ID.png, or call "
        "tile_grid(slide, tissue=...)"
    )


def _run_at_url(
    entries: Sequence[SlideEntry],
    out: str,
    spec: RunConfig,
    stages: tuple[AnyStage, ...],
    listeners: Listeners,
    *,
    executor: object,
    own_encoder: TileEncoder | None,
) -> RunSummary:
    """Runs with results at a URL, where each slide is uploaded as it ends."""
    from thinsection.run.remote_out import uploads_to

    with uploads_to(out, spec, executor) as uploads:
        uploading = replace(
            listeners,
            on_event=uploads.watch(listeners.on_event),
            on_entries=uploads.expect,
            final_result=uploads.final_result,
        )
        try:
            # `uploads_to` refuses every executor but 'inline', so none is passed on
            summary = _run_in_folder(
                entries,
                uploads.folder,
                spec,
                stages,
                uploading,
                own_encoder=own_encoder,
            )
        except BaseException:
            # upload the tables if the target is writable
            with contextlib.suppress(StoreError):
                uploads.put_tables(last_record=None)
            raise
        uploads.put_tables(last_record=summary.record.name)
    return replace(summary, out=out)


def _run_in_folder(
    entries: Sequence[SlideEntry],
    out: Path,
    spec: RunConfig,
    stages: tuple[AnyStage, ...],
    listeners: Listeners,
    *,
    executor: object = None,
    own_encoder: TileEncoder | None = None,
) -> RunSummary:
    """Runs with checked settings in an existing folder; `stages` are from `stages_of(spec)`."""
    entries = assign_stored_ids(out, entries, listeners.on_message)
    if spec.qc.qc_edits is not None:
        without_file = check_edits_source(
            spec.qc.qc_edits, entries, listeners.on_message
        )
        for stage in stages:
            if isinstance(stage, QcStage):
                stage.say_kept_edits(out, without_file, listeners.on_message)
    listeners.on_entries(entries)
    if own_encoder is not None and spec.encoding.encoders:
        check_own_encoder(out, own_encoder)
    task = make_task(out, spec, own_encoder)
    record = Record.read(task.record)
    records.update_record(record, {"grids": list(grid_names(stages))})
    listeners = listeners.logged(task.record)
    for stage in stages:
        for note in stage.notes:
            listeners.on_message(f"note: {note}")
    if own_encoder is None:
        for note in notes_on_tiles(spec):
            listeners.on_message(f"note: {note}")
    reports: list[Report[SlideResult]] = []
    begun = False
    try:
        with output_errors(out):
            finished: Report[SlideResult] = Report(results=())
            ledgers: dict[str, SlideLedger] = {}
            if own_encoder is None:
                finished, ledgers = finished_report(
                    task.out, record, entries, spec, stages
                )
            finished_ids = {result.slide_id for result in finished.results}
            unfinished = [
                entry for entry in entries if entry.slide_id not in finished_ids
            ]
            facts: PlainValues = {}
            if unfinished and own_encoder is None and spec.encoding.encoders:
                task = task.with_expected_tiles(unfinished)
            if unfinished and executor is None and spec.executor.in_process:
                # raise errors of settings and weights before any slide is read
                if spec.encoding.encoders:
                    names = ", ".join(spec.encoding.encoders)
                    listeners.on_message(f"loading {names}")
                facts = task.facts(task.models())
            if unfinished:
                # free the ledgers: their memory is needed for the work, and `finish_run` reads them
                # again
                ledgers = {}
            begun = True
            reports.append(finished)
            for result in finished.results:
                listeners.on_event(task.end_event(result))
            if unfinished and finished.results and not spec.executor.in_process:
                listeners.on_message(skipped_line(len(finished.results), len(entries)))
            if unfinished:
                _execute(
                    unfinished, task, listeners, reports, executor=executor, facts=facts
                )
            if own_encoder is not None:
                check_weights_kept(own_encoder)
            patients: tuple[SlideResult, ...] = ()
            if spec.encoding.patients != "none":
                patients = _write_patients(task, listeners.on_message)
            report = merge_reports(reports)
            ended = {r.slide_id: listeners.final_result(r) for r in report.results}
            results = tuple(ended[entry.slide_id] for entry in entries)
            report = replace(report, results=results)
            for line in _other_engines(task.out, record, report.facts):
                listeners.on_message(line)
            summary = finish_run(task, entries, report, stages, ledgers)
            summary = replace(summary, patients=patients)
            for stage in stages:
                if isinstance(stage, QcStage):
                    stage.say_unapplied_rules(task.out, listeners.on_message)
            for line in _equal_lines(summary.equal_slides):
                listeners.on_message(line)
            return summary
    except Submitted:  # the work continues in the batch system
        raise
    except BaseException as error:
        # after an error of settings or weights before the first slide there are no results to write
        # tables of
        if begun or not isinstance(error, ThinsectionError):
            end_early(task, entries, merge_reports(reports), error)
        raise


def _execute(
    entries: Sequence[SlideEntry],
    task: RunTask,
    listeners: Listeners,
    reports: list[Report[SlideResult]],
    *,
    executor: object,
    facts: PlainValues,
) -> None:
    """Works on the entries, adds the reports to `reports`, and records the resource use."""
    monitor = resource_monitor(
        task.record,
        facts=facts,
        stage_seconds=lambda: merge_reports(reports).stage_seconds,
    )
    with monitor:
        execute(
            entries,
            task,
            task.spec.executor,
            folder=task.record,
            cluster=executor,
            on_report=reports.append,
            on_event=listeners.on_event,
            on_message=listeners.on_message,
            # without encoders, `finished_report` made the same check
            look_for_finished=bool(task.spec.encoding.encoders),
        )


def _write_patients(task: RunTask, on_message: OnMessage) -> tuple[SlideResult, ...]:
    """Makes the embeddings of patients; returns their results."""
    encoding = task.spec.encoding
    # imported here: it loads torch, which other runs may not need
    from thinsection.run.patients import write_patients

    results: list[SlideResult] = []
    models = task.models()
    of_this_run = {stage.address for stage in stages_of(task.spec, models)}
    for encoder in models.loaded_slide_encoders:
        results += write_patients(
            task.out,
            encoder,
            pooling=PoolingConfig(patients=encoding.patients),
            addresses=of_this_run,
            on_message=on_message,
        )
    for result in results:
        if result.status == "failed":
            on_message(describe(result))
    on_message(f"{slides_done(results, 'patients')} have an embedding")
    return tuple(results)


def finished_report(
    out: Path,
    record: Record,
    entries: Sequence[SlideEntry],
    spec: RunConfig,
    stages: tuple[AnyStage, ...],
) -> tuple[Report[SlideResult], dict[str, SlideLedger]]:
    """Report of the slides that need no work, and their ledgers; empty if that cannot be known.

    It makes the same check as a worker: is the key of each stage in the ledger? But it takes no
    lock and loads no encoder, so the keys come from the encoder identities in an earlier record.
    `stages` are those of `stages_of` without models.

    Memory: some kB per slide.
    """
    if spec.output.overwrite or not spec.output.resume:
        return Report(results=()), {}
    facts: PlainValues = {}
    if spec.encoding.encoders:
        for earlier in records.same_settings(out, record):
            facts = earlier.document.get("models", {})
            models = recorded_models(facts, spec.encoding)
            if models is not None:
                stages = stages_of(spec, models)
                break
        else:
            return Report(results=()), {}
    results = []
    ledgers = {}
    for entry in entries:
        work = finished_work(entry, stages, out=out, spec=spec)
        if work is not None:
            results.append(SlideResult.of(entry, "skipped", work.facts()))
            ledgers[entry.slide_id] = work.ledger
    return Report(results=tuple(results), facts=facts if results else {}), ledgers


def _other_engines(out: Path, record: Record, models: PlainValues) -> list[str]:
    """One line for each encoder of which earlier runs in this folder used another engine."""
    lines = []
    for label, facts in models.items():
        engines: dict[str, None] = {}
        for earlier in records.read_records(out):
            if earlier.folder == record.folder or not earlier.document.get("counts"):
                continue
            if earlier.document["counts"].get("done"):
                engine = _engine_of(earlier.document.get("models", {}).get(label))
                engines[engine] = None
        here = _engine_of(facts)
        others = [engine for engine in engines if engine not in ("", here)]
        if here and others:
            lines.append(
                f"note: {label} was computed by {here}, and earlier in this folder by "
                f"{', '.join(others)}; embeddings differ by rounding alone, and --engine chooses "
                "one engine for all slides"
            )
    return lines


def _engine_of(facts: object) -> str:
    """Engine in the recorded facts of a model, without the reason; '' if it has none."""
    if not isinstance(facts, dict):
        return ""
    return str(facts.get("engine", "")).partition(" (")[0]


def _equal_lines(groups: Sequence[Sequence[str]]) -> list[str]:
    """One line for each of the first groups of equal slides, and the number of further groups."""
    lines = []
    for ids in groups[:_SHOWN_GROUPS]:
        names = ", ".join(map(repr, ids))
        lines.append(
            f"warning: {names} have the same content; check whether they are one slide"
        )
    if len(groups) > _SHOWN_GROUPS:
        count = len(groups) - _SHOWN_GROUPS
        lines.append(
            f"warning: {counted(count, 'more group')} of slides with the same content"
        )
    return lines


def make_task(
    out: Path, spec: RunConfig, own_encoder: TileEncoder | None = None
) -> RunTask:
    """Makes the task of an invocation that begins now, and its record."""
    folder = out.resolve()
    until = spec.output.until
    command = _COMMANDS.get(until, f"run --until {until}")
    record = records.begin_record(folder, command, as_mapping(spec))
    log(
        record.folder, f"thinsection {thinsection.__version__}: {command} into {folder}"
    )
    # slides that these earlier invocations finished are not sent to Slurm again
    earlier_records: tuple[Path, ...] = ()
    if chosen_executor(spec.executor) == "slurm":
        same_settings = records.same_settings(folder, record)
        earlier_records = tuple(earlier.folder for earlier in same_settings)
    if own_encoder is not None:
        return OwnEncoderTask(
            out=folder,
            record=record.folder,
            spec=spec,
            threads=spec.executor.threads,
            started=filesystem_now(folder),
            encoder=own_encoder,
        )
    return RunTask(
        out=folder,
        record=record.folder,
        spec=spec,
        threads=spec.executor.threads,
        started=filesystem_now(folder),
        kept=earlier_records,
    )


def check_folder(out: Path) -> Path:
    """Makes the results folder, and checks that it is writable and has room.

    Raises OutputError: it is not writable. StoreError: it has an earlier layout, or less than
    256 MiB free.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with atomic_path(out / "writable") as tmp:
            tmp.write_bytes(b"\0")
        (out / "writable").unlink(missing_ok=True)  # another run may have deleted it
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise OutputError(
            f"out must be a writable folder, got {str(out)!r}: {error.strerror or error}; pass "
            'another out="...", or make this one writable and run the same command again'
        ) from None
    if free < MIN_FREE_BYTES:
        raise DiskSpaceError(
            f"out must have {format_bytes(MIN_FREE_BYTES)} free, got {format_bytes(free)} "
            f"in {str(out)!r}; free some space or choose another disk"
        )
    for folder in (out, *out.glob(f"{RECORDS}/*")):
        sweep_old(folder)
    has_layout = (out / SLIDES).is_dir() or (out / RECORDS).is_dir()
    has_earlier = (out / "run.json").is_file() or any(out.glob("*/slide.json"))
    if has_earlier and not has_layout:
        raise StoreError(
            f"out must be a new folder or one of this layout, got {str(out)!r} with "
            'results of an earlier version (<slide_id>/tiles.h5); choose another out="...": '
            "nothing was changed"
        )
    return out
