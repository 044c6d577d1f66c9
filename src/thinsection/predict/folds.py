"""Which cases train, say when to stop, and test; and each such fold as a job of an executor.

OUT/cohort.json            cases, files, labels, folds: what every worker reads
OUT/folds/<job>.safetensors    weights `head.*`; `logits` (n, K) of the test cases, `means`
                           (n, D) of their embeddings, `slides` (m, K) of slides of cases that
                           have several; metadata `told`: key, losses, best epoch, ...
    <job>.checkpoint       of one that is on its way
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import psutil
from safetensors import SafetensorError

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import DatasetError, rewording
from thinsection.files.atomic import write_json
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.jobs.contract import OnEvent, Report, Task
from thinsection.pipeline.task import set_threads
from thinsection.predict.bags import Bags
from thinsection.predict.heads.config import HEADS, HeadConfig
from thinsection.predict.labels import Cohort, Floats
from thinsection.predict.training import FitConfig, Losses, Part, State, Trainer, read_told
from thinsection.probe.data.cases import PATHOBENCH_TABLE
from thinsection.probe.data.files import TEST, TRAIN, VAL, check, read_rows, split_name
from thinsection.probe.groups import CASE_COLUMNS
from thinsection.probe.statistics import IndexArray, stratified_folds
from thinsection.store.ledger import stage_key
from thinsection.types import parse_bytes

COHORT_NAME, FOLDS = "cohort.json", "folds"
SIDES = (TRAIN, VAL, TEST)
_BAGS_AT_WORK = 9  # of the largest bag: two that are read, what one takes in a head of 512 channels
_CLAM = re.compile(r"splits_\d+\.csv")  # and not splits_0_bool.csv beside it
_IDS = ("cases", "case_ids", "slides", "slide_ids", "ids")  # nanopath's words for them


def make_parts(
    cohort: Cohort, splits: Path | None = None, *, folds: int, inner: int, seed: int
) -> tuple[Part, ...]:
    """The folds of a file, else `folds` stratified ones.

    Where a fold has nobody to stop by, every `inner`-th of its training cases is, stratified.

    Raises DatasetError, InvalidInputError: a case on two sides, a side without cases, a class with
    fewer cases than folds.
    """
    strata, target = cohort.strata, cohort.target
    names = target.names if target.exclusive else ()
    if splits is not None:
        triples = [_sides(cohort, words, splits) for words in _read_splits(splits)]
    else:
        drawn = stratified_folds(strata, folds=folds, seed=seed, class_names=names)
        triples = [(train, train[:0], test) for train, test in drawn]
    parts = []
    for fold, (train, stop, test) in enumerate(triples):
        if not len(stop):
            own = strata[train]
            most = max(2, min(inner, int(np.unique(own, return_counts=True)[1].min())))
            held = stratified_folds(own, folds=most, seed=seed + fold + 1, class_names=names)
            train, stop = (train[part] for part in held[0])  # noqa: PLW2901
        sides = {"train": train, "stop": stop, "test": test}
        parts.append(Part(**{side: tuple(rows.tolist()) for side, rows in sides.items()}))
    return tuple(parts)


def _sides(cohort: Cohort, words: Mapping[str, str], path: Path) -> tuple[IndexArray, ...]:
    """Cases that train, stop and test; where nobody tests, those that stop do."""
    sides: dict[str, list[int]] = {side: [] for side in SIDES}
    for i, (case, slides) in enumerate(zip(cohort.cases, cohort.slides, strict=True)):
        found = sorted({words[name] for name in (case, *slides) if name in words})
        check(len(found) < 2, "a case must be on one side of a split", f"{case!r} in {found}")
        for side in found:
            sides[side].append(i)
    if not sides[TEST]:
        sides[TEST], sides[VAL] = sides[VAL], []
    got = f"{len(sides[TRAIN])} and {len(sides[TEST])} of {len(cohort.cases)} in {str(path)!r}"
    check(sides[TRAIN] and sides[TEST], "a split must have cases to train and to test", got)
    return tuple(np.array(sides[name], dtype=np.int64) for name in SIDES)


def _read_splits(path: Path) -> Iterator[dict[str, str]]:
    """For each fold: id of a case or slide -> train, val or test.

    A folder of CLAM's splits_0.csv, ...; Patho-Bench's k=all.tsv or its folder; nanopath's JSON; a
    table with the columns fold_0, ... or split, beside case_id or slide_id.
    """
    file = path / PATHOBENCH_TABLE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        files = sorted(p for p in path.iterdir() if _CLAM.fullmatch(p.name))
        rule = f"splits must hold {PATHOBENCH_TABLE} or splits_0.csv"
        check(files, rule, f"none in {str(path)!r}")
        for rows in (read_rows(file, (TRAIN, TEST)) for file in files):
            yield {row[side]: side for row in rows for side in SIDES if row.get(side)}
    elif path.suffix == ".json":
        with rewording("splits must be JSON", path, OSError, ValueError, error=DatasetError):
            document = json.loads(path.read_text(encoding="utf-8"))
        for fold in document.get("folds", [document]):
            yield {str(i): side for side in SIDES if side in fold for i in _listed(fold[side])}
    else:
        rows = read_rows(file, ())
        key = next((c for c in (*CASE_COLUMNS, "slide_id") if c in rows[0]), "")
        columns = [c for c in rows[0] if c.startswith("fold_") or c == "split"]
        got = f"{', '.join(rows[0])} in {str(file)!r}"
        check(key and columns, "splits must have case_id or slide_id, and fold_0 or split", got)
        for column in columns:
            yield {r[key]: split_name(r[column], str(file)) for r in rows if r[column]}


def _listed(ids: Any) -> list[Any]:
    """The ids of a side: a list, or under one of nanopath's words."""
    found = next((ids[w] for w in _IDS if w in ids), []) if isinstance(ids, dict) else ids
    check(isinstance(found, list), "a side of a split must be a list of ids", repr(found))
    return [*found]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained on, in every worker."""

    cohort: Cohort
    parts: tuple[Part, ...]
    sums: tuple[str, ...] = ()  # `fingerprint` of each file of embeddings

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
    losses: Losses
    best: int  # epoch, from 1
    temperature: float
    logits: Floats  # (n, K) of the test cases
    slides: Floats  # (m, K)
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

    def __call__(self, entries: Sequence[FoldJob], *, on_event: OnEvent) -> Report[FoldDone]:
        """See `Task.__call__`. Memory: `memory`, of the whole process."""
        set_threads(self.threads, torch_too=True)
        study, results = Study.load(self.out), []
        files = study.cohort.paths
        largest = max(sum(path.stat().st_size for path in paths) for paths in files)
        rest = parse_bytes(self.memory) - psutil.Process().memory_info().rss
        cells = any(HEADS.load(job.head.head).needs_cells for job in entries)
        with Bags(files, budget_bytes=rest - _BAGS_AT_WORK * largest, cells=cells) as bags:
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
        with hold(home / job.name / LOCK_NAME):  # another process at the same fold is waited for
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
    """Hash of all that decides a fold's bytes; of embeddings 8 samples of each file."""
    cohort, part = study.cohort, study.parts[job.fold]
    fit = replace(job.fit, checkpoint_s=0.0)
    known = {"cases": cohort.cases, "slides": cohort.slides, "values": cohort.values}
    told = {"target": as_mapping(cohort.target), "part": as_mapping(part), "sums": study.sums}
    return stage_key(head=as_mapping(job.head), fit=as_mapping(fit), **known, **told)


def read_fold(out: Path, name: str, key: str | None = None) -> FoldResult | None:
    """A fold's file; None where it is not there, damaged, or has another key than is asked for."""
    try:
        said, tensors = read_told(out / FOLDS / f"{name}.safetensors")
    except (OSError, SafetensorError):
        return None
    own: dict[str, Any] = {k: tensors.pop(k).numpy() for k in ("logits", "slides", "means")}
    own |= {"best": said["best"], "temperature": said["temperature"]}
    state = {k.removeprefix("head."): v for k, v in tensors.items()}
    losses = [(train, stop) for train, stop in said["losses"]]
    fits = key is None or said["key"] == key
    return FoldResult(name=name, state=state, losses=losses, **own) if fits else None
