"""`qc`: quality control of a cohort with the same stages as a run."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinsection.config import Settings, option, section
from thinsection.errors import ConfigError
from thinsection.extras import Need
from thinsection.files.atomic import write_text
from thinsection.files.urls import without_secrets
from thinsection.jobs.executor import ExecutorConfig
from thinsection.qc import Pipeline, load_pipeline
from thinsection.qc.histoqc_config import pipeline_from_ini
from thinsection.qc.pipeline import dump_pipeline
from thinsection.qc.rules import QcRule
from thinsection.report.qc_pictures import write_histoqc
from thinsection.report.qc_sheet import write_qc_parquet
from thinsection.results.records import RECORDS
from thinsection.run.process import OnEvent
from thinsection.run.run import run
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.stages.config import (
    OutputConfig,
    QcConfig,
    RunConfig,
    SegmentConfig,
)
from thinsection.stages.labels import short_hash
from thinsection.stages.own_tables import (
    failing_rules,
    qc_rows,
    qc_table_name,
)
from thinsection.stages.spec import Slides, qc_stage, resolve
from thinsection.store.outcome import SlideResult, known_slides


def _copied_option(section_type: type, name: str, *, daily: bool = False) -> Any:
    """Copies a setting from a section of a run: default, help and choices.

    `daily` puts it on the first page of help, also if it is not there for a run.
    """
    by_name = {field.name: field for field in dataclasses.fields(section_type)}
    field = by_name[name]
    metadata = dict(field.metadata)
    metadata["daily"] = daily or metadata["daily"]
    return dataclasses.field(default=field.default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksConfig:
    """Checks, and the rules by which a slide fails them."""

    qc: str = option(
        "auto",
        "Pipeline of checks: auto, histoqc-NAME (default, light, ihc, clinical, first, "
        "v2.1), or a pipeline file (.toml), which may also check areas that a segmenter finds.",
        daily=True,
    )
    from_histoqc: Path | None = option(
        None,
        "Use the pipeline of a HistoQC configuration file (config.ini).",
        daily=True,
    )
    histoqc_data: Path | None = option(
        None,
        "Folder with HistoQC's example pictures and templates (histoqc/data of its source), for"
        " histoqc-NAME and --from-histoqc. Without them those checks are left out.",
    )
    qc_fail: tuple[str, ...] = _copied_option(QcConfig, "qc_fail")
    qc_remove: tuple[str, ...] = _copied_option(QcConfig, "qc_remove", daily=True)
    qc_rules: Path | None = _copied_option(QcConfig, "qc_rules")
    qc_strict: bool = _copied_option(QcConfig, "qc_strict")
    qc_edits: str | None = _copied_option(QcConfig, "qc_edits", daily=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkConfig:
    """Device of the checks, and the files to write."""

    qc_device: str = _copied_option(QcConfig, "qc_device")
    qc_pictures: bool = _copied_option(QcConfig, "qc_pictures")
    segment_memory: str = _copied_option(SegmentConfig, "segment_memory")
    trust_code: tuple[str, ...] = _copied_option(SegmentConfig, "trust_code")
    resume: bool = _copied_option(OutputConfig, "resume")
    overwrite: bool = _copied_option(OutputConfig, "overwrite")
    write: tuple[str, ...] = option(
        (),
        "Also write histoqc (results.tsv and pictures, as HistoQC does) or parquet (the"
        " table); repeat the option for several.",
        daily=True,
        choices=lambda: ("histoqc", "parquet"),
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class QcRunConfig(Settings):
    """All settings of `thinsection qc`, by section."""

    checks: ChecksConfig = section(ChecksConfig)
    slides: SlidesConfig = section(SlidesConfig)
    work: WorkConfig = section(WorkConfig, "Results")
    executor: ExecutorConfig = section(ExecutorConfig, "Workers and clusters")

    def needs(self) -> Iterator[Need]:
        """Packages of the sections, and of the table."""
        yield from super().needs()
        if "parquet" in self.work.write:
            yield "--write parquet", ("pyarrow",)


@dataclass(frozen=True, kw_only=True)
class QcSummary:
    """Results of a QC run."""

    results: tuple[SlideResult, ...]  # one per slide, in the order of the cohort
    # (slide_id, rule) for each rule that applies
    failing: tuple[tuple[str, QcRule], ...]
    page: Path  # the contact sheet
    # slides with the verdict 'exclude' that no rule of `qc_fail` excludes, and why
    unusable: tuple[tuple[str, str], ...] = ()

    @property
    def num_failed(self) -> int:
        """Number of slides that could not be checked."""
        return sum(result.status == "failed" for result in self.results)


def chosen_pipeline(config: QcRunConfig) -> Pipeline:
    """Pipeline from the settings.

    Raises ConfigError: no such pipeline, an unknown key, or a folder that does not exist or has
    none of HistoQC's pictures.
    """
    checks = config.checks
    data = checks.histoqc_data
    if data is not None and not data.is_dir():
        raise ConfigError(f"histoqc_data must be an existing folder, got {str(data)!r}")
    if checks.from_histoqc is not None:
        pipeline = pipeline_from_ini(checks.from_histoqc, data)
    else:
        pipeline = load_pipeline(checks.qc, histoqc_data=data)
    return pipeline.removing(checks.qc_remove)


def check_slides(
    slides: Slides,
    *,
    out: Path,
    config: QcRunConfig,
    on_event: OnEvent = lambda event: None,
    on_message: Callable[[str], None] = lambda text: None,
) -> QcSummary:
    """Checks every slide and writes its files, then the table, the page and other requested files.

    A `run` into the same folder with the same checks reuses these results.

    Memory: as `run_qc`, in each worker.

    Raises:
        ThinsectionError: bad settings or no slides, before work starts. A bad slide does not raise.
    """
    config.check_packages()
    checks = config.checks
    pipeline = chosen_pipeline(config)
    settings = _run_settings(config, pipeline, out)
    summary = run(
        slides,
        out=out,
        config=settings,
        on_event=on_event,
        on_message=on_message,
    )
    stage = qc_stage(resolve(settings))
    rows = qc_rows(known_slides(out), stage)
    name = qc_table_name(stage)
    if "parquet" in config.work.write:
        write_qc_parquet(out / f"{name}.parquet", rows)
    if "histoqc" in config.work.write:
        headers = {
            "start_time": summary.record.name,
            "pipeline": " ".join(f"{c.kind}:{c.name}" for c in pipeline.checks),
            "outdir": str(out.resolve()),
            "config_file": str(checks.from_histoqc or checks.qc),
            "command_line_args": without_secrets(" ".join(sys.argv[1:])),
        }
        write_histoqc(out, rows, headers)
    slide_ids = {result.slide_id for result in summary.results}
    rows = [row for row in rows if row["slide_id"] in slide_ids]
    failing = tuple(failing_rules(rows, checks.qc_fail, pipeline.checks))
    return QcSummary(
        results=summary.results,
        failing=failing,
        page=out / f"{name}.html",
        unusable=summary.unusable,
    )


def _run_settings(config: QcRunConfig, pipeline: Pipeline, out: Path) -> RunConfig:
    """Settings of the run that does the checks; a pipeline that is no preset and no file becomes
    a file that every worker process can load."""
    checks = config.checks
    source = checks.qc
    is_listed = checks.from_histoqc is None
    if checks.histoqc_data is not None and is_listed:
        # a preset that needs no pictures stays under its name
        is_listed = pipeline == load_pipeline(checks.qc, remove=checks.qc_remove)
    if not is_listed:
        name = f"{pipeline.name}-{short_hash(pipeline.as_mapping())}.toml"
        source = str(out.resolve() / RECORDS / "pipelines" / name)
        write_text(Path(source), dump_pipeline(pipeline))
    qc = QcConfig(
        qc=source,
        qc_device=config.work.qc_device,
        # HistoQC's files are made from the pictures
        qc_pictures=config.work.qc_pictures or "histoqc" in config.work.write,
        qc_fail=checks.qc_fail,
        qc_remove=checks.qc_remove,
        qc_rules=checks.qc_rules,
        qc_strict=checks.qc_strict,
        qc_edits=checks.qc_edits,
    )
    output = OutputConfig(
        until="qc", resume=config.work.resume, overwrite=config.work.overwrite
    )
    return RunConfig(
        qc=qc,
        segment=SegmentConfig(
            segment_memory=config.work.segment_memory,
            trust_code=config.work.trust_code,
        ),
        output=output,
        slides=config.slides,
        executor=config.executor,
    )
