"""`run_probes`: many probes through an executor, and the table of their scores."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from thinsection.config import option, section
from thinsection.errors import ConfigError
from thinsection.files.atomic import write_text
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.probe.config import ComputeSection, DataSection, ProbeConfig
from thinsection.probe.grid_task import ProbeRow, ProbeTask, probe_jobs

TABLE_NAME = "probes.csv"


@dataclass(frozen=True, kw_only=True)
class GridSection:
    """Which jobs."""

    probe: tuple[str, ...] = option(
        ("linear",), "kind; repeat: linear, knn, fewshot, tileset, slide, abmil, survival, ..."
    )
    encoders: tuple[str, ...] = option((), "tile encoders to compare, where DATA holds images")
    seeds: tuple[str, ...] = option((), "base seeds, instead of the protocol's")
    resume: bool = option(True, "skip jobs that are done with the same settings")


@dataclass(frozen=True, kw_only=True)
class ProbeGridConfig:
    """Settings of `thinsection probe grid`."""

    grid: GridSection = section(GridSection)
    data: DataSection = section(DataSection)
    compute: ComputeSection = section(ComputeSection)
    executor: ExecutorConfig = section(ExecutorConfig)


def run_probes(
    data: Sequence[Path],
    *,
    out: Path,
    config: ProbeGridConfig | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[ProbeRow]:
    """Every combination of data, encoders, seeds and probes, each a job of its own.

    Writes OUT/<job>/ with the probe's report and OUT/probes.csv with a row per score.

    Args:
        data: each as `thinsection probe` takes it.
        out: made where it is missing; on a shared file system for workers of other nodes.
        config: all settings.
        on_message: lines for the person who waits.

    Memory: of the largest probe, in each worker.

    Raises:
        ThinsectionError: bad settings, or the cluster; a failed job is a row.
    """
    config = config or ProbeGridConfig()
    base = ProbeConfig(data=config.data, compute=config.compute)
    jobs = probe_jobs(
        data,
        base,
        probes=config.grid.probe,
        encoders=config.grid.encoders,
        seeds=[_seed(text) for text in config.grid.seeds],
    )
    out = Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    task = ProbeTask(out=out, threads=config.executor.threads, resume=config.grid.resume)
    rows: list[ProbeRow] = []
    execute(
        jobs,
        task,
        # a probe may take long: each is a task of its own
        replace(config.executor, chunk_slides=config.executor.chunk_slides or 1),
        folder=out,
        on_report=lambda report: rows.extend(row for job in report.results for row in job.rows),
        on_message=on_message,
    )
    order = {job.name: number for number, job in enumerate(jobs)}
    rows.sort(key=lambda row: order[row.job])  # stable: the four of a tile set stay in order
    write_text(out / TABLE_NAME, _csv(rows))
    return rows


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"grid.seeds must be whole numbers, got {text!r}") from None


def _csv(rows: Sequence[ProbeRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(ProbeRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
