"""Folds as jobs of an executor, and the file that each of them writes.

OUT/cohort.json            cases, files, labels, folds, for every worker
OUT/folds/<job>.safetensors    weights `head.*`; logits: `logits` (n, K) of the test cases, `stop`
                           (m, K) of the inner validation cases, `slides` (l, K) of slides in
                           cases with several; metadata `told` (one JSON text, `HEADER_KEY`):
                           key, losses, epochs before each start, best epoch, target
    <job>/checkpoint.safetensors    checkpoint of an unfinished fold
    <job>/.lock                     its lock

A start is a training from other initial weights, see `training.py: Trainer.run`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
import psutil
from safetensors import SafetensorError

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import ConfigError, naming_file
from thinsection.evaluation.embeddings import open_embeddings
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.parts import FoldCases
from thinsection.evaluation.target import Target
from thinsection.files.atomic import read_json, write_json
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.jobs.task import OnEvent, Report, Task
from thinsection.predict.bags import Bags
from thinsection.predict.config import BAGS_AT_WORK, FitConfig
from thinsection.predict.heads.config import BLOCK_ROWS, HeadConfig
from thinsection.predict.heads.head import load_head
from thinsection.predict.model_file import FOLDS
from thinsection.predict.outputs import reads_whole
from thinsection.predict.training import Losses, State, Trainer, read_state
from thinsection.run.task import set_threads
from thinsection.store.ledger import stage_key
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.types import Floats, counted, parse_bytes, rounded

COHORT_NAME = "cohort.json"
FORMAT = 5  # format of a fold's file, and of the rules by which a head is trained
# If no case has more bytes of embeddings, one thread trains: its operations are so short that more
# threads would mostly wait, which takes CPU time.
ONE_THREAD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Study:
    """Training study: cases, labels and folds of a training, as all workers read them."""

    cohort: Cohort
    parts: tuple[FoldCases, ...]
    digests: tuple[str, ...] = ()  # `content_digest` of each file of embeddings
    warnings: tuple[str, ...] = ()  # warnings about leaks that are likely, or allowed

    @classmethod
    def load(cls, out: Path) -> Self:
        """Reads OUT/cohort.json. Raises ConfigError: a field is wrong."""
        path = out / COHORT_NAME
        with naming_file(path):
            study = from_mapping(cls, read_json(path))
            widths = {len(values) for values in study.cohort.values}
            if len(widths) > 1:
                raise ConfigError(
                    f"cohort.values must have as many numbers for each case, got {sorted(widths)}"
                )
            widths = {len(values) for values in study.cohort.covariates}
            if widths - {len(study.cohort.covariate_columns)}:
                raise ConfigError(
                    "cohort.covariates must have a number for each column, got "
                    f"{sorted(widths)}"
                )
            return study

    @property
    def case_of_slide(self) -> IndexArray:
        """Index of the case of each slide, (slides,), in the order of `leaks.py: Contents`."""
        counts = [len(slides) for slides in self.cohort.slides]
        return np.repeat(np.arange(len(counts)), counts)

    def save(self, out: Path) -> None:
        """Writes OUT/cohort.json."""
        write_json(out / COHORT_NAME, as_mapping(self))


@dataclass(frozen=True, kw_only=True)
class FoldJob:
    """One fold with one setting, as plain values that travel between processes."""

    fold: int
    setting: int  # index among the settings that are searched
    head: HeadConfig
    fit: FitConfig

    @property
    def name(self) -> str:
        """Name of the fold's file."""
        return f"fold{self.fold}-{self.setting}"


@dataclass(frozen=True, kw_only=True)
class FoldDone:
    """Outcome of a fold job."""

    name: str
    words: str = ""  # text for the user
    error: str = ""  # why it failed, '' if it did not


class FoldResult(NamedTuple):
    """Content of a fold's file."""

    name: str  # name of its job
    state: State  # weights of its head
    losses: Losses
    best: int  # best epoch, counted from 1 through all starts
    first_epochs: tuple[int, ...]  # number of epochs before each start
    # target with centre, spread and edges from the fold's training cases
    target: Target
    logits: Floats  # (n, K) logits of the test cases
    stop: Floats  # (m, K) logits of the inner validation cases
    slides: Floats  # (l, K) logits of slides in cases with several

    @property
    def epochs(self) -> list[int]:
        """Number of epochs of each start."""
        ends = (*self.first_epochs[1:], len(self.losses))
        return [end - begin for begin, end in zip(self.first_epochs, ends, strict=True)]

    @property
    def best_start(self) -> int:
        """Start with the best epoch, from 1."""
        return int(np.searchsorted(self.first_epochs, self.best, side="left"))

    @property
    def best_epoch(self) -> int:
        """Best epoch of its start, from 1."""
        return self.best - self.first_epochs[self.best_start - 1]

    @property
    def has_learnt(self) -> bool:
        """False if the first epoch of the best start has the lowest inner validation loss."""
        return self.best_epoch > 1

    @property
    def best_words(self) -> str:
        """The best epoch, its start if there are several, and whether the head has learnt."""
        unlearnt = "" if self.has_learnt else " (did not learn after it)"
        if len(self.first_epochs) == 1:
            return f"{self.best_epoch}{unlearnt}"
        return f"{self.best_epoch} of start {self.best_start}{unlearnt}"

    @property
    def stop_loss(self) -> float:
        """Inner validation loss of the head, by which settings are chosen."""
        return self.losses[self.best - 1][1]


def _stored_bytes(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def bytes_at_work(files: Sequence[Sequence[Path]], jobs: Iterable[FoldJob]) -> int:
    """Memory of the largest bag at work, beside those that are kept.

    It is that of the drawn tiles, or of blocks, where the heads read blocks and the files too.

    Args:
        files: for each case, one embeddings file per slide.
        jobs: the folds, with their heads and settings.
    """
    largest = max(files, key=_stored_bytes)
    whole_bytes = BAGS_AT_WORK * _stored_bytes(largest)
    num_rows = BLOCK_ROWS
    for job in jobs:
        if not job.fit.bag_size or reads_whole(load_head(job.head.head)):
            return whole_bytes
        num_rows = max(num_rows, job.fit.bag_size)
    dim = 0
    for path in largest:
        slide = open_embeddings(path)
        # rows of a compressed file are not read alone
        if not (isinstance(slide, EmbeddingRows) and slide.index_bytes):
            return whole_bytes
        dim = slide.shape[1]
    return min(whole_bytes, BAGS_AT_WORK * 4 * dim * num_rows)


@dataclass(frozen=True, kw_only=True)
class TrainTask(Task[FoldJob, FoldDone]):
    """See `Task`: trains folds in one process; they share the bags that fit into its memory."""

    kind: ClassVar[str] = "train"
    entry_type: ClassVar[type[FoldJob]] = FoldJob
    result_type: ClassVar[type[FoldDone]] = FoldDone
    event_type: ClassVar[type[FoldDone]] = FoldDone
    streams: ClassVar[bool] = True

    out: Path  # absolute path that every worker can reach
    memory: str

    def __call__(
        self, entries: Sequence[FoldJob], *, on_event: OnEvent
    ) -> Report[FoldDone]:
        """See `Task.__call__`. Memory: `memory` for the whole process."""
        study = Study.load(self.out)
        files = study.cohort.paths
        largest = max(map(_stored_bytes, files))
        threads = 1 if largest <= ONE_THREAD_BYTES else self.threads
        set_threads(threads, torch_too=True)
        free = parse_bytes(self.memory) - psutil.Process().memory_info().rss
        budget_bytes = free - bytes_at_work(files, entries)
        cells = any(load_head(job.head.head).needs_cells for job in entries)
        results = []
        with Bags(
            files,
            budget_bytes=budget_bytes,
            cells=cells,
            covariates=study.cohort.covariate_array,
        ) as bags:
            for job in entries:
                done = self._run(job, study, bags)
                results.append(done)
                on_event(done)
        return Report(results=tuple(results))

    def lost(self, entry: FoldJob, reason: str) -> FoldDone:
        """See `Task.lost`."""
        return FoldDone(name=entry.name, error=reason)

    def finished(self, entry: FoldJob) -> FoldDone | None:
        """See `Task.finished`; the fold's file must have these settings and labels."""
        done = read_fold(self.out, entry.name, fold_key(entry, Study.load(self.out)))
        return FoldDone(name=entry.name) if done else None

    def end_event(self, result: FoldDone) -> FoldDone:
        """See `Task.end_event`."""
        return result

    def _run(self, job: FoldJob, study: Study, bags: Bags) -> FoldDone:
        key = fold_key(job, study)
        folder = self.out / FOLDS
        # wait for another process with the same fold
        with hold(folder / job.name / LOCK_NAME):
            result = read_fold(self.out, job.name, key)
            if result is None:
                part = study.parts[job.fold]
                trainer = Trainer(bags, study.cohort, part, fold=job.fold, fit=job.fit)
                checkpoint = folder / job.name / "checkpoint.safetensors"
                trainer.run(job.head, checkpoint, key)
                trainer.write(folder / f"{job.name}.safetensors", key)
                checkpoint.unlink(missing_ok=True)
                result = read_fold(self.out, job.name, key)
                assert result is not None
        loss = rounded(result.stop_loss, len(result.stop))
        words = (
            f"{job.name}: best epoch {result.best_words}, "
            f"{_epochs_words(result.epochs)}, validation loss {loss}"
        )
        return FoldDone(name=job.name, words=words)


def _epochs_words(epochs: Sequence[int]) -> str:
    """Epochs of each start, as '15 epochs' or '3 random starts of 15, 15 and 9 epochs'."""
    if len(epochs) == 1:
        return counted(epochs[0], "epoch")
    if len(set(epochs)) == 1:
        return f"{len(epochs)} random starts of {counted(epochs[0], 'epoch')} each"
    counts = ", ".join(map(str, epochs[:-1]))
    return f"{len(epochs)} random starts of {counts} and {epochs[-1]} epochs"


def fold_key(job: FoldJob, study: Study) -> str:
    """Hash of all that decides a fold's bytes: embeddings, labels, split, settings."""
    cohort = study.cohort
    target = as_mapping(cohort.target)
    # the positive class changes no model
    del target["positive"], target["positive_by"]
    return stage_key(
        format=FORMAT,
        head=as_mapping(job.head),
        fit=as_mapping(replace(job.fit, checkpoint_s=0.0)),
        cases=cohort.cases,
        slides=cohort.slides,
        values=cohort.values,
        covariates=cohort.covariates,
        target=target,
        part=as_mapping(study.parts[job.fold]),
        digests=study.digests,
    )


def read_fold(out: Path, name: str, key: str | None = None) -> FoldResult | None:
    """Reads a fold's file; None if it is missing, damaged, or does not have this key."""
    try:
        header, tensors = read_state(out / FOLDS / f"{name}.safetensors")
        if key is not None and header["key"] != key:
            return None
        logits = tensors.pop("logits").numpy()
        inner_logits = tensors.pop("stop").numpy()
        slide_logits = tensors.pop("slides").numpy()
        return FoldResult(
            name=name,
            state={k.removeprefix("head."): v for k, v in tensors.items()},
            losses=[(train, inner) for train, inner in header["losses"]],
            best=header["best"],
            first_epochs=tuple(header.get("first_epochs", [0])),
            target=from_mapping(Target, header["target"]),
            logits=logits,
            stop=inner_logits,
            slides=slide_logits,
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None
