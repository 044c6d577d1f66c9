"""Layers say what the results say; similar tiles are those of a search over all."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import PCA
from tests.view.conftest import HOSTILE, OWN_CLASS, A, B

from thinsection.errors import InvalidInputError, StoreError, ThinsectionError
from thinsection.results.folder import Results, open_results
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.view.layers import (
    Layer,
    component_scores,
    layers_of,
    outline_layers,
    tile_clusters,
)
from thinsection.view.similar import similar_tiles as similar

BUDGET = 128 << 20


@pytest.fixture(scope="module")
def layers(view_results: Results) -> dict[tuple[str, str], Layer]:
    found = layers_of(view_results, A, 3, BUDGET)
    return {(layer.group, layer.name): layer for layer in found}


def unpacked(layer: Layer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Head, corners, values, as the browser reads them."""
    data = layer.read()
    head = np.frombuffer(data, "<u4", 5)
    coords = np.frombuffer(data, "<i4", 2 * head[0], 20).reshape(-1, 2)
    kind = {"values": "<f4", "edges": "<i4"}.get(layer.kind, "u1")
    return head, coords, np.frombuffer(data, kind, offset=20 + 8 * int(head[0]))


def test_every_table_graph_mask_and_embedding_is_a_layer(
    view_results: Results, layers: dict[Any, Layer]
) -> None:
    (grid,), (features,) = view_results.grids, view_results.features
    kinds = {key: layer.kind for key, layer in layers.items()}
    assert kinds["qc_auto", "Usable tissue"] == "outlines"
    assert kinds[grid, "tiles"] == "grid"
    assert kinds[grid, "graph_knn-4"] == "edges"
    assert kinds[f"{grid}/tiles", "tissue_fraction"] == "values"
    assert kinds[f"{grid}/columns", OWN_CLASS] == "categories"
    assert kinds[f"{grid}/measures", "px_focus"] == "values"
    heatmap = f"heatmap_m:{HOSTILE.replace('/', '')}"
    assert kinds[f"{grid}/heatmap_m", heatmap] == "values"
    assert kinds[features, "principal components"] == "colours"
    assert kinds[features, "3 clusters"] == "classes"


def test_values_are_those_of_the_tables(
    view_results: Results, layers: dict[Any, Layer]
) -> None:
    tiles = view_results.tiles(A)
    for (_, name), layer in layers.items():
        if layer.kind != "values":
            continue
        head, coords, values = unpacked(layer)
        assert head[1:].tolist()[:2] == [256, 256]
        np.testing.assert_array_equal(coords, tiles.coords_l0)
        np.testing.assert_array_equal(values, tiles.columns[name].astype("f4"))


def test_edges_are_those_of_the_graph_each_pair_once(
    view_results: Results, layers: dict[Any, Layer]
) -> None:
    import h5py

    (grid,) = view_results.grids
    _, _, values = unpacked(layers[grid, "graph_knn-4"])
    with h5py.File(view_results.file(A, f"{grid}/graph_knn-4")) as file:
        edges = np.asarray(file["edge_index"])
    pairs = {(min(e), max(e)) for e in edges.T.tolist()}
    assert {tuple(pair) for pair in values.reshape(-1, 2).tolist()} <= pairs
    assert len(values) // 2 == (edges[0] < edges[1]).sum() > 0


def test_components_are_those_of_scikit_learn_and_clusters_are_seeded(
    view_results: Results, layers: dict[Any, Layer]
) -> None:
    (features,) = view_results.features
    embeddings = view_results.tile_embeddings(A).features
    want = PCA(3, svd_solver="full").fit_transform(embeddings.astype(np.float64))
    scores = component_scores(view_results.embedding_rows(A), BUDGET)
    for n in range(3):
        assert abs(np.corrcoef(scores[:, n], want[:, n])[0, 1]) > 0.999
    _, _, colours = unpacked(layers[features, "principal components"])
    colours = colours.reshape(-1, 3)
    assert (colours.min(axis=0) == 0).all() and (colours.max(axis=0) == 255).all()
    _, _, classes = unpacked(layers[features, "3 clusters"])
    counts = np.bincount(classes)
    assert len(counts) <= 3 and (np.diff(counts) <= 0).all()
    np.testing.assert_array_equal(classes, unpacked(layers[features, "3 clusters"])[2])


def test_clusters_find_what_is_apart() -> None:
    rng = np.random.default_rng(7)
    truth = rng.permutation(np.repeat([0, 1, 2], [60, 30, 10]))
    scores = (truth[:, None] * 10 + rng.normal(size=(100, 4))).astype(np.float32)
    np.testing.assert_array_equal(tile_clusters(scores, 3), truth)


@pytest.mark.parametrize("num_tiles", [0, 1, 2])
def test_a_slide_of_few_tiles_has_layers(tmp_path: Any, num_tiles: int) -> None:
    with TilesWriter(tmp_path / "e.h5", dim=5, attributes={}) as writer:
        corners = np.arange(2 * num_tiles, dtype=np.int64).reshape(-1, 2)
        writer.append(corners, np.ones((num_tiles, 5), dtype=np.float32))
    assert component_scores(EmbeddingRows(tmp_path / "e.h5"), BUDGET).shape == (
        num_tiles,
        5,
    )


def test_outlines_are_the_geometries_of_each_class(
    annotations: Any, tmp_path: Any
) -> None:
    (layer,) = outline_layers(annotations / f"{A}.geojson", "annotations")
    assert (layer.name, layer.color) == (HOSTILE, "#ff0000")
    assert [s["type"] for s in json.loads(layer.read())] == [
        "Polygon",
        "LineString",
        "MultiPoint",
    ]
    (tmp_path / "bad.geojson").write_text("[1]")
    with pytest.raises(StoreError, match="outlines must be GeoJSON"):
        list(outline_layers(tmp_path / "bad.geojson", ""))


def brute_force(
    results: Results, slide_id: str, row: int
) -> list[tuple[float, str, int]]:
    """Every tile with its cosine in float64, the most similar first."""
    found = []
    query = results.tile_embeddings(slide_id).features[row].astype(np.float64)
    for name in results.slides:
        for n, other in enumerate(
            results.tile_embeddings(name).features.astype(np.float64)
        ):
            cosine = query @ other / np.linalg.norm(query) / np.linalg.norm(other)
            found.append((-cosine, name, n))
    return [(-cosine, name, n) for cosine, name, n in sorted(found)]


def test_similar_tiles_are_those_of_a_search_over_all(view_results: Results) -> None:
    (features,) = view_results.features
    tiles = view_results.tiles(A)
    for row in (0, len(tiles.coords_l0) // 2):
        x, y = (tiles.coords_l0[row] + 100).tolist()
        *_, last = similar(view_results, A, features, (x, y), count=5, budget=BUDGET)
        assert (last["tile"]["row"], last["done"], last["of"]) == (row, 2, 2)
        all_of = brute_force(view_results, A, row)
        for kind, own in (("slide", True), ("cohort", False)):
            every = [
                t for t in all_of if (t[1] == A) == own and (t[1], t[2]) != (A, row)
            ]
            want = every[:5]
            assert [(t["slide"], t["row"]) for t in last[kind]] == [t[1:] for t in want]
            np.testing.assert_allclose(
                [t["similarity"] for t in last[kind]], [t[0] for t in want]
            )
    with pytest.raises(InvalidInputError, match="point must be in a tile"):
        next(similar(view_results, A, features, (-5, 0), count=5, budget=BUDGET))


def test_outlines_nest_as_annotations_do_and_an_object_without_a_place_is_none(
    tmp_path: Path,
) -> None:
    square = {"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 0]]]}
    drawn = {"type": "Feature", "geometry": square, "properties": None}
    placeless = {"type": "Feature", "geometry": None, "properties": {"name": "x"}}
    inner = {"type": "FeatureCollection", "features": [drawn, placeless]}
    documents = (
        {"type": "FeatureCollection", "features": [placeless, inner, drawn]},
        [drawn, inner],
        square,
    )
    for document, number in zip(documents, (2, 2, 1), strict=True):
        path = tmp_path / "a.geojson"
        path.write_text(json.dumps(document))
        (layer,) = outline_layers(path, "annotations")
        assert json.loads(layer.read()) == [square] * number
    derived = {"classification": {"names": ["a", "b"], "color": [1, 2, 3]}}
    words = {"classification": "c"}
    path.write_text(
        json.dumps([{**drawn, "properties": one} for one in (derived, words)])
    )
    layers = [(one.name, one.color) for one in outline_layers(path, "annotations")]
    assert layers == [("a: b", "#010203"), ("c", "#5a5a5a")]
    path.write_text('[{"type": "FeatureCollection", "features": 7}]')
    with pytest.raises(ThinsectionError, match="list of features"):
        list(outline_layers(path, "annotations"))


def test_a_damaged_slide_is_left_out_of_a_search_and_the_others_are_found(
    view_results: Results, tmp_path: Path
) -> None:
    """An error in the middle would cut off the answer that the browser is reading."""
    out = tmp_path / "results"
    shutil.copytree(view_results.folder, out)
    (features,) = view_results.features
    path = out / features / f"{B}.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)
    x, y = (view_results.tiles(A).coords_l0[0] + 100).tolist()
    place = {"point_l0": (x, y), "count": 5, "budget": BUDGET}
    *_, whole = similar(view_results, A, features, **place)
    *_, last = similar(open_results(out), A, features, **place)
    assert (last["done"], last["cohort"]) == (2, [])
    assert last["slide"] == whole["slide"]
    (reason,) = last["left_out"].values()
    assert [*last["left_out"]] == [B] and "b.h5" in reason
    assert whole["left_out"] == {}
