"""Encoders beside each other: the results of probes of the same rows, as one table and page.

    OUT/comparison.json, .csv, .html, comparison_<picture>.png

A result is a probe's <probe>.json with the table of its rows beside it. Results of one task (data
set and probe) are compared where rows, folds and protocol are the same, each on the same resamples.
"""

import base64
import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from thinsection.errors import DatasetError, InvalidInputError
from thinsection.evaluation import comparison
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.intervals import LEVEL
from thinsection.evaluation.metrics import LOWER_IS_BETTER
from thinsection.files.atomic import write_bytes, write_json, write_table, write_text
from thinsection.files.json_text import read_json
from thinsection.files.pages import render_page
from thinsection.probe import curves, plots
from thinsection.probe.result import Predictions, Ratios, Risks, Rows, Values, strict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEED = 1337  # of the resamples, which every model of a task shares
# facts of a result that say what was probed
_PROBED = "encoder encoder_commit weights_sha256 precision tiles rows_sha256 embeddings_sha256"
IDENTITY = tuple(_PROBED.split())


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One result with its rows."""

    model: str
    document: dict[str, Any]
    rows: Rows


def compare(folders: Sequence[Path], out: Path, *, metric: str | None = None) -> Path:
    """Writes the comparison of all results below the folders; returns the page.

    A model is named by the encoder that its results name, else by its folder; `metric` is taken in
    every task instead of each probe's own.

    Memory: the rows of one task for every model, and `comparison.resample`. Raises DatasetError: no
    task with two models, or results of other rows or protocols.
    """
    by_task: dict[str, dict[str, Scored]] = {}
    for scored in find_results(folders):
        task = f"{scored.document['dataset']}, {scored.document['probe']}"
        models = by_task.setdefault(task, {})
        if scored.model in models:
            raise DatasetError(
                f"models must differ, got {scored.model!r} twice for {task!r}"
            )
        models[scored.model] = scored
    several = {task: models for task, models in by_task.items() if len(models) > 1}
    if not several:
        raise DatasetError(
            "results must hold a task of two models or more, "
            f"got {sorted(by_task) or 'no result'}"
        )
    tasks = [
        _compare_task(name, [*models.values()], metric)
        for name, models in several.items()
    ]
    pairs = [*chain.from_iterable(task["pairs"] for task in tasks)]
    p_values = [pair["p_value"] for pair in pairs]
    rates = stats.false_discovery_control(p_values)  # Benjamini and Hochberg's
    for pair, holm, fdr in zip(pairs, comparison.holm(p_values), rates, strict=True):
        pair |= {
            "p_holm": float(holm),
            "p_bh": float(fdr),
            "different": bool(holm < 1 - LEVEL),
        }
    for compared in tasks:
        _rank(compared)
    return _write({"tasks": tasks, "models": _overall(tasks)}, out)


def _compare_task(
    task: str, models: list[Scored], metric: str | None
) -> dict[str, Any]:
    """Scores of every model by every metric, and each pair's difference, not yet corrected."""
    first = models[0]
    for other in models[1:]:
        keys = [
            (model.document["data"].get("rows_sha256"), _key(model.rows))
            for model in (first, other)
        ]
        difference_in = ""
        if first.document["protocol"] != other.document["protocol"]:
            difference_in = "settings"
        if keys[0] != keys[1]:
            difference_in = "rows"
        if difference_in:
            raise DatasetError(
                f"results of {task!r} must be of the same rows, folds and protocol, "
                f"got {first.model!r} and {other.model!r} with other {difference_in}; "
                "probe them alike"
            )
    metric = metric or first.document["metric"]
    groups = first.rows.groups
    for model in models:
        if metric not in model.rows.scorers:
            raise InvalidInputError(
                f"metric of {task!r} must be one of {', '.join(model.rows.scorers)}, got {metric}"
            )
    ids, scorers = first.rows.ids, [model.rows.scorers[metric] for model in models]
    drawn = comparison.resample(scorers, first.rows.sampling, seed=SEED)
    pairs = []
    for a, b in combinations(range(len(models)), 2):
        difference = _delong(
            models[a].rows, models[b].rows, metric
        ) or drawn.difference(a, b)
        named = {
            "a": models[a].model,
            "b": models[b].model,
            "difference": difference.value,
        }
        pairs.append(named | asdict(difference) | {"detectable": difference.detectable})
    told = {
        "task": task,
        "metric": metric,
        "rows": len(ids),
        "groups": drawn.sampling.units,
    }
    shown = [_model(m, float(s)) for m, s in zip(models, drawn.observed, strict=True)]
    return told | {
        "unit": groups.unit if groups else "rows",
        "models": shown,
        "pairs": pairs,
    }


def _model(scored: Scored, score: float) -> dict[str, Any]:
    told, data = scored.document, scored.document["data"]
    known = {"model": scored.model, "score": score, "interval": told["interval"]}
    identity = {name: data[name] for name in IDENTITY if data.get(name) is not None}
    return {**known, "metrics": told["metrics"], "identity": identity}


def _key(rows: Rows) -> list[Any]:
    """Key that results of the same rows share: names, folds, truth."""
    fold = getattr(rows, "fold", None)
    truth = rows.time if isinstance(rows, Risks) else getattr(rows, "truth", None)
    parts = [np.asarray(p).tolist() for p in (fold, truth) if p is not None]
    return [type(rows), rows.ids, *parts]  # training rows: the facts' rows_sha256


def _delong(a: Rows, b: Rows, metric: str) -> comparison.Difference | None:
    """DeLong's test, where the score is one area under one curve of two classes."""
    if (
        metric != "auroc"
        or not isinstance(a, Predictions)
        or not isinstance(b, Predictions)
    ):
        return None
    if len(a.class_names) > 2 or a.probability is None or b.probability is None:
        return None
    shares = [a.probability[:, 1], b.probability[:, 1]]
    folds = (a.fold, b.fold)
    return comparison.delong(shares, a.truth == 1, a.sampling, folds=folds)


def _rank(task: dict[str, Any]) -> None:
    """Adds to each model its rank among those that the corrected tests tell apart."""
    names = [model["model"] for model in task["models"]]
    better = np.zeros((len(names), len(names)), dtype=bool)
    for pair in task["pairs"]:
        if pair["different"]:
            a, b = names.index(pair["a"]), names.index(pair["b"])
            wins = (pair["difference"] > 0) != (task["metric"] in LOWER_IS_BETTER)
            better[(a, b) if wins else (b, a)] = True
    for model, rank in zip(task["models"], comparison.tied_ranks(better), strict=True):
        model["rank"] = int(rank)


def _overall(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean rank and mean score of each model over its tasks, best first."""
    names = [
        *dict.fromkeys(model["model"] for task in tasks for model in task["models"])
    ]
    found = [
        {model["model"]: model["score"] for model in task["models"]} for task in tasks
    ]
    scores = np.array([[of.get(name, np.nan) for name in names] for of in found])
    lower = [task["metric"] in LOWER_IS_BETTER for task in tasks]
    ranks, means = (
        comparison.mean_ranks(scores, lower=lower),
        np.nanmean(scores, axis=0),
    )
    rows = zip(names, ranks.tolist(), means.tolist(), strict=True)
    overall = [
        {"model": name, "mean_rank": rank, "mean_score": mean}
        for name, rank, mean in rows
    ]
    return sorted(overall, key=lambda model: model["mean_rank"])


def find_results(folders: Sequence[Path]) -> list[Scored]:
    """Every result with a table of rows, in the folders and all below them."""
    found = []
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.json")):
            document = read_json(path)
            if (
                not isinstance(document, dict)
                or not {"probe", "metrics"} <= document.keys()
            ):
                continue
            model = document["data"].get("encoder") or Path(folder).name
            found.append(
                Scored(model=model, document=document, rows=read_rows(path, document))
            )
    return found


def read_rows(path: Path, document: dict[str, Any]) -> Rows:
    """The rows of a result, from the table beside it."""
    with path.with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        table = [*csv.DictReader(file)]
    if not table:
        raise InvalidInputError(
            f"result must have a table of rows, got none beside {str(path)!r}"
        )
    known: dict[str, Any] = {"ids": tuple(row["id"] for row in table)}
    if "group" in table[0]:
        unit = (document["interval"] or {}).get("unit", "patients")
        known["groups"] = Groups(unit, tuple(row["group"] for row in table))

    def numbers(name: str) -> Any:
        return np.array([float(row[name]) for row in table])

    fold = {"fold": numbers("fold").astype(np.int64)} if "fold" in table[0] else {}
    if "bottom" in table[0]:
        top, bottom = numbers("top"), numbers("bottom")
        return Ratios(metric=document["metric"], top=top, bottom=bottom, **known)
    if "risk" in table[0]:
        event, high = (numbers(name) > 0 for name in ("event", "above_fold_median"))
        values = {
            "risk": numbers("risk"),
            "time": numbers("time"),
            "event": event,
            "high": high,
        }
        return Risks(**values, **known, **fold)
    if "classes" in document:
        names = tuple(entry["name"] for entry in document["classes"])
        seeds = [name for name in table[0] if name.startswith("seed_")]
        columns = ("truth", "prediction", *seeds)
        labels = np.array([[names.index(r[k]) for r in table] for k in columns])
        known["repeats"] = labels[2:] if seeds else None
        shares = [numbers(f"p_{name}") for name in names if f"p_{name}" in table[0]]
        known |= {
            "class_names": names,
            "truth": labels[0],
            "prediction": labels[1],
            **fold,
        }
        return Predictions(
            probability=np.stack(shares, axis=1) if shares else None, **known
        )
    names = tuple(
        name.removeprefix("true ") for name in table[0] if name.startswith("true ")
    )
    both = [
        [numbers(f"{kind} {name}") for name in names] for kind in ("true", "predicted")
    ]
    truth, guess = (np.stack(of_kind, axis=1) for of_kind in both)
    return Values(target_names=names, truth=truth, prediction=guess, **known, **fold)


def _write(found: dict[str, Any], out: Path) -> Path:
    pairs = [
        {"task": task["task"], **pair}
        for task in found["tasks"]
        for pair in task["pairs"]
    ]
    write_table(out / "comparison.csv", pairs, list(pairs[0]))
    draws = {
        "ranks": (found["models"], _draw_ranks),
        "differences": (pairs, _draw_differences),
    }
    pictures = [
        plots.draw_picture(name, source, draw) for name, (source, draw) in draws.items()
    ]
    for picture in pictures:
        write_bytes(out / f"comparison_{picture.name}.png", picture.png)
    shown = [
        (p.title, p.caption, base64.b64encode(p.png).decode("ascii")) for p in pictures
    ]
    names = [model["model"] for model in found["models"]]
    page = out / "comparison.html"
    values = {
        "names": names,
        "pictures": shown,
        "lower": LOWER_IS_BETTER,
        "level": LEVEL,
    }
    write_text(
        page, render_page("thinsection.probe", "compare.html.j2", **found, **values)
    )
    write_json(page.with_suffix(".json"), strict(found))
    return page


def _draw_ranks(axes: "Axes", models: list[dict[str, Any]], _: Any) -> curves.Words:
    names, ranks = ([m[k] for m in models[::-1]] for k in ("model", "mean_rank"))
    axes.figure.set_size_inches(5.4, 1 + 0.4 * len(models))  # type: ignore[union-attr]
    axes.barh(names, ranks, color=curves.COLORS[0], height=0.6)
    axes.set(xlabel="mean rank over the tasks", xlim=(0, len(names) + 0.2))
    return "Mean rank", "1 is best in every task; equal scores share their mean rank."


def _draw_differences(
    axes: "Axes", pairs: list[dict[str, Any]], _: Any
) -> curves.Words:
    axes.figure.set_size_inches(7.2, 1.2 + 0.28 * len(pairs))  # type: ignore[union-attr]
    for y, pair in enumerate(pairs[::-1]):
        color = curves.COLORS[5 if pair["different"] else 7]
        axes.plot([pair["low"], pair["high"]], [y, y], color=color, linewidth=1.6)
        axes.plot(pair["difference"], y, "o", color=color, markersize=4)
    axes.axvline(0, color="#999999", linestyle=":", linewidth=1)
    names = [f"{p['a']} − {p['b']}: {p['task']}" for p in pairs[::-1]]
    axes.set_yticks(range(len(pairs)), names, fontsize=7)
    axes.set(xlabel="difference of scores")
    words = "Paired differences with their 95 % intervals; in colour what Holm's correction keeps."
    return "Differences", words
