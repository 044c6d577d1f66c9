"""What folds say of cases that they have not seen: scored, compared, as a table and as a page."""

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.stats import rankdata

from thinsection.errors import StoreError, importing, require, rewording
from thinsection.files.pages import data_uri, render_page
from thinsection.predict.folds import FoldResult, Study, read_fold
from thinsection.predict.labels import Floats, Target, several
from thinsection.probe import intervals, statistics
from thinsection.probe.plots import COLORS, Picture, Words, draw_picture, probe_pictures
from thinsection.probe.protocol import NANOPATH
from thinsection.probe.result import METRIC_WORDS, Predictions, ProbeResult, Risks, Rows, Values
from thinsection.probe.statistics import IndexArray
from thinsection.store.ledger import SLIDES
from thinsection.weights.origin import slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXPERIMENT_NAME = "experiment.json"
HEADLINE = {"regression": "pearson", "cox": "c_index", "discrete": "c_index"}  # else auroc
WORST, THUMBNAIL_PX, BINS = 12, 200, 10
Column = tuple[str, npt.NDArray[np.bool_], Floats]  # a class or label, who has it, the answers (n,)


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

    def scorers(self, rows: IndexArray | None = None) -> statistics.Scorers:
        """Every metric of some rows or all, its mean over folds."""
        known = np.arange(len(self.cases)) if rows is None else rows

        def of(some: IndexArray) -> statistics.Scorers:
            each = [one.scorers for one in self.said(known[some])]
            return {name: statistics.mean_of([one[name] for one in each]) for name in each[0]}

        return statistics.over_folds(self.fold[known], len(known), of)

    def of_fold(self, fold: int) -> float:
        """The first metric of one fold's cases."""
        rows = np.flatnonzero(self.fold == fold)
        return statistics.all_scores(self.scorers(rows), len(rows))[self.metric]

    def said(self, rows: IndexArray) -> list[Rows]:
        """Some rows as a probe would say them: classes, values or risks; of labels each."""
        target, fold = self.target, self.fold[rows]
        truth, answers = self.truth[rows], self.answers[rows]
        known: dict[str, Any] = {"ids": tuple(self.cases[i] for i in rows)}
        if target.exclusive:
            known |= {"class_names": target.names, "truth": truth[:, 0].astype(np.int64)}
            return [Predictions(**known, prediction=answers.argmax(axis=1), probability=answers)]
        if target.kind == "multilabel":
            known["class_names"], found = ("without", "with"), list[Rows]()
            for label, share in zip((truth == 1).astype(np.int64).T, answers.T, strict=True):
                guess, both = (share > 0.5).astype(np.int64), np.stack([1 - share, share], axis=1)
                found.append(Predictions(**known, truth=label, prediction=guess, probability=both))
            return found
        if target.kind == "regression":
            return [Values(**known, target_names=target.names, truth=truth, prediction=answers)]
        risk = target.risk(answers)
        middle = {f: np.median(risk[fold == f]) for f in np.unique(fold)}
        high = risk > np.array([middle[f] for f in fold])
        return [Risks(**known, risk=risk, high=high, event=truth[:, 0] == 1, time=truth[:, 1])]


def tested_of(study: Study, results: Sequence[FoldResult]) -> tuple[Tested, dict[str, Floats]]:
    """What each fold says of its test cases, and of the slides of cases that have several."""
    cohort, slides, answers = study.cohort, dict[str, Floats](), []
    for part, result in zip(study.parts, results, strict=True):
        answers.append(cohort.target.answers(result.logits / result.temperature))
        if names := [slide for i in part.test for slide in several(cohort.slides[i])]:
            said = cohort.target.answers(result.slides / result.temperature)
            slides |= dict(zip(names, said, strict=True))
    rows = [i for part in study.parts for i in part.test]
    known: dict[str, Any] = {"target": cohort.target, "truth": cohort.array[rows]}
    known |= {n: tuple(getattr(cohort, n)[i] for i in rows) for n in ("cases", "slides")}
    fold = np.repeat(np.arange(len(study.parts)), [len(part.test) for part in study.parts])
    return Tested(**known, fold=fold, answers=np.concatenate(answers)), slides


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
    both = mine, tested_of(study, whole)[0]
    got = f"{mine.target} and {both[1].target}"
    require(mine.target == both[1].target, "experiments must have one target", got)
    places = [{case: row for row, case in enumerate(one.cases)} for one in both]
    shared = sorted(places[0].keys() & places[1].keys())
    require(len(shared) >= intervals.MIN_GROUPS, "experiments must share cases", len(shared))
    rows = [np.array([place[case] for case in shared]) for place in places]
    scorers = [one.scorers(own)[mine.metric] for one, own in zip(both, rows)]
    drawn = intervals.resample(scorers, len(shared), groups=shared, seed=0)
    found: dict[str, Any] = {"name": other.name, "cases": len(shared), "metric": mine.metric}
    found |= {"by": "paired bootstrap of cases", **asdict(drawn.difference(0, 1))}
    if mine.target.kind == "binary":
        shares = [one.answers[own, 1] for one, own in zip(both, rows)]
        areas = intervals.delong(shares, mine.truth[rows[0], 0] == 1)
        found["delong"] = {"by": "DeLong, folds pooled", **asdict(areas)}
    return found


def lines_of(tested: Tested, slides: Mapping[str, Floats]) -> Iterator[dict[str, Any]]:
    """Rows of predictions.csv, as those of `predict`, with truth and fold."""
    target = tested.target
    for i, (case, own) in enumerate(zip(tested.cases, tested.slides, strict=True)):
        lines = [("case", "", tested.answers[i]), *(("slide", s, slides[s]) for s in several(own))]
        if len(own) == 1:
            lines = [("slide", own[0], tested.answers[i])]
        truth = {f"truth_{c}": v for c, v in zip(target.columns, tested.truth[i].tolist())}
        if target.exclusive:
            truth = {"truth": target.names[int(tested.truth[i, 0])]}
        for level, slide, said in lines:
            known: dict[str, Any] = {"level": level, "case_id": case, "slide_id": slide}
            yield known | {"fold": int(tested.fold[i])} | truth | target.cells(said.tolist())


def experiment_page(document: Mapping[str, Any], tested: Tested, grid: Path, out: Path) -> str:
    """The page as HTML, pictures inside.

    `document` is that of experiment.json; `grid` the folder of the tile grid in the results, where
    heatmaps will be; `out` the experiment's folder, where links begin.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    shown = {"against": None, **document}
    shown["facts"] = [(key, document[key]) for key in ("target", "task", "head", "date")]
    shown["metric"] = METRIC_WORDS.get(tested.metric, tested.metric)
    shown["scores"] = [(METRIC_WORDS.get(k, k), v) for k, v in document["scores"].items()]
    drawn = _pictures(document, tested)
    shown["pictures"] = [(p.title, p.caption, base64.b64encode(p.png).decode()) for p in drawn]
    shown["worst"] = list(_worst(tested, grid / f"heatmap_{slug(document['name'])}", out))
    return render_page("thinsection.predict", "experiment.html.j2", **shown)


def _pictures(document: Mapping[str, Any], tested: Tested) -> list[Picture]:
    target, truth, answers = tested.target, tested.truth, tested.answers
    first, columns = tested.said(np.arange(len(truth)))[0], list[Column]()
    given: dict[str, Any] = {"probe": "train", "dataset": document["name"], "protocol": NANOPATH}
    given |= {"metric": tested.metric, "score": document["value"], "interval": None}
    if target.exclusive:
        given["predictions"], labels = first, truth[:, 0]
        classes = [1] if len(target.names) == 2 else range(len(target.names))
        columns = [(target.names[c], labels == c, answers[:, c]) for c in classes]
    elif target.kind == "multilabel":
        columns = [(n, truth[:, c] == 1, answers[:, c]) for c, n in enumerate(target.names)]
    elif isinstance(first, Risks):
        given["risks"] = first
    found = probe_pictures(ProbeResult(**given))
    if isinstance(first, Risks):
        found[0] = found[0]._replace(caption=f"{found[0].caption} {_log_rank(first)}")
    if target.kind == "multilabel":
        found.append(draw_picture("roc", columns, partial(_curve, precision=False)))
    if columns:
        found.append(draw_picture("pr", columns, partial(_curve, precision=True)))
        found.append(draw_picture("calibration", columns, _calibration))
    if target.kind == "regression":
        found.append(draw_picture("values", (truth[:, 0], answers[:, 0]), _values))
    return [*found, draw_picture("folds", document, _folds)]


def _log_rank(risks: Risks) -> str:
    with importing("the log-rank test needs scikit-survival", "probe"):
        from sksurv.compare import compare_survival
        from sksurv.util import Surv
    if risks.high.all() or not risks.high.any():
        return "All risks are equal: no log-rank test."
    chi, p = compare_survival(Surv.from_arrays(risks.event, risks.time), risks.high)
    return f"Log-rank test: chi² {chi:.2f}, p {p:.2g}."


def _curve(axes: "Axes", columns: Sequence[Column], result: Any, *, precision: bool) -> Words:
    from sklearn.metrics import auc, average_precision_score, precision_recall_curve, roc_curve

    for (name, truth, share), color in zip(columns, COLORS * len(columns), strict=False):
        if truth.all() or not truth.any():
            continue  # no curve without both kinds
        if precision:
            y, x, _ = precision_recall_curve(truth, share)
            area = average_precision_score(truth, share)
            axes.axhline(truth.mean(), color=color, linestyle=":", linewidth=1)
        else:
            x, y, _ = roc_curve(truth, share)
            area = auc(x, y)
        axes.plot(x, y, color=color, label=f"{name}: {area:.3f}", linewidth=1.8)
    words = ("recall", "precision") if precision else ("false positive rate", "true positive rate")
    axes.set(xlabel=words[0], ylabel=words[1], xlim=(0, 1.01), ylim=(0, 1.02))
    caption = "Folds are pooled." + (" Dotted: the share of cases, chance." if precision else "")
    return "Precision and recall" if precision else "ROC", caption


def _calibration(axes: "Axes", columns: Sequence[Column], result: Any) -> Words:
    """How often what is said with a probability is so, in bins of equally many cases."""
    for (name, truth, share), color in zip(columns, COLORS * len(columns), strict=False):
        parts = np.array_split(np.argsort(share, kind="stable"), min(BINS, max(2, len(share) // 8)))
        said, so = ([v[part].mean() for part in parts] for v in (share, truth))
        axes.plot(said, so, "o-", color=color, label=name, markersize=4, linewidth=1.4)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="probability that is said", ylabel="share that is so", aspect="equal")
    return "Calibration", "Bins of equally many cases; on the dotted line probabilities hold."


def _values(axes: "Axes", pair: tuple[Floats, Floats], result: Any) -> Words:
    axes.scatter(*pair, s=14, color=COLORS[0], linewidths=0)
    ends = [min(map(np.min, pair)), max(map(np.max, pair))]
    axes.plot(ends, ends, color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="measured", ylabel="predicted")
    return "Predicted values", "Each case by the fold that has not seen it."


def _folds(axes: "Axes", document: Mapping[str, Any], result: Any) -> Words:
    scores, (low, high) = [f["score"] for f in document["folds"]], document["interval"]
    axes.axhspan(low, high, color=COLORS[4], alpha=0.25, linewidth=0)
    axes.axhline(document["value"], color=COLORS[0], linewidth=1.2)
    axes.plot(range(1, len(scores) + 1), scores, "o", color=COLORS[5])
    words = METRIC_WORDS.get(document["metric"], document["metric"])
    axes.set(xlabel="fold", ylabel=words, xticks=range(1, len(scores) + 1))
    return "Score by fold", "Line: the mean over folds; band: its 95 % interval over cases."


def _worst(tested: Tested, heatmaps: Path, out: Path) -> Iterator[dict[str, Any]]:
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
        folder = heatmaps.parents[1] / SLIDES / slide
        path = next(iter(sorted(folder.glob("thumbnail*.jpg"))), None)
        heat = folder.is_dir() and os.path.relpath(heatmaps / f"{slide}.attention.png", out)
        shown = {"picture": path and data_uri(Image.open(path), THUMBNAIL_PX), "heatmap": heat}
        known = target.names[int(truth[i, 0])] if target.exclusive else ""
        known = known or ", ".join(f"{c} {v:g}" for c, v in told)
        said = dict(zip(target.names, (f"{v:.3g}" for v in answers[i]), strict=True))
        yield {"case": tested.cases[i], "slide": slide, "truth": known, "said": said, **shown}
