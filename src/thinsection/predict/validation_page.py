"""The page of a validation: its figures as HTML, with pictures inside."""

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from thinsection.evaluation.labels import Floats
from thinsection.files.pages import render_page
from thinsection.probe.plots import COLORS, Picture, Words, draw_picture
from thinsection.probe.result import METRIC_WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CALL_WORDS = {
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ppv": "positive predictive value (PPV)",
    "npv": "negative predictive value (NPV)",
    "accuracy": "accuracy",
}
Curves = list[tuple[str, np.ndarray, Floats]]  # name, truth (n,), predicted probability


def validation_page(document: Mapping[str, Any], truth: Floats, answers: Floats) -> str:
    """The page as HTML.

    Args:
        document: what validation.json holds.
        truth: of the scored cases, (n, T).
        answers: of the scored cases, (n, K).

    Raises MissingDependencyError: matplotlib is not installed.
    """
    pictures = [
        (picture.title, picture.caption, base64.b64encode(picture.png).decode())
        for picture in _pictures(document, truth, answers)
    ]
    return render_page(
        "thinsection.predict",
        "validation.html.j2",
        document=document,
        pictures=pictures,
        metric_words=METRIC_WORDS,
        call_words=CALL_WORDS,
        number=number_words,
        interval=interval_words,
    )


def number_words(value: float | None) -> str:
    """A figure with four digits; a dash where there is none."""
    return "–" if value is None else f"{value:.4f}"


def interval_words(score: Mapping[str, Any]) -> str:
    """The 95 % confidence interval, or why there is none."""
    if score["low"] is None:
        return f"none: {score.get('missing') or 'no value'}"
    return f"{score['low']:.4f} to {score['high']:.4f}"


def _pictures(
    document: Mapping[str, Any], truth: Floats, answers: Floats
) -> list[Picture]:
    drawn = []
    outcomes = document["outcomes"]
    if outcomes:
        curves = _curves(document, truth, answers)
        drawn.append(draw_picture("roc", curves, _roc))
        drawn.append(draw_picture("pr", curves, _precision_recall))
        drawn.append(draw_picture("calibration", outcomes, _calibration))
        drawn.append(draw_picture("decision", outcomes, _decision))
    if document["task"] == "regression":
        drawn.append(draw_picture("values", (truth[:, 0], answers[:, 0]), _values))
    survival = document["survival"]
    if survival and survival["groups"]:
        drawn.append(draw_picture("survival", survival, _survival))
    if survival and survival["calibration"]:
        drawn.append(
            draw_picture("calibration", survival["calibration"], _survival_calibration)
        )
    return drawn


def _curves(document: Mapping[str, Any], truth: Floats, answers: Floats) -> Curves:
    """Truth and predicted probability of each outcome that has cases of both kinds."""
    curves = []
    for outcome in document["outcomes"]:
        k = document["outputs"].index(outcome["name"])
        exclusive = document["task"] != "multilabel"
        positive = truth[:, 0] == k if exclusive else truth[:, k] == 1
        if positive.any() and not positive.all():
            curves.append((outcome["name"], positive, answers[:, k]))
    return curves


def _roc(axes: "Axes", curves: Curves, result: Any) -> Words:
    from sklearn.metrics import roc_curve

    for i, (name, positive, share) in enumerate(curves):
        x, y, _ = roc_curve(positive, share)
        axes.plot(x, y, color=COLORS[i % len(COLORS)], label=name, linewidth=1.8)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="1 - specificity", ylabel="sensitivity", aspect="equal")
    return "ROC", "Dotted: chance."


def _precision_recall(axes: "Axes", curves: Curves, result: Any) -> Words:
    from sklearn.metrics import precision_recall_curve

    for i, (name, positive, share) in enumerate(curves):
        color = COLORS[i % len(COLORS)]
        precision, recall, _ = precision_recall_curve(positive, share)
        axes.plot(recall, precision, color=color, label=name, linewidth=1.8)
        axes.axhline(positive.mean(), color=color, linestyle=":", linewidth=1)
    axes.set(xlabel="recall (sensitivity)", ylabel="precision (PPV)")
    axes.set(xlim=(0, 1.01), ylim=(0, 1.02))
    return "Precision and recall", "Dotted: the share of positive cases, chance."


def _calibration(axes: "Axes", outcomes: list[dict[str, Any]], result: Any) -> Words:
    for i, outcome in enumerate(outcomes):
        color = COLORS[i % len(COLORS)]
        _bins(axes, outcome["calibration_curve"], color=color, label=outcome["name"])
    axes.set(xlabel="predicted probability", ylabel="observed frequency")
    caption = (
        "Bins of equally many cases with exact 95 % confidence intervals; on the dotted line "
        "predicted probabilities equal observed frequencies."
    )
    return "Calibration", caption


def _bins(
    axes: "Axes", bins: list[dict[str, Any]], *, color: str, label: str | None = None
) -> None:
    """Observed by predicted, each with its interval, beside the line of equality."""
    predicted = np.array([one["predicted"] for one in bins])
    value, low, high = (
        np.array([one["observed"][name] for one in bins], dtype=np.float64)
        for name in ("value", "low", "high")
    )
    errors = np.maximum(0, [value - low, high - value])
    axes.errorbar(
        predicted,
        value,
        yerr=errors,
        fmt="o-",
        color=color,
        label=label,
        markersize=4,
        linewidth=1.4,
        elinewidth=0.9,
        capsize=2,
    )
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")


def _decision(axes: "Axes", outcomes: list[dict[str, Any]], result: Any) -> Words:
    highest = 0.05
    for i, outcome in enumerate(outcomes):
        color = COLORS[i % len(COLORS)]
        curve = outcome["decision_curve"]
        t = curve["thresholds"]
        axes.plot(t, curve["model"], color=color, label=outcome["name"], linewidth=1.8)
        label = "treat all" if len(outcomes) == 1 else None
        axes.plot(
            t, curve["treat_all"], color=color, linestyle="--", linewidth=1, label=label
        )
        highest = max(highest, *curve["model"], *curve["treat_all"])
    axes.axhline(0, color="#555555", linewidth=1, label="treat none")
    axes.set(xlabel="threshold probability", ylabel="net benefit")
    axes.set(ylim=(-0.25 * highest, 1.1 * highest), xlim=(0, 1))
    caption = (
        "Net benefit of acting on cases whose predicted probability reaches the threshold; "
        "dashed: of acting on all."
    )
    return "Decision curve", caption


def _values(axes: "Axes", pair: tuple[Floats, Floats], result: Any) -> Words:
    measured, predicted = pair
    axes.scatter(predicted, measured, s=14, color=COLORS[0], linewidths=0)
    ends = [float(min(map(np.min, pair))), float(max(map(np.max, pair)))]
    axes.plot(ends, ends, color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="predicted value", ylabel="measured value")
    return "Values", "On the dotted line predictions equal measurements."


def _survival(axes: "Axes", survival: dict[str, Any], result: Any) -> Words:
    """Kaplan-Meier curves with bands, the numbers at risk below."""
    colors = {"low risk": COLORS[0], "high risk": COLORS[5]}
    ticks = survival["ticks"]
    for row, group in enumerate(survival["groups"]):
        color = colors[group["name"]]
        times = np.r_[0.0, group["times"]]
        share, low, high = (
            np.r_[1.0, group[name]] for name in ("survival", "low", "high")
        )
        label = f"{group['name']}: {group['cases']} cases, {group['events']} events"
        axes.step(times, share, where="post", color=color, label=label, linewidth=1.8)
        axes.fill_between(times, low, high, step="post", color=color, alpha=0.15)
        for tick, count in zip(ticks, group["at_risk"], strict=True):
            axes.annotate(
                str(count),
                (tick, 0),
                xycoords=("data", "axes fraction"),
                xytext=(0, -44 - 13 * row),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=color,
            )
    axes.annotate(
        "at risk",
        (0, 0),
        xycoords="axes fraction",
        xytext=(-42, -44),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color="#555555",
    )
    axes.set(xlabel="time (the table's unit)", ylabel="share without event")
    axes.set(ylim=(0, 1.03), xlim=(0, ticks[-1]), xticks=ticks)
    caption = (
        "Kaplan-Meier curves with log-log 95 % confidence bands; the groups are cut at the median "
        "out-of-fold risk of training, and numbers at risk stand below."
    )
    return "Survival by risk group", caption


def _survival_calibration(
    axes: "Axes", calibration: dict[str, Any], result: Any
) -> Words:
    _bins(axes, calibration["bins"], color=COLORS[0])
    axes.set(xlabel="predicted survival", ylabel="observed survival (Kaplan-Meier)")
    caption = (
        f"At time {calibration['time']:g}, in bins of equally many cases with 95 % confidence "
        "intervals; on the dotted line predicted survival equals observed."
    )
    return "Calibration of survival", caption
