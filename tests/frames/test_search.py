"""Every implementation gives the specification's answer to the bit, and errors say what to do."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree

from thinsection.errors import BudgetError, InvalidInputError
from thinsection.frames import Neighbors, explain, nearest_neighbors
from thinsection.frames.blocks import least_block_bytes
from thinsection.frames.tree import least_tree_bytes

FAST = ("blocks", "kdtree")
ROOM = 1 << 30


def assert_equal(found: Neighbors, expected: Neighbors) -> None:
    assert torch.equal(
        torch.as_tensor(found.indices), torch.as_tensor(expected.indices)
    )
    assert torch.equal(
        torch.as_tensor(found.distances), torch.as_tensor(expected.distances)
    )


def distances_from(points: np.ndarray, i: int) -> np.ndarray:
    """Of one point to all others; the root is torch's, which differs from numpy's by an ulp."""
    row = (torch.from_numpy(((points - points[i]) ** 2).sum(axis=1)) ** 0.5).numpy()
    row[i] = np.inf
    return row


def brute_force(points: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Independent of the package: float64 differences, self left out, ties to the lower index."""
    distances, indices = [], []
    for i in range(len(points)):
        row = distances_from(points, i)
        order = np.argsort(row, kind="stable")[:k]
        distances.append(row[order])
        indices.append(order)
    return np.array(distances), np.array(indices)


@st.composite
def searches(draw: st.DrawFn) -> tuple[torch.Tensor, dict]:
    """Batches of few distinct coordinates, so that ties and duplicates abound."""
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 3)]))
    num_points = draw(st.integers(1, 40))
    dims = draw(st.sampled_from([2, 3]))
    dtype = draw(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])
    )
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    distinct = draw(st.sampled_from([1, 2, 5, 1000]))
    points = torch.randint(0, distinct, (*batch, num_points, dims), generator=generator)
    points = points.to(dtype) if dtype == torch.int64 else (points * 0.37).to(dtype)
    options: dict = {"k": draw(st.integers(1, num_points))}
    if draw(st.booleans()):
        options["mask"] = torch.rand((*batch, num_points), generator=generator) > 0.3
    if draw(st.booleans()):
        options["group"] = torch.randint(
            -1, 3, (*batch, num_points), generator=generator
        )
    return points, options


@given(searches())
@settings(max_examples=150, deadline=None)
def test_every_implementation_equals_the_specification(
    search: tuple[torch.Tensor, dict],
) -> None:
    points, options = search
    expected = nearest_neighbors(points, **options, impl="reference", budget_bytes=ROOM)
    for impl in FAST:
        assert_equal(nearest_neighbors(points, **options, impl=impl), expected)


@given(searches())
@settings(max_examples=50, deadline=None)
def test_the_specification_equals_a_loop_over_rows(
    search: tuple[torch.Tensor, dict],
) -> None:
    points, options = search
    points = points.reshape(-1, *points.shape[-2:])[0].double().numpy()
    k = options["k"]
    found = nearest_neighbors(points, k=k, impl="reference", budget_bytes=ROOM)
    distances, indices = brute_force(points, k)
    real = np.isfinite(distances)
    np.testing.assert_array_equal(found.distances, distances)
    np.testing.assert_array_equal(found.indices, np.where(real, indices, -1))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("impl", ["auto", "kdtree"])
def test_it_agrees_with_scipy_on_1e5_points(dims: int, impl: str) -> None:
    points = np.random.default_rng(1).normal(size=(100_000, dims))
    found = nearest_neighbors(points, k=5, impl=impl)
    distances, indices = cKDTree(points).query(points, k=6)
    np.testing.assert_array_equal(found.indices, indices[:, 1:])
    np.testing.assert_allclose(found.distances, distances[:, 1:], rtol=1e-12)


def test_it_agrees_with_float64_brute_force_on_sampled_rows_of_1e5_points() -> None:
    rng = np.random.default_rng(2)
    points = rng.integers(0, 400, size=(100_000, 3)).astype(
        np.float64
    )  # ties and duplicates
    found = nearest_neighbors(points, k=8)
    for i in rng.integers(0, len(points), 40):
        row = distances_from(points, i)
        order = np.argsort(row, kind="stable")[:8]
        np.testing.assert_array_equal(found.indices[i], order)
        np.testing.assert_array_equal(found.distances[i], row[order])


def test_the_block_size_does_not_change_the_result() -> None:
    points = torch.randint(0, 150, (5000, 2)).float()
    least = least_block_bytes(points)
    expected = nearest_neighbors(points, k=9, impl="blocks")
    for budget in (least, 3 * least + 1):
        found = nearest_neighbors(points, k=9, impl="blocks", budget_bytes=budget)
        assert_equal(found, expected)
    small_tree = least_tree_bytes(points, 9)
    found = nearest_neighbors(points, k=9, impl="kdtree", budget_bytes=small_tree)
    assert_equal(found, expected)


def test_rows_with_more_ties_than_the_tree_lists_are_still_exact() -> None:
    points = torch.zeros(3000, 3)
    points[::2] = 1.0
    least = least_tree_bytes(points, 4)
    found = nearest_neighbors(points, k=4, impl="kdtree", budget_bytes=least)
    assert found.indices[0].tolist() == [2, 4, 6, 8]
    assert found.indices[7].tolist() == [1, 3, 5, 9]
    assert bool((found.distances == 0).all())


def test_separate_queries_keep_points_at_distance_zero() -> None:
    points = torch.rand(50, 3)
    for impl in (*FAST, "reference"):
        found = nearest_neighbors(points, points[10:20], k=2, impl=impl)
        assert found.indices[:, 0].tolist() == list(range(10, 20))
        assert bool((found.distances[:, 0] == 0).all())


def test_queries_find_only_points_of_their_own_group() -> None:
    points, queries = np.random.default_rng(3).random((2, 60, 2))
    ids, wanted = np.arange(60) % 3, np.full(60, 2)
    for impl in (*FAST, "reference"):
        found = nearest_neighbors(points, queries, k=25, group=(ids, wanted), impl=impl)
        assert set(found.indices.ravel()) == {-1, *np.flatnonzero(ids == 2)}
        assert np.isinf(found.distances[:, 20:]).all()


def test_fewer_than_k_are_marked_and_absent_points_have_none() -> None:
    points = np.array([[0.0, 0], [1, 0], [np.nan, 0], [9, 9]])
    found = nearest_neighbors(
        points, k=3, mask=np.array([1, 1, 0, 1]), group=np.array([5, 5, 5, 6])
    )
    assert found.indices.tolist() == [[1, -1, -1], [0, -1, -1], [-1] * 3, [-1] * 3]
    assert found.distances[0].tolist() == [1.0, np.inf, np.inf]


def test_the_kind_and_dtype_of_the_points_come_back() -> None:
    as_numpy = nearest_neighbors(np.zeros((3, 2), np.float32), k=1)
    assert (
        isinstance(as_numpy.distances, np.ndarray)
        and as_numpy.distances.dtype == np.float32
    )
    assert (
        nearest_neighbors(torch.zeros(3, 2).half(), k=1).distances.dtype
        == torch.float32
    )
    assert (
        nearest_neighbors(np.zeros((3, 2), np.int64), k=1).distances.dtype == np.float64
    )
    read_only = np.zeros((3, 2))
    read_only.setflags(write=False)
    assert nearest_neighbors(read_only, k=1).indices.dtype == np.int64


def test_no_points_at_all_in_a_group_is_no_error() -> None:
    found = nearest_neighbors(np.zeros((2, 2)), k=1, mask=np.zeros(2, bool))
    assert found.indices.tolist() == [[-1], [-1]]


def test_far_coordinates_keep_their_digits() -> None:
    points = np.array([[1e8, 0.0], [1e8 + 1e-3, 0.0], [1e8 + 3e-3, 0.0]])
    for impl in (*FAST, "reference"):
        found = nearest_neighbors(points, k=2, impl=impl)
        assert found.indices.tolist() == [[1, 2], [0, 2], [1, 0]]


@pytest.mark.parametrize("impl", ["auto", *FAST, "reference"])
def test_a_k_above_the_number_of_points_is_filled_with_inf_and_minus_1(
    impl: str,
) -> None:
    corners = np.array([[0, 0], [128, 0], [0, 256], [128, 256]])
    found = nearest_neighbors(corners, k=8, impl=impl)
    assert found.indices[:, :3].tolist() == [[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]]
    assert found.distances[:, 0].tolist() == [128] * 4
    assert (found.indices[:, 3:] == -1).all() and np.isinf(found.distances[:, 3:]).all()
    with_queries = nearest_neighbors(
        torch.from_numpy(corners), torch.from_numpy(corners[:1] + 1), k=5, impl=impl
    )
    assert with_queries.indices.tolist() == [[0, 1, 2, 3, -1]]
    for num_points in (0, 1):
        few = nearest_neighbors(np.zeros((num_points, 2)), k=2, impl=impl)
        assert few.indices.tolist() == [[-1, -1]] * num_points
    batch = np.stack([corners, corners * 2])
    pieces = nearest_neighbors(
        batch, k=6, group=np.array([[0, 0, 1, 1], [0, 1, 1, 1]]), impl=impl
    )
    assert (pieces.indices >= 0).sum(axis=2).tolist() == [[1, 1, 1, 1], [0, 2, 2, 2]]


def test_auto_says_what_it_takes_and_why() -> None:
    rng = np.random.default_rng(0)
    assert explain(rng.random((50, 2)), k=3).impl == "blocks"
    many = explain(rng.random((50_000, 2)), k=3)
    assert many.impl == "kdtree" and "2500000000 pairs" in many.reason
    tight = explain(rng.random((50_000, 2)), k=3, budget_bytes=1 << 20)
    assert tight.impl == "blocks" and "budget" in tight.reason
    assert explain(rng.random((50, 2)), k=3, impl="kdtree").reason == "asked for"


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        (np.zeros((4, 2)), {"k": 0}, "k must be an int >= 1, got 0"),
        (np.zeros((4, 2)), {"k": True}, "k must be"),
        (
            np.zeros((4, 4)),
            {"k": 1},
            r"points must be of shape .* got float64 \(4, 4\)",
        ),
        (
            np.full((4, 2), np.nan),
            {"k": 1},
            r"points must be finite .* got \[nan, nan\] at \(0,\)",
        ),
        (np.full((4, 2), 1e200), {"k": 1}, "points must be finite and below"),
        (
            np.zeros((4, 2)),
            {"k": 1, "mask": np.ones(3)},
            r"mask must be of shape \(4,\), got \(3,\)",
        ),
        (
            np.zeros((4, 2)),
            {"k": 1, "group": np.ones(4)},
            "group must be of integer ids, got",
        ),
        (np.zeros((4, 2)), {"k": 1, "impl": "kdtre"}, "did you mean 'kdtree'"),
        (
            np.zeros((4, 2)),
            {"k": 1, "queries": np.zeros((4, 3))},
            "queries must have the batch",
        ),
        (
            np.zeros((4, 2)),
            {"k": 1, "queries": np.zeros((4, 2)), "group": np.ones(4, int)},
            "group must be a pair",
        ),
        (
            [[0, 0]],
            {"k": 1},
            "points must be a NumPy array or a torch tensor, got list",
        ),
        (np.zeros((4, 2), "S1"), {"k": 1}, "points must be of numbers"),
        (np.zeros((4, 2), complex), {"k": 1}, "points must be of numbers"),
    ],
)
def test_bad_arguments_are_named(
    points: np.ndarray, options: dict, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        nearest_neighbors(points, **options)


@pytest.mark.parametrize("impl", ["reference", "blocks", "kdtree"])
def test_a_budget_that_cannot_hold_the_search_is_refused(impl: str) -> None:
    with pytest.raises(BudgetError, match="budget"):
        nearest_neighbors(np.random.rand(5000, 3), k=2, impl=impl, budget_bytes=10_000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_answer_of_the_cpu() -> None:
    points = torch.randint(0, 50, (3, 3000, 3)).float()
    group = torch.randint(0, 4, (3, 3000))
    found = nearest_neighbors(points.cuda(), k=7, group=group.cuda())
    expected = nearest_neighbors(points, k=7, group=group)
    assert_equal(Neighbors(found.distances.cpu(), found.indices.cpu()), expected)
