"""Labels of tiles: of slides, columns and functions; what has none is left out and counted."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.results.conftest import COARSE, FINE, grades
from torch.utils.data import DataLoader

import thinsection as ts
from thinsection.errors import InvalidInputError
from thinsection.results.tile_dataset import TileDataset
from thinsection.store.tiles_h5 import TilesFile

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
GRADE = "heatmap_m:grade"


def dataset(out: Path, labels: Any, messages: list[str], **more: Any) -> TileDataset:
    settings = {"grid": FINE, "memory": "2MiB"} | more
    return TileDataset(out, labels=labels, on_message=messages.append, **settings)


def tables(out: Path, grid: str = FINE) -> dict[str, TilesFile]:
    results = ts.open_results(out)
    return {slide_id: results.tiles(slide_id, grid) for slide_id in results.slides}


def left_side(slide_id: str, tiles: TilesFile) -> np.ndarray:
    """1 for the tiles in the left half of a slide."""
    x = tiles.coords_l0[:, 0]
    return x < x.max() / 2


# where labels come from


@pytest.mark.parametrize("grid", [FINE, COARSE])
def test_a_column_of_numbers_labels_tiles(two_grids: Path, grid: str) -> None:
    messages: list[str] = []
    chosen = dataset(two_grids, "tissue_fraction", messages, grid=grid)
    columns = {
        slide: table.columns["tissue_fraction"]
        for slide, table in tables(two_grids, grid).items()
    }
    items = list(chosen)
    assert len(items) == chosen.num_tiles == sum(map(len, columns.values()))
    for item in items:
        assert item["label"] == columns[item["slide_id"]][item["row"]]
    assert messages == []


def test_tiles_without_a_value_in_the_column_are_left_out_and_counted(
    two_grids: Path,
) -> None:
    messages: list[str] = []
    chosen = dataset(two_grids, GRADE, messages)
    expected = set()
    num_all = 0
    for slide_id, table in tables(two_grids).items():
        values = grades(len(table.coords_l0))
        num_all += len(values)
        rows = np.flatnonzero(~np.isnan(values))
        expected |= {(slide_id, row, float(values[row])) for row in rows.tolist()}
    seen = [(i["slide_id"], i["row"], float(i["label"])) for i in chosen]
    assert len(seen) == len(set(seen)) and set(seen) == expected
    assert messages == [
        f"{num_all - len(expected)} of {num_all} tiles left out, without a label"
    ]
    assert chosen.num_tiles == len(expected)
    by_number = [(i["slide_id"], i["row"], i["label"]) for i in chosen.map_style()]
    assert set(by_number) == expected


@pytest.mark.parametrize("grid", [FINE, COARSE])
def test_a_function_of_the_slide_and_its_tiles_labels_them(
    two_grids: Path, grid: str
) -> None:
    messages: list[str] = []
    chosen = dataset(two_grids, left_side, messages, grid=grid)
    expected = {s: left_side(s, table) for s, table in tables(two_grids, grid).items()}
    for item in chosen:
        assert item["label"] is bool(expected[item["slide_id"]][item["row"]])
    assert set(chosen.label_counts) == {False, True}


def test_words_and_what_is_missing_among_them(two_grids: Path) -> None:
    words = ["tumour", None, "stroma", "", float("nan"), pd.NA]

    def named(slide_id: str, tiles: TilesFile) -> pd.Series:
        return pd.Series(np.resize(np.array(words, object), len(tiles.coords_l0)))

    messages: list[str] = []
    chosen = dataset(two_grids, named, messages)
    num_all = sum(len(table.coords_l0) for table in tables(two_grids).values())
    counts = chosen.label_counts
    assert list(counts) == ["stroma", "tumour"]
    assert sum(counts.values()) == chosen.num_tiles < num_all / 2
    assert messages[0].startswith(f"{num_all - chosen.num_tiles} of {num_all} tiles")
    for item in chosen:
        assert type(item["label"]) is str
        assert item["label"] == words[item["row"] % 6]
    batch = next(iter(DataLoader(chosen, batch_size=4)))
    assert set(batch["label"]) <= {"stroma", "tumour"}


def test_labels_of_slides_may_be_missing_too(two_grids: Path) -> None:
    messages: list[str] = []
    chosen = dataset(two_grids, {"a": float("nan"), "b c": 2, "d": 1}, messages)
    assert chosen.slide_ids == ("b c",)
    assert "tiles left out, without a label" in messages[0]
    messages.clear()
    assert dataset(two_grids, {"b c": "x"}, messages).slide_ids == ("b c",)
    assert messages == []


def test_categories_that_were_written_label_tiles_by_their_names(
    two_grids: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    shutil.copytree(two_grids, out)
    results = ts.open_results(out)
    words = ["tumour", "", "stroma 2:a"]
    for slide_id, table in tables(out).items():
        values = np.resize(words, len(table.coords_l0))
        results.write_column(slide_id, "by hand", values, grid=FINE)
    messages: list[str] = []
    chosen = dataset(out, "by hand", messages, columns=["by hand", GRADE])
    assert list(chosen.label_counts) == ["stroma 2:a", "tumour"]
    assert messages[0].endswith("tiles left out, without a label")
    names = chosen.categories["by hand"].names
    tiles = chosen.map_style()
    for item in chosen:
        same = tiles[item["index"]]
        assert item["label"] == same["label"] == words[item["row"] % 3]
        assert (
            names[int(item["by hand"])] == names[int(same["by hand"])] == item["label"]
        )
        np.testing.assert_equal(item[GRADE], grades(item["row"] + 1)[-1])
        np.testing.assert_equal(same[GRADE], item[GRADE])
    numbered = dataset(out, "by hand", messages, classes=["tumour", "stroma 2:a"])
    assert {item["label"] for item in numbered} == {0, 1}


def test_a_series_of_pandas_labels_slides(two_grids: Path) -> None:
    chosen = dataset(two_grids, pd.Series({"a": 4, "b c": 6}), [])
    assert {(i["slide_id"], int(i["label"])) for i in chosen} == {("a", 4), ("b c", 6)}


# classes


def test_classes_make_numbers_of_labels_and_leave_out_others(two_grids: Path) -> None:
    messages: list[str] = []
    chosen = dataset(two_grids, GRADE, messages, classes=[2, 0])
    for item in chosen:
        assert [2, 0][item["label"]] == grades(1000)[item["row"]]
    by_name = dataset(two_grids, {"a": "x", "b c": "y"}, messages, classes=["y", "x"])
    assert list(by_name.label_counts) == ["y", "x"]
    assert {(i["slide_id"], i["label"]) for i in by_name} == {("a", 1), ("b c", 0)}
    one = dataset(two_grids, {"a": "x", "b c": "y"}, messages, classes=["y"])
    assert one.slide_ids == ("b c",)
    assert messages[-1].endswith("tiles left out, whose label is no class: x")


# weights


def test_weights_make_the_classes_equal(two_grids: Path) -> None:
    chosen = dataset(two_grids, GRADE, [])
    weights = chosen.weights()
    labels = np.array([item["label"] for item in chosen.map_style()])
    sums = [weights[labels == grade].sum() for grade in (0, 1, 2)]
    np.testing.assert_allclose(sums, len(weights) / 3)
    assert weights.dtype == np.float64 and np.isclose(weights.mean(), 1)
    # scikit-learn's rule for balanced classes
    sklearn = pytest.importorskip("sklearn.utils.class_weight")
    theirs = sklearn.compute_sample_weight("balanced", labels)
    np.testing.assert_allclose(weights, theirs)


def test_weights_make_the_slides_of_a_class_equal(two_grids: Path) -> None:
    chosen = dataset(two_grids, GRADE, [])
    items = list(chosen.map_style())
    sums: Counter[tuple[str, float]] = Counter()
    for item, weight in zip(items, chosen.weights(by_slide=True).tolist(), strict=True):
        sums[item["slide_id"], float(item["label"])] += weight
    assert len(sums) == 6
    np.testing.assert_allclose(list(sums.values()), len(items) / 6)


def test_weights_of_slides_need_no_labels(two_grids: Path) -> None:
    chosen = TileDataset(two_grids, grid=FINE)
    weights = chosen.weights(by_slide=True)
    sizes = [len(table.coords_l0) for table in tables(two_grids).values()]
    first = weights[: sizes[0]]
    np.testing.assert_allclose(
        [first.sum(), weights.sum()], [sum(sizes) / 2, sum(sizes)]
    )
    with pytest.raises(InvalidInputError, match="labels must be given for weights"):
        chosen.weights()


# the stream with labels of tiles


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_stream_has_each_labelled_tile_once_and_resumes(
    two_grids: Path, num_workers: int
) -> None:
    def read(chosen: TileDataset, limit: int = 1000) -> list[list[int]]:
        batches = []
        for batch in DataLoader(chosen, batch_size=8, num_workers=num_workers):
            chosen.advance(batch)
            batches.append(batch["index"].tolist())
            if len(batches) == limit:
                break
        return batches

    settings = {"memory": "1MiB", "seed": 3}
    whole = read(dataset(two_grids, GRADE, [], **settings))
    numbers = [number for batch in whole for number in batch]
    assert sorted(numbers) == list(range(len(numbers)))
    stopped = dataset(two_grids, GRADE, [], **settings)
    assert read(stopped, 5) == whole[:5]
    resumed = dataset(two_grids, GRADE, [], **settings)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert read(resumed) == whole[5:]


# refusals


@pytest.mark.parametrize(
    ("labels", "more", "message"),
    [
        (
            "tissue_fractoin",
            {},
            "labels must be a column.*did you mean 'tissue_fraction'",
        ),
        (
            lambda s, t: [1, 2],
            {},
            r"labels must have one value for each tile, \(\d+,\)",
        ),
        (lambda s, t: np.zeros((len(t.coords_l0), 2)), {}, r"got \(\d+, 2\) in 'a'"),
        (lambda s, t: [1, "x"] * 500, {}, "labels must have one value"),
        (None, {"classes": ["x"]}, "classes must go with labels"),
        (lambda s, t: [None] * len(t.coords_l0), {}, "slides must have tiles"),
        (
            lambda s, t: np.resize(np.array([1, "x"], object), len(t.coords_l0)),
            {},
            "all words or all numbers, got both in 'a'",
        ),
        (
            lambda s, t: np.zeros(len(t.coords_l0), complex),
            {},
            "words or numbers, got complex128 in 'a'",
        ),
    ],
)
def test_what_labels_cannot_be(
    two_grids: Path, labels: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        dataset(two_grids, labels, [], **more)


def test_labels_that_measure_have_no_weights(two_grids: Path) -> None:
    with pytest.raises(InvalidInputError, match="labels must be classes for weights"):
        dataset(two_grids, "tissue_fraction", []).weights()
