"""Page of a validation: its figures as HTML, with pictures inside."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thinsection.evaluation.curves import Band
from thinsection.evaluation.plots import (
    Columns,
    Picture,
    Words,
    bin_words,
    color_of,
    draw_band,
    draw_decision,
    draw_frequencies,
    draw_groups,
    draw_picture,
    draw_precision,
    draw_roc,
    draw_values,
    units_words,
)
from thinsection.evaluation.rows import METRIC_WORDS
from thinsection.evaluation.target import Floats
from thinsection.files.pages import render_page
from thinsection.predict.tested import Score
from thinsection.report.values import CLASS_COLORS
from thinsection.types import Json, counted, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# threshold probabilities at which the page tells the net benefit
SHOWN_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CALL_WORDS = {
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ppv": "positive predictive value (PPV)",
    "npv": "negative predictive value (NPV)",
    "accuracy": "accuracy",
}


# figures that a model file holds, by kind of target
_FIXED_WORDS = {
    "binary": "The threshold and the temperature come from the model file.",
    "multilabel": "Thresholds and temperature come from the model file.",
    "multiclass": "The temperature comes from the model file.",
    "ordinal": "The temperature comes from the model file.",
    "cox": "The cut of the risk groups and the baseline hazard come from the model file.",
    "discrete": "The cut of the risk groups and the temperature come from the model file.",
}


def validation_page(
    document: Mapping[str, Json],
    curves: Columns,
    truth: Floats,
    answers: Floats,
    *,
    home: str | None = None,
) -> str:
    """Page as HTML.

    Args:
        document: the content of validation.json.
        curves: classes or labels of the scored cases; empty for values and survival.
        truth: true values of the scored cases, (n, T).
        answers: predictions for the scored cases, (n, K).
        home: address of the results' index on the page, if there is one.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    pictures = [
        picture.for_page() for picture in _pictures(document, curves, truth, answers)
    ]
    return render_page(
        "thinsection.predict",
        "validation.html.j2",
        document=document,
        home=home,
        pictures=pictures,
        metric_words=METRIC_WORDS,
        fixed_words=_FIXED_WORDS.get(
            document["task"], "The model file was not changed."
        ),
        time_name=_time_name(document),
        call_words=CALL_WORDS,
        net_benefit=_net_benefit_rows,
        counted=counted,
        number=partial(number_words, cases=document["cases"]),
        interval=partial(interval_words, cases=document["cases"]),
        signed=partial(rounded, rows=document["cases"], sign="+"),
    )


def _time_name(document: Mapping[str, Json]) -> str:
    """Column of the label table with the times of survival."""
    return ", ".join(document["target"][1:]) if document["survival"] else ""


def number_words(value: float | None, cases: int) -> str:
    """Number with the decimals that so many cases allow; a dash if there is none."""
    return "–" if value is None else rounded(value, cases)


def interval_words(score: Score, cases: int) -> str:
    """95 % confidence interval, or the reason why there is none."""
    if score["low"] is None or score["high"] is None:
        return f"none: {score.get('missing') or 'no value'}"
    return f"{rounded(score['low'], cases)} to {rounded(score['high'], cases)}"


def _net_benefit_rows(curve: Mapping[str, Json]) -> list[dict[str, Json]]:
    """Rows of a decision curve at a few thresholds that some case reaches."""
    rows = []
    for place, threshold in enumerate(curve["thresholds"]):
        if round(threshold, 2) in SHOWN_THRESHOLDS:
            rows.append({name: values[place] for name, values in curve.items()})
    return rows


def _pictures(
    document: Mapping[str, Json], curves: Columns, truth: Floats, answers: Floats
) -> list[Picture]:
    drawn = []
    if curves.columns:
        drawn.append(draw_picture("roc", curves, draw_roc))
        drawn.append(draw_picture("pr", curves, draw_precision))
        draw = partial(_calibration, columns=curves)
        drawn.append(draw_picture("calibration", document["outcomes"], draw))
        drawn.append(draw_picture("decision", curves, draw_decision))
    if document["task"] == "regression":
        drawn.append(draw_picture("values", (truth[:, 0], answers[:, 0]), draw_values))
    survival = document["survival"]
    if survival and survival["groups"]:
        draw_survival = partial(
            _survival,
            time_name=_time_name(document),
            independent=document["independent"],
        )
        drawn.append(draw_picture("survival", survival, draw_survival))
    if survival and survival["calibration"]:
        draw_bins = partial(
            _survival_calibration,
            time_name=_time_name(document),
            unit=document["unit"],
        )
        bins = survival["calibration"]
        drawn.append(draw_picture("calibration", bins, draw_bins))
    return drawn


def _calibration(axes: "Axes", outcomes: Sequence[Json], *, columns: Columns) -> Words:
    for i, outcome in enumerate(outcomes):
        color = color_of(i)
        smooth = outcome["smooth_calibration"]
        if smooth is not None:
            draw_band(axes, _smooth_band(smooth), outcome["name"], color)
        if smooth is not None and len(outcomes) > 1:
            continue  # the points of several classes hide each other
        label = outcome["name"] if smooth is None else None
        band = _band(outcome["calibration_curve"])
        form = "o-" if smooth is None else "o"
        draw_frequencies(axes, band, color=color, label=label, form=form)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    after = outcomes[0]["recalibration"] if len(outcomes) == 1 else None
    if after and after["smooth_calibration"]:
        band = _smooth_band(after["smooth_calibration"])
        axes.plot(
            band.x,
            band.y,
            color=color_of(1),
            linestyle="--",
            linewidth=1.6,
            label="after recalibration",
        )
    axes.set(xlabel="predicted probability", ylabel="observed frequency")
    caption = (
        "Line and band: logistic regression on a restricted cubic spline, with its pointwise 95 % "
        f"confidence interval (cluster sandwich, {units_words(columns)}). On the dotted line "
        "predicted probabilities equal observed frequencies."
    )
    if len(outcomes) == 1:
        caption += (
            " Points: groups of equally many cases with 95 % confidence intervals"
            f"{bin_words(columns)}."
        )
    if after:
        caption += " Dashed: after recalibration, each case by a fit to other cases."
    return "Calibration", caption


def _smooth_band(smooth: Mapping[str, Json]) -> Band:
    return Band(
        x=np.array(smooth["predicted"]),
        y=np.array(smooth["observed"]),
        low=np.array(smooth["low"]),
        high=np.array(smooth["high"]),
    )


def _band(bins: Sequence[Json]) -> Band:
    """Bins of the document as arrays, with NaN in place of None."""
    observed = {
        name: np.array([one["observed"][name] for one in bins], dtype=np.float64)
        for name in ("value", "low", "high")
    }
    return Band(
        x=np.array([one["predicted"] for one in bins]),
        y=observed["value"],
        low=observed["low"],
        high=observed["high"],
    )


def _survival(
    axes: "Axes", survival: Mapping[str, Json], *, time_name: str, independent: str
) -> Words:
    draw_groups(axes, survival["groups"], survival["ticks"], time_name=time_name)
    caption = (
        "Kaplan-Meier curves with pointwise log-log 95 % confidence intervals over "
        f"{independent}. The groups are split at the median out-of-fold risk in training. The "
        "numbers of cases at risk are below the curves."
    )
    return "Survival by risk group", caption


def _survival_calibration(
    axes: "Axes", calibration: Mapping[str, Json], *, time_name: str, unit: str
) -> Words:
    draw_frequencies(axes, _band(calibration["bins"]), color=CLASS_COLORS[0])
    axes.set(xlabel="predicted survival", ylabel="observed survival (Kaplan-Meier)")
    caption = (
        f"At {time_name} {calibration['time']:g}, in bins of equally many cases. Bars: 95 % "
        f"confidence intervals over the {unit} of a bin, where they can be computed. On the dotted "
        "line predicted survival equals observed survival."
    )
    return "Calibration of survival", caption
