"""Cases: one vector (or bags of tiles) per patient, with a label or a survival time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.probe.examples import Embeddings, Labels, check_finite
from thinsection.probe.splits import Fold

ReadEmbeddings = Callable[[Path], Embeddings]  # a file to (N, D)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSet:
    """Labelled cases.

    Attributes:
        name: of the dataset.
        class_names: of labels 0..K-1.
        ids: case ids, (n,).
        labels: int64 (n,).
        vectors: float32 (n, D).
        folds: the dataset's own folds; None lets the protocol draw them.
        facts: what a result file should say of the data.
    """

    name: str
    class_names: tuple[str, ...]
    ids: tuple[str, ...]
    labels: Labels
    vectors: Embeddings
    folds: tuple[Fold, ...] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_cases(self.ids, self.vectors)
        if self.labels.shape != (len(self.ids),):
            raise InvalidInputError(
                f"labels must be one a case, got {self.labels.shape} for {len(self.ids)} cases"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalSet:
    """Cases with a follow-up.

    Attributes:
        name: of the dataset.
        ids: case ids, (n,).
        event: bool (n,), True where the event was seen, False where the case was censored.
        time: float64 (n,), > 0, in the dataset's own unit.
        vectors: float32 (n, D).
        folds: the dataset's own folds; None lets the protocol draw them.
        facts: what a result file should say of the data.
    """

    name: str
    ids: tuple[str, ...]
    event: npt.NDArray[np.bool_]
    time: npt.NDArray[np.float64]
    vectors: Embeddings
    folds: tuple[Fold, ...] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_cases(self.ids, self.vectors)
        n = len(self.ids)
        if self.event.shape != (n,) or self.time.shape != (n,):
            raise InvalidInputError(
                f"event and time must be one a case, got {self.event.shape} and "
                f"{self.time.shape} for {n} cases"
            )
        bad = np.flatnonzero(~(np.isfinite(self.time) & (self.time > 0)))
        if len(bad):
            raise InvalidInputError(
                f"time must be finite and > 0, got {self.time[bad[0]]} for case "
                f"{self.ids[bad[0]]!r}"
            )
        if not self.event.any():
            raise InvalidInputError("event must be seen in some case, got only censored cases")


def check_cases(ids: Sequence[str], vectors: Embeddings) -> None:
    """Raises InvalidInputError unless vectors are finite (n, D), one per distinct id."""
    if vectors.ndim != 2 or len(vectors) != len(ids) or 0 in vectors.shape:
        raise InvalidInputError(
            f"vectors must be (n, D), one a case, got {vectors.shape} for {len(ids)} cases"
        )
    if len(set(ids)) != len(ids):
        twice = next(i for i in ids if list(ids).count(i) > 1)
        raise InvalidInputError(f"case ids must be distinct, got {twice!r} twice")
    check_finite(vectors, ids)


def mean_vectors(files_of_case: Sequence[Sequence[Path]], read: ReadEmbeddings) -> Embeddings:
    """Mean of tile embeddings per slide, then mean of slides per case, float32 (n, D).

    A file with one row (a slide embedding) is its own mean.

    Memory: one slide's embeddings + 4 n D.

    Raises:
        InvalidInputError: a case without slides, or slides of different widths.
    """
    vectors = []
    for files in files_of_case:
        if not files:
            raise InvalidInputError("each case must have a slide, got a case without any")
        vectors.append(np.mean([_slide_mean(path, read) for path in files], axis=0))
        if len(vectors[-1]) != len(vectors[0]):
            raise InvalidInputError(
                f"embeddings must have the same D, got {len(vectors[-1])} after "
                f"{len(vectors[0])} in {str(files[0])!r}; were two encoders mixed?"
            )
    return np.stack(vectors).astype(np.float32)


def _slide_mean(path: Path, read: ReadEmbeddings) -> npt.NDArray[np.float64]:
    tiles = read(path)
    if not len(tiles):
        raise InvalidInputError(f"a slide must have tile embeddings, got none in {str(path)!r}")
    mean: npt.NDArray[np.float64] = tiles.mean(axis=0, dtype=np.float64)
    return mean
