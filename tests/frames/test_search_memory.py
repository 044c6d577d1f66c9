"""The search stays within its budget, and what it needs beyond grows no faster than the points."""

import pytest
import torch

from thinsection.frames import nearest_neighbors
from thinsection.frames.tree import tree_bytes
from thinsection.testing import run_and_measure
from thinsection.types import MIB


def points_of(num_points: int, impl: str, budget_bytes: int) -> torch.Tensor:
    nearest_neighbors(
        torch.rand(5000, 3), k=8, impl=impl
    )  # libraries and thread pools are there
    return torch.rand(num_points, 3)


def search(points: torch.Tensor, num_points: int, impl: str, budget_bytes: int) -> int:
    found = nearest_neighbors(points, k=8, impl=impl, budget_bytes=budget_bytes)
    return found.indices.numel()


@pytest.mark.check
@pytest.mark.parametrize(
    ("impl", "sizes"), [("blocks", (3000, 12000)), ("kdtree", (40_000, 160_000))]
)
def test_memory_beyond_the_result_stays_within_the_budget(
    impl: str, sizes: tuple
) -> None:
    budget = 32 * MIB
    growth = []
    for num_points in sizes:
        measured = run_and_measure(
            "tests.frames.test_search_memory",
            "search",
            setup="points_of",
            num_points=num_points,
            impl=impl,
            budget_bytes=budget,
        )
        result = num_points * 8 * (4 + 8)
        sorted_copy = num_points * (3 * 4 + 24)
        assert measured.growth_bytes <= budget + 2 * result + sorted_copy
        growth.append(measured.growth_bytes)
    per_point = 2 * 8 * (4 + 8) + (3 * 4 + 24) + tree_bytes(1, 3)
    assert growth[1] - growth[0] <= (sizes[1] - sizes[0]) * per_point + 4 * MIB
