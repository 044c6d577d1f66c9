"""Labelled embeddings: what every probe of tiles takes, checked once at the door."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError, InvalidInputError

Embeddings = npt.NDArray[np.float32]  # (N, D)
Labels = npt.NDArray[np.int64]  # (N,), 0..K-1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSet:
    """Training and validation rows of one dataset. A test split has no place here.

    Attributes:
        name: of the dataset.
        class_names: of labels 0..K-1.
        train, val: the two splits.
        facts: what a result file should say of the data (source, split rule, encoder).
    """

    name: str
    class_names: tuple[str, ...]
    train: Split
    val: Split
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)


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
        raise InvalidInputError(
            f"embeddings and labels must have the same N, got {len(x)} and {len(y)}"
        )
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
    if data.train.embeddings.shape[1] != data.val.embeddings.shape[1]:
        raise DatasetError(
            f"embeddings of train and val must have the same D, got "
            f"{data.train.embeddings.shape[1]} and {data.val.embeddings.shape[1]} in {data.name!r}"
        )
    for name, split in (("train", data.train), ("val", data.val)):
        if split.labels.min() < 0 or split.labels.max() >= data.num_classes:
            raise DatasetError(
                f"labels of {name} must lie in 0..{data.num_classes - 1}, got "
                f"{split.labels.min()}..{split.labels.max()} in {data.name!r}"
            )
    absent = sorted(set(range(data.num_classes)) - set(data.train.labels.tolist()))
    if data.num_classes < 2 or absent:
        missing = f" (none of {', '.join(data.class_names[c] for c in absent)})" if absent else ""
        raise DatasetError(
            f"train must hold at least two classes, each with rows, got "
            f"{data.num_classes - len(absent)} of {data.num_classes}{missing} in {data.name!r}"
        )
