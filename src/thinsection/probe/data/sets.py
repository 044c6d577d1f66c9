"""Labelled data: what probes take, checked once at the door.

A test split has no place here: sets hold training and validation rows, or cases and their folds.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from thinsection.errors import require
from thinsection.evaluation.cases import (
    CASE_COLUMNS,
    Groups,
    spelling_notes,
    table_groups,
)
from thinsection.evaluation.embeddings import Embeddings, check_finite, check_vectors
from thinsection.evaluation.labels import encode_labels
from thinsection.evaluation.leaks import check_leakage, near_cases
from thinsection.evaluation.metrics import Fold, IndexArray
from thinsection.evaluation.splits import draw_rows, drawn_folds
from thinsection.evaluation.tables import TextRow, check, split_fold

Labels = npt.NDArray[np.int64]  # (N,), 0..K-1
FOLDS = 3  # where data bring no split: one of so many validates


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows that are used together; `make_split` makes and checks one."""

    embeddings: Embeddings  # finite
    labels: Labels
    ids: tuple[str, ...]  # a name per row, for the table of predictions
    groups: Groups | None = None  # whose the rows are; None where nobody knows

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: IndexArray) -> "Split":
        """Those of some rows."""
        groups, ids = (
            self.groups and self.groups.take(rows),
            tuple(self.ids[i] for i in rows),
        )
        x, labels = self.embeddings[rows], self.labels[rows]
        return Split(embeddings=x, labels=labels, ids=ids, groups=groups)


Pair = tuple[Split, Split]  # train and validation


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSet:
    """Training and validation embeddings of one dataset."""

    name: str
    class_names: tuple[str, ...]  # of labels 0..K-1
    train: Split
    val: Split
    facts: dict[str, Any] = field(
        default_factory=dict
    )  # for the result file: source, split, ...
    allow_leakage: bool = (
        False  # whether train and val may share patients, slides or rows
    )

    def tested_on(self, other: "TileSet") -> "TileSet":
        """All rows train, and all rows of the other set are scored.

        Memory: both once more. Raises DatasetError: they have other classes.
        """
        names, rule = self.class_names, "test must have the classes of the data"
        found = f"{', '.join(other.class_names)} for {', '.join(names)}"
        check(other.class_names == names, rule, found)
        facts = {
            **self.facts,
            "split_rule": f"all rows train, all of {other.name!r} are scored",
        }
        train, val = (
            join_splits(self.train, self.val),
            join_splits(other.train, other.val),
        )
        return replace(self, train=train, val=val, facts=facts)

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def hashes(self) -> dict[str, str]:
        """See `data_hashes`."""
        parts = (self.train, self.val)
        rows = [(part.ids, part.labels.tolist()) for part in parts]
        return data_hashes(
            [part.embeddings for part in parts], (self.class_names, rows)
        )


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image: a file, or row `row` of the dataset 'x' of an HDF5 file (PCam)."""

    path: Path
    row: int | None = None

    @property
    def name(self) -> str:
        """For tables: folder/file, or file:row."""
        of_folder = f"{self.path.parent.name}/{self.path.name}"
        return of_folder if self.row is None else f"{self.path.stem}:{self.row}"


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """A dataset before it is split: N labelled rows, either embeddings or images."""

    name: str
    class_names: tuple[str, ...]
    labels: Labels
    fold: Fold  # rows that train, and rows that validate; a row may do neither
    facts: dict[str, Any]
    embeddings: Embeddings | None = None
    ids: Sequence[str] = ()  # (N,), of embeddings; images have names
    images: Sequence[ImageRef] = ()
    groups: Groups | None = None

    def __post_init__(self) -> None:
        if self.embeddings is not None:
            check_finite(self.embeddings, self.ids)

    def tile_set(
        self, read: Callable[[IndexArray], Embeddings], **facts: Any
    ) -> TileSet:
        """The embeddings that `read` gives of the fold's rows, with further facts."""
        ids = self.ids or [image.name for image in self.images]

        def part(rows: IndexArray) -> Split:
            groups = self.groups and self.groups.take(rows)
            return make_split(
                read(rows), self.labels[rows], [ids[i] for i in rows], groups=groups
            )

        train, val = map(part, self.fold)
        facts, names = {**self.facts, **facts}, self.class_names
        return TileSet(
            name=self.name, class_names=names, train=train, val=val, facts=facts
        )

    def at_most_per_class(self, most: int, *, seed: int) -> "LabelledRows":
        """With at most `most` rows of each class in train and in val; the facts say so."""
        require(most >= 1, "max_per_class must be >= 1", most)
        train, val = (r[draw_rows(self.labels[r], most, seed=seed)] for r in self.fold)
        return replace(
            self, fold=(train, val), facts={**self.facts, "max_per_class": most}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cases:
    """Patients or slides with a vector each."""

    name: str
    ids: tuple[str, ...]  # (n,)
    vectors: Embeddings  # (n, D)
    # files of each case's tile embeddings, for probes of other packages; () for given vectors
    files: tuple[tuple[Path, ...], ...] = ()
    folds: tuple[Fold, ...] | None = (
        None  # the dataset's own; None lets the protocol draw them
    )
    groups: Groups | None = (
        None  # the patients of the cases; None: each case is its own
    )
    allow_leakage: bool = (
        False  # whether the parts of a fold may share patients or vectors
    )
    facts: dict[str, Any] = field(default_factory=dict)  # for the result file

    _columns: ClassVar[
        tuple[str, ...]
    ]  # of a case, beside its vector; the first makes the strata

    def __post_init__(self) -> None:
        """Vectors must be finite (n, D), columns (n,), ids distinct."""
        shape, n = self.vectors.shape, len(self.ids)
        fits = len(shape) == 2 and shape[0] == n and 0 not in shape
        require(fits, "vectors must be (n, D), one a case", f"{shape} for {n} cases")
        twice = next((i for i, times in Counter(self.ids).items() if times > 1), None)
        require(twice is None, "case ids must be distinct", f"{twice!r} twice")
        check_vectors(self.vectors, self.ids)
        shapes = [getattr(self, name).shape for name in self._columns]
        found = f"{' and '.join(map(str, shapes))} for {n} cases"
        require(
            {*shapes} == {(n,)},
            f"{' and '.join(self._columns)} must be one a case",
            found,
        )

    def hashes(self, folds: Sequence[Fold]) -> dict[str, str]:
        """See `data_hashes`."""
        names = [n for n in ("class_names", *self._columns) if hasattr(self, n)]
        asked = [np.asarray(getattr(self, name)).tolist() for name in names]
        by_fold = [(train.tolist(), val.tolist()) for train, val in folds]
        return data_hashes([self.vectors], (self.ids, asked, by_fold))

    def take(self, rows: IndexArray) -> Self:
        """Some of the cases, without the dataset's folds."""
        kept: dict[str, Any] = {
            n: getattr(self, n)[rows] for n in ("vectors", *self._columns)
        }
        kept["ids"] = tuple(self.ids[i] for i in rows)
        kept["files"] = tuple(self.files[i] for i in rows if self.files)
        return replace(
            self, folds=None, groups=self.groups and self.groups.take(rows), **kept
        )

    def relabelled(self, order: IndexArray) -> Self:
        """Each case with the label, or the follow-up, of another."""
        return replace(
            self, **{name: getattr(self, name)[order] for name in self._columns}
        )

    @property
    def strata(self) -> Labels:
        """What folds keep in proportion: labels, or events."""
        return np.asarray(getattr(self, self._columns[0]), dtype=np.int64)

    @property
    def together(self) -> tuple[str, ...]:
        """The patients, where one of them has several cases; else ()."""
        of_row = self.groups.of_row if self.groups else ()
        return of_row if len({*of_row}) < len(of_row) else ()

    def leakage(self, folds: Sequence[Fold]) -> str:
        """What the parts of any fold share; raises DatasetError where that is not allowed."""
        known: dict[str, Any] = {
            "embeddings": self.vectors,
            "labels": self.strata,
            "ids": self.ids,
        }
        whole = Split(**known, groups=self.groups)
        parts = [(whole.take(train), whole.take(val)) for train, val in folds]
        allowed = self.allow_leakage
        said = check_leakage(parts, self.name, allowed=allowed, rows="cases")
        return said + near_cases(self.vectors, self.ids, folds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSet(_Cases):
    """Labelled cases."""

    class_names: tuple[str, ...]  # of labels 0..K-1
    labels: Labels  # (n,)
    _columns: ClassVar[tuple[str, ...]] = ("labels",)


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalSet(_Cases):
    """Cases with a follow-up."""

    event: npt.NDArray[
        np.bool_
    ]  # (n,): True where it was seen, False where the case was censored
    time: npt.NDArray[np.float64]  # (n,), > 0, in the dataset's own unit
    _columns: ClassVar[tuple[str, ...]] = ("event", "time")

    def __post_init__(self) -> None:
        _Cases.__post_init__(self)
        for name, time in zip(self.ids, self.time, strict=True):
            require(
                0 < time < np.inf,
                "time must be finite and > 0",
                f"{time} for case {name!r}",
            )
        require(
            self.event.any(), "event must be seen in some case", "only censored cases"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustnessSet:
    """Tiles with their biology, centre and slide, one string a tile."""

    name: str  # of the subset ('camelyon', 'tolkach_esca', or one's own): it decides k
    embeddings: Embeddings  # [CLS | mean of the tokens] in PathoROB
    biological_class: tuple[str, ...]
    medical_center: tuple[str, ...]
    slide_id: tuple[str, ...]
    # the 2 x 2 pair of classes and centres that scores the tile (PathoROB's subset); () for none
    pair: tuple[str, ...] = ()
    groups: Groups | None = None  # None: the slides
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSet:
    """Tiles (spots) with numbers to predict, gene expression for one."""

    name: str
    ids: tuple[str, ...]  # (N,)
    embeddings: Embeddings  # (N, D)
    target_names: tuple[str, ...]  # (T,)
    targets: npt.NDArray[np.float64]  # (N, T)
    folds: tuple[Fold, ...]
    groups: Groups | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def make_split(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike,
    ids: Sequence[str] | None = None,
    *,
    groups: Groups | None = None,
) -> Split:
    """A checked split.

    Raises InvalidInputError: shapes do not fit, nothing is there, or a value is not finite.
    """
    x, y = np.ascontiguousarray(embeddings, dtype=np.float32), np.asarray(labels)
    shaped, whole = (
        x.ndim == 2 and x.size,
        y.ndim == 1 and np.issubdtype(y.dtype, np.integer),
    )
    require(shaped, "embeddings must be (N, D) with N, D >= 1", f"shape {x.shape}")
    require(whole, "labels must be integers (N,)", f"{y.dtype} {y.shape}")
    n, found = len(y), f"{len(x)} and {len(y)}"
    require(len(x) == n, "embeddings and labels must have the same N", found)
    names = tuple(map(str, range(n)) if ids is None else ids)
    require(len(names) == n, "ids must be one a row", f"{len(names)} for {n} rows")
    found = f"{len(groups.of_row) if groups else n} for {n} rows"
    require(
        groups is None or len(groups.of_row) == n, "groups must be one a row", found
    )
    check_finite(x, names)
    return Split(embeddings=x, labels=y.astype(np.int64), ids=names, groups=groups)


def join_splits(*parts: Split) -> Split:
    """The rows of several splits. Memory: all of them."""
    x, labels = (
        np.concatenate(v) for v in zip(*((p.embeddings, p.labels) for p in parts))
    )
    known, groups = [p.groups for p in parts if p.groups], None
    if len(known) == len(parts):
        of_row, slides = (
            sum(v, ()) for v in zip(*((g.of_row, g.slide_ids) for g in known))
        )
        groups = Groups(known[0].unit, of_row, slides)
    return Split(
        embeddings=x, labels=labels, ids=sum((p.ids for p in parts), ()), groups=groups
    )


def data_hashes(embeddings: Sequence[npt.NDArray[Any]], rows: Any) -> dict[str, str]:
    """sha256 of the rows (names, labels, folds), the same for every encoder, and of the vectors."""
    digest = hashlib.sha256()
    for array in embeddings:
        digest.update(np.ascontiguousarray(array).data)
    asked = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return {"rows_sha256": asked, "embeddings_sha256": digest.hexdigest()}


def check_tile_set(data: TileSet) -> TileSet:
    """The set with what its parts share among the facts.

    Raises DatasetError: parts that do not fit each other or the classes, validation of one class,
    or rows, slides or patients in both parts where that is not allowed; InvalidInputError:
    embeddings that are constant or zero.
    """
    if "leakage" in data.facts:  # checked before
        return data
    k, where, parts = (
        data.num_classes,
        f"in {data.name!r}",
        {"train": data.train, "val": data.val},
    )
    widths = [str(split.embeddings.shape[1]) for split in parts.values()]
    rule = "embeddings of train and val must have the same D"
    check(widths[0] == widths[1], rule, f"{' and '.join(widths)} {where}")
    for name, split in parts.items():
        low, high = split.labels.min(), split.labels.max()
        rule = f"labels of {name} must lie in 0..{k - 1}"
        check(low >= 0 and high < k, rule, f"{low}..{high} {where}")
        check_vectors(split.embeddings, split.ids)
    absent = sorted({*range(k)} - {*data.train.labels.tolist()})
    missing = (
        f" (none of {', '.join(data.class_names[c] for c in absent)})" if absent else ""
    )
    rule = "train must hold at least two classes, each with rows"
    check(k >= 2 and not absent, rule, f"{k - len(absent)} of {k}{missing} {where}")
    only = f"only {data.class_names[data.val.labels[0]]!r} {where}"
    several, rule = (
        len({*data.val.labels.tolist()}) > 1,
        "val must hold at least two classes",
    )
    check(several, rule, f"{only}; split by patients of every class")
    said = check_leakage(
        [(data.train, data.val)], data.name, allowed=data.allow_leakage
    )
    return replace(data, facts={**data.facts, "leakage": said})


def label_rows(
    rows: Sequence[TextRow],
    name: str,
    *,
    where: str,
    seed: int,
    class_names: Sequence[str] = (),
    rule: str = "split column",
    **content: Any,
) -> LabelledRows:
    """The one way from rows (label[, split, case_id, slide_id]) to classes, groups and a fold.

    Without a split one of FOLDS validates; `rule` tells of what is given, {} of what is drawn.
    """
    names, labels = encode_labels([r["label"] for r in rows], where, class_names)
    groups, splits = table_groups(rows, where), [r.get("split", "") for r in rows]
    if not rows or any(splits):
        every = "split must be given for every labelled region or tile, or for none"
        check(all(splits), every, f"some in {where}")
        remedy = f"; leave the column out to have one of {FOLDS} folds validate"
        fold = split_fold(splits, where, remedy)
    else:
        folds, over = drawn_folds(
            labels, groups, folds=FOLDS, seed=seed, class_names=names
        )
        drawn = f"fold 0 of {FOLDS} {over}" if over else f"stratified fold 0 of {FOLDS}"
        drawn, fold = f"{drawn}, seed {seed}", folds[0]
        rule = rule.format(drawn) if "{}" in rule else drawn
    columns = ("slide_id", *CASE_COLUMNS)
    notes = spelling_notes(*([row.get(name, "") for row in rows] for name in columns))
    told = {"ids": notes[0]} if notes else {}
    content["facts"] = {"split_rule": rule, **told, **content.get("facts", {})}
    return LabelledRows(name, names, labels, fold, groups=groups, **content)
