"""Labelled data: what probes take, checked once at the door.

A test split has no place here: sets hold training and validation rows, or cases and their folds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError, InvalidInputError
from thinsection.probe.statistics import Fold, IndexArray

Embeddings = npt.NDArray[np.float32]  # (N, D)
Labels = npt.NDArray[np.int64]  # (N,), 0..K-1
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows that are used together.

    Attributes:
        embeddings: float32 (N, D), finite.
        labels: int64 (N,).
        ids: a name per row, for the table of predictions.
    """

    embeddings: Embeddings
    labels: Labels
    ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: IndexArray) -> "Split":
        """Some of the rows, in that order."""
        ids = tuple(self.ids[i] for i in rows)
        return Split(embeddings=self.embeddings[rows], labels=self.labels[rows], ids=ids)


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image: a file, or row `row` of the dataset 'x' of an HDF5 file (PCam)."""

    path: Path
    row: int | None = None

    @property
    def name(self) -> str:
        """For tables: folder/file, or file:row."""
        if self.row is not None:
            return f"{self.path.stem}:{self.row}"
        return f"{self.path.parent.name}/{self.path.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """Images of one split with their labels (N,); as `Split`, before the encoder."""

    images: tuple[ImageRef, ...]
    labels: Labels

    def take(self, rows: IndexArray) -> "ImagePart":
        """Some of the images, in that order."""
        return ImagePart(images=tuple(self.images[i] for i in rows), labels=self.labels[rows])


Part = TypeVar("Part", Split, ImagePart)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TwoParts(Generic[Part]):
    """Training and validation rows of one dataset.

    Attributes:
        class_names: of labels 0..K-1.
        facts: what a result file should say of the data (source, split rule, encoder).
    """

    name: str
    class_names: tuple[str, ...]
    train: Part
    val: Part
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def folded(cls, whole: Part, fold: Fold, **known: Any) -> Self:
        """The training and the validation rows of a fold; `known`: the other attributes."""
        train, val = map(whole.take, fold)
        return cls(train=train, val=val, **known)

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)


class TileSet(_TwoParts[Split]):
    """Training and validation embeddings of one dataset."""


class ImageSet(_TwoParts[ImagePart]):
    """Training and validation images of one dataset; as `TileSet`, before the encoder."""


Either = TypeVar("Either", bound=TileSet | ImageSet)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cases:
    """Patients or slides with a vector each.

    Attributes:
        ids: case ids, (n,).
        vectors: float32 (n, D).
        files: embedding files of each case; empty where the vectors were handed in.
        folds: the dataset's own folds; None lets the protocol draw them.
        facts: what a result file should say of the data.
    """

    name: str
    ids: tuple[str, ...]
    vectors: Embeddings
    files: tuple[tuple[Path, ...], ...] = ()
    folds: tuple[Fold, ...] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def _check(self, *columns: str) -> None:
        """Raises InvalidInputError unless vectors are finite (n, D), columns (n,), ids distinct."""
        shape, n = self.vectors.shape, len(self.ids)
        if len(shape) != 2 or shape[0] != n or 0 in shape:
            found = f"{shape} for {n} cases"
            raise InvalidInputError(f"vectors must be (n, D), one a case, got {found}")
        if len(set(self.ids)) != n:
            twice = next(i for i in self.ids if self.ids.count(i) > 1)
            raise InvalidInputError(f"case ids must be distinct, got {twice!r} twice")
        check_finite(self.vectors, self.ids)
        shapes = [getattr(self, name).shape for name in columns]
        if set(shapes) != {(n,)}:
            found = f"{' and '.join(map(str, shapes))} for {n} cases"
            raise InvalidInputError(f"{' and '.join(columns)} must be one a case, got {found}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSet(_Cases):
    """Labelled cases: besides `ids` and `vectors`, labels int64 (n,) and the names of 0..K-1."""

    class_names: tuple[str, ...]
    labels: Labels

    def __post_init__(self) -> None:
        self._check("labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalSet(_Cases):
    """Cases with a follow-up.

    Attributes:
        event: bool (n,), True where the event was seen, False where the case was censored.
        time: float64 (n,), > 0, in the dataset's own unit.
    """

    event: npt.NDArray[np.bool_]
    time: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        self._check("event", "time")
        for case, time in zip(self.ids, self.time, strict=True):
            if not 0 < time < np.inf:
                found = f"{time} for case {case!r}"
                raise InvalidInputError(f"time must be finite and > 0, got {found}")
        if not self.event.any():
            raise InvalidInputError("event must be seen in some case, got only censored cases")


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustnessSet:
    """Tiles with their biology, centre and slide.

    Attributes:
        name: of the subset ('camelyon', 'tolkach_esca', or one's own): it decides k.
        embeddings: float32 (N, D), [CLS | mean of the tokens] in PathoROB.
        biological_class, medical_center, slide_id: one string a tile.
    """

    name: str
    embeddings: Embeddings
    biological_class: tuple[str, ...]
    medical_center: tuple[str, ...]
    slide_id: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)


def make_split(
    embeddings: npt.ArrayLike, labels: npt.ArrayLike, ids: Sequence[str] | None = None
) -> Split:
    """A checked split.

    Raises:
        InvalidInputError: shapes do not fit, nothing is there, or a value is not finite.
    """
    x = np.ascontiguousarray(embeddings, dtype=np.float32)
    y = np.asarray(labels)
    if x.ndim != 2 or 0 in x.shape:
        raise InvalidInputError(f"embeddings must be (N, D) with N, D >= 1, got shape {x.shape}")
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise InvalidInputError(f"labels must be integers (N,), got {y.dtype} {y.shape}")
    if len(x) != len(y):
        found = f"{len(x)} and {len(y)}"
        raise InvalidInputError(f"embeddings and labels must have the same N, got {found}")
    names = tuple(ids) if ids is not None else tuple(map(str, range(len(y))))
    if len(names) != len(y):
        raise InvalidInputError(f"ids must be one a row, got {len(names)} for {len(y)} rows")
    check_finite(x, names)
    return Split(embeddings=x, labels=y.astype(np.int64), ids=names)


def check_finite(embeddings: Embeddings, ids: Sequence[str]) -> None:
    """Raises InvalidInputError naming the rows with NaN or inf.

    Memory: O(N); a row's sum is non-finite where a value is (float64, so nothing overflows).
    """
    bad = np.flatnonzero(~np.isfinite(embeddings.sum(axis=1, dtype=np.float64)))
    if len(bad):
        shown = ", ".join(repr(ids[i]) for i in bad[:3])
        raise InvalidInputError(
            f"embeddings must be finite, got NaN or inf in {len(bad)} of {len(ids)} rows "
            f"({shown}{', ...' if len(bad) > 3 else ''}); embed these again, in fp32"
        )


def check_tile_set(data: TileSet) -> None:
    """Raises DatasetError where the splits do not fit each other or the classes."""
    k, where = data.num_classes, f"in {data.name!r}"
    widths = [str(split.embeddings.shape[1]) for split in (data.train, data.val)]
    if widths[0] != widths[1]:
        found = f"{' and '.join(widths)} {where}"
        raise DatasetError(f"embeddings of train and val must have the same D, got {found}")
    for name, split in (("train", data.train), ("val", data.val)):
        low, high = split.labels.min(), split.labels.max()
        if low < 0 or high >= k:
            found = f"{low}..{high} {where}"
            raise DatasetError(f"labels of {name} must lie in 0..{k - 1}, got {found}")
    absent = sorted(set(range(k)) - set(data.train.labels.tolist()))
    if k < 2 or absent:
        missing = f" (none of {', '.join(data.class_names[c] for c in absent)})" if absent else ""
        found = f"{k - len(absent)} of {k}{missing} {where}"
        raise DatasetError(f"train must hold at least two classes, each with rows, got {found}")


def at_most_per_class(data: Either, most: int, *, seed: int) -> Either:
    """The set with at most `most` rows of each class in train and in val; the facts say so.

    Raises:
        InvalidInputError: most < 1.
    """
    if most < 1:
        raise InvalidInputError(f"max_per_class must be >= 1, got {most}")
    parts = [p.take(draw_rows(p.labels, most, seed=seed)) for p in (data.train, data.val)]
    facts = {**data.facts, "max_per_class": most}
    return replace(data, train=parts[0], val=parts[1], facts=facts)  # type: ignore[arg-type]


def draw_rows(labels: Labels, most: int, *, seed: int) -> IndexArray:
    """Sorted indices of at most `most` rows of each class."""
    rng = np.random.default_rng(seed)
    kept = []
    for c in np.unique(labels):
        rows = np.flatnonzero(labels == c)
        kept.append(rng.choice(rows, most, replace=False) if len(rows) > most else rows)
    return np.sort(np.concatenate(kept))
