"""`thinsection bench SUITE.toml`: encoders x tasks as jobs, one JSON and one page.

    name = "two encoders on nanopath's lists"
    encoders = ["uni", "conch_v15"]
    protocol = "nanopath"                       # any setting of `thinsection probe`, for all tasks

    [[tasks]]
    data = "nanopath/benchmarking"              # a file, a task's folder, or a folder of many
    root = "/data/{task}"                       # more settings, for these tasks alone
    embeddings = "features/{encoder}/{task}"    # where tiles are embedded already
    probes = ["knn", "linear"]                  # else by the kind of task

Paths are relative to the suite's file. Task files are read as published: nanopath's and THUNDER's
JSON lists, Patho-Bench's folders (k=all.tsv and config.yaml), eva's manifest.csv.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import thinsection
from thinsection.config import read_toml, replace_flat, section
from thinsection.errors import ConfigError, require
from thinsection.files.atomic import write_json
from thinsection.jobs.executor import ExecutorConfig
from thinsection.probe.compare import compare
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data.cases import PATHOBENCH_TABLE
from thinsection.probe.data.files import TABLE_SUFFIXES
from thinsection.probe.grid import ProbeJob, ProbeRow, run_jobs
from thinsection.probe.registry import load_probe

BY_KIND = {"tiles": ("knn", "linear", "fewshot"), "slide": ("slide",), "survival": ("survival",)}
_KEYS = ("name", "encoders", "tasks")
_TASK_KEYS = ("data", "probes", "name")
_PATHS = ("root", "embeddings", "labels", "test")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Settings of `thinsection bench`."""

    executor: ExecutorConfig = section(ExecutorConfig)


def run_suite(
    path: Path,
    out: Path,
    config: BenchConfig | None = None,
    *,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[ProbeRow]:
    """Runs every encoder on every task; writes OUT/suite.json and OUT/comparison.html.

    A job that is done is skipped, a failed one is a row. With one encoder there is no comparison.

    Memory: of the largest probe, in each worker.

    Raises ConfigError: the suite's file, with the key that is wrong.
    """
    config, document = config or BenchConfig(), read_toml(path)
    jobs = suite_jobs(path, document)
    rows = run_jobs(jobs, out=out, executor=config.executor, on_message=on_message)
    done, out = [row for row in rows if row.status != "failed"], Path(out)
    if len({row.encoder for row in done}) > 1:
        on_message(str(compare([out], out)))
    results = [json.loads((out / r.job / f"{r.probe}.json").read_text()) for r in done]
    version = {"thinsection": thinsection.__version__, "suite": document}
    shown = [asdict(row) for row in rows]
    write_json(out / "suite.json", {**version, "rows": shown, "results": results})
    return rows


def suite_jobs(path: Path, document: Mapping[str, Any]) -> list[ProbeJob]:
    """The jobs of a suite: tasks, then encoders, then probes."""
    encoders, tasks = document.get("encoders"), document.get("tasks")
    require(encoders, "encoders must name at least one", encoders, error=ConfigError)
    require(tasks, "tasks must be given as [[tasks]]", tasks, error=ConfigError)
    shared = {k: v for k, v in document.items() if k not in _KEYS}
    jobs = []
    for given in tasks or ():
        require("data" in given, "each task must have data", sorted(given), error=ConfigError)
        own = shared | {k: v for k, v in given.items() if k not in _TASK_KEYS}
        for task, data, kind in find_tasks(path.parent / given["data"]):
            name = given.get("name", task)
            for encoder in encoders or ():
                words = {"encoder": encoder, "task": task}
                config = _settings({**own, "encoder": encoder}, words, path.parent)
                where = str(data).format(**words)
                for probe in given.get("probes", BY_KIND[kind]):
                    load_probe(probe)  # its name is right before anything runs
                    job = {"probe": probe, "data": where, "config": config, "dataset": name}
                    jobs.append(ProbeJob(name=f"{name}-{encoder}-{probe}", **job))
    return jobs


def _settings(given: dict[str, Any], words: dict[str, str], base: Path) -> ProbeConfig:
    """A probe's settings; {encoder} and {task} stand for themselves in paths."""
    for name in _PATHS:
        if name in given:
            given[name] = base / str(given[name]).format(**words)
    return replace_flat(ProbeConfig(), given)


def find_tasks(path: Path) -> Iterator[tuple[str, Path, str]]:
    """(name, path, kind) of the task that a path is, or of every task below it.

    A path with {encoder} in it is taken as it stands.
    """
    if "{" in str(path) or path.suffix.lower() in TABLE_SUFFIXES:
        yield path.stem, path, _kind(path)
    elif (path / PATHOBENCH_TABLE).is_file():
        survival = "_days" in (path / PATHOBENCH_TABLE).read_text(encoding="utf-8").split("\n")[0]
        yield path.name, path, "survival" if survival else "slide"
    else:
        names = ("*.json", f"*/*/{PATHOBENCH_TABLE}", f"*/{PATHOBENCH_TABLE}", "*/manifest.csv")
        found = sorted(p for name in names for p in path.glob(name))
        if not found:
            yield path.name, path, "tiles"  # a folder of images
        for task in found:
            if task.name == "manifest.csv":
                yield task.parent.name, task, "tiles"
            else:
                yield from find_tasks(task.parent if task.name == PATHOBENCH_TABLE else task)


def _kind(path: Path) -> str:
    """What a list is of: survival, slides, or else tiles."""
    if path.suffix.lower() != ".json":
        return "tiles"
    words = path.read_text(encoding="utf-8")
    if '"events"' in words:
        return "survival"
    return "slide" if '"slides"' in words or '"slide_ids"' in words else "tiles"
