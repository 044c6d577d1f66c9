"""Columns of the caller: stored per slide, checked, found by everything that reads a folder."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.errors import (
    InvalidInputError,
    OutputError,
    OverwriteError,
    SlideOpenError,
    StoreError,
    ThinsectionError,
)
from thinsection.results import column_files
from thinsection.results.columns import own_column
from thinsection.results.folder import Results, open_results
from thinsection.results.verify import verify
from thinsection.run.merge import merge_results
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.store.ledger import load_ledger
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.testing.synthetic import write_he_slide

SMALL, LARGE = "128px_0.5mpp", "200px_0.5mpp"
A, B = "a & 'x'", "b 1x2"  # ids with signs that an index of rows has, too


def settings(**flat: object) -> RunConfig:
    return replace_flat(RunConfig(), {"memory": "256MiB", "pretrained": False, **flat})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides and two grids, with embeddings of the small tiles."""
    root = tmp_path_factory.mktemp("columns")
    for seed, name in enumerate((A, B)):
        path = root / "slides" / f"{name}.svs"
        path.parent.mkdir(exist_ok=True)
        write_he_slide(path, (900 + 200 * seed, 700), seed=seed, downsamples=(1, 4))
    slides = [root / "slides"]
    run(slides, out=root / "results", config=settings(tile_px=200), until="tiles")
    small = settings(tile_px=128)
    run(slides, out=root / "results", config=small, until="embeddings")
    return root


@pytest.fixture
def results(made: Path, tmp_path: Path) -> Results:
    """A copy that a test may change."""
    shutil.copytree(made / "results", tmp_path / "results")
    return open_results(tmp_path / "results")


def num_tiles(results: Results, slide_id: str, grid: str = SMALL) -> int:
    return len(results.tiles(slide_id, grid).coords_l0)


def words_of(results: Results, slide_id: str, grid: str = SMALL) -> list[str]:
    names = ("T cell", "stroma", "")
    return [names[row % 3] for row in range(num_tiles(results, slide_id, grid))]


def times(results: Results) -> dict[str, int]:
    return {
        str(path): path.stat().st_mtime_ns
        for path in sorted(results.folder.rglob("*"))
        if path.is_file()
    }


def test_values_of_every_type_are_read_back_as_they_were(results: Results) -> None:
    for slide_id in results.slides:
        count = num_tiles(results, slide_id)
        rows = np.arange(count)
        numbers = np.where(rows == 1, np.nan, rows / 7)
        columns = {
            "score 1.5": numbers,
            "half": numbers.astype(np.float16),
            "count": rows.astype(np.int32) - 5,
            "is_odd": rows % 2 == 1,
        }
        for name, values in columns.items():
            results.write_column(slide_id, name, values, grid=SMALL)
        results.write_column(slide_id, "list", rows.tolist(), grid=SMALL)
        for source in (results, open_results(results.folder)):
            stored = source.tiles(slide_id, SMALL)
            for name, values in columns.items():
                assert stored.columns[name].dtype == values.dtype, name
                np.testing.assert_array_equal(stored.columns[name], values)
            assert stored.columns["list"].tolist() == rows.tolist()
            # the other grid has none of them
            assert not set(columns) & set(source.tiles(slide_id, LARGE).columns)


def test_words_are_categories_with_names_and_colours(results: Results) -> None:
    for slide_id in results.slides:
        words = words_of(results, slide_id)
        colors = {"stroma": "red"}
        results.write_column(slide_id, "cell type", words, grid=SMALL, colors=colors)
        stored = results.tiles(slide_id, SMALL)
        assert stored.values("cell type").tolist() == words
        named = stored.categories["cell type"]
        assert dict(zip(named.names, named.colors)) == {
            "T cell": "#0072B2",
            "stroma": "#FF0000",
        }
        codes = stored.columns["cell type"]
        assert codes.dtype == np.int16 and set(codes.tolist()) == {-1, 0, 1}
    with pytest.raises(InvalidInputError, match="did you mean 'cell type'"):
        stored.values("cell typ")


def test_a_name_keeps_its_colour_on_the_next_slide(results: Results) -> None:
    first = ["x", "y"] * num_tiles(results, A)
    results.write_column(A, "c", first[: num_tiles(results, A)], grid=SMALL)
    second = ["w", "y"] * num_tiles(results, B)
    results.write_column(B, "c", second[: num_tiles(results, B)], grid=SMALL)
    of_a = results.tiles(A, SMALL).categories["c"].color_by_name
    of_b = results.tiles(B, SMALL).categories["c"].color_by_name
    assert of_b["y"] == of_a["y"]
    assert of_b["w"] not in of_a.values()


def test_pandas_categories_codes_and_words_in_an_order_are_the_same(
    results: Results,
) -> None:
    pandas = pytest.importorskip("pandas")
    words = words_of(results, A)
    names = ["stroma", "T cell", "unused"]
    kinds = {
        "categorical": pandas.Categorical([w or None for w in words], names),
        "series": pandas.Series([w or None for w in words], dtype="string"),
        "objects": np.array([w or None for w in words], dtype=object),
        "nan": [w or np.nan for w in words],
    }
    for name, values in kinds.items():
        order = None if name == "categorical" else names
        results.write_column(A, name, values, grid=SMALL, categories=order)
    codes = [names.index(word) if word else -1 for word in words]
    results.write_column(A, "codes", codes, grid=SMALL, categories=names)
    stored = results.tiles(A, SMALL)
    for name in (*kinds, "codes"):
        assert stored.categories[name].names == tuple(names)
        assert stored.values(name).tolist() == words


def test_values_are_aligned_by_their_corners(results: Results) -> None:
    coords_l0 = results.tiles(A, SMALL).coords_l0
    order = np.random.default_rng(0).permutation(len(coords_l0))
    values = coords_l0[:, 0] * 1000 + coords_l0[:, 1]
    results.write_column(A, "v", values[order], grid=SMALL, coords_l0=coords_l0[order])
    np.testing.assert_array_equal(results.tiles(A, SMALL).columns["v"], values)
    twice = coords_l0.copy()
    twice[0] = twice[1]
    for wrong in (coords_l0[:-1], coords_l0 + 1, twice, coords_l0[0]):
        with pytest.raises(InvalidInputError, match="coords_l0 of 'w' must be"):
            results.write_column(A, "w", values, grid=SMALL, coords_l0=wrong)
    assert "w" not in results.tiles(A, SMALL).columns


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda n: np.zeros(n - 1), r"one for each of the \d+ tiles of .* got \d+;"),
        (lambda n: np.zeros(n + 1), "one for each"),
        (lambda n: np.zeros((n, 2)), r"of shape \(N,\), got shape"),
        (lambda n: np.full(n, np.inf), "must be finite, or NaN.* got inf in row 0"),
        (lambda n: np.zeros(n, complex), "numbers, bool or words, got complex128"),
        (lambda n: np.zeros(n, "M8[s]"), "numbers, bool or words, got datetime64"),
        (lambda n: ["a", *[1.5] * (n - 1)], "all numbers or all words, got 1.5"),
        (lambda n: [[1.0], *[1.0] * (n - 1)], "must be an array of one value"),
        (lambda n: np.array([1, *["a"] * (n - 1)], object), "got 1 of type int"),
        (lambda n: [f"c{i}" for i in range(1001)], "at most 1000, got 1001"),
        (lambda n: ["a\nb"] * n, "different words of at most 200"),
        (lambda n: None, "of shape"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_nothing_is_written(
    results: Results, values: Callable[[int], Any], message: str
) -> None:
    before = times(results)
    given = values(num_tiles(results, A))
    with pytest.raises(InvalidInputError, match=message):
        results.write_column(A, "v", given, grid=SMALL)
    assert times(results) == before


@pytest.mark.parametrize(
    "name",
    [
        *("a/b", "a:b", "..", ".a", "a\\b", "", " a", "a\n", "x" * 121, "slide_id"),
        *("label", "px_focus", "tissue_fraction", "Tissue_Fraction", 3),
    ],
)
def test_a_name_that_means_something_else_is_refused(
    results: Results, name: Any
) -> None:
    values = np.zeros(num_tiles(results, A))
    with pytest.raises(InvalidInputError, match="name must"):
        results.write_column(A, name, values, grid=SMALL)


def test_two_names_differ_in_more_than_capitals(results: Results) -> None:
    values = np.zeros(num_tiles(results, A))
    results.write_column(A, "leiden", values, grid=SMALL)
    with pytest.raises(InvalidInputError, match="in more than capitals, got 'Leiden'"):
        results.write_column(A, "Leiden", values, grid=SMALL)


def test_a_slide_or_grid_that_is_not_there_is_named(results: Results) -> None:
    with pytest.raises(InvalidInputError, match="slide_id must be in this folder"):
        results.write_column("c", "v", [1.0], grid=SMALL)
    with pytest.raises(InvalidInputError, match="grid must match one of"):
        results.write_column(A, "v", [1.0], grid="512px_0.5mpp")


@pytest.mark.parametrize(
    ("colors", "message"),
    [
        (["red"], "one for each of its 2 categories"),
        ("red", "one for each of its 2"),
        ({"other": "red"}, "got a colour of 'other'"),
        ({"stroma": "rot"}, "a colour must be a name"),
        ({"stroma": (0.5, 0, 0)}, "a colour must be a name"),
        ({"stroma": (0, 300, 0)}, "a colour must be a name"),
    ],
)
def test_colours_are_checked(results: Results, colors: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        words = words_of(results, A)
        results.write_column(A, "c", words, grid=SMALL, colors=colors)
    with pytest.raises(InvalidInputError, match="colors must go with categories"):
        values = np.zeros(num_tiles(results, A))
        results.write_column(A, "c", values, grid=SMALL, colors=colors)


def test_equal_values_are_not_written_again_and_others_are_refused(
    results: Results,
) -> None:
    words = words_of(results, A)
    results.write_column(A, "c", words, grid=SMALL)
    results.write_column(A, "v", np.arange(len(words)), grid=SMALL)
    before = times(results)
    results.write_column(A, "c", words, grid=SMALL)
    results.write_column(A, "c", words, grid=SMALL, overwrite=True)
    open_results(results.folder).write_column(A, "v", np.arange(len(words)), grid=SMALL)
    assert times(results) == before
    with pytest.raises(OverwriteError, match="pass overwrite=True"):
        results.write_column(A, "c", words[::-1], grid=SMALL)
    with pytest.raises(OverwriteError):  # another type
        results.write_column(A, "v", np.arange(len(words)) * 1.0, grid=SMALL)
    with pytest.raises(OverwriteError):  # another colour
        colors = {"stroma": "#123456"}
        results.write_column(A, "c", words, grid=SMALL, colors=colors)
    assert times(results) == before
    results.write_column(A, "c", words[::-1], grid=SMALL, overwrite=True)
    assert results.tiles(A, SMALL).values("c").tolist() == words[::-1]
    assert verify(results.folder)[1] == []


def test_a_file_that_no_ledger_has_is_not_replaced_in_silence(results: Results) -> None:
    path = results.folder / SMALL / "column_mine" / f"{A}.h5"
    path.parent.mkdir()
    tiles = results.tiles(A, SMALL)
    with TilesWriter(path, dim=0, attributes={}) as writer:
        writer.append(tiles.coords_l0, None)
        writer.add_column("mine", np.ones(len(tiles.coords_l0)))
    # a hand-written file in such a folder has the plain name, too
    assert results.tiles(A, SMALL).columns["mine"].all()
    with pytest.raises(OverwriteError):
        results.write_column(A, "mine", np.zeros(len(tiles.coords_l0)), grid=SMALL)
    zeros = np.zeros(len(tiles.coords_l0))
    results.write_column(A, "mine", zeros, grid=SMALL, overwrite=True)
    assert not results.tiles(A, SMALL).columns["mine"].any()


def test_the_ledger_has_the_column_with_its_values_per_slide(results: Results) -> None:
    results.write_column(A, "c", words_of(results, A), grid=SMALL)
    odd = np.arange(num_tiles(results, A)) % 2 == 1
    results.write_column(A, "odd", odd, grid=SMALL)
    values = np.where(odd, 3.0, np.nan)
    results.write_column(A, "v", values, grid=SMALL)
    record = load_ledger(results.folder, A).stages[f"{SMALL}/column_c"]
    assert record.needs == (f"{SMALL}/tiles",)
    assert [*record.files] == [*record.sums] == [f"{SMALL}/column_c/{A}.h5"]
    assert f"{SMALL}/column_c" in {row.address for row in results.folders}
    (row,) = [r for r in results.rows() if (r["slide_id"], r["grid"]) == (A, SMALL)]
    assert row["v_mean"] == 3.0
    assert row["odd_share"] == pytest.approx(odd.mean())
    words = words_of(results, A)
    assert row["c_share_T cell"] == pytest.approx(words.count("T cell") / len(words))
    assert "column" not in row and "column_c" in row["also"].split("|")
    (other,) = [r for r in results.rows() if (r["slide_id"], r["grid"]) == (A, LARGE)]
    assert "v_mean" not in other


def test_a_column_without_any_value_has_no_mean(results: Results) -> None:
    results.write_column(A, "v", np.full(num_tiles(results, A), np.nan), grid=SMALL)
    assert open_results(results.folder).rows()[0].get("v_mean") is None
    assert np.isnan(results.tiles(A, SMALL).columns["v"]).all()


def test_verify_refuses_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"folder must exist, got '.*none'"):
        verify(tmp_path / "none")


def test_verify_names_a_damaged_column(results: Results) -> None:
    results.write_column(A, "c", words_of(results, A), grid=SMALL)
    path = results.folder / SMALL / "column_c" / f"{A}.h5"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    _, damaged = verify(results.folder)
    assert [one.file for one in damaged] == [f"{SMALL}/column_c/{A}.h5"]


def test_merge_takes_columns_and_a_resumed_run_keeps_them(
    made: Path, results: Results, tmp_path: Path
) -> None:
    for slide_id in results.slides:
        results.write_column(slide_id, "c", words_of(results, slide_id), grid=SMALL)
    merge_results([results.folder], out=tmp_path / "merged")
    merged = open_results(tmp_path / "merged")
    assert merged.tiles(B, SMALL).values("c").tolist() == words_of(results, B)
    small = settings(tile_px=128)
    summary = run(
        [made / "slides"], out=results.folder, config=small, until="embeddings"
    )
    assert summary.counts["skipped"] == 2
    assert "c" in open_results(results.folder).tiles(A, SMALL).columns
    # other values of the same slide are a conflict, as any other result
    other = open_results(tmp_path / "merged")
    words = words_of(results, A)[::-1]
    other.write_column(A, "c", words, grid=SMALL, overwrite=True)
    assert results.tiles(A, SMALL).values("c").tolist() != words
    with pytest.raises(StoreError, match="folders must agree"):
        merge_results([results.folder, other.folder], out=tmp_path / "both")


def test_a_grid_with_other_tiles_keeps_no_column_of_the_old_ones(
    tmp_path: Path,
) -> None:
    slide = tmp_path / "s.svs"
    regions = tmp_path / "regions"
    regions.mkdir()
    write_he_slide(slide, (900, 700), seed=0, downsamples=(1, 4))

    def draw(right: int) -> None:
        ring = [[0, 0], [right, 0], [right, 700], [0, 700], [0, 0]]
        shape = {"type": "Polygon", "coordinates": [ring]}
        (regions / "s.geojson").write_text(
            json.dumps({"type": "Feature", "geometry": shape, "properties": {}})
        )

    config = settings(tile_px=128, roi=str(regions))
    draw(600)
    run([slide], out=tmp_path / "out", config=config, until="tiles")
    results = open_results(tmp_path / "out")
    (grid,) = results.grids
    before = num_tiles(results, "s", grid)
    results.write_column("s", "v", np.arange(before), grid=grid)
    draw(400)
    run([slide], out=tmp_path / "out", config=config, until="tiles")
    again = open_results(tmp_path / "out")
    assert num_tiles(again, "s", grid) < before
    assert "v" not in again.tiles("s", grid).columns
    assert not (tmp_path / "out" / grid / "column_v" / "s.h5").exists()
    # the folder that was opened before knows the old tiles
    with pytest.raises((StoreError, InvalidInputError)):
        results.write_column("s", "w", np.arange(before), grid=grid)


def test_a_change_of_the_tiles_between_check_and_write_is_noticed(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.zeros(num_tiles(results, A))
    ledger_path = results.ledgers[A].path
    text = ledger_path.read_text()
    key = results.ledgers[A].stages[f"{SMALL}/tiles"].key
    ledger_path.write_text(text.replace(key, "0" * 24))
    with pytest.raises(StoreError, match=r"tiles of .* must stay the same"):
        results.write_column(A, "v", values, grid=SMALL)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda g, n: g.create_dataset("v", data=np.zeros(n - 1)),
            "one value for each",
        ),
        (
            lambda g, n: g.create_dataset("v", data=np.zeros((n, 2))),
            "one value for each",
        ),
        (lambda g, n: g.create_dataset("v", data=["a"] * n), "got words"),
        (lambda g, n: g.create_dataset("v", data=np.array([b"a"] * n)), "got words"),
    ],
)
def test_a_foreign_column_is_checked_when_it_is_read(
    results: Results, write: Callable[[Any, int], object], message: str
) -> None:
    path = results.folder / SMALL / "mine" / f"{A}.h5"
    path.parent.mkdir()
    coords_l0 = results.tiles(A, SMALL).coords_l0
    with h5py.File(path, "w") as file:
        file["coords"] = coords_l0
        write(file.create_group("tiles"), len(coords_l0))
    with pytest.raises(StoreError, match=f"column 'v' must .*{message}") as caught:
        results.tiles(A, SMALL)
    assert str(path) in str(caught.value) and "write_column" in str(caught.value)
    results.tiles(B, SMALL)


def test_foreign_codes_must_be_places_of_their_names(results: Results) -> None:
    path = results.folder / SMALL / "mine" / f"{A}.h5"
    path.parent.mkdir()
    coords_l0 = results.tiles(A, SMALL).coords_l0
    with h5py.File(path, "w") as file:
        file["coords"] = coords_l0
        file["tiles/v"] = np.arange(len(coords_l0)) % 2
        file["tiles/v"].attrs["categories"] = ["no", "yes"]
    stored = results.tiles(A, SMALL)
    assert stored.values("mine:v")[:2].tolist() == ["no", "yes"]
    for names, colors in ((["no"], []), (["a", "a"], []), (["a", "b"], ["blue"])):
        with h5py.File(path, "a") as file:
            file["tiles/v"].attrs["categories"] = names
            file["tiles/v"].attrs["colors"] = np.array(colors, dtype="S")
        with pytest.raises(StoreError, match=str(path.name)):
            results.tiles(A, SMALL)


# ---- whole tables


def test_columns_of_a_data_frame_find_their_tiles(results: Results) -> None:
    pandas = pytest.importorskip("pandas")
    table = results.to_pandas(SMALL)
    assert len(table) == sum(num_tiles(results, s) for s in results.slides)
    table["sum"] = table["x"] + 10_000 * table["y"]
    table["kind"] = pandas.Categorical(np.where(table["x"] > 300, "right", "left"))
    shuffled = table.sample(frac=1, random_state=1)
    results.write_columns(shuffled[["sum", "kind"]], grid=SMALL)
    by_corner = shuffled[["slide_id", "x", "y", "sum"]].reset_index(drop=True)
    by_corner = by_corner.rename(columns={"sum": "sum 2"})
    results.write_columns(by_corner, grid=SMALL)
    arrow = pytest.importorskip("pyarrow")
    renamed = by_corner.rename(columns={"sum 2": "sum 3"})
    results.write_columns(arrow.Table.from_pandas(renamed), grid=SMALL)
    for slide_id in results.slides:
        stored = results.tiles(slide_id, SMALL)
        want = stored.coords_l0[:, 0] + 10_000 * stored.coords_l0[:, 1]
        for name in ("sum", "sum 2", "sum 3"):
            np.testing.assert_array_equal(stored.columns[name], want)
        words = np.where(stored.coords_l0[:, 0] > 300, "right", "left")
        np.testing.assert_array_equal(stored.values("kind"), words)


def test_one_column_of_pandas_is_a_table_too(results: Results) -> None:
    pytest.importorskip("pandas")
    table = results.to_pandas(SMALL)
    results.write_columns(table["x"].rename("left"), grid=SMALL)
    stored = results.tiles(B, SMALL)
    np.testing.assert_array_equal(stored.columns["left"], stored.coords_l0[:, 0])


def test_slides_without_a_row_are_named(
    results: Results, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("pandas")
    table = results.to_pandas(SMALL, slides=[A])
    table["v"] = 1.5
    results.write_columns(table[["v"]], grid=SMALL)
    assert (
        f"1 slide of 2 have no row in the table and get no column: {B}" in caplog.text
    )
    assert "v" in results.tiles(A, SMALL).columns
    assert "v" not in results.tiles(B, SMALL).columns
    # a column that only one slide has: NaN on the other, and not in AnnData
    both = results.to_pandas(SMALL)
    assert both.loc[both.slide_id == A, "v"].eq(1.5).all()
    assert both.loc[both.slide_id == B, "v"].isna().all()


def broken(table: Any, how: str) -> tuple[Any, str]:
    """Returns a table with one fault in its last row, and the message about it."""
    last = table.index[-1]
    if how == "row":
        return table.rename(index={last: f"{B}:7x7"}), r"at other places in .*\(7, 7\)"
    if how == "slide":
        return table.rename(index={last: "c:0x0"}), "1 row of 'c'"
    if how == "name":
        return table.rename(index={last: f"{last}-1"}), "rows must be named"
    if how == "twice":
        return table.rename(index={last: table.index[-2]}), "name each tile once"
    if how == "missing":
        return table.iloc[:-1], "pass partial=True"
    if how == "infinite":
        return table.replace({table["v"].iloc[-1]: np.inf}), "must be finite"
    return table.rename(columns={"v": "a:b"}), "name must"


FAULTS = ("row", "slide", "name", "twice", "missing", "infinite", "column")


@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_in_the_last_row_stops_before_the_first_is_written(
    results: Results, how: str
) -> None:
    pytest.importorskip("pandas")
    table = results.to_pandas(SMALL)
    table["v"] = np.arange(len(table)) / 3
    before = times(results)
    wrong, message = broken(table[["v"]], how)
    with pytest.raises(InvalidInputError, match=message):
        results.write_columns(wrong, grid=SMALL)
    assert times(results) == before


def test_other_values_on_the_last_slide_stop_before_the_first_is_written(
    results: Results,
) -> None:
    pytest.importorskip("pandas")
    results.write_column(B, "v", np.zeros(num_tiles(results, B)), grid=SMALL)
    table = results.to_pandas(SMALL, slides=[A, B])
    table["v"] = 1.0
    before = times(results)
    with pytest.raises(OverwriteError):
        results.write_columns(table[["v"]], grid=SMALL)
    assert times(results) == before
    results.write_columns(table[["v"]], grid=SMALL, overwrite=True)
    assert results.tiles(B, SMALL).columns["v"].all()


def test_tiles_without_a_row_get_no_value_if_that_is_allowed(results: Results) -> None:
    pandas = pytest.importorskip("pandas")
    table = results.to_pandas(SMALL, slides=[A])
    count = len(table)
    table["number"] = np.arange(count)
    table["flag"] = True
    table["word"] = pandas.Categorical(["w"] * count)
    part = table[["number", "flag", "word"]].iloc[::2]
    results.write_columns(part, grid=SMALL, partial=True)
    stored = results.tiles(A, SMALL)
    even = np.arange(count) % 2 == 0
    np.testing.assert_array_equal(np.isnan(stored.columns["number"]), ~even)
    np.testing.assert_array_equal(np.isnan(stored.columns["flag"]), ~even)
    assert stored.values("word").tolist() == np.where(even, "w", "").tolist()


def test_the_grid_of_a_table_must_be_that_of_its_rows(results: Results) -> None:
    pytest.importorskip("pandas")
    table = results.to_pandas(LARGE)
    table["v"] = 1.0
    with pytest.raises(InvalidInputError, match='pass the grid of the table: grid="'):
        results.write_columns(table[["v"]], grid=SMALL)
    results.write_columns(table[["v"]], grid=LARGE)
    assert "v" in results.tiles(A, LARGE).columns
    assert "v" not in results.tiles(A, SMALL).columns


def test_a_class_has_one_colour_on_all_slides_of_a_table(results: Results) -> None:
    """The second slide's first class is one that the first slide lacks."""
    pytest.importorskip("pandas")
    table = results.to_pandas(SMALL)
    is_first = (table["slide_id"] == A).to_numpy()
    table["kind"] = [
        "stroma" if first or row % 2 else "blood" for row, first in enumerate(is_first)
    ]
    results.write_columns(table[["kind"]], grid=SMALL)
    first, second = (results.tiles(one, SMALL).categories["kind"] for one in (A, B))
    assert first.names == ("stroma",) and second.names == ("blood", "stroma")
    assert first.color_by_name["stroma"] == second.color_by_name["stroma"]
    assert len(set(second.colors)) == 2


def test_what_is_no_table_is_named(results: Results) -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(InvalidInputError, match=r"table must be of pandas.* got list"):
        results.write_columns([1, 2], grid=SMALL)
    with pytest.raises(InvalidInputError, match="a row per tile and a column"):
        results.write_columns(pandas.DataFrame(index=[f"{A}:0x0"]), grid=SMALL)
    table = results.to_pandas(SMALL)
    with pytest.raises(InvalidInputError, match="columns must be of the table"):
        results.write_columns(table, columns=["leiden"], grid=SMALL)
    # a whole table has names that mean something else
    with pytest.raises(InvalidInputError, match="name must not be"):
        results.write_columns(table, grid=SMALL)


# ---- slides, tables and files of others


def test_a_slide_is_opened_as_its_run_has_read_it(made: Path, tmp_path: Path) -> None:
    slide_path = made / "slides" / f"{A}.svs"
    table = tmp_path / "cohort.csv"
    table.write_text(f'slide_path,slide_mpp\n"{slide_path}",0.25\n')
    config = settings(tile_px=128, tile_mpp="0.25", reader="openslide")
    run([table], out=tmp_path / "out", config=config, until="tiles")
    results = open_results(str(tmp_path / "out"))
    with results.open_slide(A) as slide:
        assert (slide.reader, slide.slide_mpp) == ("openslide", (0.25, 0.25))
        assert slide.size == (900, 700)
    with ts.open_slide(slide_path) as plain:
        assert plain.slide_mpp == (0.5, 0.5)
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copytree(made / "slides", moved / "slides")
    own = tmp_path / "own"
    run([moved / "slides"], out=own, config=settings(tile_px=128), until="tiles")
    (moved / "slides").rename(moved / "elsewhere")
    with pytest.raises(SlideOpenError, match="relink"):
        open_results(own).open_slide(A)
    # another picture at the same place
    (moved / "slides").mkdir()
    write_he_slide(moved / "slides" / f"{A}.svs", (800, 600), seed=5)
    with pytest.raises(InvalidInputError, match="must be the file of the run"):
        open_results(own).open_slide(A)
    with pytest.raises(InvalidInputError, match="slide_id must be in this folder"):
        results.open_slide("c")


STRANGER = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
CAPABILITIES = (
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
)


def test_a_folder_of_another_user_names_the_remedy(results: Results) -> None:
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    code = (
        "import sys, thinsection as ts\n"
        "results = ts.open_results(sys.argv[1])\n"
        "count = len(results.tiles(sys.argv[2], sys.argv[3]).coords_l0)\n"
        "try: results.write_column(sys.argv[2], 'v', [1.0] * count, grid=sys.argv[3])\n"
        "except ts.errors.OutputError as error: print(error)\n"
    )
    arguments = [sys.executable, "-c", code, str(results.folder), A, SMALL]
    before = times(results)
    if os.getuid() == 0:
        arguments = [*STRANGER, *CAPABILITIES, *arguments]
    else:
        for path in (results.folder, *results.folder.rglob("*/")):
            path.chmod(0o555)
    try:
        environment = {**os.environ, "HOME": "/nonexistent"}
        ended = subprocess.run(
            arguments, capture_output=True, text=True, env=environment, check=False
        )
    finally:
        if os.getuid() != 0:
            for path in (results.folder, *results.folder.rglob("*/")):
                path.chmod(0o755)
    assert "results folder must be writable" in ended.stdout, ended.stderr
    assert "thinsection merge" in ended.stdout
    assert times(results) == before


def test_a_full_disk_leaves_no_column(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.zeros(num_tiles(results, A))
    results.write_column(A, "v", values, grid=SMALL)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(TilesWriter, "add_column", refuse)
        with pytest.raises(OutputError, match="No space left"):
            results.write_column(A, "v", values + 1, grid=SMALL, overwrite=True)
    again = open_results(results.folder)
    assert "v" not in again.tiles(A, SMALL).columns
    assert verify(results.folder)[1] == []
    again.write_column(A, "v", values + 1, grid=SMALL)
    assert again.tiles(A, SMALL).columns["v"].all()


def test_a_lock_of_a_process_that_works_on_the_slide_is_waited_for(
    results: Results,
) -> None:
    import threading

    from thinsection.files.lock import hold

    values = np.zeros(num_tiles(results, A))
    lock = results.folder / "slides" / A / ".lock"
    with hold(lock):
        writer = threading.Thread(
            target=results.write_column, args=(A, "v", values), kwargs={"grid": SMALL}
        )
        writer.start()
        writer.join(0.7)
        assert writer.is_alive()
        assert "v" not in results.tiles(A, SMALL).columns
    writer.join(30)
    assert "v" in results.tiles(A, SMALL).columns


@pytest.fixture
def no_pandas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "pandas", None)
    yield


def test_a_column_needs_no_pandas(results: Results, no_pandas: None) -> None:
    results.write_column(A, "c", words_of(results, A), grid=SMALL)
    assert results.tiles(A, SMALL).values("c").tolist() == words_of(results, A)
    with pytest.raises(ThinsectionError, match="pip install 'thinsection"):
        results.to_pandas(SMALL)


def test_a_key_depends_on_tiles_values_names_and_colours() -> None:
    coords = np.arange(8).reshape(4, 2)
    words = ["a", "b", "a", ""]
    keys = [
        own_column("c", words).key(coords),
        own_column("d", words).key(coords),
        own_column("c", words[::-1]).key(coords),
        own_column("c", words, colors={"a": "red"}).key(coords),
        own_column("c", words, categories=["b", "a"]).key(coords),
        own_column("c", words).key(coords + 1),
        own_column("c", [0, 1, 0, -1]).key(coords),
        own_column("c", [0.0, 1.0, 0.0, -1.0]).key(coords),
    ]
    assert len(set(keys)) == len(keys)
    assert own_column("c", np.array(words)).key(coords.copy()) == keys[0]


def test_facts_of_few_tiles() -> None:
    assert own_column("c", np.zeros(0, bool)).facts()["c_share"] == 0
    assert own_column("c", [True]).facts()["c_share"] == 1
    named = own_column("c", ["x"], categories=["x", "y"]).facts()
    assert (named["c_share_x"], named["c_share_y"]) == (1, 0)
    assert own_column("c", []).facts()["c_mean"] is None
    assert own_column("c", [2.0, np.nan, 4.0]).facts()["c_mean"] == 3


def test_a_colour_is_a_word_a_number_or_three_of_them() -> None:
    for color in ("#FF0072", (255, 0, 114), [255, 0, 114], np.array([255, 0, 114])):
        named = own_column("c", ["x"], colors={"x": color}).categories
        assert named is not None and named.colors == ("#FF0072",)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
def test_a_folder_that_cannot_be_written_is_told_from_a_broken_one(
    results: Results, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    @contextmanager
    def refuse(*_: object, **__: object) -> Iterator[None]:
        raise StoreError("no lock") from OSError(number, os.strerror(number))
        yield

    monkeypatch.setattr(column_files, "hold", refuse)
    values = np.zeros(num_tiles(results, A))
    message = "no lock" if number == errno.EIO else "thinsection merge"
    with pytest.raises(StoreError, match=message):
        results.write_column(A, "v", values, grid=SMALL)
