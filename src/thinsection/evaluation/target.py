"""Target of a head: classes, labels, a value or a risk; and the meaning of the head's outputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError
from thinsection.types import Floats, Reals, counted

Kind = Literal[
    "binary", "multiclass", "ordinal", "multilabel", "regression", "cox", "discrete"
]
TaskName = Literal[
    "auto",
    "binary",
    "multiclass",
    "ordinal",
    "multilabel",
    "regression",
    "cox",
    "discrete",
]
# standard terms for kinds of targets whose name is not such a term
_KIND_WORDS: dict[str, str] = {
    "cox": "survival (Cox model)",
    "discrete": "survival (discrete time)",
}
PositiveRule = Literal["", "choice", "rarer", "tie"]
INTERVALS = (
    4  # number of time intervals in 'discrete'; each has equally many training events
)
# reason why a class is the positive one, by `Target.positive_by`
_POSITIVE_WORDS = {
    "choice": "chosen with `train --positive`",
    "rarer": "the rarer class in training; `train --positive` chooses another",
    "tie": (
        "the last in alphabetical order, as both classes are equally frequent in training; "
        "`train --positive` chooses another"
    ),
    "": (
        "the last in alphabetical order, as in all models of earlier versions; train the model "
        "again to choose with `train --positive`"
    ),
}
FAR = 5.0  # distance of an outlier from the median, in robust standard deviations
_TO_SD = 1.4826  # standard deviation over MAD of a normal distribution


@dataclass(frozen=True, kw_only=True)
class Target:
    """Meaning of a head's outputs."""

    kind: Kind
    # columns of the table: one column, several labels, or event and time
    columns: tuple[str, ...]
    # names of the outputs: classes (ordinal ones in their order), labels, the value, the risk, or
    # intervals of time
    names: tuple[str, ...]
    # positive class of two classes, for sensitivity, curves and thresholds; '' in files of earlier
    # versions, where it is the second name
    positive: str = ""
    positive_by: PositiveRule = ""  # rule that chose the positive class
    # The next three come from the training cases of one fold, see `fitted`.
    edges: tuple[float, ...] = ()  # limits between the intervals of time
    center: float = 0.0  # a head predicts (value - center) / spread
    spread: float = 1.0

    @property
    def exclusive(self) -> bool:
        """True if each case has exactly one class."""
        return self.kind in ("binary", "multiclass", "ordinal")

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the scores of a tile: each output, or one score for ordered classes."""
        return self.columns if self.kind == "ordinal" else self.names

    @property
    def order_words(self) -> str:
        """The order of ordinal classes, and how it was read; '' for other targets."""
        if self.kind != "ordinal":
            return ""
        return f"{' < '.join(self.names)} (by the number in each name)"

    @property
    def positive_index(self) -> int:
        """Number of the positive class of two."""
        return self.names.index(self.positive) if self.positive else 1

    @property
    def positive_name(self) -> str:
        """The positive class of two; '' for other targets."""
        return self.names[self.positive_index] if self.kind == "binary" else ""

    @property
    def kind_words(self) -> str:
        """Kind of the target in the words of the field."""
        return _KIND_WORDS.get(self.kind, self.kind)

    @property
    def time_words(self) -> str:
        """Columns with the times of survival; '' for other targets."""
        return ", ".join(self.columns[1:]) if self.kind in _KIND_WORDS else ""

    @property
    def positive_first(self) -> tuple[int, int]:
        """Indices of two classes, the positive class first."""
        return self.positive_index, 1 - self.positive_index

    @property
    def positive_words(self) -> str:
        """The positive class of two classes, and why it was chosen; '' for other targets."""
        if self.kind != "binary":
            return ""
        return f"{self.positive_name} ({_POSITIVE_WORDS[self.positive_by]})"

    def fitted(self, values: Floats) -> "Target":
        """The target with centre, spread and edges of training cases, values (n, T)."""
        if self.kind == "regression":
            inliers = values[~outliers(values[:, 0])]
            center = float(inliers.mean())
            spread = float(inliers.std()) or 1.0
            return replace(self, center=center, spread=spread)
        if self.kind == "discrete":
            times = values[values[:, 0] == 1, 1]
            if len(times) == 0:
                rule = "training cases of each fold must have an event"
                raise DatasetError(
                    f"{rule}, got none in {counted(len(values), 'case')}"
                )
            cuts = np.linspace(0, 1, INTERVALS + 1)[1:-1]
            return replace(self, edges=tuple(np.quantile(times, cuts).tolist()))
        return self

    def strata(self, values: Floats) -> npt.NDArray[np.int64]:
        """Strata of folds and samples (n,): class, event, a value's quarter.

        Of several labels: 1 for the cases with the one value of a label that the fewest have.
        """
        if self.kind == "regression":
            return np.searchsorted(np.quantile(values, (0.25, 0.5, 0.75)), values[:, 0])
        if self.kind == "multilabel":
            counts = np.stack([(values == flag).sum(axis=0) for flag in (0, 1)])
            counts[counts == 0] = len(values)
            flag, label = np.unravel_index(counts.argmin(), counts.shape)
            return np.asarray(values[:, label] == flag, dtype=np.int64)
        return np.asarray(values[:, 0], dtype=np.int64)

    def answers(self, logits: Reals) -> Floats:
        """Answers (n, K) of logits (n, K), column by column as `names`.

        Probabilities of classes or labels; the value; the log risk; of 'discrete' the probability
        that the event is in an interval.
        """
        from scipy.special import expit, softmax  # `--help` must not wait for it

        z = np.asarray(logits, dtype=np.float64)
        if self.exclusive:
            return np.asarray(softmax(z, axis=1))
        if self.kind == "multilabel":
            return np.asarray(expit(z))
        if self.kind == "discrete":
            hazard = np.concatenate([expit(z[:, :-1]), np.ones((len(z), 1))], axis=1)
            before = np.cumprod(np.c_[np.ones(len(z)), 1 - hazard[:, :-1]], axis=1)
            return np.asarray(before * hazard)
        return self.center + self.spread * z

    def risk(self, answers: Floats) -> Floats:
        """One number (n,) that is higher the earlier the event: minus the mean interval."""
        if self.kind == "cox":
            return answers[:, 0]
        return -answers @ np.arange(len(self.names))

    def truth_cells(
        self, values: Sequence[float | None]
    ) -> dict[str, str | float | None]:
        """True values (T,) of a case as cells of a table: its class, else one a column.

        Blank labels (NaN, None) are empty cells.
        """
        if self.exclusive:
            return {"truth": self.names[int(values[0] or 0)]}
        pairs = zip(self.columns, values, strict=True)
        return {
            f"truth_{column}": None if value is None or math.isnan(value) else value
            for column, value in pairs
        }

    def cells(self, answers: Sequence[float]) -> dict[str, str | float | None]:
        """Answers (K,) as cells of a table, empty ones for (): the class or risk, then each."""
        row = np.array([answers])
        cells: dict[str, str | float | None] = {}
        if self.exclusive:
            cells["prediction"] = self.names[int(row.argmax())] if row.size else None
        elif self.kind == "discrete":
            cells["risk"] = float(self.risk(row)[0]) if row.size else None
        begin = "" if self.kind in ("cox", "regression") else "p_"
        return cells | self.named(begin, answers)

    def named(self, begin: str, values: Sequence[float]) -> dict[str, float | None]:
        """A cell for each output, its name with `begin` before it; empty ones for ()."""
        cells: Sequence[float | None] = values or [None for _ in self.names]
        return {begin + name: cell for name, cell in zip(self.names, cells)}


def outliers(values: Floats) -> npt.NDArray[np.bool_]:
    """True for values (n,) more than FAR robust standard deviations (1.4826 MAD) from the median.

    None is one where half of the values are equal, since nothing says how far they spread.
    """
    if len(values) == 0:
        return np.zeros(0, dtype=bool)
    distance = np.abs(values - np.median(values))
    spread = _TO_SD * float(np.median(distance))
    if spread == 0:
        return np.zeros(len(values), dtype=bool)
    return distance > FAR * spread
