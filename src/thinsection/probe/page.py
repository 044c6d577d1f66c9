"""Files of a probe's result: JSON and CSV for programs, pictures and a page for people."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinsection.config import as_mapping
from thinsection.evaluation.plots import (
    Columns,
    Picture,
    Words,
    class_columns,
    color_of,
    draw_confusion,
    draw_picture,
    draw_risks,
    draw_roc,
)
from thinsection.evaluation.rows import Risks, per_class_rows
from thinsection.files.atomic import write_bytes, write_json, write_table, write_text
from thinsection.files.pages import render_page
from thinsection.probe.result import Examples, ProbeResult, selection_words
from thinsection.report.index import index_address

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OVERLAY = 0.55  # opacity of a class over the image
LOSSES = ("train_losses", "val_losses", "best_epochs")  # of each fold
SWEEPS = {"score_by_k": "k neighbours", "score_by_c": "C (inverse regularisation)"}

PROBE_WORDS = {
    "linear": "Linear probe",
    "knn": "kNN probe",
    "fewshot": "16-shot probe (SimpleShot)",
    "tileset": "Tile-set score",
    "slide": "Slide probe (logistic regression)",
    "survival": "Survival probe (Cox)",
    "robustness": "Robustness index (PathoROB)",
    "segment": "Segmentation probe (MaskTransformer)",
    "regression": "Regression probe (PCA and ridge)",
    "retrieval": "Retrieval",
    "calibration": "Calibration of the linear probe",
    "invariance": "Invariance under stain, blur, JPEG and rotation",
    "croma": "Cross-confounder robustness margin (CRoMa)",
    "clustering": "Clustering score (PathoROB)",
    "apd": "Average performance drop (PathoROB)",
}
# shown above, as pictures or row by row, or too long for a table of details
LONG_DETAILS = ("curve", "selected_on", *LOSSES[:2])


def write_probe_report(result: ProbeResult, out_dir: Path) -> Path:
    """Writes <probe>.json, .csv, .html and <probe>_<picture>.png, each atomically.

    Returns the page, <probe>.html, where nothing is fetched.

    Memory: the pictures and the rows as text. Raises MissingDependencyError: no matplotlib.
    """
    pictures = probe_pictures(result)
    page = out_dir / f"{result.probe}.html"
    for picture in pictures:
        write_bytes(out_dir / f"{result.probe}_{picture.name}.png", picture.png)
    columns = _columns(result)
    write_table(
        page.with_suffix(".csv"), zip(*columns.values(), strict=True), list(columns)
    )
    words = PROBE_WORDS.get(result.probe, f"Probe {result.probe}")
    settings = selection_words(result)
    rows = result.predictions
    html = render_page(
        "thinsection.probe",
        "probe.html.j2",
        home=index_address(out_dir),
        title=f"{words} on {result.dataset}",
        score=f"{result.score:.4f}",
        metric=result.metric_words,
        interval=interval_words(result),
        settings=settings,
        classes=[] if rows is None else per_class_rows(rows),
        facts=_facts(result),
        pictures=[picture.for_page() for picture in pictures],
        protocol=json.dumps(as_mapping(result.protocol), indent=2),
    )
    write_text(page, html)
    document = {**result.as_mapping(), "settings_chosen": settings}
    write_json(page.with_suffix(".json"), document)  # last: where it is, the rest is
    return page


def _columns(result: ProbeResult) -> dict[str, Iterable[object]]:
    """Columns by header: the answers row by row; else details by name."""
    rows = result.rows
    if rows is None:
        return {"name": result.details.keys(), "value": result.details.values()}
    columns: dict[str, Iterable[object]] = {"id": rows.ids}
    if rows.groups is not None:
        columns["group"] = rows.groups.of_row
    if rows.fold is not None:
        columns["fold"] = rows.fold.tolist()
    return columns | rows.columns


def interval_words(result: ProbeResult) -> str:
    """The interval with what was resampled, or why there is none."""
    interval = result.interval
    if interval is None:
        return "no interval"
    if interval.missing:
        return f"no interval: {interval.missing}"
    ends = f"{interval.low:.4f} to {interval.high:.4f}"
    words = (
        f"{interval.level:.0%} interval {ends}, from {interval.units} {interval.unit}"
    )
    null_score = result.details.get("null_score")
    if null_score is not None:
        words += f"; the score with permuted labels is {null_score:.4f}"
    p_value = result.details.get("null_p")
    if p_value is not None:
        words += f", p {p_value:.3g}"
    return words


def _facts(result: ProbeResult) -> list[tuple[str, str]]:
    """Name and value of the protocol's name, the data's facts and the sweep's short details."""
    protocol = result.protocol
    short = {k: v for k, v in result.details.items() if k not in LONG_DETAILS}
    rows = [
        ("protocol", f"{protocol.name} ({protocol.source})"),
        ("seed", protocol.seed),
        *result.facts.items(),
        *short.items(),
    ]
    return [(name.replace("_", " "), _words(value)) for name, value in rows]


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_words(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
