"""Encoders beside each other: the results of probes of the same rows, as one table and page.

    OUT/comparison.json, .csv, .html, comparison_<picture>.png

A result is a probe's <probe>.json with the table of its rows beside it. Results of one task (data
set and probe) are compared where rows, folds and protocol are the same, each on the same units.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from thinsection.errors import DatasetError, InvalidInputError
from thinsection.evaluation import comparison, plots
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.intervals import LEVEL
from thinsection.evaluation.metrics import (
    LOWER_IS_BETTER,
    FloatVector,
    IndexArray,
    chance_of,
)
from thinsection.evaluation.rows import (
    Predictions,
    Ratios,
    Risks,
    Rows,
    Values,
    strict,
)
from thinsection.files.atomic import (
    read_json,
    write_bytes,
    write_json,
    write_table,
    write_text,
)
from thinsection.files.pages import render_page
from thinsection.report.index import index_address, refresh_index
from thinsection.tiles.categories import CLASS_COLORS
from thinsection.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# facts of a result that say what was probed
IDENTITY = (
    "encoder",
    "encoder_commit",
    "weights_sha256",
    "precision",
    "tiles",
    "rows_sha256",
    "embeddings_sha256",
)
Document = dict[str, Json]  # a result, or a part of a comparison, as JSON holds it


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One result with its rows."""

    model: str
    document: Document
    rows: Rows


def compare(
    folders: Sequence[Path],
    out: Path,
    *,
    metric: str | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> Path:
    """Writes the comparison of all results below the folders; returns the page.

    A model is named by the encoder that its results name, else by its folder; `metric` is taken in
    every task instead of each probe's own. A task with too few groups for a test is left out, and
    `on_message` receives the reason.

    Memory: the rows of one task for every model, and `comparison.jackknife`. Raises
    DatasetError: no
    task with two models, or results of other rows or protocols.
    """
    by_task: dict[str, dict[str, Scored]] = {}
    for scored in find_results(folders):
        name = f"{scored.document['dataset']}, {scored.document['probe']}"
        models = by_task.setdefault(name, {})
        if scored.model in models:
            raise DatasetError(
                f"models must have different names, got {scored.model!r} twice for {name!r}"
            )
        models[scored.model] = scored
    tasks = []
    reasons = []
    for name, models in by_task.items():
        if len(models) < 2:
            continue
        reason = comparison.why_no_test(next(iter(models.values())).rows.sampling)
        if reason:
            reasons.append(f"{name}: {reason}")
            on_message(f"not compared: {reasons[-1]}")
        else:
            tasks.append(_compare_task(name, [*models.values()], metric))
    if not tasks:
        raise DatasetError(
            "results must contain a task of at least two models and enough groups, got "
            f"{reasons or sorted(by_task) or 'no result'}"
        )
    pairs = [*chain.from_iterable(task["pairs"] for task in tasks)]
    p_values = [pair["p_value"] for pair in pairs]
    rates = stats.false_discovery_control(p_values)  # Benjamini and Hochberg's
    for pair, holm, rate in zip(pairs, comparison.holm(p_values), rates, strict=True):
        pair["p_holm"] = float(holm)
        pair["p_bh"] = float(rate)
        pair["different"] = bool(holm < 1 - LEVEL)
    for task in tasks:
        _rank(task)
    page = _write(tasks, _overall(tasks), out)
    refresh_index(out)
    return page


def _compare_task(name: str, models: list[Scored], metric: str | None) -> Document:
    """Scores of every model by every metric, and each pair's difference, not yet corrected."""
    first = models[0]
    metric = metric or first.document["metric"]
    for model in models[1:]:
        _check_alike(name, first, model)
    for model in models:
        if metric not in model.rows.scorers:
            raise InvalidInputError(
                f"metric of {name!r} must be one of {', '.join(model.rows.scorers)}, got {metric}"
            )
    scorers = [model.rows.scorers[metric] for model in models]
    sampling = first.rows.sampling
    chance = chance_of(metric, len(sampling.units_by_stratum))
    models_scored = comparison.jackknife(scorers, sampling, chance=chance)
    pairs = []
    for (i, a), (k, b) in combinations(enumerate(models), 2):
        difference = models_scored.difference(i, k)
        pairs.append(
            {
                "a": a.model,
                "b": b.model,
                "difference": difference.value,
                **asdict(difference),
                "detectable": difference.detectable,
            }
        )
    return {
        "task": name,
        "metric": metric,
        "rows": len(first.rows.ids),
        "groups": models_scored.units,
        "unit": first.rows.units.unit,
        "models": [
            _model(model, float(score))
            for model, score in zip(models, models_scored.observed, strict=True)
        ],
        "pairs": pairs,
    }


def _check_alike(task: str, first: Scored, other: Scored) -> None:
    """Refuses results of other rows, folds or settings."""
    # the hash is of all rows, those of training included
    hashes = [one.document["data"].get("rows_sha256") for one in (first, other)]
    if hashes[0] != hashes[1] or _key(first.rows) != _key(other.rows):
        difference = "rows"
    elif first.document["protocol"] != other.document["protocol"]:
        difference = "settings"
    else:
        return
    raise DatasetError(
        f"results of {task!r} must have the same rows, folds and protocol, got {first.model!r} "
        f"and {other.model!r} with a different {difference}; run both probes with the same "
        "settings"
    )


def _key(rows: Rows) -> tuple[object, ...]:
    """Key that results of the same scored rows share: names, folds, truth."""
    truth = rows.time if isinstance(rows, Risks) else getattr(rows, "truth", None)
    fold = np.asarray(rows.fold).tolist()
    return (type(rows), rows.ids, fold, np.asarray(truth).tolist())


def _model(scored: Scored, score: float) -> Document:
    document = scored.document
    facts = document["data"]
    return {
        "model": scored.model,
        "score": score,
        "interval": document["interval"],
        "metrics": document["metrics"],
        "identity": {k: facts[k] for k in IDENTITY if facts.get(k) is not None},
    }


def _rank(task: Document) -> None:
    """Adds to each model its rank among those that the corrected tests tell apart."""
    names = [model["model"] for model in task["models"]]
    better = np.zeros((len(names), len(names)), dtype=bool)
    for pair in task["pairs"]:
        if pair["different"]:
            a = names.index(pair["a"])
            b = names.index(pair["b"])
            a_wins = (pair["difference"] > 0) != (task["metric"] in LOWER_IS_BETTER)
            better[(a, b) if a_wins else (b, a)] = True
    for model, rank in zip(task["models"], comparison.tied_ranks(better), strict=True):
        model["rank"] = int(rank)


def _overall(tasks: list[Document]) -> list[Document]:
    """Mean rank and mean score of each model over its tasks, best first."""
    models = chain.from_iterable(task["models"] for task in tasks)
    names = [*dict.fromkeys(model["model"] for model in models)]
    scores = np.full((len(tasks), len(names)), np.nan)
    for of_task, task in zip(scores, tasks, strict=True):
        for model in task["models"]:
            of_task[names.index(model["model"])] = model["score"]
    lower = [task["metric"] in LOWER_IS_BETTER for task in tasks]
    ranks = comparison.mean_ranks(scores, lower=lower).tolist()
    means = np.nanmean(scores, axis=0).tolist()
    overall = [
        {"model": name, "mean_rank": rank, "mean_score": mean}
        for name, rank, mean in zip(names, ranks, means, strict=True)
    ]
    return sorted(overall, key=lambda model: model["mean_rank"])


def find_results(folders: Sequence[Path]) -> list[Scored]:
    """Every result with a table of rows, in the folders and all below them."""
    results = []
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.json")):
            document = read_json(path)
            if isinstance(document, dict) and {"probe", "metrics"} <= document.keys():
                model = document["data"].get("encoder") or Path(folder).name
                rows = read_rows(path, document)
                results.append(Scored(model=model, document=document, rows=rows))
    return results


def read_rows(path: Path, document: Document) -> Rows:
    """The rows of a result, from the table beside it."""
    with path.with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        table = [*csv.DictReader(file)]
    if not table:
        raise InvalidInputError(
            f"result must have its predictions beside it, got no rows in "
            f"{str(path.with_suffix('.csv'))!r}; run the probe again"
        )

    def numbers(name: str) -> FloatVector:
        return np.array([float(row[name]) for row in table])

    headers = table[0].keys()
    ids = tuple(row["id"] for row in table)
    groups = None
    if "group" in headers:
        unit = (document["interval"] or {}).get("unit", "patients")
        groups = Groups(unit, tuple(row["group"] for row in table))
    fold = numbers("fold").astype(np.int64) if "fold" in headers else None
    if "bottom" in headers:
        return Ratios(
            ids=ids,
            groups=groups,
            metric=document["metric"],
            top=numbers("top"),
            bottom=numbers("bottom"),
        )
    if "risk" in headers:
        return Risks(
            ids=ids,
            groups=groups,
            fold=fold,
            risk=numbers("risk"),
            high=numbers("above_fold_median") > 0,
            event=numbers("event") > 0,
            time=numbers("time"),
        )
    if "classes" in document:
        class_names = tuple(entry["name"] for entry in document["classes"])

        def labels(name: str) -> IndexArray:
            return np.array([class_names.index(row[name]) for row in table])

        shares = [numbers(f"p_{n}") for n in class_names if f"p_{n}" in headers]
        repeats = [labels(name) for name in headers if name.startswith("seed_")]
        return Predictions(
            ids=ids,
            groups=groups,
            fold=fold,
            class_names=class_names,
            truth=labels("truth"),
            prediction=labels("prediction"),
            probability=np.stack(shares, axis=1) if shares else None,
            repeats=np.array(repeats) if repeats else None,
        )
    names = [h.removeprefix("true ") for h in headers if h.startswith("true ")]
    return Values(
        ids=ids,
        groups=groups,
        fold=fold,
        target_names=tuple(names),
        truth=np.stack([numbers(f"true {name}") for name in names], axis=1),
        prediction=np.stack([numbers(f"predicted {name}") for name in names], axis=1),
    )


def _write(tasks: list[Document], models: list[Document], out: Path) -> Path:
    """Writes table, pictures, page and JSON of a comparison; returns the page."""
    pairs = []
    for task in tasks:
        pairs += [{"task": task["task"], **pair} for pair in task["pairs"]]
    write_table(out / "comparison.csv", pairs, list(pairs[0]))
    pictures = [
        plots.draw_picture("ranks", models, _draw_ranks),
        plots.draw_picture("differences", pairs, _draw_differences),
    ]
    for picture in pictures:
        write_bytes(out / f"comparison_{picture.name}.png", picture.png)
    page = out / "comparison.html"
    html = render_page(
        "thinsection.probe",
        "compare.html.j2",
        home=index_address(out),
        tasks=tasks,
        models=models,
        names=[model["model"] for model in models],
        pictures=[picture.for_page() for picture in pictures],
        lower=LOWER_IS_BETTER,
        level=LEVEL,
    )
    write_text(page, html)
    write_json(page.with_suffix(".json"), strict({"tasks": tasks, "models": models}))
    return page


def _draw_ranks(axes: "Axes", models: list[Document]) -> plots.Words:
    names = [model["model"] for model in models[::-1]]
    ranks = [model["mean_rank"] for model in models[::-1]]
    axes.figure.set_size_inches(5.4, 1 + 0.4 * len(models))  # type: ignore[union-attr]
    axes.barh(names, ranks, color=CLASS_COLORS[0], height=0.6)
    axes.set(xlabel="mean rank over the tasks", xlim=(0, len(names) + 0.2))
    return "Mean rank", "1 is best in every task; equal scores share their mean rank."


def _draw_differences(axes: "Axes", pairs: list[Document]) -> plots.Words:
    axes.figure.set_size_inches(7.2, 1.2 + 0.28 * len(pairs))  # type: ignore[union-attr]
    for y, pair in enumerate(pairs[::-1]):
        color = CLASS_COLORS[5 if pair["different"] else 7]
        axes.plot([pair["low"], pair["high"]], [y, y], color=color, linewidth=1.6)
        axes.plot(pair["difference"], y, "o", color=color, markersize=4)
    axes.axvline(0, color="#999999", linestyle=":", linewidth=1)
    names = [f"{p['a']} − {p['b']}: {p['task']}" for p in pairs[::-1]]
    axes.set_yticks(range(len(pairs)), names, fontsize=7)
    axes.set(xlabel="difference of scores")
    words = (
        "Paired differences with their 95 % confidence intervals. Coloured: different after Holm's "
        "correction."
    )
    return "Differences", words
