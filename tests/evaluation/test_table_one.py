from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from lifelines import KaplanMeierFitter
from tests.predict.planted import write_embeddings

from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import read_cohort
from thinsection.evaluation.leaks import read_contents
from thinsection.evaluation.table_one import TableOne, table_one


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
