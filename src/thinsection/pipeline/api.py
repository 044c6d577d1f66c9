"""`run`: slides in, results out."""

import datetime
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import thinsection
from thinsection.config import as_mapping
from thinsection.errors import ConfigError, DiskSpaceError, StoreError
from thinsection.files.atomic import atomic_path, write_json
from thinsection.files.sources import is_url
from thinsection.jobs.execute import execute
from thinsection.jobs.task import Report
from thinsection.neighbors import parse_graph_spec
from thinsection.pipeline import qc_batch
from thinsection.pipeline.efficiency import write_efficiency
from thinsection.pipeline.exports import check_formats
from thinsection.pipeline.qc_batch import finished_row, slide_key, slide_row
from thinsection.pipeline.results import SlideResult, write_tables
from thinsection.pipeline.run_task import RunTask, make_task
from thinsection.pipeline.slides import OnEvent, budget_of
from thinsection.qc import load_pipeline, parse_rule, prepare_models
from thinsection.slide.cohort import SlideEntry, load_cohort, parse_mpp
from thinsection.stages.config import RunConfig
from thinsection.stages.keys import STAGES
from thinsection.stream import StageClock
from thinsection.tiles import load_filters
from thinsection.types import MIB
from thinsection.units import format_bytes
from thinsection.usage.monitor import ResourceMonitor

MIN_FREE_BYTES = 256 * MIB
EXIT_OK, EXIT_SOME_FAILED = 0, 3


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run left.

    Attributes:
        out: the output folder, or its URL.
        results: one per slide, in the order of the cohort.
        stage_seconds: busy and waiting seconds by stage.
        seconds: wall-clock time.
    """

    out: Path | str
    results: tuple[SlideResult, ...]
    stage_seconds: dict[str, float]
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        """Number of slides by status: done, skipped, excluded, failed."""
        counted = Counter(result.status for result in self.results)
        return {status: counted[status] for status in ("done", "skipped", "excluded", "failed")}

    @property
    def exit_code(self) -> int:
        """0 where every slide has its result, 3 where some failed."""
        return EXIT_SOME_FAILED if self.counts["failed"] else EXIT_OK


def run(
    slides: Sequence[str | Path],
    *,
    out: str | Path,
    config: RunConfig | None = None,
    stage: str = "aggregate",
    on_event: OnEvent = lambda event: None,
    on_message: Callable[[str], None] = lambda text: None,
) -> RunSummary:
    """Takes slides from files to embeddings, resuming what an earlier run left.

    Under `out`: `<slide_id>/` with tiles.h5, slide_embedding.h5, tissue.png, tissue.geojson,
    thumbnail.jpg, overview.png and slide.json; `summary.csv`, `failed.csv`, `run.json` and
    `efficiency.html`.

    Args:
        slides: files, folders, URLs or cohort CSVs.
        out: output folder, made if absent; or a URL (s3://, ...), for one run at a time.
        config: all settings.
        stage: the last stage: 'tissue', 'tile', 'embed' or 'aggregate'.
        on_event: progress, from any thread.
        on_message: lines of the executor: the dashboard's address, a worker's death.

    Memory: `config.stream.memory` for tiles, whatever the slides' size, beside the encoders.

    Raises:
        ThinsectionError: bad settings, no slides, unknown encoder, unwritable or full folder; all
            before work starts. A bad slide does not raise.
    """
    config = config or RunConfig()
    if stage not in STAGES:
        raise ConfigError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    given = config.slides.slide_mpp
    mpp = parse_mpp(given, where="slides.slide_mpp") if given else None
    entries = load_cohort(slides, slide_mpp=mpp)
    check_settings(config)
    if is_url(str(out)):
        from thinsection.pipeline.remote_out import run_to_url

        return run_to_url(
            entries,
            out=str(out),
            config=config,
            stage=stage,
            on_event=on_event,
            on_message=on_message,
        )
    return run_in_folder(
        entries,
        out=check_folder(Path(out)),
        config=config,
        stage=stage,
        on_event=on_event,
        on_message=on_message,
    )


def run_in_folder(
    entries: Sequence[SlideEntry],
    *,
    out: Path,
    config: RunConfig,
    stage: str,
    on_event: OnEvent,
    on_message: Callable[[str], None],
    settle: Callable[[SlideEntry, SlideResult], SlideResult] = lambda entry, result: result,
) -> RunSummary:
    """`run` on checked settings and a folder that exists; `settle` has the last word on a slide."""
    started = datetime.datetime.now(datetime.UTC)
    task = make_task(out, config, stage)
    work = do_slides(entries, task, on_event=on_event, on_message=on_message)
    results = [settle(entry, work.results[entry.slide_id]) for entry in entries]
    seconds = (datetime.datetime.now(datetime.UTC) - started).total_seconds()
    summary = RunSummary(
        out=out, results=tuple(results), stage_seconds=work.clock.seconds(), seconds=seconds
    )
    write_run(summary, entries, config, stage=stage, identities=work.identities, started=started)
    if config.qc.qc != "off":
        write_qc_tables(entries, out, config)
    write_efficiency(out)
    return summary


@dataclass(kw_only=True)
class Work:
    """What came of a run's slides.

    Attributes:
        results: by slide id.
        clock: busy and waiting seconds, over all workers.
        identities: of the models that did it.
    """

    results: dict[str, SlideResult] = field(default_factory=dict)
    clock: StageClock = field(default_factory=StageClock)
    identities: dict[str, Any] = field(default_factory=dict)

    def take(self, report: Report[SlideResult]) -> None:
        """Adds the report of a chunk."""
        self.results |= {result.slide_id: result for result in report.results}
        for name, seconds in report.stage_seconds.items():
            self.clock.add(name, seconds)
        self.identities |= report.facts


def do_slides(
    entries: Sequence[SlideEntry],
    task: RunTask,
    *,
    on_event: OnEvent,
    on_message: Callable[[str], None],
) -> Work:
    """Runs the slides through the executor of the task's settings, monitored.

    Raises:
        ThinsectionError: settings, weights or the cluster; a bad slide does not raise.
    """
    config = task.config.executor
    work, facts = Work(), {}
    if config.executor == "inline":
        facts = task.facts(task.models())  # errors of settings and weights come before any work
    else:
        check_encoder_name(task.config.encode.encoder)
    with ResourceMonitor(task.out, facts=facts, stage_seconds=work.clock.seconds):
        execute(
            entries,
            task,
            config,
            folder=task.out,
            on_report=work.take,
            on_event=on_event,
            on_message=on_message,
        )
    return work


def check_encoder_name(name: str) -> None:
    """Refuses an unknown encoder where the driver does not load it.

    Raises:
        UnknownEncoderError: no such name.
    """
    from thinsection.encode.load import find_spec
    from thinsection.encode.registry import plugin_encoders

    if name not in plugin_encoders():
        find_spec(name)


def write_qc_tables(entries: Sequence[SlideEntry], out: Path, config: RunConfig) -> None:
    """Writes qc.csv and qc.html of the slides that quality control has looked at."""
    pipeline = load_pipeline(config.qc.qc)
    rows = []
    for entry in entries:
        if not Path(entry.slide_path).is_file():
            continue  # by URL, or gone: its failure is in failed.csv
        found = finished_row(out / entry.slide_id, slide_key(entry, pipeline))
        if found is not None:
            rows.append(slide_row(entry, found))
    rules = [parse_rule(rule) for rule in config.qc.qc_fail]
    qc_batch.write_tables(rows, out, rules=rules)


def write_run(
    summary: RunSummary,
    entries: Sequence[SlideEntry],
    config: RunConfig,
    *,
    stage: str,
    identities: dict[str, Any],
    started: datetime.datetime,
) -> None:
    """Writes summary.csv, failed.csv and run.json."""
    out = Path(summary.out)
    write_tables(out, entries, summary.results)
    document = {
        "thinsection_version": thinsection.__version__,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(summary.seconds, 3),
        "host": platform.node(),
        "stage": stage,
        "counts": summary.counts,
        "models": identities,
        "stage_seconds": {k: round(v, 3) for k, v in summary.stage_seconds.items()},
        "config": as_mapping(config),
    }
    write_json(out / "run.json", document)


def check_settings(config: RunConfig) -> None:
    """Finds out in seconds what would else fail slide by slide.

    Raises:
        ConfigError: unknown tile filter, or a graph that is not one.
        MissingDependencyError: a format whose package is not installed.
        BudgetError: the memory does not hold the stream's least.
    """
    load_filters(config.tiles.tile_filter)
    for rule in config.qc.qc_fail:
        parse_rule(rule)
    if config.qc.qc != "off":
        prepare_models(load_pipeline(config.qc.qc))
    elif config.qc.qc_fail:
        raise ConfigError("qc_fail must go with --qc, got --qc off; pass --qc default")
    if config.output.graph:
        parse_graph_spec(config.output.graph)
    check_formats(config.output.write)
    budget_of(config, config.encode.batch_size or 1)


def check_folder(out: Path) -> Path:
    """The output folder, made and proved writable and with room.

    Raises:
        StoreError: it cannot be made or written.
        DiskSpaceError: fewer than 256 MiB are free.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with atomic_path(out / "writable") as tmp:
            tmp.write_bytes(b"\0")
        (out / "writable").unlink()
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise StoreError(f"out must be a writable folder, got {str(out)!r}: {error}") from None
    if free < MIN_FREE_BYTES:
        raise DiskSpaceError(
            f"out must have {format_bytes(MIN_FREE_BYTES)} free, got {format_bytes(free)} "
            f"in {str(out)!r}; free some space or choose another disk"
        )
    return out
