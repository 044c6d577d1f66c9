"""Many probes as jobs of an executor, one a data set, encoder, seed and probe.

OUT/probes.csv                             a row per score
    <job>/<probe>.json, .csv, .html   the report of the probe
          job.json                         its rows and the key of its settings, written last
          traceback.txt                    where it failed

`probe grid` takes them from its flags, `bench` from a suite (docs/probes.md): encoders x tasks, one
JSON, one page; its paths are relative to its file, settings of a task go before the suite's.
"""

import hashlib
import itertools
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

import thinsection
from thinsection.config import (
    Settings,
    as_mapping,
    option,
    read_toml,
    replace_flat,
    section,
)
from thinsection.encode.registry import needs_of_encoder
from thinsection.errors import (
    ConfigError,
    DatasetError,
    ThinsectionError,
    error_words,
    naming_file,
)
from thinsection.evaluation.parts import PATHOBENCH_TABLE
from thinsection.evaluation.tables import TABLE_SUFFIXES
from thinsection.extras import Need, require_packages
from thinsection.files.atomic import read_json, write_json, write_table, write_text
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import OnEvent, Report, Task
from thinsection.probe.compare import compare
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data.hest import FIRST_SPLIT, is_hest_task
from thinsection.probe.page import write_probe_report
from thinsection.probe.registry import PROBES, load_probe
from thinsection.probe.result import ProbeResult
from thinsection.probe.scores import SCORES, small_result
from thinsection.report.index import refresh_index
from thinsection.run.task import set_threads
from thinsection.store.ledger import stage_key
from thinsection.types import Json

TABLE_NAME = "probes.csv"
JOB_NAME = "job.json"
TRACEBACK_NAME = "traceback.txt"
BY_KIND = {
    "tiles": ("knn", "linear", "fewshot"),
    "slide": ("slide",),
    "survival": ("survival",),
    "values": ("regression",),
}
_KEYS = ("name", "encoders", "tasks")
_TASK_KEYS = ("data", "probes", "name")
_PATHS = ("root", "embeddings", "labels", "test")
OnMessage = Callable[[str], None]
Status = Literal["done", "skipped", "failed"]  # skipped: it was done before


def grid_probes() -> tuple[str, ...]:
    """Names of the probes whose settings are a `ProbeConfig`; those of others do not fit a grid."""

    def fits(name: str) -> bool:
        try:
            return issubclass(load_probe(name).config_type, ProbeConfig)
        except ThinsectionError:
            return True  # one that cannot be loaded says why when it is asked for

    return tuple(filter(fits, PROBES.names()))


@dataclass(frozen=True, kw_only=True)
class GridSection:
    """Choice of jobs."""

    probe: tuple[str, ...] = option(
        ("linear",),
        "Probe to run; repeat the option for several.",
        daily=True,
        choices=grid_probes,
    )
    encoders: tuple[str, ...] = option(
        (),
        "Tile encoder to compare, if DATA holds images; repeat the option for several.",
        daily=True,
        flag="--encoder",
    )
    seeds: tuple[str, ...] = option(
        (),
        "Seed, in place of the protocol's; repeat the option for several.",
        daily=True,
        flag="--seed",
    )
    resume: bool = option(
        True,
        "Skip jobs that are complete with the same settings. --no-resume runs all jobs "
        "again.",
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class ProbeGridConfig(ProbeConfig):
    """Settings of `thinsection probe grid`."""

    grid: GridSection = section(GridSection)
    executor: ExecutorConfig = section(ExecutorConfig, "Workers and clusters")

    def needs(self) -> Iterator[Need]:
        """Packages of the sections, the encoders and the probes."""
        yield from super().needs()
        for name in self.grid.encoders:
            yield needs_of_encoder(name)
        for name in self.grid.probe:
            yield f"probe {name!r}", PROBES.entry(name).needs


@dataclass(frozen=True, kw_only=True, repr=False)
class BenchConfig(Settings):
    """Settings of `thinsection bench`."""

    executor: ExecutorConfig = section(ExecutorConfig, "Workers and clusters")


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """One score, or why there is none; a row of probes.csv."""

    job: str
    data: str
    encoder: str | None
    seed: int | None
    probe: str  # of the result; 'tileset' has four
    status: Status
    metric: str = ""
    score: float | None = None
    low: float | None = None  # with `high` the bootstrap interval
    high: float | None = None
    error: str = ""  # one line
    # why a slide or file could not be used, by name
    left_out: dict[str, str] = field(default_factory=dict)


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
        return stage_key(
            probe=self.probe, data=self.data, settings=as_mapping(self.config)
        )

    def failed_row(self, error: str) -> ProbeRow:
        """The row of the table that says why there is no score."""
        return ProbeRow(
            job=self.name,
            data=self.data,
            encoder=self.config.data.encoder,
            seed=self.config.compute.seed,
            probe=self.probe,
            status="failed",
            error=error,
        )

    def done_row(self, result: ProbeResult) -> ProbeRow:
        """The row of a result."""
        interval = result.interval
        if interval is not None and not math.isfinite(interval.low):  # of one slide
            interval = None
        return replace(
            self.failed_row(""),
            probe=result.probe,
            status="done",
            metric=result.metric,
            score=float(result.score),
            low=float(interval.low) if interval else None,
            high=float(interval.high) if interval else None,
            left_out=result.left_out,
        )


@dataclass(frozen=True, kw_only=True)
class ProbeDone:
    """Outcome of a job: a row per score; 'tileset' has four, a failed job one."""

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
    on_message: OnMessage = lambda text: None,
) -> list[ProbeRow]:
    """Every combination of data, encoders, seeds and probes, each a job of its own.

    Workers of other nodes must see `out`; `data` are each as `thinsection probe` takes it. A failed
    job is a row; bad settings, or a cluster that fails, raise a ThinsectionError. Memory: of the
    largest probe, in each worker.
    """
    config = config or ProbeGridConfig()
    config.check_packages()
    jobs = probe_jobs(data, config)
    return _run_jobs(
        jobs, out, config.executor, resume=config.grid.resume, tell=on_message
    )


def run_suite(
    path: Path,
    out: Path,
    config: BenchConfig | None = None,
    *,
    on_message: OnMessage = lambda text: None,
) -> list[ProbeRow]:
    """Runs every encoder on every task; writes OUT/suite.json, comparison.html and scores/*.json.

    A job that is done is skipped, a failed one is a row. There is no comparison with one encoder,
    nor of a task with too few patients for a test; `on_message` receives the reason.

    Memory: of the largest probe, in each worker. Raises ConfigError: the suite's file, with the key
    that is wrong.
    """
    config = config or BenchConfig()
    config.check_packages()
    document = read_toml(path)
    out = Path(out)
    with naming_file(path):
        jobs = suite_jobs(path, document)
    for job in jobs:
        job.config.check_packages()
        require_packages(f"probe {job.probe!r}", *PROBES.entry(job.probe).needs)
    rows = _run_jobs(jobs, out, config.executor, resume=True, tell=on_message)
    done = [row for row in rows if row.status != "failed"]
    suite = {
        "thinsection": thinsection.__version__,
        "suite": document,
        "rows": [asdict(row) for row in rows],
    }
    write_json(out / "suite.json", suite)
    for row in done:
        result = read_json(out / row.job / f"{row.probe}.json")
        name = row.job if row.job.endswith(row.probe) else f"{row.job}-{row.probe}"
        write_json(out / SCORES / f"{_slug(name)}.json", small_result(result))
    if len({row.encoder for row in done}) > 1:
        # last, so that scores are kept where no task has enough patients for a test
        try:
            on_message(str(compare([out], out, on_message=on_message)))
        except DatasetError as error:
            on_message(f"no comparison: {error_words(error)}")
    return rows


def _run_jobs(
    jobs: list[ProbeJob],
    out: Path,
    executor: ExecutorConfig,
    *,
    resume: bool,
    tell: OnMessage,
) -> list[ProbeRow]:
    out = Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    task = ProbeTask(out=out, threads=executor.threads, resume=resume)
    rows: list[ProbeRow] = []

    def keep(report: Report[ProbeDone]) -> None:
        for done in report.results:
            rows.extend(done.rows)

    # a probe may take long: each is a task of its own
    executor = replace(executor, chunk_slides=executor.chunk_slides or 1)
    execute(jobs, task, executor, folder=out, on_report=keep, on_message=tell)
    order = {job.name: number for number, job in enumerate(jobs)}
    # stable: the four of a tile set stay in order
    rows.sort(key=lambda row: order[row.job])
    lines = [asdict(row) | {"left_out": "; ".join(row.left_out)} for row in rows]
    write_table(out / TABLE_NAME, lines, [f.name for f in fields(ProbeRow)])
    refresh_index(out)
    return rows


def probe_jobs(data: Sequence[Path], config: ProbeGridConfig) -> list[ProbeJob]:
    """Every combination, data first; without encoders or seeds those of the other settings.

    Jobs of equal names (data of one stem) get a hash of their data's path.
    """
    grid = config.grid
    base = ProbeConfig(data=config.data, compute=config.compute)
    other = [
        p for p in grid.probe if not issubclass(load_probe(p).config_type, ProbeConfig)
    ]
    if not grid.probe or other:
        raise ConfigError(
            f"probe must be one with a `ProbeConfig`, got {other or 'none'}"
        )
    if not data:
        raise ConfigError("data must name at least one path, got none")
    if not all(re.fullmatch(r"\s*[+-]?\d+\s*", seed) for seed in grid.seeds):
        raise ConfigError(
            f"grid.seeds must be whole numbers, got {', '.join(map(repr, grid.seeds))}"
        )
    encoders = grid.encoders or (base.data.encoder,)
    seeds: Sequence[int | None] = [*map(int, grid.seeds)] or [base.compute.seed]
    jobs = []
    for path, encoder, seed, probe in itertools.product(
        data, encoders, seeds, grid.probe
    ):
        parts = (path.stem, encoder, None if seed is None else f"seed{seed}", probe)
        name = _slug("-".join(filter(None, parts)))
        settings = replace_flat(base, {"encoder": encoder, "seed": seed})
        jobs.append(
            ProbeJob(name=name, probe=probe, data=str(path.resolve()), config=settings)
        )
    counts = Counter(job.name for job in jobs)
    for number, job in enumerate(jobs):
        if counts[job.name] > 1:
            digest = hashlib.sha256(job.data.encode()).hexdigest()
            jobs[number] = replace(job, name=f"{job.name}-{digest[:6]}")
    return jobs


def _slug(name: str) -> str:
    """Name of a file or folder."""
    return re.sub(r"[^\w.=-]+", "_", name)


def suite_jobs(path: Path, document: Mapping[str, Json]) -> list[ProbeJob]:
    """The jobs of a suite: tasks, then encoders, then probes."""
    encoders = document.get("encoders")
    tasks = document.get("tasks")
    if not encoders:
        raise ConfigError(f"encoders must name at least one, got {encoders}")
    if not tasks:
        raise ConfigError(f"tasks must be listed as [[tasks]], got {tasks}")
    shared = {k: v for k, v in document.items() if k not in _KEYS}
    jobs = []
    for entry in tasks:
        if "data" not in entry:
            raise ConfigError(f"each task must have data, got {sorted(entry)}")
        settings = shared | {k: v for k, v in entry.items() if k not in _TASK_KEYS}
        place = path.parent / entry["data"]
        found: Iterable[tuple[str, Path, str]] = find_tasks(place)
        if settings.get("layout", "auto") not in ("auto", "manifest"):
            # files in a folder of this layout are no lists, such as OCELOT's metadata.json
            found = [(place.name, place, "tiles")]
        for (task, data, kind), encoder in itertools.product(found, encoders):
            name = entry.get("name", task)
            own = {**settings, "encoder": encoder}
            for key in _PATHS:
                if key in own:
                    text = str(own[key]).format(encoder=encoder, task=task)
                    own[key] = path.parent / text
            config = replace_flat(ProbeConfig(), own)
            for probe in entry.get("probes", BY_KIND[kind]):
                load_probe(probe)  # its name is right before anything runs
                job = ProbeJob(
                    name=f"{name}-{encoder}-{probe}",
                    dataset=name,
                    probe=probe,
                    data=str(data).format(encoder=encoder, task=task),
                    config=config,
                )
                jobs.append(job)
    return jobs


def find_tasks(path: Path) -> Iterator[tuple[str, Path, str]]:
    """(name, path, kind) of the task that a path is, or of every task below it.

    A path with {encoder} in it is taken as it stands.
    """
    table = path / PATHOBENCH_TABLE
    if "{" in str(path):
        yield path.stem, path, "tiles"
    elif path.suffix.lower() in TABLE_SUFFIXES:
        kind = "tiles"
        if path.suffix.lower() == ".json":
            text = path.read_text(encoding="utf-8")
            if '"events"' in text:
                kind = "survival"
            elif '"slides"' in text or '"slide_ids"' in text:
                kind = "slide"
        yield path.stem, path, kind
    elif table.is_file():
        survival = "_days" in table.read_text(encoding="utf-8").split("\n")[0]
        yield path.name, path, "survival" if survival else "slide"
    elif is_hest_task(path):
        yield path.name, path, "values"
    else:
        names = (
            "*.json",
            f"*/*/{PATHOBENCH_TABLE}",
            f"*/{PATHOBENCH_TABLE}",
            "*/manifest.csv",
            f"*/{FIRST_SPLIT}",
        )
        files = sorted(itertools.chain.from_iterable(map(path.glob, names)))
        if not files:
            yield path.name, path, "tiles"  # a folder of images
        for file in files:
            if file.name == "manifest.csv":
                yield file.parent.name, file, "tiles"
            elif file.name == PATHOBENCH_TABLE:
                yield from find_tasks(file.parent)
            elif file.match(FIRST_SPLIT):
                yield from find_tasks(file.parent.parent)
            else:
                yield from find_tasks(file)


@dataclass(frozen=True, kw_only=True)
class ProbeTask(Task[ProbeJob, ProbeDone]):
    """Task of some probe jobs in one process. A failed job is a row."""

    kind: ClassVar[str] = "probe"
    entry_type: ClassVar[type] = ProbeJob
    result_type: ClassVar[type] = ProbeDone

    out: Path  # output folder, absolute, on a file system that every worker sees
    resume: bool = True  # whether a job that is done with the same settings is skipped

    def __call__(
        self, entries: Sequence[ProbeJob], *, on_event: OnEvent
    ) -> Report[ProbeDone]:
        """Runs the jobs, see `Task.__call__`."""
        set_threads(self.threads, torch_too=True)
        return Report(results=tuple(self._run(job) for job in entries))

    def lost(self, entry: ProbeJob, reason: str) -> ProbeDone:
        """The row of a job whose worker died."""
        return ProbeDone(rows=(entry.failed_row(reason),))

    def finished(self, entry: ProbeJob) -> ProbeDone | None:
        """The rows of a job that was done with the same settings."""
        try:
            document = read_json(self.out / entry.name / JOB_NAME)
            if not self.resume or document["key"] != entry.key:
                return None
            rows = [
                ProbeRow(**{**row, "status": "skipped"}) for row in document["rows"]
            ]
            return ProbeDone(rows=tuple(rows))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None  # damaged counts as none

    def _run(self, job: ProbeJob) -> ProbeDone:
        folder = self.out / job.name
        # another process that is at the same job is waited for
        with hold(folder / LOCK_NAME):
            done = self.finished(job)
            if done is not None:
                return done
            (folder / JOB_NAME).unlink(missing_ok=True)
            try:
                rows = _probe_rows(job, folder)
            except Exception as error:  # noqa: BLE001 - the per-job boundary; its traceback is kept
                lines = traceback.format_exception(error)
                write_text(folder / TRACEBACK_NAME, "".join(lines))
                return self.lost(job, error_words(error))
            (folder / TRACEBACK_NAME).unlink(missing_ok=True)
            document = {"key": job.key, "rows": [asdict(row) for row in rows]}
            write_json(folder / JOB_NAME, document)
            return ProbeDone(rows=rows)


def _probe_rows(job: ProbeJob, folder: Path) -> tuple[ProbeRow, ...]:
    """A row per result of a job, their reports written."""
    probe = load_probe(job.probe)
    config = probe.config_type(data=job.config.data, compute=job.config.compute)
    data = probe.kind.load(Path(job.data), config)
    rows = []
    for result in probe.run(data, config):
        named = replace(
            result,
            dataset=job.dataset or result.dataset,
            facts={"encoder": job.config.data.encoder, **result.facts},
        )
        write_probe_report(named, folder)
        rows.append(job.done_row(named))
    return tuple(rows)
