"""A results folder for who opens it: in Python, in a notebook, in the shell, in AnnData."""

import csv
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.config import replace_flat
from thinsection.errors import ChoiceError, InvalidInputError, StoreError
from thinsection.evaluation.embeddings import feature_files
from thinsection.exchange.anndata import export_anndata
from thinsection.files.atomic import write_table
from thinsection.results.choice import matching
from thinsection.results.folder import Results, open_results
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.store.ledger import SlideLedger, StageRecord
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import read_slide_embedding
from thinsection.testing.synthetic import write_he_slide

GRID = "256px_0.5mpp"
LITE0, RESNET = "efficientnet_lite0_seed0", "timm-resnet18_seed0"
A, B = "a&'i'", "b"  # as hostile as an id may be


def settings(**flat: object) -> RunConfig:
    return replace_flat(RunConfig(), {"memory": "256MiB", "pretrained": False, **flat})


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cohort of two slides and a text file."""
    root = tmp_path_factory.mktemp("slides")
    write_he_slide(root / f"{A}.svs", (1500, 1100), seed=3, downsamples=(1, 4))
    write_he_slide(root / f"{B}.svs", (1100, 1500), seed=5, downsamples=(1, 4))
    (root / "bad.svs").write_text("no slide <script>")
    rows = [("slide_path", "patient_id", "label", "split")]
    rows += [(f"{A}.svs", "p1", "LUAD", "train"), (f"{B}.svs", "p2", "LUSC", "test")]
    with (root / "cohort.csv").open("w", newline="") as file:
        csv.writer(file).writerows([*rows, ("bad.svs", "p3", "", "")])
    return root


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, slides: Path) -> Path:
    """Two encoders, two slide encoders of one of them, and a second grid of one slide."""
    out = tmp_path_factory.mktemp('a<b>&"c"') / "results"
    cohort = slides / "cohort.csv"
    both = settings(encoders=["efficientnet_lite0", "timm:resnet18"], graph="knn:4")
    assert run([cohort], out=out, config=both, until="embeddings").counts["done"] == 2
    run([cohort], out=out, config=settings(slide_encoders=["mean", "max"]))
    run([slides / f"{B}.svs"], out=out, config=settings(tile_px=200), until="tiles")
    return out


@pytest.fixture(scope="module")
def results(out: Path) -> Results:
    return open_results(out)


def test_what_is_there_is_listed(results: Results) -> None:
    assert results.slides == (A, B)
    assert results.grids == ("200px_0.5mpp", GRID)
    assert results.features == (f"{GRID}/features_{LITE0}", f"{GRID}/features_{RESNET}")
    pooled = (f"{GRID}/slide_features_{name}-{LITE0}" for name in ("max", "mean"))
    assert results.slide_features == tuple(pooled)
    rows = {row.address: row for row in results.folders}
    assert next(iter(rows)) == "slides/tissue"
    assert rows["200px_0.5mpp/tiles"].num_slides == 1
    features = rows[f"{GRID}/features_{RESNET}"]
    files = (results.folder / features.address).glob("*.h5")
    assert features.num_bytes == sum(path.stat().st_size for path in files)
    assert (features.num_slides, features.facts["dim"]) == (2, 512)
    assert features.facts["encoder"] == "timm:resnet18"
    assert list(results.failures()) == ["bad"]
    assert "no reader opens 'bad.svs'" in results.failures()["bad"]
    commands = [record.document["command"] for record in results.records]
    assert commands == ["run --until embeddings", "run", "run --until tiles"]
    started = [record.document["started"] for record in results.records]
    assert started == sorted(started)


def test_a_row_per_slide_and_grid_says_what_there_is(
    results: Results, tmp_path: Path
) -> None:
    rows = results.rows()
    assert [(row["slide_id"], row["grid"]) for row in rows] == [
        *((A, GRID), (B, "200px_0.5mpp"), (B, GRID))
    ]
    first, third, second = rows
    assert first["features"] == f"{LITE0}|{RESNET}"
    assert sorted(first["slide_features"].split("|")) == [
        f"max-{LITE0}",
        f"mean-{LITE0}",
    ]
    assert set(first["also"].split("|")) == {"overviews", "graph_knn-4"}
    assert (first["label"], second["patient_id"]) == ("LUAD", "p2")
    assert (third["features"], third["also"]) == ("", "overviews")
    assert second["num_tiles"] != third["num_tiles"]
    assert first["num_tiles"] == len(results.tiles(A, GRID).coords_l0)
    with (results.folder / "summary.csv").open(newline="") as file:
        table = [row for row in csv.DictReader(file) if row["status"] != "failed"]
    for row, told in zip(
        rows, sorted(table, key=lambda row: row["slide_id"]), strict=True
    ):
        for name in ("slide_id", "grid", "features", "slide_features", "also"):
            assert row[name] == told[name]
        assert str(row["num_tiles"]) == told["num_tiles"]


def test_labels_are_joined_by_slide_id(results: Results, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    labels = tmp_path / "labels.csv"
    with labels.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("slide_id", "event"), (A, "1"), ("other", "0")])
    table = results.table(labels)
    assert isinstance(table, pandas.DataFrame)
    assert len(table) == 3
    assert table.loc[table.slide_id == A, "event"].tolist() == ["1"]
    assert table.loc[table.slide_id == B, "event"].isna().all()
    labels.write_text("slide,event\na,1\n")
    with pytest.raises(
        StoreError, match=r"must have the column 'slide_id', got slide, event"
    ):
        results.rows(labels)
    with pytest.raises(
        StoreError, match=r"table must be a readable file, got .*none.csv"
    ):
        results.rows(tmp_path / "none.csv")


def test_labels_of_our_own_tables_are_joined_by_the_text_that_was_written(
    tmp_path: Path,
) -> None:
    results = Results(
        folder=tmp_path, ledgers={"=a": SlideLedger(out=tmp_path, slide_id="=a")}
    )
    write_table(tmp_path / "labels.csv", [{"slide_id": "=a", "event": "-1"}])
    (row,) = results.rows(tmp_path / "labels.csv")
    assert (row["slide_id"], row["event"]) == ("=a", "-1")


def test_embeddings_are_arrays_with_their_tiles(results: Results) -> None:
    stored = results.tile_embeddings(A, RESNET)
    assert stored.features is not None
    assert stored.features.shape == (len(stored.coords_l0), 512)
    np.testing.assert_array_equal(stored.coords_l0, results.tiles(A, GRID).coords_l0)
    assert "tissue_fraction" in results.tiles(A, GRID).columns
    for name in (f"{GRID}/features_{RESNET}", f"features_{RESNET}"):
        np.testing.assert_array_equal(
            results.tile_embeddings(A, name).features, stored.features
        )


@pytest.mark.parametrize(
    "rows",
    [
        *(
            slice(None),
            slice(2, 5),
            slice(5, 2),
            slice(None, None, 2),
            slice(None, None, -1),
        ),
        *(
            slice(-3, None),
            0,
            -1,
            np.int64(1),
            [3, 0, 3],
            [-1, 0],
            [],
            np.array([[0, 1], [2, 0]]),
        ),
        *(np.arange(4) % 2 == 0,),
    ],
    ids=repr,
)
def test_rows_of_embeddings_are_those_of_the_array(
    results: Results, rows: object
) -> None:
    whole = results.tile_embeddings(A, LITE0).features
    assert whole is not None
    lazy = results.embedding_rows(A, LITE0)
    if isinstance(rows, np.ndarray) and rows.dtype == bool:
        rows = np.resize(rows, len(whole))
    found = lazy[rows]  # type: ignore[index]
    expected = whole[rows]  # type: ignore[index]
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_rows_that_are_not_there_are_an_error_as_of_an_array(results: Results) -> None:
    lazy = results.embedding_rows(A, LITE0)
    number = len(lazy)
    assert lazy.shape == (number, 1280)
    for rows in ([number], number, -number - 1, np.ones(number + 1, bool)):
        with pytest.raises(IndexError):
            lazy[rows]
    assert repr(lazy) == f"<EmbeddingRows ({number}, 1280) float32 in {A + '.h5'!r}>"


def test_rows_of_a_slide_without_tiles_are_none(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "e.h5", "w") as file:
        file.create_dataset("features", (0, 5), np.float16)
    lazy = EmbeddingRows(tmp_path / "e.h5")
    assert (len(lazy), lazy[:].shape, lazy[[]].shape) == (0, (0, 5), (0, 5))


def test_slide_embeddings_are_one_array_in_the_order_of_the_ids(
    results: Results,
) -> None:
    ids, matrix = results.slide_embeddings("max-" + LITE0)
    assert ids == (A, B)
    assert matrix.dtype == np.float32
    for slide_id, vector in zip(ids, matrix, strict=True):
        path = results.folder / GRID / f"slide_features_max-{LITE0}" / f"{slide_id}.h5"
        np.testing.assert_array_equal(
            read_slide_embedding(path).slide_embedding, vector
        )
        tiles = results.tile_embeddings(slide_id, LITE0).features
        assert tiles is not None
        np.testing.assert_array_equal(tiles.max(axis=0), vector)


def test_damaged_slide_embeddings_are_left_out_and_named(tmp_path: Path) -> None:
    """The rows of the others are as before; without a listener the first damage is an error."""
    names = ("cut", "good0", "good1", "ledger", "other", "removed")
    for number, slide_id in enumerate(names):
        place = f"g/slide_features_mean/{slide_id}.h5"
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        vector = np.full(3 if slide_id == "other" else 4, number, np.float32)
        with h5py.File(path, "w") as file:
            file["features"] = vector
        SlideLedger(
            out=tmp_path,
            slide_id=slide_id,
            slide={"slide_id": slide_id, "slide_path": ""},
            source={},
            stages={
                "g/slide_features_mean": StageRecord(
                    key="k", files={place: path.stat().st_size}
                )
            },
        ).save()
    assert open_results(tmp_path).slide_features == ("g/slide_features_mean",)
    (tmp_path / "g" / "slide_features_mean" / "cut.h5").write_bytes(b"\x89HDF")
    (tmp_path / "g" / "slide_features_mean" / "removed.h5").unlink()
    (tmp_path / "slides" / "ledger" / "slide.json").write_text("{")
    lines: list[str] = []
    ids, matrix = open_results(tmp_path).slide_embeddings(on_left_out=lines.append)
    assert ids == ("good0", "good1")
    np.testing.assert_array_equal(matrix, [[1] * 4, [2] * 4])
    assert {line.partition(": left out: ")[0] for line in lines} == {
        *("cut", "ledger", "other", "removed")
    }
    assert any("must have 4 numbers as that of 'good0', got 3" in one for one in lines)
    with pytest.raises(StoreError, match="cut"):
        open_results(tmp_path).slide_embeddings()


def test_a_name_that_means_none_says_which_there_are(results: Results) -> None:
    with pytest.raises(
        InvalidInputError, match=r"slide features must match one of .*, got 'titan'"
    ):
        results.slide_embeddings("titan")
    with pytest.raises(
        InvalidInputError, match="slide_id must be in this folder, got 'bb'; did"
    ):
        results.tiles("bb", GRID)
    with pytest.raises(
        StoreError, match=r"200px_0.5mpp/tiles of .* must exist, got none; run"
    ):
        results.tiles(A, "200px_0.5mpp")


def test_a_line_per_folder_fits_on_a_screen(results: Results) -> None:
    lines = str(results).splitlines()
    assert lines[0] == f"<Results {str(results.folder)!r}: 2 slides>"
    assert len(lines) == 1 + len(results.folders)
    assert f"{GRID}/features_{RESNET}" in str(results)
    assert all(len(line) <= 100 for line in lines[1:])


def test_a_notebook_sees_pictures_and_names_that_do_no_harm(results: Results) -> None:
    page = results._repr_html_()
    assert page.count("<img") == 2
    assert "data:image/jpeg;base64," in page
    assert "a<b>" not in page
    assert "&lt;b&gt;&amp;&quot;c&quot;" in page
    assert "a&amp;&#x27;i&#x27;" in page
    assert 'src="http' not in page
    for row in results.folders:
        assert row.address in page


def test_the_shell_lists_the_same(out: Path, results: Results) -> None:
    done = CliRunner().invoke(build_app(["ls"]), ["ls", str(out)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == f"{out}: 2 slides"
    told = {line.split()[0]: line for line in lines[1:]}
    assert {row.address for row in results.folders} <= set(told)
    assert told[f"{GRID}/features_{RESNET}"].endswith("timm:resnet18, dim 512")
    assert told[f"{GRID}/slide_features_max-{LITE0}"].endswith("max, dim 1280")
    assert "2 slides" in told["slides/tissue"]
    assert [line for line in lines if line.startswith("  failed: bad: ")]
    records = [line for line in lines if line.startswith("  records/")]
    assert len(records) == 3
    assert records[0].endswith("run --until embeddings: 2 done, 1 failed")


def test_what_is_no_results_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_text("")
    with pytest.raises(
        StoreError, match="results must be a folder of `thinsection run`"
    ):
        open_results(tmp_path)


def test_a_folder_in_which_every_slide_failed_opens(
    tmp_path: Path, slides: Path
) -> None:
    run([slides / "bad.svs"], out=tmp_path, config=settings(), until="tiles")
    results = open_results(tmp_path)
    assert (results.slides, results.folders, results.rows()) == ((), (), [])
    assert list(results.failures()) == ["bad"]
    assert "<table>" in results._repr_html_()


def test_anndata_holds_one_of_several_embeddings_and_what_is_known_of_each_tile(
    out: Path, results: Results, tmp_path: Path
) -> None:
    anndata = pytest.importorskip("anndata", reason="anndata is not installed")
    target = tmp_path / "tiles.h5ad"
    number = export_anndata(out, target, features=RESNET)
    data = anndata.read_h5ad(target)
    stored = [results.tile_embeddings(slide_id, RESNET) for slide_id in (A, B)]
    assert data.shape == (number, 512)
    np.testing.assert_array_equal(data.X, np.concatenate([s.features for s in stored]))
    spatial = np.concatenate([s.coords_l0 for s in stored])
    np.testing.assert_array_equal(data.obsm["spatial"], spatial)
    assert data.obs["label"].value_counts().to_dict() == {
        **{"LUAD": len(stored[0].coords_l0), "LUSC": len(stored[1].coords_l0)}
    }
    assert data.obs_names.is_unique
    x, y = stored[0].coords_l0[0]
    assert data.obs_names[0] == f"{A}:{x}x{y}"
    assert "tissue_fraction" in data.obs
    assert (data.uns["encoder"], data.uns["features"]) == (
        *("timm:resnet18", f"{GRID}/features_{RESNET}"),
    )


def test_anndata_of_the_only_embeddings_needs_no_name_and_of_none_says_what_to_run(
    slides: Path, tmp_path: Path
) -> None:
    anndata = pytest.importorskip("anndata", reason="anndata is not installed")
    out = tmp_path / "out"
    run([slides / f"{B}.svs"], out=out, config=settings(), until="tiles")
    with pytest.raises(
        StoreError, match=r"must contain tile embeddings, got none .*run `thinsection"
    ):
        export_anndata(out, tmp_path / "tiles.h5ad")
    run([slides / f"{B}.svs"], out=out, config=settings(), until="embeddings")
    command = ["export", "anndata", str(out), "--out", str(tmp_path / "tiles.h5ad")]
    done = CliRunner().invoke(build_app(["export"]), command)
    assert done.exit_code == 0, done.output
    data = anndata.read_h5ad(tmp_path / "tiles.h5ad")
    assert f"wrote {len(data)} tiles" in done.output
    assert data.uns["encoder"] == "efficientnet_lite0"


def test_a_part_names_features_and_a_deleted_grid_counts_no_more(
    tmp_path: Path,
) -> None:
    ledger = SlideLedger(out=tmp_path, slide_id="s")
    addresses = ["256px_0.5mpp_qc-auto/features_lite", "256px_1mpp/features_lite"]
    for address in addresses:
        (tmp_path / address).mkdir(parents=True)
        record = StageRecord(key="k", files={f"{address}/s.h5": 1})
        ledger = ledger.with_stage(address, record)
    results = Results(folder=tmp_path, ledgers={"s": ledger})
    assert results.features == tuple(addresses)
    for name in ("256px_1mpp", "1mpp", "1mpp/features"):
        assert results.choose_features(name) == addresses[1]
    for name in (None, "features_lite", "256px"):
        assert matching(results.features, name) == addresses
        with pytest.raises(ChoiceError) as error:
            results.choose_features(name)
        listed = ", ".join(f"{address} (1 slide)" for address in addresses)
        remedy = f'got {name!r}; pass features="{addresses[0]}"'
        assert str(error.value) == f"features must match one of {listed}, {remedy}"
    shutil.rmtree(tmp_path / "256px_1mpp")
    results = Results(folder=tmp_path, ledgers={"s": ledger})
    assert results.choose_features() == addresses[0]
    assert results.grids == ("256px_0.5mpp_qc-auto",)


def test_the_grid_alone_means_its_tile_embeddings(out: Path) -> None:
    only_lite0 = feature_files(out, f"{GRID}/features_{LITE0}")
    assert only_lite0.place == f"{GRID}/features_{LITE0}"
    assert feature_files(out, f"mean-{LITE0}").place.endswith(f"mean-{LITE0}")
    assert feature_files(out, GRID).place == f"{GRID}/features_{LITE0}"
