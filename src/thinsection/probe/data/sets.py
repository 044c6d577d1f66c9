"""Labelled data: what probes take, checked once at the door.

A test split has no place here: sets hold training and validation rows, or cases and their folds.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError, InvalidInputError
from thinsection.evaluation.cases import (
    CASE_COLUMNS,
    Groups,
    spelling_notes,
    table_groups,
    take_rows,
)
from thinsection.evaluation.embeddings import Embeddings, check_finite, check_vectors
from thinsection.evaluation.labels import encode_labels
from thinsection.evaluation.leaks import check_leakage, near_cases
from thinsection.evaluation.metrics import Flags, FloatVector, Fold, IndexArray
from thinsection.evaluation.splits import draw_rows, drawn_folds
from thinsection.evaluation.tables import TextRow, split_fold
from thinsection.types import Json

Labels = npt.NDArray[np.int64]  # (N,), 0..K-1
LEFT_OUT = "left_out"  # fact: why a slide or file cannot be used, by name
FOLDS = 3  # where data bring no split: one of so many validates


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows that are used together; `make_split` makes and checks one."""

    embeddings: Embeddings  # finite
    labels: Labels
    ids: tuple[str, ...]  # a name per row, for the table of predictions
    groups: Groups | None = None  # patients of the rows; None where nobody knows

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: IndexArray) -> "Split":
        """Split of some rows."""
        return take_rows(self, rows, ("embeddings", "labels", "ids", "groups"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSet:
    """Training and validation embeddings of one dataset."""

    name: str
    class_names: tuple[str, ...]  # of labels 0..K-1
    train: Split
    val: Split
    # for the result file: source, split, ...
    facts: dict[str, Json] = field(default_factory=dict)
    # True where train and val may share patients, slides or rows
    allow_leakage: bool = False

    def tested_on(self, other: "TileSet") -> "TileSet":
        """All rows train, and all rows of the other set are scored.

        Memory: both once more. Raises DatasetError: they have other classes.
        """
        if other.class_names != self.class_names:
            raise DatasetError(
                "test must have the classes of the data, "
                f"got {', '.join(other.class_names)} for {', '.join(self.class_names)}"
            )
        rule = (
            f"all rows are in the training set, all rows of {other.name!r} are scored"
        )
        return replace(
            self,
            train=join_splits(self.train, self.val),
            val=join_splits(other.train, other.val),
            facts={
                **self.facts,
                "split_rule": rule,
                **left_out_fact(self.left_out | other.left_out),
            },
        )

    @property
    def left_out(self) -> dict[str, str]:
        """Why a slide, file or image could not be used, by name."""
        return dict(self.facts.get(LEFT_OUT, {}))

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of rows and vectors, see `data_hashes`."""
        parts = (self.train, self.val)
        rows = [(part.ids, part.labels.tolist()) for part in parts]
        vectors = [part.embeddings for part in parts]
        return data_hashes(vectors, (self.class_names, rows))


@dataclass(frozen=True, slots=True)
class Square:
    """A square of an image around a point, px of the image."""

    x: int
    y: int
    size: int  # of an edge


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image: a file, a square of it, or a row of a dataset of an HDF5 file (PCam)."""

    path: Path
    row: int | None = None
    dataset: str = "x"
    square: Square | None = None

    @property
    def name(self) -> str:
        """Name in tables: folder/file, file:row, or folder/file:XxY of a square's centre."""
        if self.row is not None:
            return f"{self.path.stem}:{self.row}"
        return f"{self.path.parent.name}/{self.path.name}{self._point}"

    @property
    def place(self) -> str:
        """Path of the file, with the row or point; unlike a name it means one image."""
        if self.row is not None:
            return f"{self.path}:{self.row}"
        return f"{self.path}{self._point}"

    @property
    def _point(self) -> str:
        return f":{self.square.x}x{self.square.y}" if self.square else ""


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """A dataset before it is split: N labelled rows, either embeddings or images."""

    name: str
    class_names: tuple[str, ...]
    labels: Labels
    fold: Fold  # rows that train, and rows that validate; a row may do neither
    facts: dict[str, Json]
    embeddings: Embeddings | None = None
    ids: Sequence[str] = ()  # (N,), of embeddings; images have names
    images: Sequence[ImageRef] = ()
    groups: Groups | None = None

    def __post_init__(self) -> None:
        if self.embeddings is not None:
            check_finite(self.embeddings, self.ids)

    def tile_set(
        self, vectors: tuple[Embeddings, Embeddings], **facts: Json
    ) -> TileSet:
        """The embeddings of the fold's rows, train and val, with further facts."""
        ids = self.ids or [image.name for image in self.images]

        def part(rows: IndexArray, embeddings: Embeddings) -> Split:
            return make_split(
                embeddings,
                self.labels[rows],
                [ids[i] for i in rows],
                groups=self.groups.take(rows) if self.groups else None,
            )

        train, val = self.fold
        return TileSet(
            name=self.name,
            class_names=self.class_names,
            train=part(train, vectors[0]),
            val=part(val, vectors[1]),
            facts={**self.facts, **facts},
        )

    def at_most_per_class(self, most: int, *, seed: int) -> "LabelledRows":
        """The dataset with at most `most` rows of each class in train and in val."""
        if most < 1:
            raise InvalidInputError(f"max_per_class must be >= 1, got {most}")
        train, val = self.fold
        train = train[draw_rows(self.labels[train], most, seed=seed)]
        val = val[draw_rows(self.labels[val], most, seed=seed)]
        facts = {**self.facts, "max_per_class": most}
        return replace(self, fold=(train, val), facts=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cases:
    """Patients or slides with a vector each."""

    name: str
    ids: tuple[str, ...]  # (n,)
    vectors: Embeddings  # (n, D)
    # files of each case's tile embeddings, for probes of other packages; () for given vectors
    files: tuple[tuple[Path, ...], ...] = ()
    # the dataset's own; None lets the protocol draw them
    folds: tuple[Fold, ...] | None = None
    # the patients of the cases; None: each case is its own
    groups: Groups | None = None
    # True where the parts of a fold may share patients or vectors
    allow_leakage: bool = False
    facts: dict[str, Json] = field(default_factory=dict)  # for the result file

    # of a case, beside its vector; the first makes the strata
    _columns: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        """Checks that vectors are finite (n, D), columns (n,), and ids distinct."""
        shape = self.vectors.shape
        count = len(self.ids)
        if len(shape) != 2 or shape[0] != count or 0 in shape:
            raise InvalidInputError(
                f"vectors must be (n, D) with one row per case, got {shape} for {count} cases"
            )
        for case, times in Counter(self.ids).items():
            if times > 1:
                raise InvalidInputError(
                    f"case ids must be distinct, got {case!r} twice"
                )
        check_vectors(self.vectors, self.ids)
        shapes = [getattr(self, name).shape for name in self._columns]
        if set(shapes) != {(count,)}:
            raise InvalidInputError(
                f"{' and '.join(self._columns)} must have one value per case, got "
                f"{' and '.join(map(str, shapes))} for {count} cases"
            )

    def hashes(self, folds: Sequence[Fold]) -> dict[str, str]:
        """Hashes of cases, folds and vectors, see `data_hashes`."""
        names = [n for n in ("class_names", *self._columns) if hasattr(self, n)]
        columns = [np.asarray(getattr(self, name)).tolist() for name in names]
        rows_by_fold = [(train.tolist(), val.tolist()) for train, val in folds]
        return data_hashes([self.vectors], (self.ids, columns, rows_by_fold))

    def take(self, rows: IndexArray) -> Self:
        """Some of the cases, without the dataset's folds."""
        columns = ("ids", "vectors", "files", "groups", *self._columns)
        return take_rows(self, rows, columns, folds=None)

    def relabelled(self, order: IndexArray) -> Self:
        """The cases, each with the label, or the follow-up, of another."""
        columns = {name: getattr(self, name)[order] for name in self._columns}
        return replace(self, **columns)

    @property
    def strata(self) -> Labels:
        """Labels or events, which folds keep in proportion."""
        return np.asarray(getattr(self, self._columns[0]), dtype=np.int64)

    @property
    def shared_patients(self) -> tuple[str, ...]:
        """The patients, where one of them has several cases; else ()."""
        patients = self.groups.of_row if self.groups else ()
        return patients if len(set(patients)) < len(patients) else ()

    def leakage(self, folds: Sequence[Fold]) -> str:
        """Sentence on what the parts of any fold share; DatasetError where that is not allowed."""
        whole = Split(
            embeddings=self.vectors,
            labels=self.strata,
            ids=self.ids,
            groups=self.groups,
        )
        parts = [(whole.take(train), whole.take(val)) for train, val in folds]
        sentence = check_leakage(
            parts, self.name, allowed=self.allow_leakage, rows="cases"
        )
        return sentence + near_cases(self.vectors, self.ids, folds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSet(_Cases):
    """Labelled cases."""

    class_names: tuple[str, ...]  # of labels 0..K-1
    labels: Labels  # (n,)
    _columns: ClassVar[tuple[str, ...]] = ("labels",)


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalSet(_Cases):
    """Cases with a follow-up."""

    # (n,): True where it was seen, False where the case was censored
    event: Flags
    time: FloatVector  # (n,), > 0, in the dataset's own unit
    _columns: ClassVar[tuple[str, ...]] = ("event", "time")

    def __post_init__(self) -> None:
        _Cases.__post_init__(self)
        for name, time in zip(self.ids, self.time, strict=True):
            if not 0 < time < np.inf:
                raise InvalidInputError(
                    f"time must be finite and > 0, got {time} for case {name!r}"
                )
        if not self.event.any():
            raise InvalidInputError(
                "at least one case must have an event, got only censored cases"
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
    facts: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSet:
    """Tiles (spots) with numbers to predict, gene expression for one."""

    name: str
    ids: tuple[str, ...]  # (N,)
    embeddings: Embeddings  # (N, D)
    target_names: tuple[str, ...]  # (T,)
    targets: FloatVector  # (N, T)
    folds: tuple[Fold, ...]
    groups: Groups | None = None
    facts: dict[str, Json] = field(default_factory=dict)


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
    x = np.ascontiguousarray(embeddings, dtype=np.float32)
    y = np.asarray(labels)
    if x.ndim != 2 or not x.size:
        raise InvalidInputError(
            f"embeddings must be (N, D) with N, D >= 1, got shape {x.shape}"
        )
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise InvalidInputError(
            f"labels must be integers (N,), got {y.dtype} {y.shape}"
        )
    count = len(y)
    if len(x) != count:
        raise InvalidInputError(
            f"embeddings and labels must have the same length, got {len(x)} and {count}"
        )
    names = tuple(map(str, range(count)) if ids is None else ids)
    if len(names) != count:
        raise InvalidInputError(
            f"ids must have one entry per row, got {len(names)} for {count} rows"
        )
    if groups is not None and len(groups.of_row) != count:
        raise InvalidInputError(
            f"groups must have one entry per row, got {len(groups.of_row)} for {count} rows"
        )
    check_finite(x, names)
    return Split(embeddings=x, labels=y.astype(np.int64), ids=names, groups=groups)


def join_splits(*parts: Split) -> Split:
    """The rows of several splits. Memory: all of them."""
    groups = None
    groups_of_parts = [part.groups for part in parts if part.groups]
    if len(groups_of_parts) == len(parts):
        groups = Groups(
            groups_of_parts[0].unit,
            tuple(chain.from_iterable(one.of_row for one in groups_of_parts)),
            tuple(chain.from_iterable(one.slide_ids for one in groups_of_parts)),
        )
    return Split(
        embeddings=np.concatenate([part.embeddings for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        ids=tuple(chain.from_iterable(part.ids for part in parts)),
        groups=groups,
    )


def data_hashes(embeddings: Sequence[Embeddings], rows: object) -> dict[str, str]:
    """sha256 of the rows (names, labels, folds), the same for every encoder, and of the vectors."""
    rows_digest = hashlib.sha256(json.dumps(rows).encode())
    digest = hashlib.sha256()
    for array in embeddings:
        digest.update(np.ascontiguousarray(array).data)
    return {
        "rows_sha256": rows_digest.hexdigest(),
        "embeddings_sha256": digest.hexdigest(),
    }


def check_tile_set(data: TileSet) -> TileSet:
    """The set with what its parts share among the facts.

    Raises DatasetError: parts that do not fit each other or the classes, validation of one class,
    or rows, slides or patients in both parts where that is not allowed; InvalidInputError:
    embeddings that are constant or zero.
    """
    if "leakage" in data.facts:  # checked before
        return data
    num_classes = data.num_classes
    where = f"in {data.name!r}"
    dim = data.train.embeddings.shape[1]
    val_dim = data.val.embeddings.shape[1]
    if dim != val_dim:
        raise DatasetError(
            f"embeddings of train and val must have the same number of channels, got {dim} and "
            f"{val_dim} {where}"
        )
    for name, split in (("train", data.train), ("val", data.val)):
        low = split.labels.min()
        high = split.labels.max()
        if low < 0 or high >= num_classes:
            raise DatasetError(
                f"labels of {name} must be in 0..{num_classes - 1}, got {low}..{high} {where}"
            )
        check_vectors(split.embeddings, split.ids)
    present = set(data.train.labels.tolist())
    absent = [n for c, n in enumerate(data.class_names) if c not in present]
    if num_classes < 2 or absent:
        missing = f" (none of {', '.join(absent)})" if absent else ""
        raise DatasetError(
            "train must contain at least two classes, each with rows, got "
            f"{num_classes - len(absent)} of {num_classes}{missing} {where}"
        )
    if len(set(data.val.labels.tolist())) < 2:
        name = data.class_names[data.val.labels[0]]
        raise DatasetError(
            f"val must contain at least two classes, got only {name!r} {where}; split by "
            "patients of every class"
        )
    parts = [(data.train, data.val)]
    leakage = check_leakage(parts, data.name, allowed=data.allow_leakage)
    return replace(data, facts={**data.facts, "leakage": leakage})


def left_out_fact(left_out: Mapping[str, str]) -> dict[str, Json]:
    """The fact that some slides or files cannot be used, and why; {} where all can."""
    return {LEFT_OUT: dict(left_out)} if left_out else {}


def label_rows(
    rows: Sequence[TextRow],
    name: str,
    *,
    where: str,
    seed: int,
    class_names: Sequence[str] = (),
    rule: str = "split column",
    facts: Mapping[str, Json] | None = None,
    embeddings: Embeddings | None = None,
    ids: Sequence[str] = (),
    images: Sequence[ImageRef] = (),
) -> LabelledRows:
    """The one way from rows (label[, split, case_id, slide_id]) to classes, groups and a fold.

    Without a split one of FOLDS validates; `rule` says how a split was made, {} stands for how it
    was drawn.
    """
    names, labels = encode_labels([row["label"] for row in rows], where, class_names)
    groups = table_groups(rows, where)
    splits = [row.get("split", "") for row in rows]
    if not rows or any(splits):
        if not all(splits):
            raise DatasetError(
                "split must be set for all labelled regions or tiles, or for none, got it for "
                f"some in {where}"
            )
        remedy = f"; omit the column to validate on one of {FOLDS} folds"
        fold = split_fold(splits, where, remedy)
    else:
        folds, over = drawn_folds(
            labels, groups, folds=FOLDS, seed=seed, class_names=names
        )
        fold = folds[0]
        drawn = f"fold 0 of {FOLDS} {over}" if over else f"stratified fold 0 of {FOLDS}"
        drawn = f"{drawn}, seed {seed}"
        rule = rule.format(drawn) if "{}" in rule else drawn
    id_columns = [
        [row.get(column, "") for row in rows] for column in ("slide_id", *CASE_COLUMNS)
    ]
    notes = spelling_notes(*id_columns)
    all_facts: dict[str, Json] = {"split_rule": rule}
    if notes:
        all_facts["ids"] = notes[0]
    return LabelledRows(
        name=name,
        class_names=names,
        labels=labels,
        fold=fold,
        facts=all_facts | dict(facts or {}),
        embeddings=embeddings,
        ids=ids,
        images=images,
        groups=groups,
    )
