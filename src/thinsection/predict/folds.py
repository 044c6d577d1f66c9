"""Each fold as a job of an executor, and the file that it leaves.

OUT/cohort.json            cases, files, labels, folds: what every worker reads
OUT/folds/<job>.safetensors    weights `head.*`; `logits` (n, K) of the test cases, `stop` (m, K)
                           of the inner ones, `slides` (l, K) of slides of cases that have
                           several; metadata `told`: key, losses, best epoch, target
    <job>.checkpoint       of one that is on its way
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import psutil
from safetensors import SafetensorError

from thinsection.config import as_mapping, from_mapping
from thinsection.evaluation.labels import Cohort, Floats, Target
from thinsection.evaluation.parts import Part
from thinsection.files.atomic import write_json
from thinsection.files.json_text import read_json
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.jobs.contract import OnEvent, Report, Task
from thinsection.pipeline.task import set_threads
from thinsection.predict.bags import Bags
from thinsection.predict.heads.config import HEADS, HeadConfig
from thinsection.predict.training import (
    FitConfig,
    Losses,
    State,
    Trainer,
    read_told,
)
from thinsection.store.ledger import stage_key
from thinsection.types import parse_bytes

COHORT_NAME, FOLDS = "cohort.json", "folds"
FORMAT = 2  # of a fold's file
_BAGS_AT_WORK = (
    9  # of the largest bag: two that are read, what one takes in a head of 512 channels
)


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained on, in every worker."""

    cohort: Cohort
    parts: tuple[Part, ...]
    digests: tuple[str, ...] = ()  # `content_digest` of each file of embeddings
    warnings: tuple[str, ...] = ()  # leaks that are likely, or allowed

    @classmethod
    def load(cls, out: Path) -> Self:
        """What `save` wrote."""
        return from_mapping(cls, read_json(out / COHORT_NAME))

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
    losses: Losses
    best: int  # epoch, from 1
    target: Target  # with centre, spread and edges of the fold's training cases
    logits: Floats  # (n, K) of the test cases
    stop: Floats  # (m, K) of the inner cases
    slides: Floats  # (m, K)

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

    def __call__(
        self, entries: Sequence[FoldJob], *, on_event: OnEvent
    ) -> Report[FoldDone]:
        """See `Task.__call__`. Memory: `memory`, of the whole process."""
        set_threads(self.threads, torch_too=True)
        study, results = Study.load(self.out), []
        files = study.cohort.paths
        largest = max(sum(path.stat().st_size for path in paths) for paths in files)
        rest = parse_bytes(self.memory) - psutil.Process().memory_info().rss
        cells = any(HEADS.load(job.head.head).needs_cells for job in entries)
        with Bags(
            files, budget_bytes=rest - _BAGS_AT_WORK * largest, cells=cells
        ) as bags:
            for job in entries:
                results.append(self._run(job, study, bags))
                on_event(results[-1])
        return Report(results=tuple(results))

    def lost(self, entry: FoldJob, reason: str) -> FoldDone:
        """See `Task.lost`."""
        return FoldDone(name=entry.name, error=reason)

    def finished(self, entry: FoldJob) -> FoldDone | None:
        """Whether the fold's file is of these settings and labels."""
        done = read_fold(self.out, entry.name, fold_key(entry, Study.load(self.out)))
        return FoldDone(name=entry.name) if done else None

    def ended(self, result: FoldDone) -> FoldDone:
        """See `Task.ended`."""
        return result

    def _run(self, job: FoldJob, study: Study, bags: Bags) -> FoldDone:
        key, home = fold_key(job, study), self.out / FOLDS
        with hold(
            home / job.name / LOCK_NAME
        ):  # another process at the same fold is waited for
            if (result := read_fold(self.out, job.name, key)) is None:
                part = study.parts[job.fold]
                trainer = Trainer(bags, study.cohort, part, fold=job.fold, fit=job.fit)
                checkpoint = home / job.name / "checkpoint.safetensors"
                trainer.run(job.head, checkpoint, key)
                trainer.write(home / f"{job.name}.safetensors", key)
                checkpoint.unlink(missing_ok=True)
                result = read_fold(self.out, job.name, key)
                assert result is not None
        best = f"best epoch {result.best} of {len(result.losses)}"
        words = f"{job.name}: {best}, inner loss {result.stop_loss:.4f}"
        return FoldDone(name=job.name, words=words)


def fold_key(job: FoldJob, study: Study) -> str:
    """Hash of all that decides a fold's bytes: embeddings, labels, part, settings."""
    cohort, part = study.cohort, study.parts[job.fold]
    fit = replace(job.fit, checkpoint_s=0.0)
    known = {"cases": cohort.cases, "slides": cohort.slides, "values": cohort.values}
    told = {
        "target": as_mapping(cohort.target),
        "part": as_mapping(part),
        "digests": study.digests,
    }
    return stage_key(
        format=FORMAT, head=as_mapping(job.head), fit=as_mapping(fit), **known, **told
    )


def read_fold(out: Path, name: str, key: str | None = None) -> FoldResult | None:
    """A fold's file; None where it is not there, damaged, or has another key than is asked for."""
    try:
        said, tensors = read_told(out / FOLDS / f"{name}.safetensors")
    except (OSError, SafetensorError):
        return None
    logits = tensors.pop("logits").numpy()
    stop = tensors.pop("stop").numpy()
    slides = tensors.pop("slides").numpy()
    state = {k.removeprefix("head."): v for k, v in tensors.items()}
    losses = [(train, stop) for train, stop in said["losses"]]
    if key is not None and said["key"] != key:
        return None
    return FoldResult(
        name=name,
        state=state,
        losses=losses,
        best=said["best"],
        target=from_mapping(Target, said["target"]),
        logits=logits,
        stop=stop,
        slides=slides,
    )
