"""Labels from a column of a table: files, pandas, pyarrow, rows; slides without one are named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import pytest
from tests.results.conftest import FINE

import thinsection as ts
from thinsection.errors import InvalidInputError, StoreError
from thinsection.results.tile_dataset import TileDataset

# one patient with two cases, and a slide that the folder lacks
ROWS = [
    {"slide_id": "a.svs", "patient_id": "P1", "case_id": "C1", "grade": "high"},
    {"slide_id": "b c", "patient_id": "P1", "case_id": "C2", "grade": "low"},
    {"slide_id": "other", "patient_id": "P2", "case_id": "C3", "grade": "none"},
]


def write_csv(
    folder: Path, rows: list[dict[str, Any]], name: str = "labels.csv"
) -> Path:
    path = folder / name
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def dataset(out: Path, labels: Any, messages: list[str], **more: Any) -> TileDataset:
    settings = {"grid": FINE, "memory": "2MiB", "label": "grade"} | more
    return TileDataset(out, labels=labels, on_message=messages.append, **settings)


def joined_rows(out: Path, folder: Path) -> Any:
    # two grids, so that each slide has two rows
    rows = ts.open_results(out).rows(write_csv(folder, ROWS))
    assert len(rows) == 4
    return rows


TABLES: dict[str, Callable[[Path, Path], Any]] = {
    "path": lambda out, folder: write_csv(folder, ROWS),
    "text": lambda out, folder: str(write_csv(folder, ROWS, "my labels.CSV")),
    "pandas": lambda out, folder: pd.DataFrame(ROWS),
    "index": lambda out, folder: pd.DataFrame(ROWS).set_index("slide_id"),
    "categories": lambda out, folder: pd.DataFrame(ROWS).astype({"grade": "category"}),
    "pyarrow": lambda out, folder: pyarrow.Table.from_pylist(ROWS),
    "rows": joined_rows,
    "table": lambda out, folder: ts.open_results(out).table(write_csv(folder, ROWS)),
}


@pytest.mark.parametrize("kind", TABLES)
def test_each_slide_has_the_label_of_its_own_row(
    two_grids: Path, tmp_path: Path, kind: str
) -> None:
    messages: list[str] = []
    chosen = dataset(two_grids, TABLES[kind](two_grids, tmp_path), messages)
    labels = {(item["slide_id"], item["label"]) for item in chosen}
    assert labels == {("a", "high"), ("b c", "low")}
    num_tiles = {
        slide_id: len(ts.open_results(two_grids).tiles(slide_id, FINE))
        for slide_id in ("a", "b c")
    }
    assert chosen.label_counts == {"high": num_tiles["a"], "low": num_tiles["b c"]}
    assert messages == []


def test_the_column_decides(two_grids: Path, tmp_path: Path) -> None:
    path = write_csv(tmp_path, ROWS)
    by_case = dataset(two_grids, path, [], label="case_id")
    by_patient = dataset(two_grids, path, [], label="patient_id", classes=["P2", "P1"])
    assert set(by_case.label_counts) == {"C1", "C2"}
    assert {item["label"] for item in by_patient} == {1}


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (None, "'b c' (no row)"),
        ("", "'b c' ('')"),
        ("n/a", "'b c' ('n/a')"),
        ("not reported", "'b c' ('not reported')"),
    ],
)
def test_slides_without_a_label_are_left_out_and_named(
    two_grids: Path, cell: str | None, words: str
) -> None:
    rows = [ROWS[0]] if cell is None else [ROWS[0], ROWS[1] | {"grade": cell}]
    messages: list[str] = []
    chosen = dataset(two_grids, rows, messages)
    assert chosen.slide_ids == ("a",)
    assert messages == [
        f"1 slide of 2 left out, without a 'grade' in the table of labels: {words}"
    ]
    # only the slides that were asked for need a label
    asked: list[str] = []
    dataset(two_grids, rows, asked, slides=["a"])
    assert asked == []


@pytest.mark.parametrize("kind", [dict, pd.Series])
def test_a_wrong_id_in_a_mapping_is_named_with_the_slide_that_is_left_out(
    two_grids: Path, kind: Callable[[dict[str, str]], Any]
) -> None:
    messages: list[str] = []
    labels = kind({"a": "high", "b_c": "low"})
    chosen = dataset(two_grids, labels, messages, label=None)
    assert chosen.slide_ids == ("a",)
    assert messages == [
        "1 slide of 2 left out, without a label: b c; labels name other slides: b_c"
    ]
    # a mapping of a larger cohort, and a choice of slides, are nothing to tell
    for labels in ({"a": "high", "b c": "low", "other": "low"}, {"a": "high"}):
        asked: list[str] = []
        dataset(two_grids, kind(labels), asked, label=None)
        assert asked == []


def test_labels_that_are_no_class_are_named(two_grids: Path) -> None:
    messages: list[str] = []
    labels = {"a": "high", "b c": "lwo"}
    dataset(two_grids, labels, messages, label=None, classes=["high", "low"])
    assert len(messages) == 1
    assert messages[0].endswith("tiles left out, whose label is no class: lwo")


@pytest.mark.parametrize("missing", [float("nan"), None, pd.NA])
def test_missing_values_of_pandas_are_no_labels(
    two_grids: Path, missing: object
) -> None:
    table = pd.DataFrame([ROWS[0] | {"grade": missing}, ROWS[1]])
    messages: list[str] = []
    assert dataset(two_grids, table, messages).slide_ids == ("b c",)
    assert "left out, without a 'grade'" in messages[0]


def test_a_class_that_reads_like_missing_is_a_class_if_it_is_asked_for(
    two_grids: Path,
) -> None:
    rows = [ROWS[0] | {"grade": "None"}, ROWS[1]]
    assert dataset(two_grids, rows, []).label_counts.keys() == {"low"}
    chosen = dataset(two_grids, rows, [], classes=["None", "low"])
    assert {(item["slide_id"], item["label"]) for item in chosen} == {
        ("a", 0),
        ("b c", 1),
    }


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [(("1", "0"), (1, 0)), (("0.5", "2"), (0.5, 2.0)), (("1", "high"), ("1", "high"))],
)
def test_texts_are_numbers_if_all_of_them_are(
    two_grids: Path,
    tmp_path: Path,
    texts: tuple[str, str],
    numbers: tuple[object, object],
) -> None:
    rows = [ROWS[0] | {"grade": texts[0]}, ROWS[1] | {"grade": texts[1]}]
    chosen = dataset(two_grids, write_csv(tmp_path, rows), [])
    labels = {item["slide_id"]: item["label"] for item in chosen}
    assert labels == dict(zip(("a", "b c"), numbers, strict=True))
    assert {type(label) for label in labels.values()} == {type(numbers[0])}


@pytest.mark.parametrize(
    ("labels", "label", "words"),
    [
        (pd.DataFrame(ROWS), None, 'got none; pass label="..."'),
        ("labels.csv", None, "label must name the column of the table of labels"),
        (Path("labels.csv"), None, "label must name the column of the table of labels"),
        (ROWS, None, "label must name the column of the table of labels"),
        ({"a": 1, "b c": 2}, "grade", "got dict; leave out label"),
        (None, "grade", "got NoneType; leave out label"),
        (len, "grade", "leave out label"),
        ([1, 2], "grade", "labels must be rows with names"),
        (ROWS, "grad", "labels must have a column 'grad', got the columns slide_id, patient_id, "
         "case_id, grade; did you mean 'grade'?"),
        (pd.DataFrame(ROWS).drop(columns="slide_id"), "grade", "must have a column 'slide_id'"),
        ([*ROWS, ROWS[0] | {"grade": "low"}], "grade", "labels must have one 'grade' for each "
         "slide, got 'high' and 'low' for 'a'; keep one row a slide"),
        (ROWS[2:], "grade", "labels must have rows of slides of the folder, which are a, b c, got "
         "other; correct the column 'slide_id'"),
    ],
)  # fmt: skip
def test_what_a_table_of_labels_cannot_be(
    two_grids: Path, labels: Any, label: str | None, words: str
) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        dataset(two_grids, labels, [], label=label)


def test_a_file_that_is_missing_or_has_no_slides_is_named(
    two_grids: Path, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=r"absent\.csv"):
        dataset(two_grids, "absent.csv", [])
    path = write_csv(tmp_path, [{"case": "a", "grade": "x"}])
    with pytest.raises(StoreError, match="slide_id"):
        dataset(two_grids, path, [])


def test_a_table_gives_what_a_mapping_gives_after_a_resume(
    two_grids: Path, tmp_path: Path
) -> None:
    by_table = dataset(two_grids, write_csv(tmp_path, ROWS), [])
    by_mapping = dataset(two_grids, {"a": "high", "b c": "low"}, [], label=None)
    items = iter(by_table)
    for _ in range(3):
        next(items)
    by_mapping.load_state_dict(by_table.state_dict())
    left = [(i["slide_id"], i["row"], i["label"]) for i in items]
    assert left == [(i["slide_id"], i["row"], i["label"]) for i in by_mapping]
