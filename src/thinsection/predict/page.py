"""The page of an experiment: scores, pictures, folds, the cases that are worst predicted."""

import base64
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from scipy.stats import rankdata

from thinsection.errors import importing
from thinsection.files.pages import data_uri, render_page
from thinsection.predict.tested import Floats, Tested
from thinsection.probe.plots import COLORS, Picture, Words, draw_picture, probe_pictures
from thinsection.probe.protocol import NANOPATH
from thinsection.probe.result import METRIC_WORDS, Predictions, ProbeResult, Risks
from thinsection.store.ledger import SLIDES
from thinsection.weights.origin import slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORST, THUMBNAIL_PX, BINS = 12, 200, 10
Column = tuple[str, Any, Any]  # name of a class or label, who has it (n,), the answers (n,)


def experiment_page(document: Mapping[str, Any], tested: Tested, grid: Path, out: Path) -> str:
    """The page as HTML, pictures inside.

    Args:
        document: of experiment.json.
        tested: what it says of each case.
        grid: folder of the tile grid in the results, where heatmaps will be.
        out: the experiment's folder, where links begin.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    pictures = [
        (p.title, p.caption, base64.b64encode(p.png).decode()) for p in _pictures(document, tested)
    ]
    return render_page(
        "thinsection.predict",
        "experiment.html.j2",
        **{key: document.get(key) for key in ("name", "value", "interval", "interval_by", "folds")},
        facts=[(key, document[key]) for key in ("target", "task", "head", "date")],
        metric=METRIC_WORDS.get(tested.metric, tested.metric),
        scores=[(METRIC_WORDS.get(k, k), v) for k, v in document["scores"].items()],
        against=document.get("against"),
        account=document["account"],
        settings=document["settings"],
        pictures=pictures,
        worst=list(_worst(tested, grid / f"heatmap_{slug(document['name'])}", out)),
    )


def _pictures(document: Mapping[str, Any], tested: Tested) -> list[Picture]:
    truth, answers, target = tested.truth, tested.answers, tested.target
    given: dict[str, Any] = {}
    known: dict[str, Any]
    columns: list[Column] = []
    if target.exclusive:
        labels = truth[:, 0].astype(np.int64)
        known = {"class_names": target.names, "ids": tested.cases, "truth": labels}
        guess = {"prediction": answers.argmax(axis=1), "probability": answers}
        given["predictions"] = Predictions(**known, **guess)
        shown = [1] if len(target.names) == 2 else range(len(target.names))
        columns = [(target.names[c], labels == c, answers[:, c]) for c in shown]
    elif target.kind == "multilabel":
        columns = [(n, truth[:, c] == 1, answers[:, c]) for c, n in enumerate(target.names)]
    elif target.kind != "regression":
        risk, high = target.risk(answers), np.zeros(len(truth), dtype=bool)
        for fold in np.unique(tested.fold):
            own = tested.fold == fold
            high[own] = risk[own] > np.median(risk[own])
        event = truth[:, 0] == 1
        follow = {"event": event, "time": truth[:, 1], "high": high}
        given["risks"] = Risks(ids=tested.cases, risk=risk, **follow)
    known = {"probe": "train", "dataset": document["name"], "protocol": NANOPATH}
    metric = {"metric": tested.metric, "score": document["value"], "interval": None}
    found = probe_pictures(ProbeResult(**known, **metric, **given))
    if "risks" in given:
        found[0] = found[0]._replace(caption=f"{found[0].caption} {_log_rank(given['risks'])}")
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


def _worst(tested: Tested, heatmaps: Path, out: Path) -> list[dict[str, Any]]:
    """The cases whose answers are farthest from the truth, the worst first."""
    target, truth, answers = tested.target, tested.truth, tested.answers
    rows = np.arange(len(truth))
    if target.exclusive:
        wrong = 1 - answers[rows, truth[:, 0].astype(np.int64)]
    elif target.kind in ("multilabel", "regression"):
        wrong = np.abs(answers - truth).mean(axis=1)
    else:  # of those that had the event: how far the order by risk is from that by time
        late = rankdata(truth[:, 1]) - rankdata(-target.risk(answers))
        wrong = np.where(truth[:, 0] == 1, np.abs(late), -1.0)
    found = []
    for i in np.argsort(-wrong, kind="stable")[:WORST]:
        slide = tested.slides[i][0]
        folder = heatmaps.parents[1] / SLIDES / slide
        picture = next(iter(sorted(folder.glob("thumbnail*.jpg"))), None)
        heat = heatmaps / f"{slide}.attention.png"
        said = dict(zip(target.names, (f"{v:.3g}" for v in answers[i]), strict=True))
        told = (
            target.names[int(truth[i, 0])]
            if target.exclusive
            else ", ".join(f"{c} {v:g}" for c, v in zip(target.columns, truth[i], strict=True))
        )
        found.append({
            "case": tested.cases[i], "slide": slide, "truth": told, "said": said,
            "picture": picture and data_uri(Image.open(picture), THUMBNAIL_PX),
            "heatmap": folder.is_dir() and os.path.relpath(heat, out),
        })  # fmt: skip
    return found
