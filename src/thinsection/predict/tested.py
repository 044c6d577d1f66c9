"""What folds say of cases that they have not seen: scored, compared, as a table and as a page."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from scipy.stats import rankdata

from thinsection.errors import (
    DatasetError,
    InvalidInputError,
    StoreError,
    rewording,
)
from thinsection.evaluation import comparison, metrics
from thinsection.evaluation.calibration import shared_temperature
from thinsection.evaluation.intervals import Sampling, interval, why_missing
from thinsection.evaluation.labels import Floats, Target, several
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.survival import comparable_pairs
from thinsection.files.json_text import read_json
from thinsection.files.pages import data_uri, render_page
from thinsection.predict.folds import FoldResult, Study, read_fold
from thinsection.predict.heatmap_links import LINKS_NAME
from thinsection.predict.training import criterion_of, targets_of
from thinsection.probe.curves import (
    COLORS,
    Columns,
    Words,
    class_columns,
    draw_calibration,
    draw_decision,
    draw_precision,
    draw_risks,
    draw_roc,
    draw_values,
)
from thinsection.probe.plots import Picture, draw_confusion, draw_picture
from thinsection.probe.result import (
    METRIC_WORDS,
    Predictions,
    Risks,
    Rows,
    Values,
)
from thinsection.report.draw import thumbnail_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXPERIMENT_NAME = "experiment.json"
HEADLINE = {
    "regression": "pearson",
    "cox": "c_index",
    "discrete": "c_index",
}  # else auroc
WORST, THUMBNAIL_PX = 12, 200


@dataclass(frozen=True, kw_only=True)
class Tested:
    """What folds say of cases that they have not seen, row by row."""

    target: Target
    cases: tuple[str, ...]  # (n,); splits of a file may test a case several times
    slides: tuple[tuple[str, ...], ...]  # of each
    fold: IndexArray
    truth: Floats  # (n, T), see `Cohort.values`
    answers: Floats  # (n, K), see `Target.answers`

    @property
    def metric(self) -> str:
        """The one that is told first."""
        return HEADLINE.get(self.target.kind, "auroc")

    @property
    def sampling(self) -> Sampling:
        """Cases as units, with the classes or events by which they are counted."""
        return case_sampling(self.target, self.cases, self.truth, self.fold)

    def take(self, rows: IndexArray) -> "Tested":
        """Some of the rows."""
        return replace(
            self,
            cases=tuple(self.cases[i] for i in rows),
            slides=tuple(self.slides[i] for i in rows),
            fold=self.fold[rows],
            truth=self.truth[rows],
            answers=self.answers[rows],
        )

    @property
    def scorers(self) -> metrics.Scorers:
        """Every metric of all cases; of labels the mean."""
        each = [one.scorers for one in self.rows()]
        return {
            name: metrics.MeanScorer([one[name] for one in each]) for name in each[0]
        }

    def of_fold(self, fold: int) -> float | None:
        """The first metric of one fold's cases; None where they have no pair of cases."""
        part = self.take(np.flatnonzero(self.fold == fold))
        score = metrics.all_scores(part.scorers, len(part.cases))[self.metric]
        return score if np.isfinite(score) else None

    def rows(self) -> list[Rows]:
        """The rows as a probe has them: classes, values or risks; of labels each."""
        target = self.target
        if target.exclusive:
            return [
                Predictions(
                    ids=self.cases,
                    fold=self.fold,
                    class_names=target.names,
                    truth=self.truth[:, 0].astype(np.int64),
                    prediction=self.answers.argmax(axis=1),
                    probability=self.answers,
                )
            ]
        if target.kind == "multilabel":
            return [
                Predictions(
                    ids=self.cases,
                    fold=self.fold,
                    class_names=(f"without {name}", name),
                    truth=(label == 1).astype(np.int64),
                    prediction=(share > 0.5).astype(np.int64),
                    probability=np.stack([1 - share, share], axis=1),
                )
                for name, label, share in zip(
                    target.names, self.truth.T, self.answers.T, strict=True
                )
            ]
        if target.kind == "regression":
            return [
                Values(
                    ids=self.cases,
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
                fold=self.fold,
                risk=risk,
                high=risk > np.array([middle[f] for f in self.fold]),
                event=self.truth[:, 0] == 1,
                time=self.truth[:, 1],
            )
        ]


def score_table(
    scorers: metrics.Scorers, sampling: Sampling, *, seed: int
) -> dict[str, dict[str, Any]]:
    """Metric -> its value and 95 % confidence interval; None where there is none, and why."""
    every = np.ones((1, len(sampling.codes)))
    table = {}
    for name, scorer in scorers.items():
        value = float(scorer(every)[0])
        found = interval(sampling, scorer, name, seed=seed)
        table[name] = {
            "value": value if np.isfinite(value) else None,
            "low": None if found.missing else found.low,
            "high": None if found.missing else found.high,
            "missing": found.missing,
            "resamples": found.draws,
            "pooled_over": metrics.pooled_over(name),
        }
    return table


def case_sampling(
    target: Target, cases: Sequence[str], truth: Floats, fold: IndexArray
) -> Sampling:
    """Sampling of tested cases: by class, by event, or by the rarest of several labels."""
    runs = max(1, len(cases) // len(set(cases)))  # splits may test a case several times
    classes = None
    events = None
    if target.exclusive:
        classes = truth[:, 0]
    elif target.kind == "multilabel":
        share = (truth == 1).mean(axis=0)
        rarest = int(np.argmin(np.minimum(share, 1 - share)))
        classes = truth[:, rarest] == 1
    elif target.kind != "regression":
        events = truth[:, 0] == 1
    return Sampling.of_rows(
        len(cases),
        cases,
        unit="cases",
        classes=classes,
        events=events,
        fold=fold,
        folds=max(1, len(np.unique(fold)) // runs),
    )


def test_rows(study: Study) -> tuple[list[int], IndexArray]:
    """Cases that the folds test, fold after fold, and the fold of each."""
    rows = [i for part in study.parts for i in part.test]
    sizes = [len(part.test) for part in study.parts]
    return rows, np.repeat(np.arange(len(study.parts)), sizes)


def forecast(study: Study) -> Iterator[str]:
    """What can be said of the scores before training, line by line.

    Raises DatasetError: no fold will have two cases whose risks can be compared.
    """
    cohort = study.cohort
    rows, fold = test_rows(study)
    truth = cohort.array[rows]
    if cohort.target.kind in ("cox", "discrete"):
        pairs = comparable_pairs(truth[:, 0] == 1, truth[:, 1], fold).sum()
        if not pairs:
            raise DatasetError(
                "folds must have cases whose times can be compared, got none in "
                f"{len(study.parts)} folds of {len(rows)} cases; use fewer --folds"
            )
        yield f"c-index: {pairs} pairs of cases of the same fold can be compared"
    cases = [cohort.cases[i] for i in rows]
    missing = why_missing(case_sampling(cohort.target, cases, truth, fold))
    if missing:
        yield f"scores will have no interval: {missing}"


def ensemble_temperature(study: Study, results: Sequence[FoldResult]) -> float:
    """The one temperature of all folds' logits, from all their inner cases."""
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
    """What each fold says of its test cases, and of the slides of cases that have several."""
    cohort = study.cohort
    slides: dict[str, Floats] = {}
    answers = []
    for part, result in zip(study.parts, results, strict=True):
        answers.append(result.target.answers(result.logits / temperature))
        names = [slide for i in part.test for slide in several(cohort.slides[i])]
        if names:
            said = result.target.answers(result.slides / temperature)
            slides.update(zip(names, said, strict=True))
    rows, fold = test_rows(study)
    tested = Tested(
        target=cohort.target,
        cases=tuple(cohort.cases[i] for i in rows),
        slides=tuple(cohort.slides[i] for i in rows),
        fold=fold,
        truth=cohort.array[rows],
        answers=np.concatenate(answers),
    )
    return tested, slides


def compare(mine: Tested, other: Path) -> dict[str, Any]:
    """The difference to another experiment on the cases of both, paired; > 0: this one is higher.

    For two classes DeLong's test of pairs of the same fold, else a paired bootstrap of cases.

    Raises StoreError, InvalidInputError: it is none, of another target, or of other cases.
    """
    rule = "experiment must be one of `thinsection train`"
    with rewording(rule, other, OSError, ValueError, KeyError, error=StoreError):
        names = read_json(other / EXPERIMENT_NAME)["heads"]
        study = Study.load(other)
        results = [read_fold(other, name) for name in names]
    whole = [result for result in results if result is not None]
    if len(whole) != len(study.parts):
        raise StoreError(f"folds must be there, got fewer in {str(other)!r}")
    theirs = tested_of(study, whole, ensemble_temperature(study, whole))[0]
    if mine.target != theirs.target:
        raise InvalidInputError(
            f"experiments must have one target, got {mine.target} and {theirs.target}"
        )
    row_of = [{case: row for row, case in enumerate(t.cases)} for t in (mine, theirs)]
    shared = sorted(row_of[0].keys() & row_of[1].keys())
    if len(shared) < comparison.MIN_GROUPS:
        raise InvalidInputError(f"experiments must share cases, got {len(shared)}")
    first = mine.take(np.array([row_of[0][case] for case in shared]))
    second = theirs.take(np.array([row_of[1][case] for case in shared]))
    if mine.target.kind == "binary":
        words = "DeLong, pairs of the same fold"
        difference = comparison.delong(
            [first.answers[:, 1], second.answers[:, 1]],
            first.truth[:, 0] == 1,
            first.sampling,
            folds=(first.fold, second.fold),
        )
    else:
        words = "paired bootstrap of cases"
        pair = [first.scorers[mine.metric], second.scorers[mine.metric]]
        difference = comparison.resample(pair, first.sampling, seed=0).difference(0, 1)
    return {
        "name": other.name,
        "cases": len(shared),
        "metric": mine.metric,
        "by": words,
        **asdict(difference),
    }


def lines_of(tested: Tested, slides: Mapping[str, Floats]) -> Iterator[dict[str, Any]]:
    """Rows of predictions.csv, as those of `predict`, with truth and fold."""
    target = tested.target
    for i, (case, own) in enumerate(zip(tested.cases, tested.slides, strict=True)):
        lines = [
            ("case", "", tested.answers[i]),
            *(("slide", s, slides[s]) for s in several(own)),
        ]
        if len(own) == 1:
            lines = [("slide", own[0], tested.answers[i])]
        truth = {
            f"truth_{c}": v for c, v in zip(target.columns, tested.truth[i].tolist())
        }
        if target.exclusive:
            truth = {"truth": target.names[int(tested.truth[i, 0])]}
        for level, slide, said in lines:
            known: dict[str, Any] = {"level": level, "case_id": case, "slide_id": slide}
            yield (
                known
                | {"fold": int(tested.fold[i])}
                | truth
                | target.cells(said.tolist())
            )


def experiment_page(document: Mapping[str, Any], tested: Tested, slides: Path) -> str:
    """The page as HTML, pictures inside.

    `document` is that of experiment.json; `slides` the folder `slides` of the results, which has
    pictures of them. Links to heatmaps come from the script beside the page, see `heatmap_links`.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    shown = {"against": None, **document}
    shown["facts"] = [
        (key, document[key]) for key in ("target", "task", "head", "date")
    ]
    shown["metric"] = METRIC_WORDS.get(tested.metric, tested.metric)
    shown["scores"] = [
        (METRIC_WORDS.get(k, k), v) for k, v in document["scores"].items()
    ]
    drawn = _pictures(document, tested)
    shown["pictures"] = [
        (p.title, p.caption, base64.b64encode(p.png).decode()) for p in drawn
    ]
    shown["worst"] = list(_worst(tested, slides))
    shown["links"] = LINKS_NAME
    return render_page("thinsection.predict", "experiment.html.j2", **shown)


def _pictures(document: Mapping[str, Any], tested: Tested) -> list[Picture]:
    rows = tested.rows()
    first = rows[0]
    drawn = []
    if isinstance(first, Predictions):
        if tested.target.exclusive:
            drawn.append(draw_picture("confusion", first, draw_confusion))
        columns = [column for one in rows for column in class_columns(one)]
        curves = Columns(columns, tested.sampling)
        drawn.append(draw_picture("roc", curves, draw_roc))
        drawn.append(draw_picture("pr", curves, draw_precision))
        drawn.append(draw_picture("calibration", curves, draw_calibration))
        drawn.append(draw_picture("decision", curves, draw_decision))
    elif isinstance(first, Risks):
        drawn.append(draw_picture("survival", first, draw_risks))
    elif isinstance(first, Values):
        pair = (tested.truth[:, 0], tested.answers[:, 0])
        drawn.append(draw_picture("values", pair, draw_values))
    return [*drawn, draw_picture("folds", document, _folds)]


def _folds(axes: "Axes", document: Mapping[str, Any], result: Any) -> Words:
    scores = [np.nan if f["score"] is None else f["score"] for f in document["folds"]]
    if document["interval"]:
        low, high = document["interval"]
        axes.axhspan(low, high, color=COLORS[4], alpha=0.25, linewidth=0)
    axes.axhline(document["value"], color=COLORS[0], linewidth=1.2)
    axes.plot(range(1, len(scores) + 1), scores, "o", color=COLORS[5])
    words = METRIC_WORDS.get(document["metric"], document["metric"])
    axes.set(xlabel="fold", ylabel=words, xticks=range(1, len(scores) + 1))
    return (
        "Score by fold",
        "Line: the score of all cases; band: its 95 % confidence interval.",
    )


def _worst(tested: Tested, slides: Path) -> Iterator[dict[str, Any]]:
    """The cases whose answers are farthest from the truth, the worst first."""
    target, truth, answers = tested.target, tested.truth, tested.answers
    if target.exclusive:
        wrong = 1 - answers[np.arange(len(truth)), truth[:, 0].astype(np.int64)]
    elif target.kind in ("multilabel", "regression"):
        wrong = np.abs(answers - truth).mean(axis=1)
    else:  # of those that had the event: how far the order by risk is from that by time
        late = rankdata(truth[:, 1]) - rankdata(-target.risk(answers))
        wrong = np.where(truth[:, 0] == 1, np.abs(late), -1.0)
    for i in np.argsort(-wrong, kind="stable")[:WORST]:
        slide, told = tested.slides[i][0], zip(target.columns, truth[i], strict=True)
        path = thumbnail_file(slides / slide)
        picture = path and data_uri(Image.open(path), THUMBNAIL_PX)
        known = target.names[int(truth[i, 0])] if target.exclusive else ""
        known = known or ", ".join(f"{c} {v:g}" for c, v in told)
        said = dict(zip(target.names, (f"{v:.3g}" for v in answers[i]), strict=True))
        yield {
            "case": tested.cases[i],
            "slide": slide,
            "truth": known,
            "said": said,
            "picture": picture,
        }
