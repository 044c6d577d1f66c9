"""Which cases train, say when to stop, and test: drawn by case, or as a file says."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinsection.errors import DatasetError, rewording
from thinsection.predict.labels import Cohort
from thinsection.probe.data.cases import PATHOBENCH_TABLE
from thinsection.probe.data.files import TEST, TRAIN, VAL, check, read_rows, split_name
from thinsection.probe.groups import CASE_COLUMNS
from thinsection.probe.statistics import IndexArray, stratified_folds

_CLAM = re.compile(r"splits_\d+\.csv")  # and not splits_0_bool.csv beside it
_IDS = ("cases", "case_ids", "slides", "slide_ids", "ids")  # nanopath's words for them


@dataclass(frozen=True, kw_only=True)
class Part:
    """A fold, as indices of cases."""

    train: tuple[int, ...]
    stop: tuple[int, ...]  # inner: they choose the epoch, the settings, the temperature
    test: tuple[int, ...]


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
        triples = [_sides(cohort, words, splits) for words in _read(splits)]
    else:
        drawn = stratified_folds(strata, folds=folds, seed=seed, class_names=names)
        triples = [(train, train[:0], test) for train, test in drawn]
    parts = []
    for fold, (rows, given, test) in enumerate(triples):
        train, stop = rows, given
        if not len(given):
            most = max(2, min(inner, int(np.unique(strata[rows], return_counts=True)[1].min())))
            own = strata[rows]
            held = stratified_folds(own, folds=most, seed=seed + fold + 1, class_names=names)
            train, stop = (rows[part] for part in held[0])
        sides = [tuple(map(int, part)) for part in (train, stop, test)]
        parts.append(Part(train=sides[0], stop=sides[1], test=sides[2]))
    return tuple(parts)


def _sides(
    cohort: Cohort, words: Mapping[str, str], path: Path
) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Cases that train, stop and test; where nobody tests, those that stop do."""
    sides: dict[str, list[int]] = {TRAIN: [], VAL: [], TEST: []}
    for i, (case, slides) in enumerate(zip(cohort.cases, cohort.slides, strict=True)):
        found = {words[name] for name in (case, *slides) if name in words}
        check(
            len(found) <= 1, "a case must be on one side of a split", f"{case!r} in {sorted(found)}"
        )
        for side in found:
            sides[side].append(i)
    if not sides[TEST]:
        sides[TEST], sides[VAL] = sides[VAL], []
    got = f"{len(sides[TRAIN])} and {len(sides[TEST])} of {len(cohort.cases)} in {str(path)!r}"
    check(sides[TRAIN] and sides[TEST], "a split must have cases to train and to test", got)
    train, stop, test = (np.array(sides[name], dtype=np.int64) for name in (TRAIN, VAL, TEST))
    return train, stop, test


def _read(path: Path) -> Iterator[dict[str, str]]:
    """For each fold: id of a case or slide -> train, val or test.

    A folder of CLAM's splits_0.csv, ...; Patho-Bench's k=all.tsv or its folder; nanopath's JSON; a
    table with the columns fold_0, ... or split, beside case_id or slide_id.
    """
    if path.is_dir() and not (path / PATHOBENCH_TABLE).exists():
        files = sorted(p for p in path.iterdir() if _CLAM.fullmatch(p.name))
        check(
            files, f"splits must hold {PATHOBENCH_TABLE} or splits_0.csv", f"none in {str(path)!r}"
        )
        for file in files:
            yield {
                r[s]: s
                for r in read_rows(file, (TRAIN, TEST))
                for s in (TRAIN, VAL, TEST)
                if r.get(s)
            }
    elif path.suffix == ".json":
        with rewording("splits must be JSON", path, OSError, ValueError, error=DatasetError):
            document = json.loads(path.read_text(encoding="utf-8"))
        for fold in document.get("folds", [document]):
            sides = {
                split_name(s, str(path)): ids for s, ids in fold.items() if s in (TRAIN, VAL, TEST)
            }
            yield {str(i): side for side, ids in sides.items() for i in _listed(ids)}
    else:
        file = path / PATHOBENCH_TABLE if path.is_dir() else path
        rows = read_rows(file, ())
        key = next((c for c in (*CASE_COLUMNS, "slide_id") if c in rows[0]), "")
        columns = [c for c in rows[0] if c.startswith("fold_") or c == "split"]
        got = f"{', '.join(rows[0])} in {str(file)!r}"
        check(key and columns, "splits must have case_id or slide_id, and fold_0 or split", got)
        for column in columns:
            yield {r[key]: split_name(r[column], str(file)) for r in rows if r[column]}


def _listed(ids: object) -> list[object]:
    """The ids of a side: a list, or under one of nanopath's words."""
    found = next((ids[w] for w in _IDS if w in ids), []) if isinstance(ids, dict) else ids
    check(isinstance(found, list), "a side of a split must be a list of ids", repr(found))
    return list(found) if isinstance(found, list) else []
