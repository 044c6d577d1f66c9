"""Columns of the caller, from embeddings to AnnData and back: all readers see the same classes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.view.test_layers import unpacked
from typer.testing import CliRunner

import thinsection as ts
from thinsection.cli.app import build_app
from thinsection.config import replace_flat
from thinsection.errors import InvalidInputError
from thinsection.results.folder import Results, open_results
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.testing.synthetic import write_he_slide
from thinsection.view.layers import layers_of

pandas = pytest.importorskip("pandas")
anndata = pytest.importorskip("anndata")

SMALL, LARGE = "128px_0.5mpp", "200px_0.5mpp"
A, B = "a 1", "b"
NAMES = ("stroma 1", "tumour: core", "fat")
COLORS = {"stroma 1": "#00FF00", "tumour: core": "#AA0000", "fat": "#FFFF00"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides and two grids with embeddings of both."""
    root = tmp_path_factory.mktemp("own columns")
    for seed, name in enumerate((A, B)):
        path = root / "slides" / f"{name}.svs"
        path.parent.mkdir(exist_ok=True)
        write_he_slide(path, (900 + 200 * seed, 700), seed=seed, downsamples=(1, 4))
    for tile_px in (200, 128):
        flat = {"memory": "256MiB", "pretrained": False, "tile_px": tile_px}
        config = replace_flat(RunConfig(), flat)
        slides = [root / "slides"]
        run(slides, out=root / "results", config=config, until="embeddings")
    return root


def features(grid: str) -> str:
    return f"{grid}/features_efficientnet_lite0_seed0"


@pytest.fixture
def results(made: Path, tmp_path: Path) -> Results:
    """A copy that a test may change."""
    shutil.copytree(made / "results", tmp_path / "results")
    return open_results(tmp_path / "results")


def clustered(table: Any) -> None:
    """Adds clusters of k-means to a table, as scanpy would, with names and colours."""
    from sklearn.cluster import KMeans

    labels = KMeans(len(NAMES), n_init=2, random_state=0).fit(table.X).labels_
    table.obs["leiden"] = pandas.Categorical([NAMES[i] for i in labels], NAMES)
    table.uns["leiden_colors"] = [COLORS[name] for name in NAMES]
    table.obs["distance"] = np.linalg.norm(table.X - table.X.mean(axis=0), axis=1)


@pytest.fixture
def with_clusters(results: Results, tmp_path: Path) -> Results:
    """Clusters of the small tiles of both slides, over a file and back."""
    assert ts.export_anndata(str(results.folder), str(tmp_path / "t.h5ad")) > 50
    table = anndata.read_h5ad(tmp_path / "t.h5ad")
    clustered(table)
    results.write_columns(table, columns=["leiden", "distance"])
    return results


def test_clusters_come_back_to_each_tile(with_clusters: Results) -> None:
    table = with_clusters.to_anndata(features(SMALL))
    expected = table.copy()
    clustered(expected)
    for slide_id in with_clusters.slides:
        stored = with_clusters.tiles(slide_id, SMALL)
        of_slide = expected.obs[expected.obs.slide_id == slide_id]
        assert stored.values("leiden").tolist() == of_slide["leiden"].tolist()
        np.testing.assert_array_equal(stored.columns["distance"], of_slide["distance"])
        assert stored.categories["leiden"].color_by_name == COLORS
        assert "leiden" not in with_clusters.tiles(slide_id, LARGE).columns


def test_a_second_round_gives_the_same_table_and_writes_nothing(
    with_clusters: Results, tmp_path: Path
) -> None:
    first = with_clusters.to_anndata(features(SMALL))
    times = {p: p.stat().st_mtime_ns for p in with_clusters.folder.rglob("*.h5")}
    with_clusters.write_columns(first.obs[["leiden", "distance"]], grid=SMALL)
    with_clusters.write_columns(first, columns=["leiden"])
    assert times == {
        p: p.stat().st_mtime_ns for p in with_clusters.folder.rglob("*.h5")
    }
    ts.export_anndata(with_clusters.folder, tmp_path / "again.h5ad")
    again = anndata.read_h5ad(tmp_path / "again.h5ad")
    # pandas has two types for the words of patients and slides
    pandas.testing.assert_frame_equal(
        again.obs, first.obs, check_dtype=False, check_categorical=False
    )
    for name in ("leiden", "distance"):
        pandas.testing.assert_series_equal(again.obs[name], first.obs[name])
    assert first.obs["leiden"].cat.categories.tolist() == list(NAMES)
    assert list(again.uns["leiden_colors"]) == list(COLORS.values())
    np.testing.assert_array_equal(again.X, first.X)


def test_slides_with_other_categories_are_joined_by_name(results: Results) -> None:
    for slide_id, words in ((A, ("x", "y")), (B, ("y", "z"))):
        count = len(results.tiles(slide_id, SMALL).coords_l0)
        values = [words[row % 2] for row in range(count)]
        results.write_column(slide_id, "c", values, grid=SMALL)
    obs = results.to_anndata(features(SMALL)).obs
    assert obs["c"].cat.categories.tolist() == ["x", "y", "z"]
    assert set(obs.loc[obs.slide_id == B, "c"]) == {"y", "z"}
    assert len(set(results.to_anndata(features(SMALL)).uns["c_colors"])) == 3


def test_the_viewer_has_the_classes_with_names_and_colours(
    with_clusters: Results,
) -> None:
    for slide_id in with_clusters.slides:
        layers = {
            layer.key: layer for layer in layers_of(with_clusters, slide_id, 3, 1 << 27)
        }
        layer = layers[f"{SMALL}/leiden"]
        assert (layer.kind, layer.words) == ("categories", "leiden")
        assert dict(zip(layer.names, layer.colors)) == COLORS
        data = layer.read()
        count = int(np.frombuffer(data, "<u4", 1)[0])
        codes = np.frombuffer(data, "<u2", offset=20 + 8 * count)
        words = [layer.names[code] for code in codes]
        assert words == with_clusters.tiles(slide_id, SMALL).values("leiden").tolist()
        distance = layers[f"{SMALL}/distance"]
        assert distance.kind == "values" and distance.group == layer.group
        _, _, values = unpacked(distance)
        stored = with_clusters.tiles(slide_id, SMALL).columns["distance"]
        np.testing.assert_array_equal(values, stored.astype("f4"))


def test_a_tile_without_a_category_is_none_in_the_viewer(results: Results) -> None:
    count = len(results.tiles(A, SMALL).coords_l0)
    results.write_column(A, "c", ["", *["x"] * (count - 1)], grid=SMALL)
    results.write_column(A, "e", [None] * count, grid=SMALL, categories=["x"])
    layers = {layer.key: layer for layer in layers_of(results, A, 3, 1 << 27)}
    codes = np.frombuffer(layers[f"{SMALL}/c"].read(), "<u2", offset=20 + 8 * count)
    assert codes.tolist() == [65535, *[0] * (count - 1)]
    assert not layers[f"{SMALL}/c"].is_empty  # although all its codes are 0
    assert layers[f"{SMALL}/e"].is_empty


def tiles_of(path: Path) -> list[dict[str, Any]]:
    features = json.loads(path.read_text())["features"]
    kinds = ("detection", "tile")
    return [f for f in features if f["properties"]["objectType"] in kinds]


def test_qupath_gets_classes_with_names_and_colours(
    with_clusters: Results, tmp_path: Path
) -> None:
    folder = str(with_clusters.folder)
    assert ts.export_qupath(folder, str(tmp_path / "q"), grid=SMALL) == 2
    for slide_id in with_clusters.slides:
        tiles = tiles_of(tmp_path / "q" / f"{slide_id}.geojson")
        stored = with_clusters.tiles(slide_id, SMALL)
        kinds = [tile["properties"]["classification"] for tile in tiles]
        assert [kind["name"] for kind in kinds] == stored.values("leiden").tolist()
        for kind in kinds:
            assert kind["color"] == list(bytes.fromhex(COLORS[kind["name"]][1:]))
        measured = [tile["properties"]["measurements"] for tile in tiles]
        assert "leiden" not in measured[0]
        assert [one["distance"] for one in measured] == pytest.approx(
            stored.columns["distance"].tolist(), rel=1e-6
        )


def test_the_column_that_gives_the_classes_can_be_chosen(
    with_clusters: Results, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for slide_id in with_clusters.slides:
        count = len(with_clusters.tiles(slide_id, SMALL).coords_l0)
        words = ["", *["x"] * (count - 1)]
        with_clusters.write_column(slide_id, "a first", words, grid=SMALL)
    ts.export_qupath(with_clusters.folder, tmp_path / "q", grid=SMALL)
    assert "classes of tiles are those of 'a first', the first of 2" in caplog.text
    first, second, *_ = tiles_of(tmp_path / "q" / f"{B}.geojson")
    assert "classification" not in first["properties"]
    assert second["properties"]["classification"]["name"] == "x"
    command = ["export", "qupath", str(with_clusters.folder), "--grid", SMALL]
    command += ["--out", str(tmp_path / "q2"), "--classes", "leiden"]
    assert CliRunner().invoke(build_app(["export"]), command).exit_code == 0
    names = {
        tile["properties"]["classification"]["name"]
        for tile in tiles_of(tmp_path / "q2" / f"{B}.geojson")
    }
    assert names <= set(NAMES)
    with pytest.raises(InvalidInputError, match="must be a column of categories"):
        ts.export_qupath(
            with_clusters.folder, tmp_path / "q", grid=SMALL, classes="distance"
        )
    # the large tiles have no categories; nothing chooses them there
    ts.export_qupath(with_clusters.folder, tmp_path / "large", grid=LARGE)
    tile, *_ = tiles_of(tmp_path / "large" / f"{B}.geojson")
    assert "classification" not in tile["properties"]


def test_a_heatmap_of_classes_has_their_colours(
    with_clusters: Results, tmp_path: Path
) -> None:
    files = ts.heatmap(
        "leiden",
        str(with_clusters.folder),
        out=str(tmp_path / "h"),
        grid=SMALL,
        top_tiles=2,
    )
    names = sorted(path.name for path in files)
    assert names == sorted(
        f"{slide_id}.{end}"
        for slide_id in with_clusters.slides
        for end in ("leiden.png", "geojson", "top.png")
    )
    stored = with_clusters.tiles(A, SMALL)
    home = files[0].parent
    with Image.open(home / f"{A}.leiden.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    plain = with_clusters.open_slide(A)
    scale = pixels.shape[1] / plain.size[0]
    with plain:
        thumbnail = plain.thumbnail((pixels.shape[1], 4000)).astype(int)
    named = stored.categories["leiden"]
    for row in (0, len(stored.coords_l0) // 2):
        x, y = ((stored.coords_l0[row] + 64) * scale).astype(int)
        color = np.array(named.rgb(int(stored.columns["leiden"][row])))
        # half of the colour of the class, half of the slide
        assert np.abs(2 * pixels[y, x] - thumbnail[y, x] - color).max() <= 30
    tiles = tiles_of(home / f"{A}.geojson")
    assert [t["properties"]["classification"]["name"] for t in tiles] == stored.values(
        "leiden"
    ).tolist()
    # numbers and bool are drawn as before
    odd = np.arange(len(stored.coords_l0)) % 2 == 1
    with_clusters.write_column(A, "odd", odd, grid=SMALL)
    for column in ("distance", "odd"):
        assert ts.heatmap(column, with_clusters.folder, out=tmp_path / "h", grid=SMALL)


def legend_of(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_plots_draw_classes(with_clusters: Results) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = ts.plot.heatmap(with_clusters, A, "leiden", SMALL)
    stored = with_clusters.tiles(A, SMALL).values("leiden").tolist()
    texts = legend_of(axes)
    for name in set(stored):
        count = stored.count(name)
        assert f"{name}: {count} tile{'s' * (count > 1)}" in texts
    axes = ts.plot.embedding(with_clusters, features(SMALL), color="leiden")
    assert set(legend_of(axes)) == set(NAMES)
    from matplotlib.colors import to_hex

    for dots in axes.collections:
        assert to_hex(dots.get_facecolor()[0]).upper() == COLORS[str(dots.get_label())]
    ts.plot.heatmap(with_clusters, A, "distance", SMALL)
    pyplot.close("all")


def test_a_dataset_of_tiles_has_the_values(with_clusters: Results) -> None:
    torch = pytest.importorskip("torch")
    data = ts.TileDataset(
        with_clusters,
        grid=SMALL,
        columns=["leiden", "distance", "tissue_fraction"],
        shuffle=False,
    )
    assert data.categories["leiden"].names == NAMES
    seen = dict.fromkeys(with_clusters.slides, 0)
    tables = {slide_id: with_clusters.tiles(slide_id, SMALL) for slide_id in seen}
    for item in data:
        table = tables[item["slide_id"]]
        row = item["row"]
        seen[item["slide_id"]] += 1
        assert NAMES[int(item["leiden"])] == table.values("leiden")[row]
        assert item["distance"] == np.float32(table.columns["distance"][row])
        assert item["tissue_fraction"] == table.columns["tissue_fraction"][row]
        assert isinstance(item["image"], torch.Tensor)
    assert seen == {name: len(table.coords_l0) for name, table in tables.items()}
    with pytest.raises(InvalidInputError, match="did you mean 'leiden'"):
        ts.TileDataset(with_clusters, grid=SMALL, columns=["leide"])


def test_codes_of_a_dataset_mean_the_same_on_all_slides(results: Results) -> None:
    pytest.importorskip("torch")
    for slide_id, words in ((A, ("x", "y")), (B, ("", "z"))):
        count = len(results.tiles(slide_id, SMALL).coords_l0)
        values = [words[row % 2] for row in range(count)]
        results.write_column(slide_id, "c", values, grid=SMALL)
    data = ts.TileDataset(results, grid=SMALL, columns=["c"], shuffle=False)
    names = data.categories["c"].names
    assert names == ("x", "y", "z")
    for item in data:
        word = results.tiles(item["slide_id"], SMALL).values("c")[item["row"]]
        assert np.isnan(item["c"]) if not word else names[int(item["c"])] == word


def write_heatmap(results: Results, columns: dict[str, float]) -> None:
    """A model's heatmap on both slides, which no ledger has."""
    for slide_id in results.slides:
        path = results.folder / SMALL / "heatmap_m" / f"{slide_id}.h5"
        path.parent.mkdir(exist_ok=True)
        coords_l0 = results.tiles(slide_id, SMALL).coords_l0
        with TilesWriter(path, dim=0, attributes={}) as writer:
            writer.append(coords_l0, None)
            for name, value in columns.items():
                writer.add_column(name, np.full(len(coords_l0), value, np.float32))


def test_spatialdata_gets_columns_whose_names_it_does_not_allow(
    with_clusters: Results, tmp_path: Path
) -> None:
    spatialdata = pytest.importorskip("spatialdata")
    write_heatmap(with_clusters, {"score_T cell": 0.5, "score_T_cell": 0.25})
    folder = str(with_clusters.folder)
    name = features(SMALL)
    assert ts.export_spatialdata(folder, str(tmp_path / "s"), features=name) == 2
    for slide_id in with_clusters.slides:
        data = spatialdata.read_zarr(tmp_path / "s" / f"{slide_id}.zarr")
        stored = with_clusters.tiles(slide_id, SMALL)
        obs = data.tables["embeddings"].obs
        for frame in (obs, data.shapes["tiles"]):
            assert frame["leiden"].tolist() == stored.values("leiden").tolist()
            assert set(frame["heatmap_m.score_T_cell"]) == {0.5}
            assert set(frame["heatmap_m.score_T_cell_2"]) == {0.25}
        colors = data.tables["embeddings"].uns["leiden_colors"]
        assert list(colors) == list(COLORS.values())
        renamed = data.attrs["thinsection_columns"]
        assert renamed["heatmap_m.score_T_cell_2"] == "heatmap_m:score_T_cell"
    # another column is another result
    count = len(with_clusters.tiles(A, SMALL).coords_l0)
    with_clusters.write_column(A, "v", np.zeros(count), grid=SMALL)
    with pytest.raises(ts.errors.OverwriteError):
        ts.export_spatialdata(folder, tmp_path / "s", features=name)


def test_names_that_spatialdata_allows_are_made_by_one_rule() -> None:
    from thinsection.exchange.spatialdata import allowed_names

    names = ["leiden 0.5", "h:a/b", "h:a b", "H.A_B", "__x", "region", "ü", "plain"]
    assert allowed_names(names) == {
        "leiden 0.5": "leiden_0.5",
        "h:a/b": "h.a_b",
        "h:a b": "h.a_b_2",
        "H.A_B": "H.A_B_3",
        "__x": "column__x",
        "region": "region_2",
        "ü": "_",
        "plain": "plain",
    }


def test_geopandas_gets_squares_with_the_columns(with_clusters: Results) -> None:
    pytest.importorskip("geopandas")
    frame = with_clusters.to_geopandas(SMALL)
    tables = [with_clusters.tiles(name, SMALL) for name in with_clusters.slides]
    corners = np.concatenate([table.coords_l0 for table in tables])
    np.testing.assert_array_equal(frame.bounds.to_numpy()[:, :2], corners)
    np.testing.assert_array_equal(frame.bounds.to_numpy()[:, 2:], corners + 128)
    words = np.concatenate([table.values("leiden") for table in tables])
    assert frame["leiden"].tolist() == words.tolist()


@pytest.mark.parametrize("kind", [str, Path])
def test_every_export_takes_text_and_paths(
    made: Path, tmp_path: Path, kind: type
) -> None:
    folder = kind(made / "results")
    assert ts.export_anndata(folder, kind(tmp_path / "t.h5ad"), features=SMALL) > 0
    assert ts.export_qupath(folder, kind(tmp_path / "q"), grid=SMALL) == 2
    out = kind(tmp_path / "trident")
    assert ts.export_peer(folder, out, "trident", features=features(SMALL)) == 2
    assert ts.export_peer(folder, kind(tmp_path / "png"), "png", features=LARGE) == 2
    imported = kind(tmp_path / "imported")
    slides = [made / "slides"]
    assert ts.import_peer(out, imported, "trident", slides=slides) == 2


def test_a_share_per_slide_can_be_the_target_of_a_label_table(
    with_clusters: Results, tmp_path: Path
) -> None:
    table = with_clusters.table()
    small = table[table["grid"] == SMALL].set_index("slide_id")
    for slide_id in with_clusters.slides:
        words = with_clusters.tiles(slide_id, SMALL).values("leiden")
        for name in NAMES:
            share = small.loc[slide_id, f"leiden_share_{name}"]
            assert share == pytest.approx((words == name).mean())
        mean = with_clusters.tiles(slide_id, SMALL).columns["distance"].mean()
        assert small.loc[slide_id, "distance_mean"] == pytest.approx(mean)
    target = "leiden_share_stroma 1"
    small.reset_index()[["slide_id", target]].to_csv(tmp_path / "l.csv", index=False)
    command = ["labels", str(tmp_path / "l.csv"), "--target", target]
    ended = CliRunner().invoke(build_app(["labels"]), command)
    assert ended.exit_code == 0, ended.output
    assert target in ended.output and "regression" in ended.output
