"""Pictures of a probe's result, as PNG bytes: drawn off screen, same input, same picture."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import MissingDependencyError
from thinsection.probe.data.sets import TileSet
from thinsection.probe.result import METRIC_WORDS, Examples, Predictions, ProbeResult, Risks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind tell apart; classes take them in order
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#555555")
DPI = 120
MAX_POINTS = 4000  # of a scatter
MIN_ROWS_FOR_MAP = 4
OVERLAY = 0.55  # opacity of a class over the image


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG with its name, title and what to see in it."""

    name: str
    title: str
    caption: str
    png: bytes


def probe_pictures(result: ProbeResult, tiles: TileSet | None = None) -> list[Picture]:
    """Every picture that the result has data for.

    Memory: MAX_POINTS rows of embeddings in float64 for the map.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    pictures = []
    if result.predictions is not None:
        pictures.append(confusion_picture(result.predictions))
        if result.predictions.probability is not None:
            pictures.append(roc_picture(result.predictions, folds=result.metric == "auroc"))
    if "curve" in result.details:
        pictures.append(curve_picture(result))
    if "score_by_k" in result.details:
        pictures.append(sweep_picture(result, "score_by_k", "k neighbours"))
    if "score_by_c" in result.details:
        pictures.append(sweep_picture(result, "score_by_c", "C (inverse regularisation)"))
    if result.risks is not None:
        pictures.append(survival_picture(result.risks))
    if {"so", "os", "ss", "oo"} <= set(result.details):
        pictures.append(neighbours_picture(result))
    if tiles is not None and len(tiles.val) >= MIN_ROWS_FOR_MAP:
        prediction = None if result.predictions is None else result.predictions.prediction
        pictures.append(map_picture(tiles, prediction, seed=result.protocol.seed))
    if result.examples is not None:
        pictures.append(examples_picture(result.examples))
    if {"train_losses", "val_losses", "best_epochs"} <= set(result.details):
        pictures.append(losses_picture(result))
    return pictures


def confusion_picture(rows: Predictions) -> Picture:
    """Rows are the truth; the shade is the share of the row, the number the count."""
    counts = rows.counts
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.6 + 0.55 * len(rows.class_names)
    figure, axes = figure_and_axes((side + 0.8, side))
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    for (r, c), count in np.ndenumerate(counts):
        color = "white" if share[r, c] > 0.5 else "black"
        axes.text(c, r, f"{count}", ha="center", va="center", color=color, fontsize=9)
    ticks = range(len(rows.class_names))
    axes.set_xticks(ticks, [_short(n) for n in rows.class_names], rotation=40, ha="right")
    axes.set_yticks(ticks, [_short(n) for n in rows.class_names])
    axes.set(xlabel="predicted", ylabel="truth")
    figure.colorbar(image, ax=axes, label="share of the true class", fraction=0.046)
    caption = "Counts of validation rows; the shade is the share of the true class."
    return Picture("confusion", "Confusion matrix", caption, png_bytes(figure))


def roc_picture(rows: Predictions, *, folds: bool = False) -> Picture:
    """One curve per class against the rest (one curve for two classes), with its area.

    Args:
        rows: the predictions.
        folds: True says that they come from several models, whose folds' mean is the score.
    """
    from sklearn.metrics import roc_auc_score, roc_curve

    assert rows.probability is not None
    figure, axes = figure_and_axes((4.6, 4.2))
    classes = [1] if len(rows.class_names) == 2 else range(len(rows.class_names))
    for c in classes:
        positive = rows.truth == c
        if positive.all() or not positive.any():
            continue  # no curve without both kinds of rows
        x, y, _ = roc_curve(positive, rows.probability[:, c])
        area = roc_auc_score(positive, rows.probability[:, c])
        label = f"{_short(rows.class_names[c])}: {area:.3f}"
        axes.plot(x, y, color=_color(c), label=label, linewidth=1.8)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="false positive rate", ylabel="true positive rate", aspect="equal")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="area under the curve", loc="lower right", fontsize=8, title_fontsize=8)
    caption = "Each class against the rest, over all validation rows; dotted: chance."
    if folds:
        caption += " Folds are pooled here; the score is the mean of their own areas."
    return Picture("roc", "ROC", caption, png_bytes(figure))


def curve_picture(result: ProbeResult) -> Picture:
    """Validation score after each epoch, one line per learning rate, the best marked."""
    figure, axes = figure_and_axes((5.6, 3.4))
    for i, (lr, scores) in enumerate(result.details["curve"].items()):
        epochs = range(1, len(scores) + 1)
        axes.plot(epochs, scores, color=_color(i), label=f"lr {lr}", linewidth=1.5)
    best = result.details["best_epoch"], result.score
    _circle(axes, *best)
    axes.set(xlabel="epoch", ylabel=METRIC_WORDS.get(result.metric, result.metric))
    axes.legend(fontsize=8)
    caption = f"The circle is what counts: lr {result.details['best_lr']:g}, epoch {best[0]}."
    return Picture("curve", "Score over epochs", caption, png_bytes(figure))


def sweep_picture(result: ProbeResult, key: str, label: str) -> Picture:
    """The score at each setting of a sweep, the best marked."""
    names = list(result.details[key])
    scores = list(result.details[key].values())
    best = int(np.argmax(scores))
    figure, axes = figure_and_axes((4.6, 3.2))
    axes.plot(range(len(names)), scores, marker="o", color=_color(0), linewidth=1.5)
    axes.plot(best, scores[best], marker="o", color="black", fillstyle="none", markersize=12)
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel=label, ylabel=METRIC_WORDS.get(result.metric, result.metric))
    caption = f"The circle is what counts: {names[best]}."
    return Picture("sweep", "Sweep", caption, png_bytes(figure))


def survival_picture(risks: Risks) -> Picture:
    """Kaplan-Meier curves of the cases above and below the median risk of their fold."""
    figure, axes = figure_and_axes((5.4, 3.6))
    groups = (("higher risk", risks.high, 5), ("lower risk", ~risks.high, 0))
    for name, group, color in groups:
        if not group.any():
            continue  # all risks are equal
        time, share = kaplan_meier(risks.event[group], risks.time[group])
        label = f"{name}: {int(group.sum())} cases, {int(risks.event[group].sum())} events"
        axes.step(time, share, where="post", color=_color(color), label=label, linewidth=1.8)
        censored = risks.time[group][~risks.event[group]]
        at = share[np.searchsorted(time, censored, side="right") - 1]
        axes.plot(censored, at, "|", color=_color(color), markersize=7)
    axes.set(xlabel="time (the dataset's unit)", ylabel="share without event", ylim=(0, 1.03))
    axes.legend(fontsize=8)
    caption = "Split at the median risk of each fold; ticks: cases censored there."
    return Picture("survival", "Survival by predicted risk", caption, png_bytes(figure))


def kaplan_meier(
    event: npt.NDArray[np.bool_], time: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(times, share without event from then on), starting at (0, 1)."""
    from sksurv.nonparametric import kaplan_meier_estimator

    times, share = kaplan_meier_estimator(event, time)
    return np.r_[0.0, times], np.r_[1.0, share]


def neighbours_picture(result: ProbeResult) -> Picture:
    """How many neighbours share the biology and the centre."""
    labels = {
        "ss": "same class,\nsame centre",
        "so": "same class,\nother centre",
        "os": "other class,\nsame centre",
        "oo": "other class,\nother centre",
    }
    figure, axes = figure_and_axes((5.2, 3.2))
    colors = ["#BBBBBB", COLORS[2], COLORS[5], "#BBBBBB"]
    axes.bar(list(labels.values()), [result.details[k] for k in labels], color=colors)
    axes.set(ylabel="neighbours")
    caption = "The index is green / (green + orange): biology against hospital."
    return Picture("neighbours", "Neighbours on other slides", caption, png_bytes(figure))


def map_picture(tiles: TileSet, prediction: npt.NDArray[np.int64] | None, *, seed: int) -> Picture:
    """Validation embeddings in two dimensions, coloured by class, wrong predictions crossed."""
    rng = np.random.default_rng(seed)
    n = len(tiles.val)
    rows = np.sort(rng.choice(n, MAX_POINTS, replace=False)) if n > MAX_POINTS else np.arange(n)
    points, method, axis_names = plane(tiles.val.embeddings[rows], seed=seed)
    labels = tiles.val.labels[rows]
    figure, axes = figure_and_axes((5.4, 4.4))
    for c, name in enumerate(tiles.class_names):
        x, y = points[labels == c].T
        axes.scatter(x, y, s=14, color=_color(c), label=_short(name), linewidths=0)
    if prediction is not None:
        x, y = points[prediction[rows] != labels].T
        axes.scatter(x, y, s=26, marker="x", color="black", linewidths=0.9, label="wrong")
    axes.set(xlabel=axis_names[0], ylabel=axis_names[1], xticks=[], yticks=[])
    axes.legend(fontsize=8, loc="best")
    shown = f"{len(rows)} of {n} validation rows" if len(rows) < n else f"All {n} validation rows"
    return Picture(
        "map",
        f"Embeddings ({method})",
        f"{shown}, coloured by their true class.",
        png_bytes(figure),
    )


def plane(
    embeddings: npt.NDArray[np.float32], *, seed: int
) -> tuple[npt.NDArray[np.float64], str, Sequence[str]]:
    """(points (N, 2), method, axis names): UMAP where it is installed, else PCA."""
    try:
        from umap import UMAP
    except ImportError:
        from sklearn.decomposition import PCA

        # the exact solver; an axis has no sign of its own: the largest loading is made positive
        pca = PCA(n_components=min(2, *embeddings.shape), svd_solver="full")
        points = np.zeros((len(embeddings), 2))
        with np.errstate(invalid="ignore"):  # no variance at all: a share of 0 / 0
            points[:, : pca.n_components] = pca.fit_transform(embeddings.astype(np.float64))
        share = np.nan_to_num(pca.explained_variance_ratio_)
        names = [f"PC {i + 1} ({s:.0%} of the variance)" for i, s in enumerate(share)]
        return points, "PCA", [*names, ""][:2]
    points = UMAP(random_state=seed, n_jobs=1).fit_transform(embeddings)
    return np.asarray(points, dtype=np.float64), "UMAP", ("UMAP 1", "UMAP 2")


def examples_picture(examples: Examples) -> Picture:
    """One row an image: the image, the truth over it, the prediction over it."""
    rows = [
        np.concatenate([image, overlaid(image, truth), overlaid(image, guess)], axis=1)
        for image, truth, guess in zip(
            examples.images, examples.truth, examples.prediction, strict=True
        )
    ]
    figure, axes = figure_and_axes((6.6, 2.2 * len(rows) + 0.6))
    axes.imshow(np.concatenate(rows))
    edge = examples.images.shape[2]
    axes.set_xticks([edge * (k + 0.5) for k in range(3)], ["image", "truth", "prediction"])
    axes.set_yticks([])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    for c, name in enumerate(examples.class_names[1:], start=1):
        axes.plot([], [], marker="s", linestyle="none", color=class_color(c), label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, fontsize=8, frameon=False)
    caption = "Validation images of the first fold, evenly spaced; background is left clear."
    return Picture("examples", "Predicted masks beside truth", caption, png_bytes(figure))


def losses_picture(result: ProbeResult) -> Picture:
    """Dice loss of training (dashed) and validation over epochs, one colour a fold."""
    figure, axes = figure_and_axes((5.6, 3.4))
    details = result.details
    for i, (train, val) in enumerate(
        zip(details["train_losses"], details["val_losses"], strict=True)
    ):
        epochs, best = range(1, len(train) + 1), details["best_epochs"][i]
        color = COLORS[i % len(COLORS)]
        axes.plot(epochs, train, color=color, linestyle="--", linewidth=1)
        axes.plot(epochs, val, color=color, label=f"fold {i + 1}", linewidth=1.6)
        _circle(axes, best, val[best - 1])
    axes.set(xlabel="epoch", ylabel="dice loss")
    axes.legend(fontsize=8)
    caption = "Solid: validation; dashed: training. The circle is the epoch that is scored."
    return Picture("losses", "Loss over epochs", caption, png_bytes(figure))


def overlaid(image: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The image (H, W, 3) with each class but 0 tinted."""
    palette = np.array([_rgb(class_color(c)) for c in range(256)], dtype=np.float32)
    opacity = np.where(labels > 0, OVERLAY, 0.0)[..., None]
    mixed: npt.NDArray[np.float64] = image * (1 - opacity) + palette[labels] * opacity
    return mixed.round().astype(np.uint8)


def class_color(label: int) -> str:
    """Of a class >= 1."""
    return COLORS[(label - 1) % len(COLORS)]


def _rgb(color: str) -> list[int]:
    return list(bytes.fromhex(color.removeprefix("#")))


def figure_and_axes(size: tuple[float, float]) -> tuple["Figure", "Axes"]:
    """A figure outside of pyplot's global state, drawn by Agg."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"pictures need matplotlib, got {error}; install thinsection[probe]"
        ) from error
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def png_bytes(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    # without the version in the metadata the bytes depend on the data alone
    figure.savefig(buffer, format="png", bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()


def _circle(axes: "Axes", x: float, y: float) -> None:
    axes.plot(x, y, marker="o", color="black", fillstyle="none", markersize=9, linestyle="none")


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _short(name: Any, most: int = 22) -> str:
    text = str(name)
    return text if len(text) <= most else text[: most - 1] + "…"
