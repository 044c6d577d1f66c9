"""Pictures of a probe's result, as PNG bytes: drawn off screen, same input, same picture."""

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.errors import importing
from thinsection.probe.data.sets import TileSet
from thinsection.probe.result import Examples, Predictions, ProbeResult, Risks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Words = tuple[str, str]  # title of a picture, and what to see in it
Draw = Callable[["Axes", Any, Any], Words]  # the second is what it is drawn from

# Okabe and Ito's colours, which the colour-blind tell apart; classes take them in order
COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#555555",
)
DPI, SIZE_IN = 120, (5.4, 4.2)  # width, height
MIN_ROWS_FOR_MAP, MAX_POINTS = 4, 4000  # of a scatter
OVERLAY = 0.55  # opacity of a class over the image
LOSSES = ("train_losses", "val_losses", "best_epochs")  # of each fold
SWEEPS = {"score_by_k": "k neighbours", "score_by_c": "C (inverse regularisation)"}


class Picture(NamedTuple):
    """A PNG with its name, title and what to see in it."""

    name: str
    title: str
    caption: str
    png: bytes


def probe_pictures(result: ProbeResult, tiles: TileSet | None = None) -> list[Picture]:
    """Every picture that the result has data for.

    Memory: MAX_POINTS rows of embeddings in float64 for the map. Raises MissingDependencyError:
    matplotlib is not installed.
    """
    rows, details = result.predictions, result.details
    mapped = tiles is not None and len(tiles.val) >= MIN_ROWS_FOR_MAP
    scored = rows if rows and rows.probability is not None else None
    draws: dict[str, tuple[Any, Draw]] = {  # None: there is nothing to draw it from
        "confusion": (rows, _confusion),
        "roc": (scored, _roc),
        "curve": (details.get("curve"), _curve),
        "sweep": (next(filter(details.__contains__, SWEEPS), None), _sweep),
        "learning": (details.get("score_by_shots"), _learning),
        "survival": (result.risks, _survival),
        "map": (tiles if mapped else None, _map),
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


def _confusion(axes: "Axes", rows: Predictions, result: ProbeResult) -> Words:
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


def _roc(axes: "Axes", rows: Predictions, result: ProbeResult) -> Words:
    """One curve per class against the rest (one curve for two classes), with its area."""
    from sklearn.metrics import auc, roc_curve

    scores = np.asarray(rows.probability)
    for c in [1] if len(rows.class_names) == 2 else range(len(rows.class_names)):
        positive = rows.truth == c
        if positive.all() or not positive.any():
            continue  # no curve without both kinds of rows
        x, y, _ = roc_curve(positive, scores[:, c])
        label = f"{_short(rows.class_names[c])}: {auc(x, y):.3f}"
        axes.plot(x, y, color=_color(c), label=label, linewidth=1.8)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="false positive rate", ylabel="true positive rate", aspect="equal")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            title="area under the curve",
            loc="lower right",
            fontsize=8,
            title_fontsize=8,
        )
    caption = "Each class against the rest, over all validation rows; dotted: chance."
    if result.metric == "auroc":  # one model a fold
        caption += " Folds are pooled here; the score is the mean of their own areas."
    return "ROC", caption


def _curve(axes: "Axes", curves: dict[str, list[float]], result: ProbeResult) -> Words:
    """Validation score after each epoch, one line per learning rate, the best marked."""
    lr, epoch = result.details["best_lr"], result.details["best_epoch"]
    for i, (name, scores) in enumerate(curves.items()):
        epochs = range(1, len(scores) + 1)
        axes.plot(epochs, scores, color=_color(i), label=f"lr {name}", linewidth=1.5)
    _circle(axes, epoch, result.score)
    axes.set(xlabel="epoch", ylabel=result.metric_words)
    return "Score over epochs", f"The circle is what counts: lr {lr:g}, epoch {epoch}."


def _sweep(axes: "Axes", key: str, result: ProbeResult) -> Words:
    """The score at each setting of a sweep, the best marked."""
    names, scores = zip(*result.details[key].items(), strict=True)
    best = int(np.argmax(scores))
    axes.plot(names, scores, marker="o", color=_color(0), linewidth=1.5)
    _circle(axes, best, scores[best])
    axes.set(xlabel=SWEEPS[key], ylabel=result.metric_words)
    return "Sweep", f"The circle is what counts: {names[best]}."


def _learning(axes: "Axes", curve: dict[str, float], result: ProbeResult) -> Words:
    """The score with more and more training rows, and what permuted labels score."""
    axes.plot([*curve], [*curve.values()], marker="o", color=_color(0), linewidth=1.5)
    null = result.details["null_score"]
    axes.axhline(
        null, color="#999999", linestyle=":", label=f"permuted labels: {null:.3f}"
    )
    axes.set(xlabel="training rows a class", ylabel=result.metric_words)
    return "Learning curve", "Means over draws, with the settings that all rows chose."


def _survival(axes: "Axes", risks: Risks, result: ProbeResult) -> Words:
    """Kaplan-Meier curves of the cases above and below the median risk of their fold."""
    from sksurv.nonparametric import kaplan_meier_estimator

    first = np.zeros(len(risks.ids), dtype=bool)  # a case once, however many seeds
    first[np.unique(risks.ids, return_index=True)[1]] = True
    both = {"higher": (risks.high, COLORS[5]), "lower": (~risks.high, COLORS[0])}
    for name, (of_kind, color) in both.items():
        event, times = risks.event[first & of_kind], risks.time[first & of_kind]
        if not len(event):
            continue  # all risks are equal
        steps = kaplan_meier_estimator(event, times)
        time, share = (np.r_[start, values] for start, values in zip((0.0, 1.0), steps))
        label = f"{name} risk: {len(event)} cases, {int(event.sum())} events"
        axes.step(time, share, where="post", color=color, label=label, linewidth=1.8)
        at = share[np.searchsorted(time, times[~event], side="right") - 1]
        axes.plot(times[~event], at, "|", color=color, markersize=7)
    axes.set(
        xlabel="time (the dataset's unit)", ylabel="share without event", ylim=(0, 1.03)
    )
    caption = "Split at the median risk of each fold; ticks: cases censored there."
    caption += "" if first.all() else " Folds of the first seed."
    return "Survival by predicted risk", caption


def _map(axes: "Axes", tiles: TileSet, result: ProbeResult) -> Words:
    """Validation embeddings in two dimensions, coloured by class, wrong predictions crossed."""
    n, seed = len(tiles.val), result.protocol.seed
    most = min(n, MAX_POINTS)
    rows = np.sort(np.random.default_rng(seed).choice(n, most, replace=False))
    points, method, axis_names = plane(tiles.val.embeddings[rows], seed=seed)
    labels = tiles.val.labels[rows]
    for c, name in enumerate(tiles.class_names):
        x, y = points[labels == c].T
        axes.scatter(x, y, s=14, color=_color(c), label=_short(name), linewidths=0)
    if result.predictions is not None:
        x, y = points[result.predictions.prediction[rows] != labels].T
        axes.scatter(
            x, y, s=26, marker="x", color="black", linewidths=0.9, label="wrong"
        )
    axes.set(xlabel=axis_names[0], ylabel=axis_names[1], xticks=[], yticks=[])
    shown = f"{most} of {n} validation rows" if most < n else f"All {n} validation rows"
    return f"Embeddings ({method})", f"{shown}, coloured by their true class."


def plane(
    embeddings: npt.NDArray[np.float32], *, seed: int
) -> tuple[npt.NDArray[np.float64], str, Sequence[str]]:
    """(points (N, 2), method, axis names): UMAP where it is installed, else PCA."""
    if find_spec("umap"):
        from umap import UMAP

        points = UMAP(random_state=seed, n_jobs=1).fit_transform(embeddings)
        return np.asarray(points, dtype=np.float64), "UMAP", ("UMAP 1", "UMAP 2")
    from sklearn.decomposition import PCA

    # the exact solver; an axis has no sign of its own: the largest loading is made positive
    pca = PCA(n_components=min(2, *embeddings.shape), svd_solver="full")
    points = np.zeros((len(embeddings), 2))
    with np.errstate(invalid="ignore"):  # no variance at all: a share of 0 / 0
        points[:, : pca.n_components] = pca.fit_transform(embeddings.astype(np.float64))
    share = np.nan_to_num(pca.explained_variance_ratio_)
    names = [f"PC {i + 1} ({s:.0%} of the variance)" for i, s in enumerate(share)]
    return points, "PCA", [*names, ""][:2]


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
    palette = ListedColormap(["#FFFFFF", *(_color(c) for c in range(len(names)))])
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
        axes.plot([], [], marker="s", linestyle="none", color=_color(c), label=name)
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
        axes.plot(epochs, train, color=_color(i), linestyle="--", linewidth=1)
        axes.plot(epochs, val, color=_color(i), label=f"fold {i + 1}", linewidth=1.6)
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


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _short(name: Any, most: int = 22) -> str:
    text = str(name)
    return text if len(text) <= most else text[: most - 1] + "…"
