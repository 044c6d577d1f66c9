"""Figures that training fixes: the threshold, the cut for high risk, the baseline hazard.

All of them are chosen on cases that the respective head was not fitted to, and stored in the model
file. New cases are judged by them; nothing is chosen on new cases.

The model file holds the mean of the folds' heads, which few cohorts can test: a case tests the mean
only if no head was trained on it. In cross-validation each case trained all heads but one. Where
given splits have the same test cases in every fold, these cases can.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from thinsection.evaluation.external import youden_threshold
from thinsection.evaluation.survival import breslow_baseline
from thinsection.predict.folds import FoldResult, Study
from thinsection.predict.model_file import Lock
from thinsection.predict.tested import Tested, score_table
from thinsection.types import Document, counted

HORIZONS = (0.25, 0.5, 0.75)  # quantiles of the times of training events


def lock_of(
    study: Study, results: Sequence[FoldResult], tested: Tested, temperature: float
) -> Lock:
    """Fixed figures for the kind of target; none for several classes and for values.

    Args:
        study: the cohort and its folds.
        results: head of each fold, with its logits of inner cases.
        tested: out-of-fold predictions.
        temperature: temperature of the logits of all folds.
    """
    kind = study.cohort.target.kind
    if kind in ("binary", "multilabel"):
        return _threshold_lock(study, results, temperature)
    if kind in ("cox", "discrete"):
        return _risk_lock(tested)
    return Lock()


def _threshold_lock(
    study: Study, results: Sequence[FoldResult], temperature: float
) -> Lock:
    """Youden's threshold of each output on the pooled inner cases of all folds.

    An output has no threshold if its inner cases are all positive or all negative.
    """
    target = study.cohort.target
    values = study.cohort.array
    rows = [case for part in study.parts for case in part.stop]
    predicted = np.concatenate(
        [result.target.answers(result.stop / temperature) for result in results]
    )
    thresholds = {}
    for k, name in enumerate(target.names):
        if target.kind == "binary" and k != target.positive_index:
            continue
        probability = predicted[:, k]
        if target.exclusive:
            truth = values[rows, 0] == k
        else:
            is_known = np.isfinite(values[rows, k])  # a label may be blank
            truth = values[rows, k][is_known] == 1
            probability = probability[is_known]
        if truth.any() and not truth.all():
            thresholds[name] = youden_threshold(truth, probability)
    return Lock(thresholds=thresholds, inner_cases=len(set(rows)))


def _risk_lock(tested: Tested) -> Lock:
    """Median out-of-fold risk, times at which survival is scored, and baseline hazard.

    The risk of a case is on the scale of all heads' mean risk: the partial likelihood does not
    determine an additive constant of each 'cox' head. A head's constant is estimated by its mean
    over its test cases, and replaced by the mean over heads.
    """
    of_row = tested.target.risk(tested.answers)
    if tested.target.kind == "cox":
        folds = np.unique(tested.fold)
        centers = {f: float(of_row[tested.fold == f].mean()) for f in folds}
        shared = float(np.mean([*centers.values()]))
        of_row = of_row - np.array([centers[f] for f in tested.fold]) + shared
    _, first, place = np.unique(tested.cases, return_index=True, return_inverse=True)
    risk = np.bincount(place, of_row) / np.bincount(place)
    event = tested.truth[first, 0] == 1
    time = tested.truth[first, 1]
    horizons = tuple(np.unique(np.quantile(time[event], HORIZONS)).tolist())
    cut = float(np.median(risk))
    if tested.target.kind != "cox":
        return Lock(risk_cut=cut, horizons=horizons)
    times, hazard = breslow_baseline(event, time, risk)
    return Lock(
        risk_cut=cut,
        horizons=horizons,
        times=tuple(times.tolist()),
        hazard=tuple(hazard.tolist()),
    )


def held_out_cases(study: Study) -> list[int]:
    """Cases that every fold tests, so that no head was trained or chosen on them."""
    tested = [set(part.test) for part in study.parts]
    return sorted(set.intersection(*tested))


def shipped_score(study: Study, folds: Tested, *, seed: int) -> Document:
    """Score of the mean of all heads on cases that none of them has seen; or why there is none.

    `words` say what the model file is, and how its score can be known.
    """
    count = len(study.parts)
    empty: Document = {"cases": 0, "score": None}
    if count == 1:
        words = "The model file holds the one head that is scored here."
        return {**empty, "words": words}
    cases = held_out_cases(study)
    if not cases:
        return {
            **empty,
            "words": (
                f"These are scores of the {count} models of the folds, each on the cases that it "
                f"was not trained on. The model file predicts with the mean of these {count} "
                "models. Its score is not known: each case of this cohort trained at least one of "
                "them. Test the model file on other cases (`thinsection predict --labels`)."
            ),
        }
    mean = _mean_of_heads(study, folds, cases)
    tables = score_table(
        {mean.metric: mean.scorers[mean.metric]}, mean.sampling, seed=seed
    )
    return {
        "cases": len(cases),
        "score": tables[mean.metric],
        "words": (
            f"The scores below are those of the {count} models of the folds, one by one. The model "
            "file holds their mean; "
            f"its own score is that on the {counted(len(cases), 'case')} that every fold tests."
        ),
    }


def _mean_of_heads(study: Study, folds: Tested, cases: list[int]) -> Tested:
    """Predictions of the mean of all heads, one row a case."""
    names = [study.cohort.cases[i] for i in cases]
    rows_by_case = {
        name: np.flatnonzero(np.array(folds.cases) == name) for name in names
    }
    first = folds.take(np.array([rows[0] for rows in rows_by_case.values()]))
    answers = [folds.answers[rows].mean(axis=0) for rows in rows_by_case.values()]
    return replace(
        first, answers=np.stack(answers), fold=np.zeros(len(names), dtype=np.int64)
    )
