from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from lifelines import KaplanMeierFitter
from tests.predict.planted import write_embeddings

from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import Cohort, read_cohort
from thinsection.evaluation.leaks import read_contents
from thinsection.evaluation.table_one import TableOne, prevalences, table_one
from thinsection.evaluation.target import Kind, Target


def table_of(root: Path, rows: Sequence[dict], **labels: object) -> TableOne:
    """Table 1 of a folder with a file for each row, of 3, 4, ... tiles."""
    rng = np.random.default_rng(0)
    root.mkdir()
    for i, row in enumerate(rows):
        write_embeddings(root / f"{row['slide_id']}.h5", rng.normal(size=(3 + i, 4)))
    pd.DataFrame(rows).to_csv(root / "labels.csv", index=False)
    cohort = read_cohort(root, LabelsConfig(labels=root / "labels.csv", **labels))  # type: ignore[arg-type]
    files = [path for paths in cohort.paths for path in paths]
    return table_one(cohort, read_contents(files).num_tiles.tolist())


def cells(table: TableOne, name: str) -> dict[str, str]:
    row = next(row for row in table.rows if row[0] == name)
    return dict(zip(table.columns[1:], row[1:], strict=False))


def test_counts_by_class_are_those_of_pandas(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    classes = ["a", "b", "b", "NA"]
    rows = [
        {
            "slide_id": f"s{i:02}",
            "case_id": f"c{i // 2:02}",
            "hospital": f"h{i // 2 % 3}",
            "label": classes[(i // 2) % 4],
        }
        for i in range(int(rng.integers(30, 40)))
    ]
    table = table_of(tmp_path / "f", rows, target=("label",), site="hospital")
    frame = pd.DataFrame(rows).assign(tiles=3 + np.arange(len(rows)))
    used = frame[frame.label != "NA"]
    groups = {f"label: {name}": own for name, own in used.groupby("label")}
    for name, own in ({"all": used} | groups).items():
        cases = own.groupby("case_id").tiles
        share = round(100 * own.case_id.nunique() / used.case_id.nunique())
        assert (
            cells(table, "cases (% of all)")[name]
            == f"{own.case_id.nunique()} ({share} %)"
        )
        assert cells(table, "slides")[name] == str(len(own))
        assert cells(table, "sites")[name] == str(own.hospital.nunique())
        assert cells(table, "tiles")[name] == str(own.tiles.sum())
        assert cells(table, "cases with several slides")[name] == str(
            (cases.size() > 1).sum()
        )
        low, middle, high = cases.sum().quantile([0.25, 0.5, 0.75])
        words = f"{middle:.4g} ({low:.4g} to {high:.4g})"
        assert cells(table, "tiles per case, median (quartiles)")[name] == words
    missing = int((frame.label == "NA").sum())
    assert cells(table, "label missing, not used")["all"] == str(missing)


def test_follow_up_is_the_reverse_kaplan_meier_median_of_lifelines(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(2)
    time = rng.exponential(100, 40).round(2) + 1
    event = rng.random(40) < 0.5
    rows = [
        {"slide_id": f"s{i:02}", "dead": int(event[i]), "days": time[i]}
        for i in range(40)
    ]
    table = table_of(tmp_path / "f", rows, target=("dead",), time="days", task="cox")
    judge = KaplanMeierFitter().fit(time, ~event).median_survival_time_
    follow_up = cells(table, "median follow-up (reverse Kaplan-Meier)")["all"]
    assert follow_up == f"{judge:.4g}"
    assert (
        cells(table, "events")["all"] == f"{event.sum()} ({100 * event.mean():.0f} %)"
    )


FIVE_CASES = Cohort(
    target=Target(kind="binary", columns=("label",), names=("a", "b"), positive="b"),
    place="",
    cases=("c0", "c1", "c2", "c3", "c4"),
    slides=(("s0", "s1"), ("s2",), ("s3",), ("s4", "s5"), ("s6",)),
    files=(("f",),) * 5,
    values=((0,), (0,), (1,), (1,), (0,)),
    patients=("p0", "p0", "p1", "p2", "p3"),
    unit="patients",
    sites=("A", "A", "B", "B", "A"),
    subgroup_columns=("sex",),
    subgroups=(("m", "f", "m", "m", "f"),),
    unlabelled=3,
    without_embeddings=2,
)
TILES = [10, 20, 5, 7, 1000, 2000, 40]


def cohort_of(
    kind: Kind, names: tuple[str, ...], values: Sequence[tuple[float | None, ...]]
) -> Cohort:
    """A case of one slide for each of the values; nothing else is known."""
    ids = tuple(f"c{i}" for i in range(len(values)))
    columns = names
    if kind in ("cox", "discrete"):
        columns = ("event", "time")
    elif kind in ("multiclass", "ordinal", "binary"):
        columns = ("label",)
    return Cohort(
        target=Target(kind=kind, columns=columns, names=names),
        place="",
        cases=ids,
        slides=tuple((name,) for name in ids),
        files=tuple((name,) for name in ids),
        values=tuple(values),
        patients=ids,
        unit="slides",
    )


def test_each_cell_is_the_count_that_is_made_by_hand() -> None:
    table = table_one(FIVE_CASES, TILES)
    assert table.columns == ("", "all", "label: a", "label: b")
    quartiles = ("30 (7 to 40)", "30 (17.5 to 35)", "1504 (755.2 to 2252)")
    assert table.rows == (
        ("cases (% of all)", "5 (100 %)", "3 (60 %)", "2 (40 %)"),
        ("patients", "4", "2", "2"),
        ("sites", "2", "1", "1"),
        ("slides", "7", "4", "3"),
        ("cases with several slides", "2", "1", "1"),
        ("tiles", "3,082", "75", "3,007"),
        ("tiles per case, median (quartiles)", *quartiles),
        ("sex: f", "2 (40 %)", "2 (67 %)", "0 (0 %)"),
        ("sex: m", "3 (60 %)", "1 (33 %)", "2 (100 %)"),
        ("label missing, not used", "3", "", ""),
        ("no embeddings, not used", "2", "", ""),
    )


def test_a_class_without_cases_has_no_median_and_no_share() -> None:
    cohort = cohort_of("multiclass", ("a", "b", "c"), [(0,), (0,), (2,)])
    subgroups = (("x", "y", "y"),)
    table = table_one(
        replace(cohort, subgroup_columns=("arm",), subgroups=subgroups), [4, 6, 9]
    )
    assert table.columns == ("", "all", "label: a", "label: b", "label: c")
    assert table.rows == (
        ("cases (% of all)", "3 (100 %)", "2 (67 %)", "0 (0 %)", "1 (33 %)"),
        ("slides", "3", "2", "0", "1"),
        ("cases with several slides", "0", "0", "0", "0"),
        ("tiles", "19", "10", "0", "9"),
        (
            "tiles per case, median (quartiles)",
            "6 (5 to 7.5)",
            "5 (4.5 to 5.5)",
            "none",
            "9 (9 to 9)",
        ),
        ("arm: x", "1 (33 %)", "1 (50 %)", "none", "0 (0 %)"),
        ("arm: y", "2 (67 %)", "1 (50 %)", "none", "1 (100 %)"),
        ("label missing, not used", "0", "", "", ""),
        ("no embeddings, not used", "0", "", "", ""),
    )


def test_values_have_mean_median_and_range() -> None:
    table = table_one(
        cohort_of("regression", ("x",), [(1,), (2,), (3,), (10,)]), [1] * 4
    )
    assert table.columns == ("", "all")
    assert table.rows[5:8] == (
        ("x, mean (standard deviation)", "4 (4.082)"),
        ("x, median (quartiles)", "2.5 (1.75 to 4.75)"),
        ("x, range", "1 to 10"),
    )


def test_a_label_counts_among_the_cases_that_have_it() -> None:
    values = [(1, None), (0, None), (None, None), (1, None), (1, None)]
    cohort = cohort_of("multilabel", ("l1", "l2"), values)
    table = table_one(cohort, [1] * 5)
    assert table.columns == ("", "all")
    assert table.rows[5:7] == (
        ("l1 (% of cases with this label)", "3 (75 %) of 4"),
        ("l2 (% of cases with this label)", "0 of 0"),
    )


@pytest.mark.parametrize("kind", ["cox", "discrete"])
@pytest.mark.parametrize(
    ("values", "events", "follow_up", "median"),
    [
        ([(1, 5), (0, 10), (1, 7), (0, 3)], "2 (50 %)", "10", "6 (4.5 to 7.75)"),
        # half of the cases, and no more
        ([(0, 1), (0, 1), (1, 2), (1, 3)], "2 (50 %)", "1", "1.5 (1 to 2.25)"),
        (
            [(0, 1), (1, 2), (1, 3), (1, 4)],
            "3 (75 %)",
            "not reached",
            "2.5 (1.75 to 3.25)",
        ),
    ],
)
def test_events_and_times_of_survival(
    kind: Kind,
    values: Sequence[tuple[float, float]],
    events: str,
    follow_up: str,
    median: str,
) -> None:
    table = table_one(cohort_of(kind, ("risk",), values), [1] * 4)
    assert table.columns == ("", "all")
    assert table.rows[5:8] == (
        ("events", events),
        ("median follow-up (reverse Kaplan-Meier)", follow_up),
        ("time, median (quartiles)", median),
    )


def test_the_prevalence_is_that_of_the_positive_class_each_class_or_each_label() -> (
    None
):
    of_two = prevalences(FIVE_CASES)
    assert of_two.keys() == {"b"}
    found = of_two["b"]
    assert (found.value, found.hits, found.cases, found.units) == (0.4, 2, 5, 4)
    of_three = prevalences(cohort_of("multiclass", ("a", "b", "c"), [(0,), (0,), (2,)]))
    assert [one.hits for one in of_three.values()] == [2, 0, 1]
    assert [*of_three] == ["a", "b", "c"]
    values = [(1, 0), (0, 0), (None, 1), (1, 0)]
    of_labels = prevalences(cohort_of("multilabel", ("l1", "l2"), values))
    assert [(one.hits, one.cases) for one in of_labels.values()] == [(2, 3), (1, 4)]
    assert prevalences(cohort_of("regression", ("x",), [(1,), (2,)])) == {}
    assert prevalences(cohort_of("cox", ("risk",), [(1, 2), (0, 3)])) == {}
