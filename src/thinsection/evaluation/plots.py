"""Pictures of predictions as PNG bytes, drawn off screen; equal inputs give equal pictures.

Each `draw_` function draws on axes and returns the title and the caption, see `draw_picture`.
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypedDict, TypeVar

import numpy as np

from thinsection.evaluation.cases import Groups
from thinsection.evaluation.curves import (
    DRAWS,
    Band,
    calibration_band,
    precision_band,
    roc_band,
)
from thinsection.evaluation.external import decision_curve
from thinsection.evaluation.intervals import MIN_UNITS, Sampling
from thinsection.evaluation.metrics import Flags, FloatVector, IndexArray
from thinsection.evaluation.rows import Predictions, Risks
from thinsection.evaluation.survival import hazard_ratio, survival_curve
from thinsection.extras import importing
from thinsection.tiles.categories import CLASS_COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Source = TypeVar("Source")  # data that a picture is drawn from
Words = tuple[str, str]  # title and caption of a picture

DPI = 120
SIZE_IN = (5.4, 4.2)  # width, height
SEED = 0  # seed of the bootstrap samples
TICKS = 6  # number of times on the axis of a survival curve
# lower end of the axis, since the net benefit of treating everybody falls without limit
LEAST_BENEFIT = -0.1


class Picture(NamedTuple):
    """A PNG with its name, title and caption."""

    name: str
    title: str
    caption: str
    png: bytes

    def for_page(self) -> tuple[str, str, str]:
        """Title, caption and PNG in base64, as the HTML templates need them."""
        return self.title, self.caption, base64.b64encode(self.png).decode("ascii")


def draw_picture(
    name: str, source: Source, draw: Callable[["Axes", Source], Words]
) -> Picture:
    """Draws a picture on a figure outside of pyplot's global state, in matplotlib's own style."""
    with importing("pictures of scores", "matplotlib"):
        from matplotlib import style
    # a style of the user, such as pyplot.rc("font", size=7), would change the bytes
    with style.context("default"):
        return _drawn(name, source, draw)


def _drawn(
    name: str, source: Source, draw: Callable[["Axes", Source], Words]
) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    title, caption = draw(axes, source)
    if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
        axes.legend(fontsize=8)
    buffer = io.BytesIO()
    # with a version in the metadata, the bytes would not depend on the data alone
    figure.savefig(
        buffer, format="png", bbox_inches="tight", metadata={"Software": None}
    )
    return Picture(name, title, caption, buffer.getvalue())


def draw_confusion(axes: "Axes", rows: Predictions) -> Words:
    """Draws a confusion matrix: rows are the truth, numbers counts, shades row fractions."""
    names = [name if len(name) <= 22 else name[:21] + "…" for name in rows.class_names]
    counts = rows.counts
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.6 + 0.55 * len(names)
    axes.figure.set_size_inches(side + 0.8, side)  # type: ignore[union-attr]
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    for (r, c), count in np.ndenumerate(counts):
        color = "white" if share[r, c] > 0.5 else "black"
        axes.text(c, r, f"{count}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted", ylabel="truth")
    axes.figure.colorbar(
        image, ax=axes, label="fraction of the true class", fraction=0.046
    )
    caption = "Counts; the shade is the fraction of the true class."
    if rows.repeats is not None:
        caption += (
            " The matrix is that of the first seed; the score is the mean over seeds."
        )
    elif len(set(rows.ids)) < len(rows.ids):
        caption += " A case counts once per seed."
    return "Confusion matrix", caption


class Column(NamedTuple):
    """A class or label: (n,) whether a case has it, and its predicted probabilities."""

    name: str
    truth: Flags
    probability: FloatVector
    # (n,) their rows in the sampling, if the label is blank for some
    rows: IndexArray | None = None


class Columns(NamedTuple):
    """Data that curves are drawn from."""

    columns: Sequence[Column]
    sampling: Sampling | None  # None: curves without bands
    ordered: bool = False  # True if a column means "this class or a higher one"

    def drawable(self) -> list[tuple[Column, Sampling | None, str]]:
        """Columns that have positive and negative rows, each with its sampling and colour."""
        drawable = []
        for i, column in enumerate(self.columns):
            if column.truth.all() or not column.truth.any():
                continue
            sampling = self.sampling
            if sampling is not None:
                if column.rows is not None:
                    codes = sampling.codes[column.rows]
                    fold = sampling.fold
                    sampling = replace(
                        sampling,
                        codes=np.unique(codes, return_inverse=True)[1],
                        fold=None if fold is None else fold[column.rows],
                        classes=None,
                    )
                sampling = replace(sampling, classes=column.truth.astype(np.int64))
            drawable.append((column, sampling, color_of(i)))
        return drawable


class RiskGroup(TypedDict):
    """Kaplan-Meier curve of a group of cases, as JSON stores it."""

    name: str
    cases: int
    events: int
    times: list[float]
    survival: list[float]
    low: list[float]
    high: list[float]
    at_risk: list[int]  # numbers at risk at the ticks of the axis


def color_of(index: int) -> str:
    """Colour of a class."""
    return CLASS_COLORS[index % len(CLASS_COLORS)]


def class_columns(rows: Predictions) -> list[Column]:
    """Each class against the rest; with two classes only the second."""
    assert rows.probability is not None
    names = rows.class_names
    classes = [1] if len(names) == 2 else range(len(names))
    return [Column(names[c], rows.truth == c, rows.probability[:, c]) for c in classes]


def _positive_sentence(columns: Columns) -> str:
    """A sentence on which class counts as positive."""
    if len(columns.columns) == 1:
        return f"Positive class: {columns.columns[0].name}."
    if columns.ordered:
        return "Positive: the class of the curve and all higher ones."
    return "Each class or label against the rest."


def _pooled_sentence(columns: Columns, *, area: str) -> str:
    """A sentence that the curve pools all folds, while the score (`area`) compares within folds."""
    sampling = columns.sampling
    if sampling is None or sampling.fold is None or len(np.unique(sampling.fold)) < 2:
        return ""
    sentence = " The cases of all folds are pooled."
    if not area:
        return sentence
    return (
        f"{sentence} The {area} is not the area under this curve: it compares cases of the same "
        "fold."
    )


def units_words(columns: Columns) -> str:
    """Number and kind of the units, '40 patients'; only the kind if labels are blank for some."""
    sampling = columns.sampling
    if sampling is None:
        return ""
    if any(column.rows is not None for column in columns.columns):
        return sampling.unit
    return f"{sampling.units} {sampling.unit}"


def _band_sentence(columns: Columns) -> str:
    if columns.sampling is None:
        return ""
    return (
        f" Band: pointwise 95 % confidence interval, from {DRAWS} resamples of the "
        f"{units_words(columns)} (Bayesian bootstrap)."
    )


def draw_roc(axes: "Axes", columns: Columns) -> Words:
    """Draws ROC curves, with bands if rows can be resampled."""
    for column, sampling, color in columns.drawable():
        band = roc_band(column.truth, column.probability, sampling, seed=SEED)
        draw_band(axes, band, column.name, color)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.set(xlim=(0, 1.01), ylim=(0, 1.02))
    caption = (
        f"{_positive_sentence(columns)}{_pooled_sentence(columns, area='AUROC')} Dotted: chance."
        f"{_band_sentence(columns)}"
    )
    return "ROC", caption


def draw_precision(axes: "Axes", columns: Columns) -> Words:
    """Draws precision-recall curves, with bands if rows can be resampled."""
    for column, sampling, color in columns.drawable():
        band = precision_band(column.truth, column.probability, sampling, seed=SEED)
        draw_band(axes, band, column.name, color)
        axes.axhline(column.truth.mean(), color=color, linestyle=":", linewidth=1)
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.02))
    caption = (
        f"{_positive_sentence(columns)}{_pooled_sentence(columns, area='')} Dotted: the share of "
        f"positive cases, chance.{_band_sentence(columns)}"
    )
    return "Precision and recall", caption


def draw_band(axes: "Axes", band: Band, name: str, color: str) -> None:
    """Draws a curve with its band."""
    axes.fill_between(band.x, band.low, band.high, color=color, alpha=0.18, linewidth=0)
    axes.plot(band.x, band.y, color=color, label=name, linewidth=1.8)


def draw_calibration(axes: "Axes", columns: Columns) -> Words:
    """Draws observed frequency by predicted probability, with a bootstrap interval for each bin."""
    for column, sampling, color in columns.drawable():
        assert sampling is not None
        band = calibration_band(column.truth, column.probability, sampling, seed=SEED)
        draw_frequencies(axes, band, color=color, label=column.name)
    axes.set(xlabel="predicted probability", ylabel="observed frequency")
    caption = (
        "Bins of equally many cases; on the dotted line predicted probabilities equal observed "
        "frequencies. Bars: 95 % confidence intervals of the observed frequency"
        f"{bin_words(columns)}."
    )
    return "Calibration", caption


def bin_words(columns: Columns) -> str:
    """Explains over which units the bars of a calibration curve vary, and which bins have none."""
    if columns.sampling is None:
        return ""
    unit = columns.sampling.unit
    return f" over the {unit} of a bin; with fewer than {MIN_UNITS} {unit} a bin has no bar"


def draw_frequencies(
    axes: "Axes",
    bins: Band,
    *,
    color: str,
    label: str | None = None,
    form: str = "o-",
) -> None:
    """Draws observed by predicted values with their intervals, and the diagonal."""
    axes.errorbar(
        bins.x,
        bins.y,
        yerr=np.maximum([bins.y - bins.low, bins.high - bins.y], 0),
        fmt=form,
        color=color,
        label=label,
        markersize=4,
        linewidth=1.4,
        elinewidth=0.8,
        capsize=2,
    )
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")


def draw_decision(axes: "Axes", columns: Columns) -> Words:
    """Draws net benefit by threshold probability; the dotted line is for treating everybody."""
    highest = 0.0
    for column, sampling, color in columns.drawable():
        curve = decision_curve(column.truth, column.probability, sampling)
        band = Band(x=curve.thresholds, y=curve.model, low=curve.low, high=curve.high)
        draw_band(axes, band, column.name, color)
        axes.plot(curve.thresholds, curve.treat_all, color=color, linestyle=":")
        highest = max(highest, float(curve.treat_all.max()))
    axes.axhline(0, color="#999999", linewidth=1)
    axes.set(xlabel="threshold probability", ylabel="net benefit")
    axes.set(xlim=(0, 1), ylim=(LEAST_BENEFIT, 1.25 * highest + 0.01))
    caption = (
        f"{_positive_sentence(columns)} Solid: the model decides who is treated. Dotted: all "
        "cases are treated. The line at 0: no case is (Vickers and Elkin 2006)."
        f"{_pooled_sentence(columns, area='')}"
    )
    if columns.sampling is not None:
        caption += (
            " Band: pointwise 95 % confidence interval, from the variance between the "
            f"{units_words(columns)}."
        )
    return "Decision curve", caption


def draw_values(axes: "Axes", pair: tuple[FloatVector, FloatVector]) -> Words:
    """Draws measured (n,) by predicted values (n,)."""
    measured, predicted = pair
    axes.scatter(predicted, measured, s=14, color=CLASS_COLORS[0], linewidths=0)
    ends = [float(np.min(pair)), float(np.max(pair))]
    axes.plot(ends, ends, color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="predicted value", ylabel="measured value")
    return "Values", "On the dotted line predictions equal measurements."


def draw_risks(axes: "Axes", risks: Risks, *, time_name: str = "") -> Words:
    """Draws Kaplan-Meier curves of the halves with low and high risk, with the hazard ratio."""
    ticks = round_times(float(risks.time.max()))
    risks = risks.take(risks.first_rows)
    groups = []
    for name, rows in (("lower risk", ~risks.high), ("higher risk", risks.high)):
        if rows.any():  # otherwise all risks are equal
            groups.append(
                risk_group(
                    name,
                    risks.event[rows],
                    risks.time[rows],
                    risks.units.take(np.flatnonzero(rows)),
                    ticks,
                )
            )
    draw_groups(axes, groups, ticks, time_name=time_name)
    caption = (
        "Kaplan-Meier curves, split at the median risk of each fold. Bands: pointwise log-log "
        f"95 % confidence intervals over {risks.units.words}. Below: cases at risk. "
        f"{_hazard_words(risks)}"
    )
    return "Survival by predicted risk", caption


def round_times(last: float) -> FloatVector:
    """Round times from 0 to the last, at which numbers at risk are shown."""
    rough = last / (TICKS - 1)
    size = 10 ** np.floor(np.log10(rough))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= rough)
    return np.arange(0, last + step / 1e6, step)


def risk_group(
    name: str,
    event: Flags,
    time: FloatVector,
    patients: Groups,
    ticks: FloatVector,
) -> RiskGroup:
    """Kaplan-Meier curve of a group, with the numbers at risk at the ticks."""
    curve = survival_curve(event, time, patients)
    return {
        "name": name,
        "cases": curve.cases,
        "events": curve.events,
        "times": curve.times.tolist(),
        "survival": curve.survival.tolist(),
        "low": curve.low.tolist(),
        "high": curve.high.tolist(),
        "at_risk": [int((time >= tick).sum()) for tick in ticks],
    }


def draw_groups(
    axes: "Axes",
    groups: Sequence[RiskGroup],
    ticks: Sequence[float] | FloatVector,
    *,
    time_name: str = "",
) -> None:
    """Draws Kaplan-Meier curves with bands, numbers at risk below; the last group is orange.

    `time_name`: column of the label table with the times.
    """
    for row, group in enumerate(groups):
        color = CLASS_COLORS[5] if row == 1 else CLASS_COLORS[0]
        times = np.r_[0.0, group["times"]]
        share = np.r_[1.0, group["survival"]]
        low = np.r_[1.0, group["low"]]
        high = np.r_[1.0, group["high"]]
        label = f"{group['name']}: {group['cases']} cases, {group['events']} events"
        axes.step(times, share, where="post", color=color, label=label, linewidth=1.8)
        axes.fill_between(times, low, high, step="post", color=color, alpha=0.15)
        for tick, count in zip(ticks, group["at_risk"], strict=True):
            _write_below(axes, str(count), (tick, 0), row, color)
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
    unit = time_name or "unit of the label table"
    axes.set(xlabel=f"time ({unit})", ylabel="fraction without event")
    axes.set(ylim=(0, 1.03), xticks=ticks)
    axes.set_xlim(left=0)


def _write_below(
    axes: "Axes", text: str, place: tuple[float, float], row: int, color: str
) -> None:
    """Writes text below the axis, at a time."""
    axes.annotate(
        text,
        place,
        xycoords=("data", "axes fraction"),
        xytext=(0, -44 - 13 * row),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color=color,
    )


def _hazard_words(risks: Risks) -> str:
    """The hazard ratio of the half with the higher risk, as a sentence.

    In a cross-validation it has no interval: any two folds test each other's training cases, and so
    intervals exclude a ratio of 1 in 11 % to 20 % of cohorts without any signal (`bench_coverage`).
    """
    high = risks.high.astype(np.float64)
    ratio = hazard_ratio(risks.event, risks.time, high, risks.units)
    if ratio is None:
        return "No hazard ratio: it is not finite."
    words = f"Hazard ratio of higher against lower risk: {ratio.value:.2f}"
    if risks.fold is not None and len(np.unique(risks.fold)) > 1:
        return f"{words} (no interval, as the folds depend on each other; see the c-index's)."
    return f"{words} [{ratio.low:.2f}, {ratio.high:.2f}]."
