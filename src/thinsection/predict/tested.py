"""Out-of-fold predictions: each fold's head predicts the cases that it was not trained on.

They are scored, compared with those of another experiment, and written as a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from thinsection.errors import DatasetError, InvalidInputError, StoreError, rewording
from thinsection.evaluation import comparison, metrics
from thinsection.evaluation.calibration import shared_temperature
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.intervals import Sampling, interval, why_missing
from thinsection.evaluation.labels import items_if_several
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.plots import Column
from thinsection.evaluation.rows import (
    Predictions,
    Risks,
    Rows,
    Values,
)
from thinsection.evaluation.survival import comparable_pairs
from thinsection.evaluation.target import Target
from thinsection.files.atomic import read_json
from thinsection.predict.folds import FoldResult, Study, read_fold
from thinsection.predict.training import criterion_of, targets_of
from thinsection.types import Document, Floats, counted

EXPERIMENT_NAME = "experiment.json"
# metric that is printed first, by kind of target; for classes and labels it is the AUROC
HEADLINE = {
    "ordinal": "weighted_kappa",
    "regression": "pearson",
    "cox": "c_index",
    "discrete": "c_index",
}


class Score(TypedDict):
    """Value of a metric with its 95 % confidence interval, as JSON holds it."""

    value: float | None
    low: float | None
    high: float | None
    missing: str  # reason why there is no interval; '' if there is one
    method: str  # papers of the interval's method
    pooled_over: str


@dataclass(frozen=True, kw_only=True)
class Tested:
    """Out-of-fold predictions, row by row."""

    target: Target
    # (n,); with splits from a file, a case may be tested several times
    cases: tuple[str, ...]
    groups: Groups  # (n,), the patient of each case
    slides: tuple[tuple[str, ...], ...]  # slides of each case
    fold: IndexArray
    truth: Floats  # (n, T), see `Cohort.values`
    answers: Floats  # (n, K), see `Target.answers`

    @property
    def metric(self) -> str:
        """Name of the metric that is printed first."""
        return HEADLINE.get(self.target.kind, "auroc")

    @property
    def sampling(self) -> Sampling:
        """Sampling of patients, with the classes or events by which they are counted."""
        return case_sampling(
            self.target, self.cases, self.groups, self.truth, self.fold
        )

    def take(self, rows: IndexArray) -> "Tested":
        """Selects some of the rows."""
        return replace(
            self,
            cases=tuple(self.cases[i] for i in rows),
            groups=self.groups.take(rows),
            slides=tuple(self.slides[i] for i in rows),
            fold=self.fold[rows],
            truth=self.truth[rows],
            answers=self.answers[rows],
        )

    @property
    def scorers(self) -> metrics.Scorers:
        """Every metric that is shown, over all cases; for several labels, the mean over labels."""
        if self.target.kind == "multilabel":
            return self._label_means()
        (rows,) = self.rows()
        scorers = rows.scorers
        if self.target.kind == "ordinal":
            truth = self.truth[:, 0].astype(np.int64)
            scorers["mae"] = metrics.class_distance(truth, self.answers.argmax(axis=1))
        shown = metrics.shown_metrics(self.target.kind, len(set(self.cases)))
        return {name: scorers[name] for name in shown or scorers}

    def _label_means(self) -> metrics.Scorers:
        """Mean over labels of the scores of each, over the cases that have it.

        Without a case, a label and so the mean have no value.
        """
        labels = []
        for k in range(len(self.target.names)):
            rows = np.flatnonzero(np.isfinite(self.truth[:, k]))
            if len(rows) == 0:
                return {self.metric: lambda weights: np.full(len(weights), np.nan)}
            labels.append((rows, self.label(k).scorers))
        return mean_over_labels(labels)

    def label(self, k: int) -> "Tested":
        """One of several labels as two classes, for the cases that have it."""
        name = self.target.names[k]
        known = self.take(np.flatnonzero(np.isfinite(self.truth[:, k])))
        probability = known.answers[:, k]
        target = Target(
            kind="binary",
            columns=(name,),
            names=(f"without {name}", name),
            positive=name,
        )
        return replace(
            known,
            target=target,
            truth=known.truth[:, [k]],
            answers=np.stack([1 - probability, probability], axis=1),
        )

    @property
    def num_positive(self) -> int | None:
        """Cases of the positive class of two, or with an event; None for other targets."""
        if self.target.kind == "binary":
            positive = self.truth[:, 0] == self.target.positive_index
        elif self.target.kind in ("cox", "discrete"):
            positive = self.truth[:, 0] == 1
        else:
            return None
        # repeated splits test a case several times
        return len({self.cases[i] for i in np.flatnonzero(positive)})

    def score(self) -> float:
        """Value of the metric that is printed first."""
        return metrics.all_scores(self.scorers, len(self.cases))[self.metric]

    def fold_score(self, fold: int) -> float | None:
        """Score of one fold's cases; None if no pair of cases can be compared."""
        score = self.take(np.flatnonzero(self.fold == fold)).score()
        return score if np.isfinite(score) else None

    def rows(self) -> list[Rows]:
        """Rows in the format of a probe: classes, values or risks; for several labels, one each."""
        target = self.target
        if target.exclusive:
            truth = self.truth[:, 0].astype(np.int64)
            if target.kind != "binary":
                return [self._classes(target.names, truth, self.answers)]
            order = target.positive_first[::-1]
            return [
                self._classes(
                    (target.names[order[0]], target.names[order[1]]),
                    (truth == order[1]).astype(np.int64),
                    self.answers[:, order],
                )
            ]
        if target.kind == "multilabel":
            return [self.label(k).rows()[0] for k in range(len(target.names))]
        if target.kind == "regression":
            return [
                Values(
                    ids=self.cases,
                    groups=self.groups,
                    fold=self.fold,
                    target_names=target.names,
                    truth=self.truth,
                    prediction=self.answers,
                )
            ]
        risk = target.risk(self.answers)
        middle = {f: np.median(risk[self.fold == f]) for f in np.unique(self.fold)}
        return [
            Risks(
                ids=self.cases,
                groups=self.groups,
                fold=self.fold,
                risk=risk,
                high=risk > np.array([middle[f] for f in self.fold]),
                event=self.truth[:, 0] == 1,
                time=self.truth[:, 1],
            )
        ]

    def _classes(
        self, names: tuple[str, ...], truth: IndexArray, probability: Floats
    ) -> Predictions:
        return Predictions(
            ids=self.cases,
            groups=self.groups,
            fold=self.fold,
            class_names=names,
            truth=truth,
            prediction=probability.argmax(axis=1),
            probability=probability,
        )


def mean_over_labels(
    labels: Sequence[tuple[IndexArray, metrics.Scorers]],
) -> metrics.Scorers:
    """Mean over labels of each score that all have; beside each label's scorers, its rows."""
    shown = set.intersection(*(set(scorers) for _, scorers in labels))
    return {
        name: metrics.MeanScorer(
            [metrics.RowsScorer(scorers[name], rows) for rows, scorers in labels]
        )
        for name in labels[0][1]
        if name in shown
    }


def score_table(
    scorers: metrics.Scorers, sampling: Sampling, *, seed: int
) -> dict[str, Score]:
    """Score of each metric."""
    every = np.ones((1, len(sampling.codes)))
    table: dict[str, Score] = {}
    for name, scorer in scorers.items():
        value = float(scorer(every)[0])
        bounds = interval(sampling, scorer, name, seed=seed)
        table[name] = {
            "value": value if np.isfinite(value) else None,
            "low": None if bounds.missing else bounds.low,
            "high": None if bounds.missing else bounds.high,
            "missing": bounds.missing,
            "method": bounds.method,
            "pooled_over": metrics.pooled_over(name),
        }
    return table


def outcome_columns(tested: Tested) -> list[Column]:
    """Each class or label against the rest; for two classes only the positive one.

    Ordered classes: each but the lowest, together with the higher ones, against the lower ones.
    """
    target = tested.target
    truth = tested.truth
    answers = tested.answers
    if target.kind == "ordinal":
        return [
            Column(f"{name} or higher", truth[:, 0] >= k, answers[:, k:].sum(axis=1))
            for k, name in enumerate(target.names)
            if k > 0
        ]
    if target.kind == "multilabel":
        columns = []
        for name, label, probability in zip(
            target.names, truth.T, answers.T, strict=True
        ):
            rows = np.flatnonzero(np.isfinite(label))
            columns.append(Column(name, label[rows] == 1, probability[rows], rows))
        return columns
    if not target.exclusive:
        return []
    columns = [
        Column(name, truth[:, 0] == k, answers[:, k])
        for k, name in enumerate(target.names)
    ]
    return [columns[target.positive_index]] if target.kind == "binary" else columns


def case_sampling(
    target: Target,
    cases: Sequence[str],
    groups: Groups,
    truth: Floats,
    fold: IndexArray,
) -> Sampling:
    """Sampling of the patients of tested cases: by class, event, or the rarest of several labels.

    `groups`: the patient of each row, (n,).
    """
    runs = max(1, len(cases) // len(set(cases)))  # splits may test a case several times
    classes: Floats | IndexArray | None = None
    events = None
    if target.exclusive:
        classes = truth[:, 0]
    elif target.kind == "multilabel":
        classes = target.strata(truth)
    elif target.kind != "regression":
        events = truth[:, 0] == 1
    return Sampling.of_rows(
        groups,
        classes=classes,
        events=events,
        fold=fold,
        folds=max(1, len(np.unique(fold)) // runs),
    )


def test_rows(study: Study) -> tuple[list[int], IndexArray]:
    """Cases tested by the folds, fold after fold, and the fold of each."""
    rows = [i for part in study.parts for i in part.test]
    sizes = [len(part.test) for part in study.parts]
    return rows, np.repeat(np.arange(len(study.parts)), sizes)


def forecast(study: Study) -> Iterator[str]:
    """Messages about the scores that are possible, before training.

    Raises DatasetError: no fold will have two cases whose risks can be compared.
    """
    cohort = study.cohort
    rows, fold = test_rows(study)
    truth = cohort.array[rows]
    if cohort.target.kind in ("cox", "discrete"):
        blocks = comparable_pairs(truth[:, 0] == 1, truth[:, 1], fold)
        pairs = sum(int(block.sum()) for _, block in blocks)
        if not pairs:
            raise DatasetError(
                "folds must have cases whose times can be compared, got none in "
                f"{len(study.parts)} folds of {counted(len(rows), 'case')}; lower folds=..."
            )
        yield f"c-index: {pairs} pairs of cases in the same fold can be compared"
    cases = [cohort.cases[i] for i in rows]
    groups = cohort.groups.take(np.array(rows))
    missing = why_missing(case_sampling(cohort.target, cases, groups, truth, fold))
    if missing:
        yield f"the scores have no confidence interval: {missing}"


def ensemble_temperature(study: Study, results: Sequence[FoldResult]) -> float:
    """Common temperature of all folds' logits, fitted on all their inner cases."""
    target = study.cohort.target
    if target.kind in ("cox", "regression"):
        return 1.0
    inner = []
    for part, result in zip(study.parts, results, strict=True):
        targets = targets_of(result.target, study.cohort.array)
        criterion = criterion_of(result.target, targets, weighted=False)
        for case, logits in zip(part.stop, result.stop, strict=True):
            inner.append((criterion, torch.from_numpy(logits), targets[case]))

    def loss(temperature: float) -> float:
        return float(sum(criterion(z / temperature, y) for criterion, z, y in inner))

    cases = {case for part in study.parts for case in part.stop}
    return shared_temperature(loss, len(cases))


def tested_of(
    study: Study, results: Sequence[FoldResult], temperature: float
) -> tuple[Tested, dict[str, Floats]]:
    """Predictions of each fold for its test cases, and for the slides of cases with several."""
    cohort = study.cohort
    slides: dict[str, Floats] = {}
    answers = []
    for part, result in zip(study.parts, results, strict=True):
        answers.append(result.target.answers(result.logits / temperature))
        names = [
            slide for i in part.test for slide in items_if_several(cohort.slides[i])
        ]
        if names:
            of_slides = result.target.answers(result.slides / temperature)
            slides.update(zip(names, of_slides, strict=True))
    rows, fold = test_rows(study)
    tested = Tested(
        target=cohort.target,
        cases=tuple(cohort.cases[i] for i in rows),
        groups=cohort.groups.take(np.array(rows)),
        slides=tuple(cohort.slides[i] for i in rows),
        fold=fold,
        truth=cohort.array[rows],
        answers=np.concatenate(answers),
    )
    return tested, slides


def read_tested(experiment: Path) -> Tested:
    """Reads the out-of-fold predictions of an experiment.

    Raises StoreError: it is not a folder of `thinsection train`, or a fold is missing.
    """
    rule = "experiment must be a folder of `thinsection train`"
    damage = (OSError, ValueError, KeyError, TypeError)
    with rewording(rule, experiment, *damage, error=StoreError):
        names = read_json(experiment / EXPERIMENT_NAME)["heads"]
        study = Study.load(experiment)
        results = [read_fold(experiment, name) for name in names]
    whole = [result for result in results if result is not None]
    if len(whole) != len(study.parts):
        raise StoreError(
            f"experiment must have the files of {len(study.parts)} folds, got {len(whole)} in "
            f"{str(experiment)!r}; run the same command again"
        )
    return tested_of(study, whole, ensemble_temperature(study, whole))[0]


def compare(mine: Tested, other: Path) -> Document:
    """Paired difference from another experiment, see `difference`.

    Raises StoreError, InvalidInputError: not an experiment, another target, or no common cases.
    """
    theirs = _with_classes_of(mine.target, read_tested(other))
    return {"name": other.name, **difference(mine, theirs)}


def difference(mine: Tested, theirs: Tested) -> Document:
    """Paired difference of two scores on the cases of both; > 0: the first is higher.

    A paired jackknife over patients, for AUROCs of two classes DeLong's test of pairs within a
    fold. A case that was tested several times counts with the mean of its rows, as in the score.

    Raises InvalidInputError: another target, or no common cases.
    """
    if mine.target != theirs.target:
        raise InvalidInputError(
            f"experiments must have the same target, got {mine.target} and {theirs.target}"
        )
    shared = set(mine.cases) & set(theirs.cases)
    if len(shared) < comparison.MIN_GROUPS:
        raise InvalidInputError(
            f"experiments must have at least {comparison.MIN_GROUPS} cases in common, got "
            f"{len(shared)}"
        )
    # every row of a case, as a score counts them: repeated splits test a case several times
    parts = [
        one.take(np.flatnonzero([case in shared for case in one.cases]))
        for one in (mine, theirs)
    ]
    words = f"paired jackknife, {parts[0].groups.words}"
    if mine.target.kind == "binary":
        words = f"DeLong, pairs of the same fold, {parts[0].groups.words}"
    models = comparison.jackknife(
        [part.scorers[mine.metric] for part in parts],
        [part.sampling for part in parts],
        chance=metrics.chance_of(mine.metric, 2),
    )
    return {
        "cases": len(shared),
        "metric": mine.metric,
        "by": words,
        **asdict(models.difference(0, 1)),
    }


def _with_classes_of(target: Target, other: Tested) -> Tested:
    """The other predictions with the order of two classes and the positive one of a target.

    Both change no area and no difference of areas. Predictions of other classes stay as they are.
    """
    same_but_order = (
        target.kind == other.target.kind == "binary"
        and target.columns == other.target.columns
        and set(target.names) == set(other.target.names)
    )
    if not same_but_order:
        return other
    if target.names == other.target.names:
        return replace(other, target=target)
    return replace(
        other, target=target, truth=1 - other.truth, answers=other.answers[:, ::-1]
    )


def compare_all(mine: Tested, others: Sequence[Path]) -> list[Document]:
    """Differences from other experiments, with p values that Holm corrected for their number.

    Raises StoreError, InvalidInputError: as `compare`.
    """
    rows = [compare(mine, other) for other in others]
    if rows:
        corrected = comparison.holm([row["p_value"] for row in rows])
        for row, p_holm in zip(rows, corrected, strict=True):
            row["p_holm"] = float(p_holm)
    return rows


def lines_of(
    tested: Tested, slides: Mapping[str, Floats]
) -> Iterator[dict[str, object]]:
    """Rows of predictions.csv, as those of `predict`, with truth and fold."""
    target = tested.target
    for i, (case, case_slides) in enumerate(
        zip(tested.cases, tested.slides, strict=True)
    ):
        if len(case_slides) == 1:
            lines = [("slide", case_slides[0], tested.answers[i])]
        else:
            lines = [("case", "", tested.answers[i])]
            lines += [
                ("slide", slide, slides[slide])
                for slide in items_if_several(case_slides)
            ]
        truth = target.truth_cells(tested.truth[i].tolist())
        for level, slide, answers in lines:
            yield {
                "level": level,
                "case_id": case,
                "slide_id": slide,
                "fold": int(tested.fold[i]),
                **truth,
                **target.cells(answers.tolist()),
            }
