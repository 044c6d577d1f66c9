"""Score of the model file beside the folds': it holds their mean, which few cohorts can test.

A case tests the mean only if no head was trained on it. In cross-validation each case trained all
heads but one. Where given splits have the same test cases in every fold, these cases can.
"""

from dataclasses import replace

import numpy as np

from thinsection.predict.folds import Study
from thinsection.predict.tested import Tested, score_table
from thinsection.types import Json, counted


def held_out_cases(study: Study) -> list[int]:
    """Cases that every fold tests, so that no head was trained or chosen on them."""
    tested = [set(part.test) for part in study.parts]
    return sorted(set.intersection(*tested))


def shipped_score(study: Study, folds: Tested, *, seed: int) -> dict[str, Json]:
    """Score of the mean of all heads on cases that none of them has seen; or why there is none.

    `words` say what the model file is, and how its score can be known.
    """
    count = len(study.parts)
    empty: dict[str, Json] = {"cases": 0, "score": None}
    if count == 1:
        words = "The model file holds the one head that is scored here."
        return {**empty, "words": words}
    cases = held_out_cases(study)
    if not cases:
        return {
            **empty,
            "words": (
                f"These are scores of the {count} models of the folds, each on the cases that it "
                f"was not trained on. The model file holds the mean of these {count} models. Its "
                "score is not known: each case of this cohort trained at least one of them. Test "
                "the model file on other cases (`thinsection predict --labels`)."
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
