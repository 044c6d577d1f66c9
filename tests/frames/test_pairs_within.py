"""Every pair nearer than the radius is in one block, and blocks keep to the budget."""

import pytest
import torch

from thinsection.frames.tree import pairs_within


@pytest.mark.parametrize("budget_bytes", [1, 20_000, 1 << 24])
def test_all_pairs_within_the_radius_are_found_once(budget_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    points, queries = (torch.rand(n, 3, generator=generator) * 9 for n in (190, 70))
    blocks = list(pairs_within(points, queries, 2.0, budget_bytes=budget_bytes))
    query, point = (torch.cat(ends) for ends in zip(*blocks, strict=True))
    assert len(set(zip(query.tolist(), point.tolist(), strict=True))) == len(query)
    near = torch.zeros(70, 190, dtype=torch.bool)
    near[query, point] = True
    exact = "donot_use_mm_for_euclid_dist"
    assert torch.equal(near, torch.cdist(queries, points, compute_mode=exact) < 2)
    most = max(int(near.sum(1).max()), budget_bytes // 160)
    assert all(len(ends[0]) <= most for ends in blocks)
    assert len(blocks) == {1: 70, 1 << 24: 1}.get(budget_bytes, len(blocks))
