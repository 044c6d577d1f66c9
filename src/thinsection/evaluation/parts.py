"""Folds of a cohort: training, validation and test cases; drawn, by site, or from a split file.

Every split is checked before anything is trained: an id is in one set only, a patient too, the
training cases have every class, and the test cases can be scored.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from thinsection.errors import ConfigError, DatasetError, InvalidInputError, rewording
from thinsection.evaluation.cases import CASE_COLUMNS, listed_names
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.splits import grouped_folds, stratified_folds
from thinsection.evaluation.tables import TEST, TRAIN, VAL, read_rows, split_name
from thinsection.files.atomic import read_json
from thinsection.slide.ids import KnownIds
from thinsection.types import Json, counted

FoldUnit = Literal["patient", "site", "each-site"]
PATHOBENCH_TABLE = "k=all.tsv"
SIDES = (TRAIN, VAL, TEST)
# smallest number of training cases of a class: one to train on, one to validate on
LEAST_INNER = 2
# smallest number of cases of a class: one of them is tested
LEAST_OF_CLASS = 3
_CLAM = re.compile(r"splits_\d+\.csv")  # does not match splits_0_bool.csv beside it
_IDS = ("cases", "case_ids", "slides", "slide_ids", "ids")  # nanopath's words for them
SplitEntry = tuple[tuple[str, ...], str]  # the ids of a slide or case, and its side


@dataclass(frozen=True, kw_only=True)
class FoldCases:
    """Cases of one fold, as indices: training, inner validation and test cases."""

    train: tuple[int, ...]
    # Inner validation cases; they decide the epoch, the settings and the temperature. "stop" is the
    # key in cohort.json.
    stop: tuple[int, ...]
    test: tuple[int, ...]
    repeat: int = 0  # number of the draw, if folds are drawn several times


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings:
    """Settings of how folds are drawn."""

    folds: int = 5
    # number of parts into which the training cases are divided; one is the inner validation set
    inner: int = 5
    seed: int = 0
    unit: FoldUnit = "patient"
    repeats: int = 1


def make_parts(
    cohort: Cohort,
    settings: FoldSettings,
    splits: Path | None = None,
    *,
    allow_leakage: bool = False,
) -> tuple[tuple[FoldCases, ...], list[str]]:
    """The folds, and sentences on how they were made.

    Folds of a file are not changed. If a fold has no inner validation set, a stratified share of
    1 / `inner` of its training cases becomes it.

    Raises DatasetError, InvalidInputError, ConfigError: an id or a patient in two sets, an empty
    set, a class with fewer cases than folds, test cases that cannot be scored.
    """
    if splits is not None:
        if settings.unit != "patient" or settings.repeats != 1:
            raise ConfigError(
                "splits must not be combined with fold_unit or repeats, got "
                f"{str(splits)!r}; omit one of them"
            )
        parts, lines = _file_parts(cohort, splits, allow_leakage=allow_leakage)
    elif settings.unit == "each-site":
        parts, lines = _each_site(cohort)
    else:
        parts = []
        for repeat in range(settings.repeats):
            parts += _drawn(cohort, settings, repeat)
        times = f", drawn {settings.repeats} times" if settings.repeats > 1 else ""
        sites = ", sites whole" if settings.unit == "site" else ""
        several_cases = len(set(cohort.patients)) < len(cohort.patients)
        patients = ", patients whole" if several_cases else ""
        lines = [
            f"{settings.folds} stratified folds of cases{patients}{sites}{times}, seed "
            f"{settings.seed}"
        ]
    for fold, part in enumerate(parts):
        why = why_unscorable(cohort, np.array(part.test))
        if why:
            raise DatasetError(
                f"test cases of each fold must allow a score, got {why} in fold {fold}; use "
                "fewer folds, more cases, or another split"
            )
    parts = [
        part if part.stop else _with_stop(cohort, part, settings, fold)
        for fold, part in enumerate(parts)
    ]
    if cohort.target.exclusive:
        for fold, part in enumerate(parts):
            present = {int(label) for label in cohort.array[list(part.train), 0]}
            names = enumerate(cohort.target.names)
            absent = [name for label, name in names if label not in present]
            if absent:
                raise DatasetError(
                    f"training cases must have every class, got none of {', '.join(absent)} in "
                    f"fold {fold}"
                )
    return tuple(parts), lines


def _drawn(cohort: Cohort, settings: FoldSettings, repeat: int) -> list[FoldCases]:
    """Folds of one draw. A patient stays in one fold, and so does a site if `unit` is 'site'.

    Site-preserved folds (Howard et al. 2021) are balanced by scikit-learn's StratifiedGroupKFold,
    which is greedy; the authors solve a quadratic programme.
    """
    groups = _required_sites(cohort) if settings.unit == "site" else cohort.patients
    strata = cohort.strata
    seed = settings.seed + repeat
    if len(set(groups)) == len(groups):
        _check_counts(cohort, settings.folds)
        folds = stratified_folds(strata, folds=settings.folds, seed=seed)
    else:
        count = len(set(groups))
        if count < settings.folds:
            word = "sites" if settings.unit == "site" else "patients"
            raise InvalidInputError(
                f"{word} must be at least {settings.folds} for {settings.folds} folds, "
                f"got {count}; pass folds={count}"
            )
        _check_counts(cohort, settings.folds)
        folds = grouped_folds(strata, groups, folds=settings.folds, seed=seed)
    return [
        FoldCases(train=_rows(train), stop=(), test=_rows(test), repeat=repeat)
        for train, test in folds
    ]


def _check_counts(cohort: Cohort, folds: int) -> None:
    """Refuses a class or stratum with fewer cases than folds."""
    fewest, words = _rarest(cohort, range(len(cohort.cases)))
    if fewest >= folds:
        return
    remedy = f"pass folds={fewest}, or add cases"
    if fewest < LEAST_OF_CLASS:
        remedy = (
            f"add cases: {LEAST_OF_CLASS} are the least, with folds={LEAST_OF_CLASS}"
        )
    raise InvalidInputError(
        f"{folds} folds must have >= {folds} cases of each class, one for each test set, got "
        f"{counted(fewest, 'case')} {words}; {remedy}"
    )


def _check_inner_counts(
    cohort: Cohort, part: FoldCases, settings: FoldSettings, fold: int
) -> None:
    """Refuses training cases that are too few for a validation set with each class."""
    fewest, words = _rarest(cohort, part.train)
    if fewest >= LEAST_INNER:
        return
    in_all = _rarest(cohort, range(len(cohort.cases)))[0]
    remedy = "add cases, or use other splits"
    if settings.unit != "each-site" and in_all > settings.folds:
        remedy = f"pass folds={in_all}, so that fewer of them are tested at once, or add cases"
    elif in_all < LEAST_OF_CLASS:
        remedy = (
            f"add cases: {LEAST_OF_CLASS} are the least, with folds={LEAST_OF_CLASS}"
        )
    raise InvalidInputError(
        f"training cases of fold {fold + 1} must have >= {LEAST_INNER} cases of each class, one "
        f"for training and one for the validation set, got {counted(fewest, 'case')} {words}; "
        f"{remedy}"
    )


def _rarest(cohort: Cohort, rows: Sequence[int]) -> tuple[int, str]:
    """Number of cases of the rarest class among some cases, and its name in words."""
    strata, counts = np.unique(cohort.strata[list(rows)], return_counts=True)
    rarest = strata[counts.argmin()]
    target = cohort.target
    words = f"of class {target.names[rarest]!r}" if target.exclusive else f"of {rarest}"
    if target.kind in ("cox", "discrete"):
        words = "with an event" if rarest else "without an event"
    elif target.kind == "multilabel":
        words = "with the rarest value of a label"
        if not rarest:
            words = "without the rarest value of any label"
    elif target.kind == "regression":
        words = f"in quarter {rarest + 1} of the values"
    return int(counts.min()), words


def _required_sites(cohort: Cohort) -> tuple[str, ...]:
    """The site of each case; refuses missing sites, and patients of several sites."""
    if not cohort.sites:
        raise DatasetError(
            "folds by site need the site of each case, got none; pass site=COLUMN of the "
            "labels"
        )
    site_by_patient: dict[str, str] = {}
    for patient, site in zip(cohort.patients, cohort.sites, strict=True):
        other = site_by_patient.setdefault(patient, site)
        if other != site:
            raise DatasetError(
                f"a patient must belong to one site, got {other!r} and {site!r} for {patient!r}"
            )
    return cohort.sites


def _each_site(cohort: Cohort) -> tuple[list[FoldCases], list[str]]:
    """One fold per site: a model of the other sites is tested on it.

    A site that cannot be scored is only in training sets.
    """
    sites = np.array(_required_sites(cohort))
    parts: list[FoldCases] = []
    unscored: list[str] = []
    num_unscored_cases = 0
    for site in np.unique(sites):
        test = np.flatnonzero(sites == site)
        why = why_unscorable(cohort, test)
        if why:
            unscored.append(f"{site}: {why}")
            num_unscored_cases += len(test)
        else:
            train = np.flatnonzero(sites != site)
            parts.append(FoldCases(train=_rows(train), stop=(), test=_rows(test)))
    # one site with a score is enough if there are other sites to train on
    if not parts or len(parts) + len(unscored) < 2:
        raise DatasetError(
            "leave-one-site-out must have two sites, one of which can be scored, got "
            f"{listed_names(unscored) or sites[0]}"
        )
    lines = [
        f"leave-one-site-out: {counted(len(parts), 'site')}, and a model of the other sites "
        "predicts each"
    ]
    if unscored:
        lines.append(
            f"{counted(len(unscored), 'site')} with {counted(num_unscored_cases, 'case')} only in "
            f"training sets, because no score can be computed there ({listed_names(unscored)})"
        )
    return parts, lines


def _with_stop(
    cohort: Cohort, part: FoldCases, settings: FoldSettings, fold: int
) -> FoldCases:
    """The fold with some of its training cases as inner validation cases; patients stay whole."""
    train = np.array(part.train)
    strata = cohort.target.strata(cohort.array[train])
    patients = [cohort.patients[i] for i in part.train]
    seed = settings.seed + fold + 1
    fewest = int(np.unique(strata, return_counts=True)[1].min())
    folds = max(LEAST_INNER, min(settings.inner, fewest))
    if len(set(patients)) == len(patients):
        _check_inner_counts(cohort, part, settings, fold)
        inner_folds = stratified_folds(strata, folds=folds, seed=seed)
    else:
        num_patients = len(set(patients))
        if num_patients < LEAST_INNER:
            raise InvalidInputError(
                f"training cases of fold {fold + 1} must have >= {LEAST_INNER} patients, one for "
                f"training and one for the validation set, got {num_patients}; add patients"
            )
        folds = min(folds, num_patients)
        inner_folds = grouped_folds(strata, patients, folds=folds, seed=seed)
    inner_train, stop = inner_folds[0]
    return replace(part, train=_rows(train[inner_train]), stop=_rows(train[stop]))


def _rows(rows: IndexArray) -> tuple[int, ...]:
    return tuple(rows.tolist())


def why_unscorable(cohort: Cohort, rows: IndexArray) -> str:
    """Why no score can be computed from these cases alone; '' if one can."""
    values = cohort.array[rows]
    target = cohort.target
    if target.exclusive:
        labels = np.unique(values[:, 0]).astype(int)
        return "" if len(labels) > 1 else f"only class {target.names[labels[0]]!r}"
    if target.kind == "multilabel":
        scored = (values == 0).any(axis=0) & (values == 1).any(axis=0)
        pairs = zip(target.names, scored, strict=True)
        constant = [name for name, is_scored in pairs if not is_scored]
        return f"one value of {', '.join(constant)}" if constant else ""
    if target.kind == "regression":
        return "" if len(np.unique(values)) > 1 else "one value"
    events, times = values.T
    has_comparable_pair = events.any() and times[events == 1].min() < times.max()
    if has_comparable_pair:
        return ""
    return "no event before the end of another case's follow-up"


def _file_parts(
    cohort: Cohort, path: Path, *, allow_leakage: bool
) -> tuple[list[FoldCases], list[str]]:
    """The folds of a file, and sentences on names that match no case, and on cases left out."""
    # a split may name a case by its own id, its patient's or its slides'
    names = {*cohort.cases, *cohort.patients}
    for slides in cohort.slides:
        names.update(slides)
    known_ids = KnownIds(names, "case_id")
    parts: list[FoldCases] = []
    unmatched: dict[str, None] = {}
    used: set[int] = set()
    for fold, entries in enumerate(read_splits(path)):
        where = f"fold {fold} of {str(path)!r}"
        sides = _side_by_id(entries, known_ids, where)
        for ids, _ in entries:
            if not any(known_ids.find(name) for name in ids):
                unmatched[known_ids.words(ids[0])] = None
        part = _part_of(cohort, sides, where, allow_leakage=allow_leakage)
        used |= {*part.train, *part.stop, *part.test}
        parts.append(part)
    left_out = [case for i, case in enumerate(cohort.cases) if i not in used]
    lines = [f"{counted(len(parts), 'fold')} of {path.name}"]
    if unmatched:
        shown = listed_names([*unmatched])
        lines.append(
            f"{path.name} has {counted(len(unmatched), 'name')} without a case: {shown}"
        )
    if left_out:
        shown = listed_names(left_out)
        lines.append(
            f"{path.name} has no fold for {counted(len(left_out), 'case')}: {shown}"
        )
    return parts, lines


def _side_by_id(
    entries: Sequence[SplitEntry], known_ids: KnownIds, where: str
) -> dict[str, str]:
    """Set (training, validation or test) by id; refuses an id in two sets."""
    sides: dict[str, str] = {}
    for ids, side in entries:
        for name in ids:
            other = sides.setdefault(known_ids.find(name) or name, side)
            if other != side:
                raise DatasetError(
                    f"an id must be on one side of a split, got {name!r} in {other} and {side} "
                    f"in {where}; put all slides of a case on one side"
                )
    return sides


def _part_of(
    cohort: Cohort, side_by_id: dict[str, str], where: str, *, allow_leakage: bool
) -> FoldCases:
    """Fold with the cases of each set; without a test set, the validation set is the test set."""
    sides: dict[str, list[int]] = {side: [] for side in SIDES}
    side_by_patient: dict[str, str] = {}
    for i, case in enumerate(cohort.cases):
        patient = cohort.patients[i]
        slides = cohort.slides[i]
        ids = {case, patient, *slides}
        sides_of_case = sorted({side_by_id[name] for name in ids if name in side_by_id})
        if len(sides_of_case) > 1:
            raise DatasetError(
                f"a case must be on one side of a split, got {case!r} in {sides_of_case} "
                f"in {where}"
            )
        for side in sides_of_case:
            sides[side].append(i)
            other = side_by_patient.setdefault(patient, side)
            if other != side and not allow_leakage:
                raise DatasetError(
                    f"a patient must be on one side of a split, got {patient!r} in {other} and "
                    f"{side} in {where}; split by patient, or pass allow_leakage=True"
                )
    if not sides[TEST]:
        sides[TEST] = sides[VAL]
        sides[VAL] = []
    if not sides[TRAIN] or not sides[TEST]:
        counts = f"{len(sides[TRAIN])} and {len(sides[TEST])} of {len(cohort.cases)}"
        raise DatasetError(
            f"a split must have cases in training and test set, got {counts} in {where}"
        )
    return FoldCases(
        train=tuple(sides[TRAIN]), stop=tuple(sides[VAL]), test=tuple(sides[TEST])
    )


def read_splits(path: Path) -> Iterator[list[SplitEntry]]:
    """For each fold: the ids of a slide or case, and train, val or test.

    A folder of CLAM's splits_0.csv, ...; Patho-Bench's k=all.tsv or its folder; nanopath's JSON; a
    table with the columns fold_0, ... or split, beside case_id or slide_id.
    """
    file = path / PATHOBENCH_TABLE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        files = sorted(p for p in path.iterdir() if _CLAM.fullmatch(p.name))
        if not files:
            raise DatasetError(
                f"splits must contain {PATHOBENCH_TABLE} or splits_0.csv, got neither in "
                f"{str(path)!r}"
            )
        for clam_file in files:
            # a table with a column of ids for each side
            rows = read_rows(clam_file, (TRAIN, TEST))
            yield [
                ((row[side],), side) for row in rows for side in SIDES if row.get(side)
            ]
    elif path.suffix == ".json":
        rule = "splits must be JSON"
        with rewording(rule, path, OSError, ValueError, error=DatasetError):
            document = read_json(path)
        for fold in document.get("folds", [document]):
            entries: list[SplitEntry] = []
            for side in SIDES:
                if side in fold:
                    entries += [((str(name),), side) for name in _listed(fold[side])]
            yield entries
    else:
        yield from _table_splits(file)


def _table_splits(file: Path) -> Iterator[list[SplitEntry]]:
    """Entries of each column of a table, see `read_splits`."""
    rows = read_rows(file, ())
    keys = [c for c in (*CASE_COLUMNS, "slide_id") if c in rows[0]]
    columns = [c for c in rows[0] if c.startswith("fold_") or c == "split"]
    if not keys or not columns:
        raise DatasetError(
            "splits must have case_id or slide_id, and fold_0 or split, "
            f"got {', '.join(rows[0])} in {str(file)!r}"
        )
    for column in columns:
        entries = []
        for row in rows:
            if row[column]:
                ids = tuple(row[key] for key in keys if row[key])
                entries.append((ids, split_name(row[column], str(file))))
        yield entries


def _listed(ids: Json) -> list[Json]:
    """The ids of a side: a list, or under one of nanopath's words."""
    if isinstance(ids, dict):
        ids = next((ids[word] for word in _IDS if word in ids), [])
    if not isinstance(ids, list):
        raise DatasetError(f"a side of a split must be a list of ids, got {ids!r}")
    return [*ids]
