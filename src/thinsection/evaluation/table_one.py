"""Table 1 of a paper: who was studied, for all cases and for each class; and prevalences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from thinsection.evaluation.cases import Groups
from thinsection.evaluation.external import Estimate, proportion
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.metrics import Flags, FloatVector, IndexArray
from thinsection.evaluation.survival import survival_curve

HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOne:
    """Rows of text: a name, then a cell for each column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table_one(cohort: Cohort, tiles_by_slide: Sequence[int]) -> TableOne:
    """Table 1 of the cases that were used, and counts of those that were not.

    Args:
        cohort: the cases with their labels.
        tiles_by_slide: number of tiles of each slide, case after case.
    """
    slides = np.array([len(slides_of_case) for slides_of_case in cohort.slides])
    ends = np.cumsum(slides)[:-1]
    parts = np.split(np.asarray(tiles_by_slide, dtype=np.int64), ends)
    tiles = np.array([part.sum() for part in parts])
    columns = _columns(cohort)
    rows = list(_count_rows(cohort, slides, tiles, columns))
    rows += _outcome_rows(cohort, columns)
    rows += _subgroup_rows(cohort, columns)
    blank = ("",) * (len(columns) - 1)
    rows.append(("label missing, not used", str(cohort.unlabelled), *blank))
    rows.append(("no embeddings, not used", str(cohort.without_embeddings), *blank))
    return TableOne(columns=("", *columns), rows=tuple(rows))


def _columns(cohort: Cohort) -> dict[str, Flags]:
    """Name of each column and the cases that it counts: all, then each class."""
    columns = {"all": np.ones(len(cohort.cases), dtype=bool)}
    if cohort.target.exclusive:
        for i, name in enumerate(cohort.target.names):
            columns[f"{', '.join(cohort.target.columns)}: {name}"] = (
                cohort.array[:, 0] == i
            )
    return columns


def _count_rows(
    cohort: Cohort, slides: IndexArray, tiles: IndexArray, columns: dict[str, Flags]
) -> Iterator[tuple[str, ...]]:
    total = len(cohort.cases)
    yield ("cases (% of all)", *(_share(int(c.sum()), total) for c in columns.values()))
    patients = np.array(cohort.patients)
    if cohort.unit == "patients":
        counts = (len(set(patients[c])) for c in columns.values())
        yield ("patients", *(str(count) for count in counts))
    if cohort.sites:
        sites = np.array(cohort.sites)
        yield ("sites", *(str(len(set(sites[c]))) for c in columns.values()))
    yield ("slides", *(str(int(slides[c].sum())) for c in columns.values()))
    has_several_slides = slides > 1
    yield (
        "cases with several slides",
        *(str(int(has_several_slides[c].sum())) for c in columns.values()),
    )
    yield ("tiles", *(f"{int(tiles[c].sum()):,}" for c in columns.values()))
    yield (
        "tiles per case, median (quartiles)",
        *(_quartiles(tiles[c]) for c in columns.values()),
    )


def _outcome_rows(cohort: Cohort, columns: dict[str, Flags]) -> list[tuple[str, ...]]:
    """Rows on labels, values, or events and follow-up."""
    kind = cohort.target.kind
    values = cohort.array
    if kind == "multilabel":
        return [
            (f"{name} (% of cases with this label)", _label_share(label))
            for name, label in zip(cohort.target.names, values.T, strict=True)
        ]
    if kind == "regression":
        value = values[:, 0]
        name = cohort.target.columns[0]
        spread = f"{value.mean():.4g} ({value.std(ddof=1):.4g})"
        return [
            (f"{name}, mean (standard deviation)", spread),
            (f"{name}, median (quartiles)", _quartiles(value)),
            (f"{name}, range", f"{value.min():.4g} to {value.max():.4g}"),
        ]
    if kind in ("cox", "discrete"):
        event = values[:, 0] == 1
        return [
            ("events", _share(int(event.sum()), len(event))),
            (
                "median follow-up (reverse Kaplan-Meier)",
                _follow_up(event, values[:, 1], cohort.groups),
            ),
            ("time, median (quartiles)", _quartiles(values[:, 1])),
        ]
    return []


def _label_share(label: FloatVector) -> str:
    """Number of positive cases among the cases with a label."""
    labelled = int(np.isfinite(label).sum())
    positive = int((label == 1).sum())
    return f"{_share(positive, labelled)} of {labelled}" if labelled else "0 of 0"


def _subgroup_rows(
    cohort: Cohort, columns: dict[str, Flags]
) -> Iterator[tuple[str, ...]]:
    """Cases of each value of the subgroup columns, as a share of the column's cases."""
    for name, values in zip(cohort.subgroup_columns, cohort.subgroups, strict=True):
        labels = np.array(values)
        for label in np.unique(labels):
            counts = (
                _share(int((labels[c] == label).sum()), int(c.sum()))
                for c in columns.values()
            )
            yield (f"{name}: {label}", *counts)


def prevalences(cohort: Cohort) -> dict[str, Estimate]:
    """Share of the cases that have each class or label; empty for values and survival."""
    truth = cohort.array
    if cohort.target.exclusive:
        members = {name: truth[:, 0] == k for k, name in enumerate(cohort.target.names)}
        if cohort.target.kind == "binary":
            positive = cohort.target.positive_name
            members = {positive: members[positive]}
        return {name: proportion(of, cohort.groups) for name, of in members.items()}
    if cohort.target.kind != "multilabel":
        return {}
    shares = {}
    for name, label in zip(cohort.target.names, truth.T, strict=True):
        rows = np.flatnonzero(np.isfinite(label))
        shares[name] = proportion(label[rows] == 1, cohort.groups.take(rows))
    return shares


def _share(count: int, total: int) -> str:
    if not total:
        return "none"
    return f"{count} ({100 * count / total:.0f} %)"


def _quartiles(values: FloatVector | IndexArray) -> str:
    if len(values) == 0:
        return "none"
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def _follow_up(event: Flags, time: FloatVector, groups: Groups) -> str:
    """Time by which half of the cases would be censored if nobody had the event.

    Source: Schemper and Smith, Controlled Clinical Trials 17 (1996).
    """
    curve = survival_curve(~event, time, groups)
    below = np.flatnonzero(curve.survival <= HALF)
    return f"{curve.times[below[0]]:.4g}" if len(below) else "not reached"
