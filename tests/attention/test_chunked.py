"""Sums over blocks: their logarithms, their units, and the rows that they are asked about."""

import math

import pytest
import torch

from thinsection.attention import chunked
from thinsection.attention.blocks import BlockPlan
from thinsection.attention.checks import checked_items
from thinsection.attention.chunked import (
    MAX_BOUND,
    RowSums,
    ScoreBlock,
    forward_chunked,
)
from thinsection.attention.reach import Reach
from thinsection.attention.reference import AttentionItem

HEADS = 2
SLOPES = torch.tensor([0.5, 0.03], dtype=torch.float64)
PLAN = BlockPlan(queries=7, keys=5, working_bytes=0)


def item_of(logit_scale: float) -> AttentionItem:
    """40 cells of a row behind one prefix token, float64."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, HEADS, 41, 4)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    cells = torch.stack([torch.arange(40), torch.zeros(40, dtype=torch.int64)], 1)
    return checked_items(q * logit_scale, k, v, cells, SLOPES)[0].item


@pytest.mark.parametrize("logit_scale", [1.0, 200.0])
def test_log_sums_are_those_of_all_scores_at_once(logit_scale: float) -> None:
    """Below the score bound without a running maximum, above it with one."""
    item = item_of(logit_scale)
    whole = [slice(0, 41)]
    is_bounded = Reach(item, whole, whole).score_bound <= MAX_BOUND
    assert is_bounded == (logit_scale == 1.0)
    places = torch.arange(40, dtype=torch.float64)
    distances = torch.zeros(41, 41, dtype=torch.float64)
    distances[1:, 1:] = (places[:, None] - places).abs()
    scores = 0.5 * item.q @ item.k.mT - SLOPES[:, None, None] * distances
    _, log_sums = forward_chunked(item, PLAN)
    expected = scores.logsumexp(2) / math.log(2)
    torch.testing.assert_close(log_sums, expected, rtol=1e-13, atol=1e-12)


def flat_block(num_queries: int, num_keys: int) -> ScoreBlock:
    """A block without distances."""
    shape = (num_queries, num_keys)
    return ScoreBlock(
        distances=torch.zeros(shape, dtype=torch.float64),
        scores=torch.empty(shape, dtype=torch.float64),
        low_precision=torch.empty(0),
        is_flat=True,
    )


@pytest.mark.parametrize("bounded", [True, False])
def test_the_least_sum_is_that_of_the_smallest_row(bounded: bool) -> None:
    """Two keys of base-2 scores 3 and 4 times the query: rows sum to 2^3 + 2^4 and 2^-3 + 2^-4."""
    q = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    k = torch.tensor([[3.0], [4.0]], dtype=torch.float64)
    sums = RowSums(q, torch.zeros_like(q), bounded=bounded)
    sums.add(flat_block(2, 2), k, k, slope=0.0, clamp=False)
    assert sums.least() == pytest.approx(math.log2(2**-3 + 2**-4))


def test_the_top_of_rows_rises_to_their_largest_score_and_never_falls() -> None:
    q = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    v = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    sums = RowSums(q, torch.zeros_like(q), bounded=False)
    for scores in ([3.0, 5.0], [-7.0, 4.0]):
        k = torch.tensor(scores, dtype=torch.float64)[:, None]
        sums.add(flat_block(2, 2), k, v, slope=0.0, clamp=False)
    assert sums.top.tolist() == [5.0, 7.0]
    first = 2.0**-2 + 1 + 2.0**-12 + 2.0**-1  # of 3, 5, -7, 4 in units of 2^5
    second = 2.0**-10 + 2.0**-12 + 1 + 2.0**-11  # of -3, -5, 7, -4 in units of 2^7
    assert sums.weights.tolist() == [first, second]
    assert sums.values[:, 0].tolist() == [first, second]  # every value is 1


def test_bounded_sums_stay_in_units_of_1() -> None:
    q = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    k = torch.tensor([[3.0], [4.0]], dtype=torch.float64)
    sums = RowSums(q, torch.zeros_like(q), bounded=True)
    sums.add(flat_block(2, 2), k, k, slope=0.0, clamp=False)
    assert sums.top.tolist() == [0.0, 0.0]
    assert sums.weights.tolist() == [24.0, 0.1875]
    assert sums.values[:, 0].tolist() == [3 * 8 + 4 * 16, 3 / 8 + 4 / 16]


@pytest.mark.parametrize("clamp", [True, False])
def test_scores_below_the_smallest_normal_number_are_raised_where_asked(
    clamp: bool,
) -> None:
    q = torch.tensor([[1.0]], dtype=torch.float64)
    k = torch.tensor([[-500.0]], dtype=torch.float64)
    sums = RowSums(q, torch.zeros_like(q), bounded=True)
    sums.add(flat_block(1, 1), k, k, slope=0.0, clamp=clamp)
    assert sums.least() == (-126.0 if clamp else -500.0)


def test_a_distance_lowers_a_score_by_the_slope() -> None:
    block = ScoreBlock(
        distances=torch.tensor([[0.0, 8.0]], dtype=torch.float64),
        scores=torch.empty(1, 2, dtype=torch.float64),
        low_precision=torch.empty(0),
        is_flat=False,
    )
    q = torch.tensor([[1.0]], dtype=torch.float64)
    k = torch.tensor([[2.0], [2.0]], dtype=torch.float64)
    sums = RowSums(q, torch.zeros_like(q), bounded=True)
    sums.add(block, k, k, slope=0.5, clamp=False)
    assert sums.weights.tolist() == [2.0**2 + 2.0**-2]


def test_bfloat16_is_converted_where_the_cpu_does_not_multiply_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is then that of float32 on the same rounded input, rounded once."""
    cells = torch.stack([torch.arange(40), torch.zeros(40, dtype=torch.int64)], 1)
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, HEADS, 41, 4, generator=generator).bfloat16()
    low = checked_items(q, k, v, cells, SLOPES)[0].item
    high = checked_items(q.float(), k.float(), v.float(), cells, SLOPES)[0].item
    expected = forward_chunked(high, PLAN)[0].bfloat16()
    for has_bf16 in (False, True):
        monkeypatch.setattr(chunked, "cpu_has_bf16", lambda has=has_bf16: has)
        out, _ = forward_chunked(low, PLAN)
        assert torch.equal(out, expected) == (not has_bf16)
