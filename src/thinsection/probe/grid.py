"""`run_probes`: many probes as jobs of an executor, one a data set, encoder, seed and probe.

OUT/probes.csv                             a row per score
    <job>/<probe>.json, .csv, .md, .html   the report of the probe
          job.json                         its rows and the key of its settings, written last
          traceback.txt                    where it failed
"""

import hashlib
import itertools
import json
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from thinsection.config import as_mapping, option, replace_flat, section
from thinsection.errors import ConfigError, ThinsectionError
from thinsection.files.atomic import write_json, write_table, write_text
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.jobs.contract import Report, Task
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.pipeline.task import set_threads
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data.sets import TileSet
from thinsection.probe.page import write_probe_report
from thinsection.probe.registry import PROBES, load_probe
from thinsection.store.ledger import stage_key

TABLE_NAME, JOB_NAME, TRACEBACK_NAME = "probes.csv", "job.json", "traceback.txt"


def grid_probes() -> tuple[str, ...]:
    """Names of the probes whose settings are a `ProbeConfig`; those of others do not fit a grid."""

    def fits(name: str) -> bool:
        try:
            return issubclass(load_probe(name).config_type, ProbeConfig)
        except ThinsectionError:  # one that cannot be loaded says why when it is asked for
            return True

    return tuple(filter(fits, PROBES.names()))


@dataclass(frozen=True, kw_only=True)
class GridSection:
    """Which jobs."""

    probe: tuple[str, ...] = option(("linear",), "probe; repeat for more", choices=grid_probes)
    encoders: tuple[str, ...] = option((), "tile encoders to compare, where DATA holds images")
    seeds: tuple[str, ...] = option((), "base seeds, instead of the protocol's")
    resume: bool = option(True, "skip jobs that are done with the same settings")


@dataclass(frozen=True, kw_only=True)
class ProbeGridConfig(ProbeConfig):
    """Settings of `thinsection probe grid`."""

    grid: GridSection = section(GridSection)
    executor: ExecutorConfig = section(ExecutorConfig)


@dataclass(frozen=True, kw_only=True)
class ProbeJob:
    """One probe: plain values that travel between processes."""

    name: str  # of its folder in the output
    dataset: str = ""  # name of the task, instead of the data's own
    probe: str  # of the registry
    data: str  # path of a manifest, a data set's folder, tile embeddings, or a table of cases
    config: ProbeConfig

    @property
    def key(self) -> str:
        """Hash of the path and the settings, not of what the files hold."""
        return stage_key(probe=self.probe, data=self.data, settings=as_mapping(self.config))


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """One score, or why there is none; a row of probes.csv."""

    job: str
    data: str
    encoder: str | None
    seed: int | None
    probe: str  # of the result; 'tileset' has four
    status: Literal["done", "skipped", "failed"]  # skipped: it was done before
    metric: str = ""
    score: float | None = None
    low: float | None = None  # with `high` the bootstrap interval
    high: float | None = None
    error: str = ""  # one line


@dataclass(frozen=True, kw_only=True)
class ProbeDone:
    """What became of a job: a row per score; 'tileset' has four, a failed job one."""

    rows: tuple[ProbeRow, ...]

    @property
    def error(self) -> str:
        """Why it failed; '' where it did not."""
        return self.rows[0].error


def run_probes(
    data: Sequence[Path],
    *,
    out: Path,
    config: ProbeGridConfig | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[ProbeRow]:
    """Every combination of data, encoders, seeds and probes, each a job of its own.

    Workers of other nodes must see `out`; `data` are each as `thinsection probe` takes it. A failed
    job is a row; bad settings, or a cluster that fails, raise a ThinsectionError.

    Memory: of the largest probe, in each worker.
    """
    config = config or ProbeGridConfig()
    jobs, executor, resume = probe_jobs(data, config), config.executor, config.grid.resume
    return run_jobs(jobs, out=out, executor=executor, resume=resume, on_message=on_message)


def run_jobs(
    jobs: Sequence[ProbeJob],
    *,
    out: Path,
    executor: ExecutorConfig,
    resume: bool = True,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[ProbeRow]:
    """See `run_probes`: the jobs themselves."""
    out = Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[ProbeRow] = []
    execute(
        jobs,
        ProbeTask(out=out, threads=executor.threads, resume=resume),
        # a probe may take long: each is a task of its own
        replace(executor, chunk_slides=executor.chunk_slides or 1),
        folder=out,
        on_report=lambda report: rows.extend(row for job in report.results for row in job.rows),
        on_message=on_message,
    )
    order = {job.name: number for number, job in enumerate(jobs)}
    rows.sort(key=lambda row: order[row.job])  # stable: the four of a tile set stay in order
    write_table(out / TABLE_NAME, map(asdict, rows), [f.name for f in fields(ProbeRow)])
    return rows


def probe_jobs(data: Sequence[Path], config: ProbeGridConfig) -> list[ProbeJob]:
    """Every combination, data first; without encoders or seeds those of the other settings.

    Jobs of equal names (data of one stem) get a hash of their data's path.
    """
    grid, base = config.grid, ProbeConfig(data=config.data, compute=config.compute)
    other = [p for p in grid.probe if not issubclass(load_probe(p).config_type, ProbeConfig)]
    if other or not grid.probe:
        raise ConfigError(f"probe must be one with a `ProbeConfig`, got {other or 'none'}")
    if not data:
        raise ConfigError("data must name at least one path, got none")
    encoders = grid.encoders or (base.data.encoder,)
    try:
        seeds: Sequence[int | None] = [*map(int, grid.seeds)] or [base.compute.seed]
    except ValueError:
        found = ", ".join(map(repr, grid.seeds))
        raise ConfigError(f"grid.seeds must be whole numbers, got {found}") from None
    jobs = []
    for path, encoder, seed, probe in itertools.product(data, encoders, seeds, grid.probe):
        parts = (path.stem, encoder, None if seed is None else f"seed{seed}", probe)
        name = re.sub(r"[^\w.=-]+", "_", "-".join(filter(None, parts)))
        settings = replace_flat(base, {"encoder": encoder, "seed": seed})
        jobs.append(ProbeJob(name=name, probe=probe, data=str(path.resolve()), config=settings))
    counts = Counter(job.name for job in jobs)
    for i, job in enumerate(jobs):
        if counts[job.name] > 1:
            mark = hashlib.sha256(job.data.encode()).hexdigest()[:6]
            jobs[i] = replace(job, name=f"{job.name}-{mark}")
    return jobs


@dataclass(frozen=True, kw_only=True)
class ProbeTask(Task[ProbeJob, ProbeDone]):
    """See `Task`: some probe jobs in one process. A failed job is a row."""

    kind: ClassVar[str] = "probe"
    entry_type: ClassVar[type[Any]] = ProbeJob
    result_type: ClassVar[type[Any]] = ProbeDone

    out: Path  # output folder, absolute, on a file system that every worker sees
    threads: int = 0  # of torch on the CPU; 0 leaves them
    resume: bool = True  # whether a job that is done with the same settings is skipped

    def __call__(
        self, entries: Sequence[ProbeJob], *, on_event: Callable[[Any], None]
    ) -> Report[ProbeDone]:
        """See `Task.__call__`."""
        set_threads(self.threads, torch_too=True)
        return Report(results=tuple(self._run(job) for job in entries))

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """See `Task.on_worker`; probes are not monitored."""
        return replace(self, threads=threads)

    def lost(self, entry: ProbeJob, reason: str) -> ProbeDone:
        """The row of a job whose worker died."""
        return ProbeDone(rows=(_row(entry, entry.probe, status="failed", error=reason),))

    def name(self, entry: ProbeJob) -> str:
        """See `Task.name`."""
        return entry.name

    def finished(self, entry: ProbeJob) -> ProbeDone | None:
        """The rows of a job that was done with the same settings."""
        try:
            document = json.loads((self.out / entry.name / JOB_NAME).read_text(encoding="utf-8"))
            if not self.resume or document["key"] != entry.key:
                return None
            rows = (ProbeRow(**{**row, "status": "skipped"}) for row in document["rows"])
            return ProbeDone(rows=tuple(rows))
        except (FileNotFoundError, ValueError, TypeError, KeyError):  # damaged counts as none
            return None

    def _run(self, job: ProbeJob) -> ProbeDone:
        folder = self.out / job.name
        with hold(folder / LOCK_NAME):  # another process that is at the same job is waited for
            if done := self.finished(job):
                return done
            (folder / JOB_NAME).unlink(missing_ok=True)
            try:
                rows = _probe_rows(job, folder)
            except Exception as error:  # noqa: BLE001 - the per-job boundary; its traceback is kept
                write_text(folder / TRACEBACK_NAME, "".join(traceback.format_exception(error)))
                return self.lost(job, f"{type(error).__name__}: {error}".replace("\n", " "))
            (folder / TRACEBACK_NAME).unlink(missing_ok=True)
            write_json(folder / JOB_NAME, {"key": job.key, "rows": [asdict(row) for row in rows]})
            return ProbeDone(rows=rows)


def _probe_rows(job: ProbeJob, folder: Path) -> tuple[ProbeRow, ...]:
    """A row per result of a job, their reports written."""
    probe = load_probe(job.probe)
    config = probe.config_type(data=job.config.data, compute=job.config.compute)
    data = probe.kind.load(Path(job.data), config)
    rows = []
    for result in probe.run(data, config):
        facts = {"encoder": job.config.data.encoder, **result.facts}
        name = job.dataset or result.dataset
        result = replace(result, dataset=name, facts=facts)  # noqa: PLW2901
        write_probe_report(result, folder, tiles=data if isinstance(data, TileSet) else None)
        values = {"metric": result.metric, "score": float(result.score)}
        if result.interval is not None and math.isfinite(result.interval.low):  # not of one slide
            values |= {"low": float(result.interval.low), "high": float(result.interval.high)}
        rows.append(_row(job, result.probe, status="done", **values))
    return tuple(rows)


def _row(job: ProbeJob, probe: str, **values: Any) -> ProbeRow:
    encoder, seed = job.config.data.encoder, job.config.compute.seed
    return ProbeRow(job=job.name, data=job.data, encoder=encoder, seed=seed, probe=probe, **values)
