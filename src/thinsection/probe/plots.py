"""Pictures of a probe's result, as PNG bytes: drawn off screen, same input, same picture."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinsection.errors import importing
from thinsection.probe.curves import (
    Columns,
    Words,
    class_columns,
    color_of,
    draw_risks,
    draw_roc,
)
from thinsection.probe.result import Examples, Predictions, ProbeResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes", Any, Any], Words]  # the second is what it is drawn from

DPI, SIZE_IN = 120, (5.4, 4.2)  # width, height
OVERLAY = 0.55  # opacity of a class over the image
LOSSES = ("train_losses", "val_losses", "best_epochs")  # of each fold
SWEEPS = {"score_by_k": "k neighbours", "score_by_c": "C (inverse regularisation)"}


class Picture(NamedTuple):
    """A PNG with its name, title and what to see in it."""

    name: str
    title: str
    caption: str
    png: bytes


def probe_pictures(result: ProbeResult) -> list[Picture]:
    """Every picture that the result has data for.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    rows = result.predictions
    details = result.details
    curves = None
    if rows is not None and rows.probability is not None:
        # tiles are many: their curves have no bands
        sampling = None if rows.fold is None else rows.sampling
        curves = Columns(class_columns(rows), sampling)
    draws: dict[str, tuple[Any, Draw]] = {  # None: there is nothing to draw it from
        "confusion": (rows, draw_confusion),
        "roc": (curves, draw_roc),
        "curve": (details.get("curve"), _curve),
        "sweep": (next(filter(details.__contains__, SWEEPS), None), _sweep),
        "learning": (details.get("score_by_shots"), _learning),
        "survival": (result.risks, draw_risks),
        "examples": (result.examples, _examples),
        "losses": (details if set(LOSSES) <= details.keys() else None, _losses),
    }
    drawn = {name: drawing for name, drawing in draws.items() if drawing[0] is not None}
    return [
        draw_picture(name, source, draw, result)
        for name, (source, draw) in drawn.items()
    ]


def draw_picture(name: str, source: Any, draw: Draw, result: Any = None) -> Picture:
    """Drawn on a figure outside of pyplot's global state."""
    with importing("pictures need matplotlib", "probe"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    title, caption = draw(axes, source, result)
    if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
        axes.legend(fontsize=8)
    buffer = io.BytesIO()
    # without the version in the metadata the bytes depend on the data alone
    figure.savefig(
        buffer, format="png", bbox_inches="tight", metadata={"Software": None}
    )
    return Picture(name, title, caption, buffer.getvalue())


def draw_confusion(axes: "Axes", rows: Predictions, result: ProbeResult) -> Words:
    """Rows are the truth; the shade is the share of the row, the number the count."""
    names, counts = [_short(name) for name in rows.class_names], rows.counts
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
        image, ax=axes, label="share of the true class", fraction=0.046
    )
    caption = "Counts of validation rows; the shade is the share of the true class."
    if rows.repeats is not None:
        caption += " Of the first seed; the score is the mean over seeds."
    elif len(set(rows.ids)) < len(rows.ids):
        caption += " A case counts once a seed."
    return "Confusion matrix", caption


def _curve(axes: "Axes", curves: dict[str, list[float]], result: ProbeResult) -> Words:
    """Validation score after each epoch, one line per learning rate, the best marked."""
    lr, epoch = result.details["best_lr"], result.details["best_epoch"]
    for i, (name, scores) in enumerate(curves.items()):
        epochs = range(1, len(scores) + 1)
        axes.plot(epochs, scores, color=color_of(i), label=f"lr {name}", linewidth=1.5)
    _circle(axes, epoch, result.score)
    axes.set(xlabel="epoch", ylabel=result.metric_words)
    return "Score over epochs", f"The circle is what counts: lr {lr:g}, epoch {epoch}."


def _sweep(axes: "Axes", key: str, result: ProbeResult) -> Words:
    """The score at each setting of a sweep, the best marked."""
    names, scores = zip(*result.details[key].items(), strict=True)
    best = int(np.argmax(scores))
    axes.plot(names, scores, marker="o", color=color_of(0), linewidth=1.5)
    _circle(axes, best, scores[best])
    axes.set(xlabel=SWEEPS[key], ylabel=result.metric_words)
    return "Sweep", f"The circle is what counts: {names[best]}."


def _learning(axes: "Axes", curve: dict[str, float], result: ProbeResult) -> Words:
    """The score with more and more training rows, and what permuted labels score."""
    axes.plot([*curve], [*curve.values()], marker="o", color=color_of(0), linewidth=1.5)
    null = result.details["null_score"]
    axes.axhline(
        null, color="#999999", linestyle=":", label=f"permuted labels: {null:.3f}"
    )
    axes.set(xlabel="training rows a class", ylabel=result.metric_words)
    return "Learning curve", "Means over draws, with the settings that all rows chose."


def _examples(axes: "Axes", shown: Examples, result: ProbeResult) -> Words:
    """One row an image: the image, the truth over it, the prediction over it."""
    from matplotlib.colors import ListedColormap

    count, height, edge = shown.truth.shape
    labels = np.concatenate(
        [np.zeros_like(shown.truth), shown.truth, shown.prediction], axis=2
    )
    labels = labels.reshape(count * height, 3 * edge)
    images = np.tile(shown.images, (1, 1, 3, 1)).reshape(count * height, 3 * edge, 3)
    names = shown.class_names[1:]
    axes.figure.set_size_inches(6.6, 2.2 * count + 0.6)  # type: ignore[union-attr]
    axes.imshow(images)
    palette = ListedColormap(["#FFFFFF", *(color_of(c) for c in range(len(names)))])
    over = np.ma.masked_equal(labels, 0)
    axes.imshow(
        over, palette, alpha=OVERLAY, vmin=0, vmax=len(names), interpolation="nearest"
    )
    axes.set_xticks(
        [edge * (k + 0.5) for k in range(3)], ["image", "truth", "prediction"]
    )
    axes.set_yticks([])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    for c, name in enumerate(names):
        axes.plot([], [], marker="s", linestyle="none", color=color_of(c), label=name)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, fontsize=8, frameon=False
    )
    caption = (
        "Validation images of the first fold, evenly spaced; background is left clear."
    )
    return "Predicted masks beside truth", caption


def _losses(axes: "Axes", details: dict[str, Any], result: ProbeResult) -> Words:
    """Dice loss of training (dashed) and validation over epochs, one colour a fold."""
    for i, (train, val, best) in enumerate(zip(*map(details.get, LOSSES), strict=True)):
        epochs = range(1, len(train) + 1)
        axes.plot(epochs, train, color=color_of(i), linestyle="--", linewidth=1)
        axes.plot(epochs, val, color=color_of(i), label=f"fold {i + 1}", linewidth=1.6)
        _circle(axes, best, val[best - 1])
    axes.set(xlabel="epoch", ylabel="dice loss")
    caption = (
        "Solid: validation; dashed: training. The circle is the epoch that is scored."
    )
    return "Loss over epochs", caption


def _circle(axes: "Axes", x: float, y: float) -> None:
    axes.plot(
        x,
        y,
        marker="o",
        color="black",
        fillstyle="none",
        markersize=11,
        linestyle="none",
    )


def _short(name: Any, most: int = 22) -> str:
    text = str(name)
    return text if len(text) <= most else text[: most - 1] + "…"
