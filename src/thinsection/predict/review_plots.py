"""Pictures that a reviewer asks for: curves with their bands, decisions, survival by risk."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinsection.errors import importing
from thinsection.evaluation.curves import (
    Band,
    calibration_band,
    precision_band,
    roc_band,
)
from thinsection.evaluation.external import (
    decision_curve,
    hazard_ratio,
    survival_curve,
)
from thinsection.evaluation.intervals import Sampling
from thinsection.evaluation.metrics import Flags, FloatVector
from thinsection.probe.plots import COLORS, Words
from thinsection.probe.result import Risks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEED = 0
BAND = "Band: pointwise 95 % confidence interval, from the resamples of the scores."
TIMES_AT_RISK = 6
LEAST_BENEFIT = -0.1  # treating everybody falls without end


class Column(NamedTuple):
    """A class or label: who has it, and the predicted probabilities, (n,) each."""

    name: str
    truth: Flags
    probability: FloatVector


class Columns(NamedTuple):
    """All that curves are drawn from."""

    columns: Sequence[Column]
    sampling: Sampling

    def drawable(self) -> list[tuple[Column, Sampling, str]]:
        """Columns with both kinds of cases, with their sampling and colour."""
        found = []
        for i, column in enumerate(self.columns):
            if column.truth.all() or not column.truth.any():
                continue
            classes = column.truth.astype(np.int64)
            own = replace(self.sampling, classes=classes)
            found.append((column, own, COLORS[i % len(COLORS)]))
        return found


def draw_roc(axes: "Axes", columns: Columns, result: Any) -> Words:
    """ROC curves with bands."""
    for column, sampling, color in columns.drawable():
        band = roc_band(column.truth, column.probability, sampling, seed=SEED)
        _draw_band(axes, band, column.name, color)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.set(xlim=(0, 1.01), ylim=(0, 1.02))
    return "ROC", f"Folds are pooled. {BAND}"


def draw_precision(axes: "Axes", columns: Columns, result: Any) -> Words:
    """Curves of precision by recall, with bands."""
    for column, sampling, color in columns.drawable():
        band = precision_band(column.truth, column.probability, sampling, seed=SEED)
        _draw_band(axes, band, column.name, color)
        axes.axhline(column.truth.mean(), color=color, linestyle=":", linewidth=1)
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.02))
    caption = f"Folds are pooled. Dotted: the share of cases, chance. {BAND}"
    return "Precision and recall", caption


def _draw_band(axes: "Axes", band: Band, name: str, color: str) -> None:
    axes.fill_between(band.x, band.low, band.high, color=color, alpha=0.18, linewidth=0)
    axes.plot(band.x, band.y, color=color, label=name, linewidth=1.8)


def draw_calibration(axes: "Axes", columns: Columns, result: Any) -> Words:
    """Observed frequency by predicted probability, with an interval for each bin."""
    for column, sampling, color in columns.drawable():
        band = calibration_band(column.truth, column.probability, sampling, seed=SEED)
        reach = np.maximum([band.y - band.low, band.high - band.y], 0)
        axes.errorbar(
            band.x,
            band.y,
            yerr=reach,
            fmt="o-",
            color=color,
            label=column.name,
            markersize=4,
            linewidth=1.4,
            elinewidth=0.8,
            capsize=2,
        )
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="predicted probability", ylabel="observed frequency")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    caption = (
        "Bins of equally many cases; on the dotted line predicted probabilities are right. "
        "Bars: 95 % confidence intervals of the observed frequency."
    )
    return "Calibration", caption


def draw_decision(axes: "Axes", columns: Columns, result: Any) -> Words:
    """Net benefit by threshold probability; treating everybody is dotted, nobody is 0."""
    highest = 0.0
    for column, _, color in columns.drawable():
        curve = decision_curve(column.truth, column.probability)
        axes.plot(curve.thresholds, curve.model, color=color, label=column.name)
        axes.plot(curve.thresholds, curve.treat_all, color=color, linestyle=":")
        highest = max(highest, float(curve.treat_all.max()))
    axes.axhline(0, color="#999999", linewidth=1)
    axes.set(xlabel="threshold probability", ylabel="net benefit")
    axes.set(xlim=(0, 1), ylim=(LEAST_BENEFIT, 1.1 * highest + 0.01))
    caption = (
        "Dotted: all cases are treated as positive; the line at 0: none is "
        "(Vickers and Elkin 2006). Folds are pooled."
    )
    return "Decision curve", caption


def draw_survival(axes: "Axes", risks: Risks, result: Any) -> Words:
    """Kaplan-Meier curves of the halves by risk, bands, numbers at risk, hazard ratio."""
    first = np.zeros(len(risks.ids), dtype=bool)  # a case once, however many repeats
    first[np.unique(risks.ids, return_index=True)[1]] = True
    places = _round_times(float(risks.time.max()))
    lines = []
    groups = (("higher", risks.high, COLORS[5]), ("lower", ~risks.high, COLORS[0]))
    for name, members, color in groups:
        event = risks.event[first & members]
        time = risks.time[first & members]
        if len(event) == 0:
            continue  # all risks are equal
        curve = survival_curve(event, time)
        label = f"{name} risk: {len(event)} cases, {int(event.sum())} events"
        x = np.r_[0.0, curve.times]
        low = np.r_[1.0, curve.low]
        high = np.r_[1.0, curve.high]
        axes.step(x, np.r_[1.0, curve.survival], where="post", color=color, label=label)
        axes.fill_between(
            x, low, high, step="post", color=color, alpha=0.18, linewidth=0
        )
        counts = [int((time >= place).sum()) for place in places]
        lines.append((name, counts, color))
    _write_at_risk(axes, places, lines)
    axes.set(ylabel="share without event", ylim=(0, 1.03))
    caption = (
        "Split at the median risk of each fold. Bands: 95 % confidence intervals. "
        f"{hazard_words(risks)} {_log_rank_words(risks)}"
    )
    return "Survival by predicted risk", caption


def _round_times(last: float) -> FloatVector:
    from matplotlib.ticker import MaxNLocator

    ticks = np.asarray(MaxNLocator(TIMES_AT_RISK).tick_values(0, last))
    return np.asarray(ticks[(ticks >= 0) & (ticks <= last)])


def _write_at_risk(
    axes: "Axes", places: FloatVector, lines: Sequence[tuple[str, list[int], str]]
) -> None:
    """Numbers at risk below the axis, a line for each group."""
    axes.set_xticks(places)
    axes.set_xlim(left=0)
    axes.set_xlabel("time (unit of the table)")
    top = -0.24
    step = 0.07
    below = axes.get_xaxis_transform()
    axes.text(
        -0.03,
        top,
        "at risk",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=8,
    )
    for i, (name, counts, color) in enumerate(lines, start=1):
        height = top - step * i
        axes.text(
            -0.03,
            height,
            name,
            color=color,
            transform=axes.transAxes,
            ha="right",
            va="top",
            fontsize=8,
        )
        for place, count in zip(places, counts, strict=True):
            axes.text(
                place,
                height,
                f"{count}",
                color=color,
                transform=below,
                ha="center",
                va="top",
                fontsize=8,
            )


def hazard_words(risks: Risks) -> str:
    """The hazard ratio of the half with the higher risk, in words."""
    first = np.unique(risks.ids, return_index=True)[1]
    found = hazard_ratio(
        risks.event[first], risks.time[first], risks.high[first].astype(np.float64)
    )
    if found is None:
        return "No hazard ratio: it is not finite."
    return (
        f"Hazard ratio of higher against lower risk: {found.value:.2f} "
        f"[{found.low:.2f}, {found.high:.2f}]."
    )


def _log_rank_words(risks: Risks) -> str:
    with importing("the log-rank test needs scikit-survival", "probe"):
        from sksurv.compare import compare_survival
        from sksurv.util import Surv
    if risks.high.all() or not risks.high.any():
        return "All risks are equal: no log-rank test."
    first = np.unique(risks.ids, return_index=True)[1]
    outcomes = Surv.from_arrays(risks.event[first], risks.time[first])
    chi, p = compare_survival(outcomes, risks.high[first])
    return f"Log-rank test: chi² {chi:.2f}, p {p:.2g}."
