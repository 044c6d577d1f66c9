"""Pictures of a probe's result, as PNG bytes: drawn off screen, same input, same picture."""

import base64
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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
from thinsection.probe.result import Examples, Predictions, ProbeResult, Risks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Source = TypeVar("Source")  # what a picture is drawn from

DPI = 120
SIZE_IN = (5.4, 4.2)  # width, height
OVERLAY = 0.55  # opacity of a class over the image
LOSSES = ("train_losses", "val_losses", "best_epochs")  # of each fold
SWEEPS = {"score_by_k": "k neighbours", "score_by_c": "C (inverse regularisation)"}


class Picture(NamedTuple):
    """A PNG with its name, title and what to see in it."""

    name: str
    title: str
    caption: str
    png: bytes

    def for_page(self) -> tuple[str, str, str]:
        """Title, caption and PNG in base64, as the templates take them."""
        return self.title, self.caption, base64.b64encode(self.png).decode("ascii")


def probe_pictures(result: ProbeResult) -> list[Picture]:
    """Every picture that the result has data for.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    rows = result.predictions
    details = result.details
    drawn = []
    if rows is not None:
        drawn.append(draw_picture("confusion", rows, draw_confusion))
    if rows is not None and rows.probability is not None:
        # tiles are many: their curves have no bands
        sampling = None if rows.fold is None else rows.sampling
        curves = Columns(class_columns(rows), sampling)
        drawn.append(draw_picture("roc", curves, draw_roc))
    if details.get("curve") is not None:
        drawn.append(draw_picture("curve", result, _curve))
    if not SWEEPS.keys().isdisjoint(details):
        drawn.append(draw_picture("sweep", result, _sweep))
    if details.get("score_by_shots") is not None:
        drawn.append(draw_picture("learning", result, _learning))
    if isinstance(result.rows, Risks):
        drawn.append(draw_picture("survival", result.rows, draw_risks))
    if result.examples is not None:
        drawn.append(draw_picture("examples", result.examples, _examples))
    if set(LOSSES) <= details.keys():
        drawn.append(draw_picture("losses", result, _losses))
    return drawn


def draw_picture(
    name: str, source: Source, draw: Callable[["Axes", Source], Words]
) -> Picture:
    """Drawn on a figure outside of pyplot's global state."""
    with importing("pictures need matplotlib", "probe"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    title, caption = draw(axes, source)
    if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
        axes.legend(fontsize=8)
    buffer = io.BytesIO()
    # without the version in the metadata the bytes depend on the data alone
    figure.savefig(
        buffer, format="png", bbox_inches="tight", metadata={"Software": None}
    )
    return Picture(name, title, caption, buffer.getvalue())


def draw_confusion(axes: "Axes", rows: Predictions) -> Words:
    """Rows are the truth; the shade is the share of the row, the number the count."""
    names = [_short(name) for name in rows.class_names]
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


def _curve(axes: "Axes", result: ProbeResult) -> Words:
    """Validation score after each epoch, one line per learning rate, the best marked."""
    lr = result.details["best_lr"]
    epoch = result.details["best_epoch"]
    for i, (name, scores) in enumerate(result.details["curve"].items()):
        epochs = range(1, len(scores) + 1)
        axes.plot(epochs, scores, color=color_of(i), label=f"lr {name}", linewidth=1.5)
    _circle(axes, epoch, result.score)
    axes.set(xlabel="epoch", ylabel=result.metric_words)
    return (
        "Score over epochs",
        f"The circle marks the scored setting: lr {lr:g}, epoch {epoch}.",
    )


def _sweep(axes: "Axes", result: ProbeResult) -> Words:
    """The score at each setting of a sweep, the best marked."""
    key = next(key for key in SWEEPS if key in result.details)
    names, scores = zip(*result.details[key].items(), strict=True)
    best = int(np.argmax(scores))
    axes.plot(names, scores, marker="o", color=color_of(0), linewidth=1.5)
    _circle(axes, best, scores[best])
    axes.set(xlabel=SWEEPS[key], ylabel=result.metric_words)
    return "Sweep", f"The circle marks the scored setting: {names[best]}."


def _learning(axes: "Axes", result: ProbeResult) -> Words:
    """The score with more and more training rows, and what permuted labels score."""
    curve = result.details["score_by_shots"]
    axes.plot([*curve], [*curve.values()], marker="o", color=color_of(0), linewidth=1.5)
    null = result.details["null_score"]
    axes.axhline(
        null, color="#999999", linestyle=":", label=f"permuted labels: {null:.3f}"
    )
    axes.set(xlabel="training rows per class", ylabel=result.metric_words)
    return (
        "Learning curve",
        "Means over draws, with the settings that were chosen on all rows.",
    )


def _examples(axes: "Axes", examples: Examples) -> Words:
    """One row an image: the image, the truth over it, the prediction over it."""
    from matplotlib.colors import ListedColormap

    truth = examples.truth
    count, height, edge = truth.shape
    labels = np.concatenate([np.zeros_like(truth), truth, examples.prediction], axis=2)
    labels = labels.reshape(count * height, 3 * edge)
    images = np.tile(examples.images, (1, 1, 3, 1))
    images = images.reshape(count * height, 3 * edge, 3)
    names = examples.class_names[1:]
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
        "Evenly spaced validation images of the first fold; background is transparent."
    )
    return "Predicted masks beside truth", caption


def _losses(axes: "Axes", result: ProbeResult) -> Words:
    """Dice loss of training (dashed) and validation over epochs, one colour a fold."""
    by_fold = zip(*map(result.details.__getitem__, LOSSES), strict=True)
    for i, (train, val, best) in enumerate(by_fold):
        epochs = range(1, len(train) + 1)
        axes.plot(epochs, train, color=color_of(i), linestyle="--", linewidth=1)
        axes.plot(epochs, val, color=color_of(i), label=f"fold {i + 1}", linewidth=1.6)
        _circle(axes, best, val[best - 1])
    axes.set(xlabel="epoch", ylabel="dice loss")
    caption = "Solid: validation; dashed: training. The circle marks the scored epoch."
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


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"
