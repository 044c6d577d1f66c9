"""Tile graphs have PyTorch Geometric's layout, exact edges and clear errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from thinsection.errors import BudgetError, ConfigError, InvalidInputError
from thinsection.stages.leaves import parse_graph_spec
from thinsection.tiles.graph import nearest_blocks, tile_graph


def grid(width: int, height: int, step: int = 512) -> np.ndarray:
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack((x, y), axis=-1).reshape(-1, 2).astype(np.int64) * step


def test_eight_neighbours_of_an_inner_tile_are_the_ring_around_it() -> None:
    graph = tile_graph(grid(7, 5), k=8)
    centre = 2 * 7 + 3
    sources = graph.edge_index[0, graph.edge_index[1] == centre]
    assert sorted(sources) == sorted(
        centre + dy * 7 + dx
        for dy in (-1, 0, 1)
        for dx in (-1, 0, 1)
        if (dx, dy) != (0, 0)
    )
    assert graph.edge_index.dtype == np.int64 and graph.edge_index.shape == (2, 8 * 35)


def test_distances_are_in_um_with_the_axes_kept_apart() -> None:
    graph = tile_graph(
        np.array([[0, 0], [100, 0], [0, 100]]), k=1, slide_mpp=(0.5, 0.25)
    )
    assert graph.edge_index.tolist() == [[2, 0, 0], [0, 1, 2]]
    assert graph.distances.tolist() == [25.0, 50.0, 25.0]


@given(
    arrays(
        np.int64, st.tuples(st.integers(0, 30), st.just(2)), elements=st.integers(0, 12)
    ),
    st.floats(0.3, 6),
)
def test_a_radius_graph_holds_every_pair_within_it_and_no_other(
    coords, radius_um
) -> None:
    graph = tile_graph(coords, radius_um=radius_um, slide_mpp=0.5)
    distances = np.sqrt((((coords[:, None] - coords[None]) * 0.5) ** 2).sum(-1))
    expected = (distances <= radius_um) & ~np.eye(len(coords), dtype=bool)
    found = np.zeros_like(expected)
    found[tuple(graph.edge_index)] = True
    np.testing.assert_array_equal(found, expected)
    assert graph.edge_index.shape[1] == expected.sum()
    np.testing.assert_array_equal(graph.distances, distances[tuple(graph.edge_index)])


def test_edges_are_ordered_by_target_then_distance_then_source() -> None:
    coords = np.random.default_rng(0).integers(0, 40, (60, 2))
    for graph in (
        tile_graph(coords, k=5),
        tile_graph(coords, radius_um=9, slide_mpp=1.0),
    ):
        keys = np.lexsort((graph.edge_index[0], graph.distances, graph.edge_index[1]))
        np.testing.assert_array_equal(keys, np.arange(len(keys)))


def test_edges_stay_within_a_group() -> None:
    coords, group = grid(6, 6), np.arange(36) % 2
    for options in ({"k": 8}, {"radius_um": 900, "slide_mpp": 1.0}):
        source, target = tile_graph(coords, group=group, **options).edge_index
        assert len(source) and (group[source] == group[target]).all()


@pytest.mark.parametrize("count", [0, 1])
def test_a_slide_of_one_tile_or_none_has_no_edges(count: int) -> None:
    coords = np.zeros((count, 2), np.int64)
    for options in ({"k": 8}, {"radius_um": 10, "slide_mpp": 0.5}):
        graph = tile_graph(coords, **options)
        assert graph.edge_index.shape == (2, 0) and graph.distances.shape == (0,)


def test_few_tiles_get_fewer_edges_than_k() -> None:
    assert tile_graph(grid(3, 1), k=8).edge_index.shape == (2, 6)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("knn:8", {"k": 8}),
        (" radius : 100 ", {"radius_um": 100.0}),
        ("radius:62.5um", {"radius_um": 62.5}),
    ],
)
def test_graph_specs_are_read(text: str, spec: dict) -> None:
    assert parse_graph_spec(text) == spec
    assert tile_graph(grid(3, 3), slide_mpp=0.5, **spec).edge_index.shape[0] == 2


@pytest.mark.parametrize(
    "text", ["", "knn", "knn:0", "knn:2.5", "radius:-3", "delaunay:3", "knn:x"]
)
def test_other_graph_specs_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="graph must be 'knn:K'"):
        parse_graph_spec(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of k and radius_um"),
        ({"k": 3, "radius_um": 3}, "exactly one of k and radius_um"),
        ({"radius_um": 3}, "slide_mpp must be set with radius_um"),
        ({"radius_um": -1, "slide_mpp": 1}, "radius_um must be > 0, got -1"),
        ({"k": 0}, "k must be an int >= 1, got 0"),
        ({"k": 2, "slide_mpp": 0.0}, "slide_mpp must be > 0"),
        (
            {"k": 2, "group": np.zeros(3, int)},
            r"group must be of shape \(9,\), got \(3,\)",
        ),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tile_graph(grid(3, 3), **options)


def test_coordinates_must_be_integers_of_two_columns() -> None:
    with pytest.raises(
        InvalidInputError, match=r"coords_l0 must be int64 .* got float32 \(5, 3\)"
    ):
        tile_graph(np.zeros((5, 3), np.float32), k=2)


def test_a_radius_that_makes_too_many_edges_is_refused_before_they_are_made() -> None:
    with pytest.raises(BudgetError, match="got 400056 edges at 1000 µm"):
        tile_graph(
            grid(20, 40, 1)[:633], radius_um=1000, slide_mpp=1.0, budget_bytes=1 << 20
        )


@pytest.mark.parametrize("kind", ["ties", "floats", "one place"])
@pytest.mark.parametrize("k", [1, 6, 100])
def test_blocks_hold_the_nearest_points_of_every_pair(kind: str, k: int) -> None:
    rng = np.random.default_rng(3)
    points = {
        "ties": rng.integers(0, 6, (61, 2)).astype(float),
        "floats": rng.normal(size=(61, 2)),
        "one place": np.zeros((61, 2)),
    }[kind]
    differences = (points[:, None] - points) * (0.25, 0.5)
    lengths = np.sqrt((differences**2).sum(axis=2))
    np.fill_diagonal(lengths, np.inf)
    # a budget of a few rows, so that there are many blocks
    blocks = list(nearest_blocks(points, k=k, slide_mpp=(0.25, 0.5), budget_bytes=5000))
    assert len(blocks) > 10
    num_rows = 0
    for targets, rows, distances in blocks:
        assert targets.start == num_rows
        num_rows = targets.stop
        expected = np.argsort(lengths[targets], axis=1, kind="stable")[:, : min(k, 60)]
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(
            distances, np.take_along_axis(lengths[targets], expected, axis=1)
        )
    assert num_rows == 61


@pytest.mark.parametrize("number", [0, 1])
def test_one_point_or_none_has_no_blocks(number: int) -> None:
    assert list(nearest_blocks(np.zeros((number, 2)), k=3)) == []
    with pytest.raises(InvalidInputError, match="k must be an int >= 1, got 0"):
        next(nearest_blocks(np.zeros((5, 2)), k=0))
