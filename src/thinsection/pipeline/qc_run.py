"""`qc_run`: quality control of a cohort, from its settings to its tables."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinsection.config import option, section
from thinsection.errors import ConfigError
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import Report
from thinsection.pipeline.qc_batch import QcReport, QcSettings, qc_slides, write_tables
from thinsection.pipeline.qc_task import make_qc_task
from thinsection.qc import Pipeline, QcRule, load_pipeline, parse_rule, prepare_models
from thinsection.qc.from_histoqc import pipeline_from_ini
from thinsection.slide.cohort import SlideEntry, load_cohort, parse_mpp
from thinsection.stages.config import SlidesConfig

WRITE_FORMATS = ("histoqc",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksConfig:
    """Which checks, and when a slide fails them."""

    pipeline: str = option(
        "default", "default, extended, light, ihc, clinical, v2.1, or a .toml file."
    )
    from_histoqc: Path | None = option(None, "Take the pipeline from HistoQC's config.ini.")
    qc_fail: tuple[str, ...] = option(
        (), "A slide fails where this holds: 'pixels_to_use<1000'; repeat."
    )

    def __post_init__(self) -> None:
        for rule in self.qc_fail:
            parse_rule(rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkConfig:
    """What computes the checks, and what is written."""

    device: str = option("cpu", "cpu or cuda[:index].")
    resume: bool = option(True, "Keep what is finished with the same checks and file.")
    write: tuple[str, ...] = option((), "Further outputs: histoqc (results.tsv, pictures).")

    def __post_init__(self) -> None:
        for name in self.write:
            if name not in WRITE_FORMATS:
                raise ConfigError(f"work.write must be of {', '.join(WRITE_FORMATS)}, got {name!r}")


@dataclass(frozen=True, kw_only=True)
class QcRunConfig:
    """All settings of `thinsection qc`, by section."""

    checks: ChecksConfig = section(ChecksConfig)
    slides: SlidesConfig = section(SlidesConfig)
    work: WorkConfig = section(WorkConfig)
    executor: ExecutorConfig = section(ExecutorConfig)


@dataclass(frozen=True, kw_only=True)
class QcSummary:
    """What a QC run left.

    Attributes:
        reports: one per slide, in the order of the cohort.
        failing: (slide_id, rule) for each rule that holds.
    """

    reports: tuple[QcReport, ...]
    failing: tuple[tuple[str, QcRule], ...]

    @property
    def num_failed(self) -> int:
        """Slides that could not be looked at."""
        return sum(report.status == "failed" for report in self.reports)


def chosen_pipeline(config: QcRunConfig) -> tuple[Pipeline, list[str]]:
    """The pipeline of the settings, with notes on what HistoQC's config could not bring along.

    Raises:
        ConfigError: no such pipeline, or an unknown key.
    """
    if config.checks.from_histoqc is not None:
        return pipeline_from_ini(config.checks.from_histoqc)
    return load_pipeline(config.checks.pipeline), []


def qc_run(
    slides: Sequence[str],
    *,
    out: Path,
    config: QcRunConfig,
    on_report: Callable[[QcReport], None] = lambda report: None,
    on_message: Callable[[str], None] = lambda text: None,
) -> QcSummary:
    """Looks at every slide and writes its files, then qc.csv, qc.html and what else was asked for.

    Args:
        slides: files, folders or cohort CSVs.
        out: folder of the run.
        config: all settings.
        on_report: told of each slide as it ends.
        on_message: lines of the executor for the person who waits.

    Memory: that of `run_qc`, in each worker.

    Raises:
        ThinsectionError: bad settings or no slides, before work starts. A bad slide does not raise.
    """
    pipeline, _ = chosen_pipeline(config)
    given = config.slides.slide_mpp
    entries = load_cohort(
        slides, slide_mpp=parse_mpp(given, where="slides.slide_mpp") if given else None
    )
    settings = QcSettings(
        pipeline=pipeline,
        device=config.work.device,
        workers=max(1, config.executor.workers),  # processes of this node, where inline
        reader=config.slides.reader,
        resume=config.work.resume,
    )
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    ended: dict[str, QcReport] = {}

    def take(report: QcReport) -> None:
        ended[report.slide_id] = report
        on_report(report)

    _execute(entries, out, settings, config.executor, on_report=take, on_message=on_message)
    reports = tuple(ended[entry.slide_id] for entry in entries)
    headers = {
        "start_time": started,
        "pipeline": " ".join(f"{c.kind}:{c.name}" for c in pipeline.checks),
        "outdir": str(out.resolve()),
        "config_file": str(config.checks.from_histoqc or config.checks.pipeline),
        "command_line_args": " ".join(sys.argv[1:]),
    }
    failing = write_tables(
        [report.row for report in reports],
        out,
        rules=[parse_rule(rule) for rule in config.checks.qc_fail],
        histoqc_headers=headers if "histoqc" in config.work.write else None,
    )
    return QcSummary(reports=reports, failing=tuple(failing))


def _execute(
    entries: Sequence[SlideEntry],
    out: Path,
    settings: QcSettings,
    executor: ExecutorConfig,
    *,
    on_report: Callable[[QcReport], None],
    on_message: Callable[[str], None],
) -> None:
    """Returns when every slide was reported once."""
    if executor.executor == "inline":
        for report in qc_slides(entries, out, settings):
            on_report(report)
        return

    def take(chunk: Report[QcReport]) -> None:
        for report in chunk.results:
            on_report(report)

    prepare_models(settings.pipeline, cache_dir=settings.cache_dir)  # once, not by every worker
    task = make_qc_task(out, settings, threads=executor.threads)
    execute(entries, task, executor, folder=task.out, on_report=take, on_message=on_message)
