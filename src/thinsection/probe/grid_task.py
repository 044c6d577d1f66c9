"""Probes as independent jobs: one data set, encoder, seed and kind of probe each.

OUT/<job>/<probe>.json, .csv, .md, .html   the report of the probe
          job.json                         its rows and the key of its settings, written last
          traceback.txt                    where it failed
"""

import hashlib
import itertools
import json
import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from thinsection.config import as_mapping, from_mapping, replace_flat
from thinsection.errors import ConfigError
from thinsection.files.atomic import write_json, write_text
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.jobs.task import Report, Task
from thinsection.pipeline.run_task import set_threads
from thinsection.probe import ProbeResult, TileSet
from thinsection.probe.api import (
    load_tiles,
    run_robustness_probe,
    run_slide_probe,
    run_survival_probe,
    run_tile_probe,
    run_tileset,
)
from thinsection.probe.config import ProbeConfig
from thinsection.probe.page import write_probe_report
from thinsection.store.ledger import stage_key

KINDS = ("linear", "knn", "fewshot", "tileset", "slide", "abmil", "survival", "robustness")
JOB_NAME, TRACEBACK_NAME = "job.json", "traceback.txt"


@dataclass(frozen=True, kw_only=True)
class ProbeJob:
    """One probe: plain values that travel between processes.

    Attributes:
        name: of its folder in the output.
        probe: of `KINDS`.
        data: path of a manifest, a data set's folder, tile embeddings, or a table of cases.
        settings: of `ProbeConfig`, as `as_mapping` gives them.
    """

    name: str
    probe: str
    data: str
    settings: dict[str, Any]

    @property
    def config(self) -> ProbeConfig:
        """The settings."""
        return from_mapping(ProbeConfig, self.settings)

    @property
    def key(self) -> str:
        """Hash of the path and the settings, not of what the files hold."""
        return stage_key(probe=self.probe, data=self.data, settings=self.settings)


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """One score, or why there is none; a row of probes.csv.

    Attributes:
        job, data, encoder, seed: which job.
        probe: of the result; 'tileset' has four.
        status: 'done' now, 'skipped' because it was done before, 'failed'.
        metric, score, low, high: with the bootstrap interval; None where there is none.
        error: one line.
    """

    job: str
    data: str
    encoder: str | None
    seed: int | None
    probe: str
    status: Literal["done", "skipped", "failed"]
    metric: str = ""
    score: float | None = None
    low: float | None = None
    high: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeDone:
    """What became of a job.

    Attributes:
        job: its name.
        status: of all its rows.
        rows: one per score; 'tileset' has four, a failed job one.
    """

    job: str
    status: Literal["done", "skipped", "failed"]
    rows: tuple[ProbeRow, ...]


def probe_jobs(
    data: Sequence[Path],
    base: ProbeConfig,
    *,
    probes: Sequence[str],
    encoders: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> list[ProbeJob]:
    """Every combination, data first; without encoders or seeds the base configuration's.

    Raises:
        ConfigError: no data or probe, or an unknown probe.
    """
    unknown = sorted(set(probes) - set(KINDS))
    if unknown or not probes:
        raise ConfigError(f"probe must be of {', '.join(KINDS)}, got {unknown or 'none'}")
    if not data:
        raise ConfigError("data must name at least one path, got none")
    jobs = []
    choices = itertools.product(
        data, encoders or (base.data.encoder,), seeds or (base.compute.seed,), probes
    )
    for path, encoder, seed, probe in choices:
        config = replace_flat(base, {"encoder": encoder, "seed": seed})
        parts = [path.stem, encoder, None if seed is None else f"seed{seed}", probe]
        name = re.sub(r"[^\w.=-]+", "_", "-".join(p for p in parts if p is not None))
        jobs.append(
            ProbeJob(name=name, probe=probe, data=str(path.resolve()), settings=as_mapping(config))
        )
    return _uniquely_named(jobs)


@dataclass(frozen=True, kw_only=True)
class ProbeTask(Task[ProbeJob, ProbeDone]):
    """See `Task`: some probe jobs in one process. A failed job is a row.

    Attributes:
        out: output folder, absolute, on a file system that every worker sees.
        threads: CPU threads of torch; 0 leaves them.
        resume: whether a job that is done with the same settings is skipped.
    """

    kind: ClassVar[str] = "probe"
    entry_type: ClassVar[type[Any]] = ProbeJob
    result_type: ClassVar[type[Any]] = ProbeDone

    out: Path
    threads: int = 0
    resume: bool = True

    def __call__(
        self, entries: Sequence[ProbeJob], *, on_event: Callable[[Any], None]
    ) -> Report[ProbeDone]:
        """See `Task.__call__`."""
        set_threads(self.threads)
        return Report(results=tuple(self._run(job) for job in entries))

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """See `Task.on_worker`; probes are not monitored."""
        return replace(self, threads=threads)

    def lost(self, entry: ProbeJob, reason: str) -> ProbeDone:
        """The row of a job whose worker died."""
        row = _row(entry, entry.probe, status="failed", error=reason)
        return ProbeDone(job=entry.name, status="failed", rows=(row,))

    def finished(self, entry: ProbeJob) -> ProbeDone | None:
        """See `Task.finished`: the rows of a job that was done with the same settings."""
        if not self.resume:
            return None
        try:
            document = json.loads((self.out / entry.name / JOB_NAME).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        if document["key"] != entry.key:
            return None
        rows = tuple(ProbeRow(**{**row, "status": "skipped"}) for row in document["rows"])
        return ProbeDone(job=entry.name, status="skipped", rows=rows)

    def _run(self, job: ProbeJob) -> ProbeDone:
        folder = self.out / job.name
        with hold(folder / LOCK_NAME):  # another process that is at the same job is waited for
            return self.finished(job) or self._probe(job, folder)

    def _probe(self, job: ProbeJob, folder: Path) -> ProbeDone:
        (folder / JOB_NAME).unlink(missing_ok=True)
        try:
            results, tiles = run_probe(job.probe, Path(job.data), job.config)
            for result in results:
                write_probe_report(result, folder, tiles=tiles)
        except Exception as error:  # noqa: BLE001 - the per-job boundary; its traceback is kept
            write_text(folder / TRACEBACK_NAME, "".join(traceback.format_exception(error)))
            return self.lost(job, f"{type(error).__name__}: {error}".replace("\n", " "))
        (folder / TRACEBACK_NAME).unlink(missing_ok=True)
        rows = tuple(_row_of(job, result) for result in results)
        write_json(folder / JOB_NAME, {"key": job.key, "rows": [asdict(row) for row in rows]})
        return ProbeDone(job=job.name, status="done", rows=rows)


def run_probe(
    kind: str, path: Path, config: ProbeConfig
) -> tuple[list[ProbeResult], TileSet | None]:
    """The results of a probe of `KINDS`, and the tiles that it looked at."""
    if kind in ("linear", "knn", "fewshot"):
        tiles = load_tiles(path, config)
        return [run_tile_probe(kind, tiles, config)], tiles  # type: ignore[arg-type]
    if kind == "tileset":
        tiles = load_tiles(path, config)
        return run_tileset(tiles, config), tiles
    if kind == "survival":
        return [run_survival_probe(path, config)], None
    if kind == "robustness":
        return [run_robustness_probe(path, config, k=None)], None
    method: Literal["logistic", "abmil"] = "abmil" if kind == "abmil" else "logistic"
    return [run_slide_probe(path, config, method=method)], None


def _uniquely_named(jobs: list[ProbeJob]) -> list[ProbeJob]:
    """Jobs of equal names (data of one stem) get a hash of their data's path."""
    counts = Counter(job.name for job in jobs)
    return [
        job
        if counts[job.name] == 1
        else replace(job, name=f"{job.name}-{hashlib.sha256(job.data.encode()).hexdigest()[:6]}")
        for job in jobs
    ]


def _row(job: ProbeJob, probe: str, **values: Any) -> ProbeRow:
    data, compute = job.config.data, job.config.compute
    return ProbeRow(
        job=job.name, data=job.data, encoder=data.encoder, seed=compute.seed, probe=probe, **values
    )


def _row_of(job: ProbeJob, result: ProbeResult) -> ProbeRow:
    interval = result.interval
    return _row(
        job,
        result.probe,
        status="done",
        metric=result.metric,
        score=float(result.score),
        low=None if interval is None else float(interval.low),
        high=None if interval is None else float(interval.high),
    )
