"""What folds say of cases that they have not seen: scored, compared, as rows of a table."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import StoreError, require, rewording
from thinsection.predict.folds import FoldResult, Study, read_fold, several
from thinsection.predict.labels import Target
from thinsection.probe import metrics, paired
from thinsection.probe.metrics import Scorers

EXPERIMENT_NAME = "experiment.json"
HEADLINE = {"regression": "pearson", "cox": "c_index", "discrete": "c_index"}  # else auroc
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Tested:
    """What folds say of cases that they have not seen, row by row."""

    target: Target
    cases: tuple[str, ...]  # (n,); splits of a file may test a case several times
    slides: tuple[tuple[str, ...], ...]  # of each
    fold: npt.NDArray[np.int64]
    truth: Floats  # (n, T), see `Cohort.values`
    answers: Floats  # (n, K), see `Target.answers`

    def take(self, rows: npt.NDArray[np.int64]) -> "Tested":
        """Some rows."""
        some: dict[str, Any] = {n: getattr(self, n)[rows] for n in ("fold", "truth", "answers")}
        some |= {n: tuple(getattr(self, n)[i] for i in rows) for n in ("cases", "slides")}
        return replace(self, **some)

    @property
    def metric(self) -> str:
        """The one that is told first."""
        return HEADLINE.get(self.target.kind, "auroc")

    def scorers(self) -> Scorers:
        """Every metric, its mean over folds."""
        return metrics.over_folds(self.fold, len(self.cases), self._of_rows)

    def _of_rows(self, rows: npt.NDArray[np.int64]) -> Scorers:
        kind, truth, answers = self.target.kind, self.truth[rows], self.answers[rows]
        if self.target.exclusive:
            labels, guess = truth[:, 0].astype(np.int64), answers.argmax(axis=1)
            return metrics.class_scorers(labels, guess, answers.shape[1], answers)
        if kind == "multilabel":
            each = [_label_scorers(y == 1, p) for y, p in zip(truth.T, answers.T, strict=True)]
            return {name: partial(_mean, [one[name] for one in each]) for name in each[0]}
        if kind == "regression":
            return metrics.value_scorers(truth[:, 0], answers[:, 0])
        return metrics.survival_scorers(truth[:, 0] == 1, truth[:, 1], self.target.risk(answers))

    def of_fold(self, fold: int) -> float:
        """The first metric of one fold's cases."""
        rows = np.flatnonzero(self.fold == fold)
        return metrics.all_scores(self._of_rows(rows), len(rows))[self.metric]


def _label_scorers(truth: npt.NDArray[np.bool_], share: Floats) -> Scorers:
    both, guess = np.stack([1 - share, share], axis=1), (share > 0.5).astype(np.int64)
    return metrics.class_scorers(truth.astype(np.int64), guess, 2, both)


def _mean(scorers: Sequence[Any], weights: npt.NDArray[Any]) -> Floats:
    return np.mean([score(weights) for score in scorers], axis=0)  # type: ignore[no-any-return]


def tested_of(study: Study, results: Sequence[FoldResult]) -> tuple[Tested, dict[str, Floats]]:
    """What each fold says of its test cases, and of the slides of cases that have several."""
    cohort, slides = study.cohort, dict[str, Floats]()
    answers = [cohort.target.answers(r.logits / r.temperature) for r in results]
    for part, result in zip(study.parts, results, strict=True):
        names = [slide for i in part.test for slide in several(cohort.slides[i])]
        if names:
            said = cohort.target.answers(result.slides / result.temperature)
            slides |= dict(zip(names, said, strict=True))
    rows = [i for part in study.parts for i in part.test]
    tested = Tested(
        target=cohort.target,
        cases=tuple(cohort.cases[i] for i in rows),
        slides=tuple(cohort.slides[i] for i in rows),
        fold=np.repeat(np.arange(len(study.parts)), [len(part.test) for part in study.parts]),
        truth=cohort.array[rows],
        answers=np.concatenate(answers),
    )
    return tested, slides


def compare(mine: Tested, other: Path) -> dict[str, Any]:
    """The difference to another experiment on the cases of both, paired; > 0: this one is higher.

    Raises StoreError, InvalidInputError: it is none, of another target, or of other cases.
    """
    rule = "experiment must be one of `thinsection train`"
    with rewording(rule, other, OSError, ValueError, KeyError, error=StoreError):
        names = json.loads((other / EXPERIMENT_NAME).read_text("utf-8"))["heads"]
        study, results = Study.load(other), [read_fold(other, name) for name in names]
    whole = [result for result in results if result is not None]
    complete = len(whole) == len(study.parts)
    require(complete, "folds must be there", f"fewer in {str(other)!r}", error=StoreError)
    theirs = tested_of(study, whole)[0]
    rule, got = "experiments must have one target", f"{mine.target} and {theirs.target}"
    require(mine.target == theirs.target, rule, got)
    places = [dict(zip(one.cases, range(len(one.cases)), strict=True)) for one in (mine, theirs)]
    shared = sorted(places[0].keys() & places[1].keys())
    require(len(shared) >= paired.MIN_GROUPS, "experiments must share cases", len(shared))
    rows = [np.array([place[case] for case in shared]) for place in places]
    both = [mine.take(rows[0]), theirs.take(rows[1])]
    scorers = [one.scorers()[mine.metric] for one in both]
    drawn = paired.resample(scorers, len(shared), groups=shared, seed=0)
    found: dict[str, Any] = {"name": other.name, "cases": len(shared), "metric": mine.metric}
    found |= {"by": "paired bootstrap of cases", **asdict(drawn.difference(0, 1))}
    if mine.target.kind == "binary":
        areas = paired.delong([one.answers[:, 1] for one in both], both[0].truth[:, 0] == 1)
        found["delong"] = {"by": "DeLong, folds pooled", **asdict(areas)}
    return found


def lines_of(tested: Tested, slides: Mapping[str, Floats]) -> Iterator[dict[str, Any]]:
    """Rows of predictions.csv, as those of `predict`, with truth and fold."""
    target = tested.target
    for i, (case, own) in enumerate(zip(tested.cases, tested.slides, strict=True)):
        fold, truth, answers = int(tested.fold[i]), tested.truth[i], tested.answers[i]
        alone = len(own) == 1
        lines = [("slide" if alone else "case", own[0] if alone else "", answers)]
        lines += [("slide", slide, slides[slide]) for slide in ([] if alone else own)]
        for level, slide, said in lines:
            line: dict[str, Any] = {
                "level": level,
                "case_id": case,
                "slide_id": slide,
                "fold": fold,
            }
            if target.exclusive:
                line["truth"] = target.names[int(truth[0])]
                line["prediction"] = target.names[int(said.argmax())]
            else:
                told = zip(target.columns, truth.tolist(), strict=True)
                line |= {f"truth_{c}": v for c, v in told}
            if target.kind == "discrete":
                line["risk"] = float(target.risk(said[None])[0])
            begin = "" if target.kind in ("cox", "regression") else "p_"
            yield line | {f"{begin}{n}": float(v) for n, v in zip(target.names, said, strict=True)}
