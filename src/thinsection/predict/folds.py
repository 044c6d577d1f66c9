"""Folds as jobs of an executor: each leaves one file, with its head and what it says of its cases.

OUT/cohort.json            cases, files, labels, folds: what every worker reads
OUT/folds/<job>.safetensors    weights `head.*`; `logits` (n, K) of the test cases, `means`
                           (n, D) of their embeddings, `slides` (m, K) of slides of cases that
                           have several; metadata `told`: key, losses, best epoch, ...
    <job>.checkpoint       of one that is on its way
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import psutil
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from thinsection.config import as_mapping, from_mapping
from thinsection.files.atomic import atomic_path, write_json
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.jobs.contract import Report, Task
from thinsection.pipeline.task import set_threads
from thinsection.predict.bags import Bags
from thinsection.predict.heads.config import HEADS, HeadConfig
from thinsection.predict.labels import Cohort
from thinsection.predict.splits import Part
from thinsection.predict.training import (
    TOLD,
    FitConfig,
    Fitted,
    State,
    Trainer,
)
from thinsection.store.ledger import stage_key
from thinsection.units import parse_bytes

COHORT_NAME, FOLDS = "cohort.json", "folds"
_BAGS_AT_WORK = 9  # of the largest bag: two that are read, what one takes in a head of 512 channels


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained on, in every worker."""

    cohort: Cohort
    parts: tuple[Part, ...]

    @classmethod
    def load(cls, out: Path) -> Self:
        """What `save` wrote."""
        return from_mapping(cls, json.loads((out / COHORT_NAME).read_text(encoding="utf-8")))

    def save(self, out: Path) -> None:
        """Writes OUT/cohort.json."""
        write_json(out / COHORT_NAME, as_mapping(self))


@dataclass(frozen=True, kw_only=True)
class FoldJob:
    """One fold with one setting; plain values that travel between processes."""

    fold: int
    setting: int  # of the grid
    head: HeadConfig
    fit: FitConfig

    @property
    def name(self) -> str:
        """Of its file."""
        return f"fold{self.fold}-{self.setting}"


@dataclass(frozen=True, kw_only=True)
class FoldDone:
    """What became of it."""

    name: str
    words: str = ""  # for the person who waits
    error: str = ""  # why it failed, '' where it did not


class FoldResult(NamedTuple):
    """What a fold's file holds."""

    name: str  # of its job
    state: State  # of its head
    losses: tuple[tuple[float, float], ...]  # training, inner
    best: int  # epoch, from 1
    temperature: float
    logits: npt.NDArray[np.float64]  # (n, K) of the test cases
    slides: npt.NDArray[np.float64]  # (m, K)
    means: npt.NDArray[np.float32]  # (n, D)

    @property
    def stop_loss(self) -> float:
        """The inner loss of the head: settings are chosen by it."""
        return self.losses[self.best - 1][1]


@dataclass(frozen=True, kw_only=True)
class TrainTask(Task[FoldJob, FoldDone]):
    """See `Task`: folds in one process, which share the bags that fit into its memory."""

    kind: ClassVar[str] = "train"
    entry_type: ClassVar[type[Any]] = FoldJob
    result_type: ClassVar[type[Any]] = FoldDone
    event_type: ClassVar[type[Any]] = FoldDone
    streams: ClassVar[bool] = True

    out: Path  # absolute, seen by every worker
    memory: str
    threads: int = 0

    def __call__(
        self, entries: Sequence[FoldJob], *, on_event: Callable[[Any], None]
    ) -> Report[FoldDone]:
        """See `Task.__call__`. Memory: `memory`, of the whole process."""
        set_threads(self.threads, torch_too=True)
        study = Study.load(self.out)
        files = [[Path(path) for path in paths] for paths in study.cohort.files]
        largest = max(sum(path.stat().st_size for path in paths) for paths in files)
        rest = parse_bytes(self.memory) - psutil.Process().memory_info().rss
        cells = any(HEADS.load(job.head.head).needs_cells for job in entries)
        with Bags(files, budget_bytes=rest - _BAGS_AT_WORK * largest, cells=cells) as bags:
            results = []
            for job in entries:
                results.append(self._run(job, study, bags))
                on_event(results[-1])
            return Report(results=tuple(results))

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """See `Task.on_worker`."""
        return replace(self, threads=threads)

    def lost(self, entry: FoldJob, reason: str) -> FoldDone:
        """See `Task.lost`."""
        return FoldDone(name=entry.name, error=reason)

    def name(self, entry: FoldJob) -> str:
        """See `Task.name`."""
        return entry.name

    def finished(self, entry: FoldJob) -> FoldDone | None:
        """Whether the fold's file is of these settings and labels."""
        study = Study.load(self.out)
        done = read_fold(self.out, entry.name, fold_key(entry, study)) is not None
        return FoldDone(name=entry.name) if done else None

    def ended(self, result: FoldDone) -> FoldDone:
        """See `Task.ended`."""
        return result

    def _run(self, job: FoldJob, study: Study, bags: Bags) -> FoldDone:
        key, home = fold_key(job, study), self.out / FOLDS
        with hold(home / job.name / LOCK_NAME):  # another process at the same fold is waited for
            if (result := read_fold(self.out, job.name, key)) is None:
                trainer = Trainer(
                    bags, study.cohort, study.parts[job.fold], fold=job.fold, fit=job.fit
                )
                checkpoint = home / job.name / "checkpoint.safetensors"
                fitted = trainer.run(job.head, checkpoint, key)
                result = _write(home / f"{job.name}.safetensors", key, trainer, fitted)
                checkpoint.unlink(missing_ok=True)
        words = (
            f"best epoch {result.best} of {len(result.losses)}, inner loss {result.stop_loss:.4f}"
        )
        return FoldDone(name=job.name, words=f"{job.name}: {words}")


def fold_key(job: FoldJob, study: Study) -> str:
    """Hash of all that decides a fold's bytes; of embeddings the sizes of their files."""
    cohort, part = study.cohort, study.parts[job.fold]
    sizes = [Path(path).stat().st_size for paths in cohort.files for path in paths]
    fit = replace(job.fit, checkpoint_s=0.0)
    known = {"cases": cohort.cases, "slides": cohort.slides, "values": cohort.values}
    told = {"target": as_mapping(cohort.target), "part": as_mapping(part), "sizes": sizes}
    return stage_key(head=as_mapping(job.head), fit=as_mapping(fit), **known, **told)


def read_fold(out: Path, name: str, key: str | None = None) -> FoldResult | None:
    """A fold's file; None where it is not there, damaged, or has another key than is asked for."""
    try:
        return _read(out / FOLDS / f"{name}.safetensors", key)
    except (OSError, SafetensorError):
        return None


def _read(path: Path, key: str | None = None) -> FoldResult | None:
    with safe_open(path, framework="pt") as file:
        said = json.loads(file.metadata()[TOLD])
        if key is not None and said["key"] != key:
            return None
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 - no mapping
    return FoldResult(
        name=path.stem,
        state={k.removeprefix("head."): v for k, v in tensors.items() if k.startswith("head.")},
        losses=tuple((a, b) for a, b in said["losses"]),
        best=said["best"],
        temperature=said["temperature"],
        **{k: tensors[k].numpy() for k in ("logits", "slides", "means")},
    )


def _write(path: Path, key: str, trainer: Trainer, fitted: Fitted) -> FoldResult:
    """Writes the head, and what it says of the test cases and their slides, whole and in fp32."""
    part, cohort = trainer.part, trainer.cohort
    stop, _ = trainer.whole(trainer.bags, part.stop)
    logits, means = trainer.whole(trainer.bags, part.test)
    single = [[Path(f)] for case in part.test for f in several(cohort.files[case])]
    with Bags(single, cells=trainer.bags.cells) as bags:
        slides, _ = trainer.whole(bags, range(len(bags)))
    said = {"key": key, "losses": fitted.losses, "best": fitted.best}
    said["temperature"] = trainer.temperature(stop)
    told = {TOLD: json.dumps(said)}
    tensors = {f"head.{k}": v.cpu().contiguous() for k, v in fitted.head.state_dict().items()}
    with atomic_path(path) as tmp:
        save_file({**tensors, "logits": logits, "slides": slides, "means": means}, tmp, told)
    result = _read(path)
    assert result is not None
    return result


def several(items: tuple[str, ...]) -> tuple[str, ...]:
    """Slides (or files) of a case that has several; of another its case says all."""
    return items if len(items) > 1 else ()
