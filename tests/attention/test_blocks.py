"""Blocks cover every token once, and their sizes and bytes are exactly what a budget allows."""

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thinsection.attention.blocks import (
    BlockPlan,
    blocks_of,
    plan_blocks,
    working_bytes,
)
from thinsection.attention.checks import checked_items
from thinsection.attention.chunked import forward_chunked
from thinsection.attention.gradient import gradients
from thinsection.attention.reference import AttentionItem, alibi_slopes
from thinsection.errors import BudgetError
from thinsection.types import MIB

HEADS = 2
DIM = 16
# bytes of blocks of (queries, keys), worked out by hand for 2 heads of 16 channels:
# 8 (3 queries keys + 2 queries (3 16 + 4) + 4 keys 16)
BYTES = {
    (1024, 512): 13_697_024,
    (512, 512): 6_979_584,
    (256, 512): 3_620_864,
    (256, 256): 1_916_928,
    (128, 256): 1_024_000,
    (128, 128): 565_248,
    (64, 128): 315_392,
    (64, 64): 184_320,
    (32, 64): 108_544,
    (32, 32): 67_584,
    (16, 32): 41_984,
    (16, 16): 27_648,
}


def q_of(tokens: int, *, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    """q [H, T, D] without memory of its own."""
    return torch.zeros(1).expand(heads, tokens, dim)


def test_blocks_keep_prefix_tokens_apart_and_cover_all() -> None:
    assert blocks_of(5, 3) == [slice(0, 3), slice(3, 5)]
    assert blocks_of(6, 3) == [slice(0, 3), slice(3, 6)]
    assert blocks_of(5, 3, 1) == [slice(0, 1), slice(1, 4), slice(4, 5)]
    assert blocks_of(5, 3, 5) == [slice(0, 3), slice(3, 5)]
    assert blocks_of(5, 3, 4) == [slice(0, 3), slice(3, 4), slice(4, 5)]
    assert blocks_of(0, 3) == []


@pytest.mark.parametrize("size", BYTES)
def test_the_bytes_of_blocks_are_those_worked_out_by_hand(
    size: tuple[int, int],
) -> None:
    assert working_bytes(HEADS, DIM, *size) == BYTES[size]


def test_each_byte_too_little_halves_the_longer_side() -> None:
    q = q_of(60_000)
    sizes = list(BYTES)
    for size, next_size in itertools.pairwise(sizes):
        plan = plan_blocks(q, budget_bytes=BYTES[size])
        assert plan == BlockPlan(
            queries=size[0], keys=size[1], working_bytes=BYTES[size]
        )
        smaller = plan_blocks(q, budget_bytes=BYTES[size] - 1)
        assert (smaller.queries, smaller.keys) == next_size


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (
            100,
            [(100, 100), (50, 100), (50, 50), (25, 50), (25, 25), (16, 25), (16, 16)],
        ),
        # half of an odd number is rounded down
        (70, [(70, 70), (35, 70), (35, 35), (17, 35), (17, 17), (16, 17), (16, 16)]),
        (20, [(20, 20), (16, 20), (16, 16)]),
        (17, [(17, 17), (16, 17), (16, 16)]),
        (16, [(16, 16)]),
        (5, [(5, 5)]),
        (1, [(1, 1)]),
    ],
)
def test_blocks_of_few_tokens_are_no_longer_than_these(
    tokens: int, sizes: list[tuple[int, int]]
) -> None:
    q = q_of(tokens)
    budget_bytes = 64 * MIB
    for size in sizes:
        plan = plan_blocks(q, budget_bytes=budget_bytes)
        assert (plan.queries, plan.keys) == size
        assert plan.working_bytes == working_bytes(HEADS, DIM, *size)
        budget_bytes = plan.working_bytes - 1
    with pytest.raises(
        BudgetError, match=r"'chunked' needs .* for its smallest blocks"
    ):
        plan_blocks(q, budget_bytes=budget_bytes)


def test_one_byte_less_than_the_smallest_blocks_is_refused_with_both_sizes() -> None:
    q = q_of(60_000)
    least = plan_blocks(q, budget_bytes=27_648)
    assert (least.queries, least.keys) == (16, 16)
    with pytest.raises(
        BudgetError,
        match=r"^attention 'chunked' needs 27\.0 KiB for its smallest blocks, "
        r"the budget is 27\.0 KiB$",
    ):
        plan_blocks(q, budget_bytes=27_647)


def test_a_gpu_gets_larger_blocks_than_a_cpu() -> None:
    on_cpu = plan_blocks(q_of(62_001, heads=12, dim=64), budget_bytes=512 * MIB)
    assert (on_cpu.queries, on_cpu.keys) == (1024, 512)
    assert on_cpu.working_bytes == 32_899_072
    elsewhere = torch.empty(1, 12, 62_001, 64, device="meta")
    plan = plan_blocks(elsewhere, budget_bytes=512 * MIB)
    assert (plan.queries, plan.keys) == (2048, 4096)
    assert plan.working_bytes == 248_250_368


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plans_count_float64_whatever_the_dtype(dtype: torch.dtype) -> None:
    q = torch.zeros(1, dtype=dtype).expand(3, HEADS, 60_000, DIM)
    plan = plan_blocks(q, budget_bytes=2_000_000)
    assert (plan.queries, plan.keys) == (256, 256)
    assert plan.working_bytes == 1_916_928


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Highest sum of the bytes of tensors that operations made and that are still alive."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # a view of an input comes out of an operation too, but is no new storage
        self._sizes = {x.untyped_storage()._cdata: 0 for x in inputs}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, key, None)
        self.peak = max(self.peak, sum(self._sizes.values()))


def forward_peak(item: AttentionItem, plan: BlockPlan) -> int:
    with LiveBytes([item.q, item.k, item.v, item.cells]) as live:
        forward_chunked(item, plan)
    return live.peak


def backward_peak(item: AttentionItem, plan: BlockPlan) -> int:
    out, log_sums = forward_chunked(item, plan)
    d_out = torch.ones_like(out)
    inputs = [item.q, item.k, item.v, item.cells, out, log_sums, d_out]
    with LiveBytes(inputs) as live:
        gradients(item, out, log_sums, d_out, plan)
    return live.peak


def item_of(tokens: int, dtype: torch.dtype, logit_scale: float) -> AttentionItem:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(3, 1, HEADS, tokens, DIM, generator=generator).to(dtype)
    places = torch.arange(tokens)
    cells = torch.stack([places // 30, places % 30], 1)
    slopes = alibi_slopes(HEADS)
    items = checked_items(q * logit_scale, k, v, cells, slopes, num_prefix_tokens=0)
    return items[0].item


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit_scale", [1.0, 40.0])
def test_measured_buffers_keep_within_the_plan_at_n_and_at_4n_tokens(
    dtype: torch.dtype, logit_scale: float
) -> None:
    """Beside the plan are arrays of T rows, as the docstrings say, and the bounds of `Reach`."""
    plan = BlockPlan(queries=64, keys=64, working_bytes=BYTES[64, 64])
    backward_bytes = []
    for tokens in (300, 1_200):
        item = item_of(tokens, dtype, logit_scale)
        math_bytes = item.math_dtype.itemsize
        num_blocks = -(-tokens // 64)
        bounds = 8 * (9 * num_blocks**2 + 12 * HEADS * num_blocks)
        outputs = item.q.nbytes + HEADS * tokens * math_bytes
        forward = forward_peak(item, plan) - outputs - bounds
        accumulators = 3 * HEADS * tokens * DIM * math_bytes
        converted = 0 if dtype == item.math_dtype else 3 * item.q.nbytes
        backward = backward_peak(item, plan) - accumulators - converted
        assert forward <= plan.working_bytes
        assert backward <= plan.working_bytes
        backward_bytes.append(backward)
    if dtype == torch.float64:
        # the formula counts every buffer, and no more
        assert backward_bytes[0] == backward_bytes[1] > 0.95 * plan.working_bytes
