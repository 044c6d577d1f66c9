"""Key blocks are left out only where that changes nothing but rounding."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thinsection.attention import alibi2d_attention
from thinsection.attention.blocks import BlockPlan, blocks_of
from thinsection.attention.checks import checked_items
from thinsection.attention.chunked import Buffers, forward_chunked
from thinsection.attention.reach import Reach
from thinsection.attention.reference import AttentionItem

PLAN = BlockPlan(queries=64, keys=32, working_bytes=0)
SLOPES = torch.tensor([0.7, 0.1, 0.0], dtype=torch.float64)


def strip(num_tokens: int, *, logit_scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """q, k, v [1, 3, T, 16] float64 and cells of a strip of tissue four cells wide."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 3, num_tokens + 1, 16)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    cells = torch.stack(
        [torch.arange(num_tokens) // 4, torch.arange(num_tokens) % 4], 1
    )
    return q * logit_scale, k, v, cells


def item_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cells: torch.Tensor
) -> AttentionItem:
    return checked_items(q, k, v, cells, SLOPES)[0][0]


def pairs_computed(item: AttentionItem, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Key blocks that each query block computes distances to."""
    counts: dict[int, int] = {}
    plain = Buffers.score_block

    def counted(self: Buffers, item: AttentionItem, rows: slice, columns: slice):  # type: ignore[no-untyped-def]
        counts[rows.start] = counts.get(rows.start, 0) + 1
        return plain(self, item, rows, columns)

    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "score_block", counted)
        forward_chunked(item, PLAN)
    return list(counts.values())


@pytest.mark.parametrize("logit_scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_left_out_is_below_rounding(
    dtype: torch.dtype, logit_scale: float
) -> None:
    """Both the bounded and the online way; float64 leaves out less and stays exact to 1e-12."""
    q, k, v, cells = strip(1_000, logit_scale=logit_scale)
    got = forward_chunked(item_of(q.to(dtype), k.to(dtype), v.to(dtype), cells), PLAN)[
        0
    ]
    wanted = alibi2d_attention(q, k, v, cells, SLOPES, impl="reference")[0]
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6 * logit_scale
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)


def test_steep_heads_end_early_and_flat_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v, cells = (x.float() if x.is_floating_point() else x for x in strip(1_000))
    item = item_of(q, k, v, cells)
    every = math.ceil(1_000 / PLAN.keys) + 1
    assert pairs_computed(item, monkeypatch)[1:] == [every] * math.ceil(
        1_000 / PLAN.queries
    )
    steep = AttentionItem(
        q=item.q[:1],
        k=item.k[:1],
        v=item.v[:1],
        cells=item.cells,
        slopes=(0.7,),
        num_prefix_tokens=1,
        scale=item.scale,
    )
    computed = pairs_computed(steep, monkeypatch)
    assert computed[0] == every  # the prefix token is as near to all
    assert max(computed[1:]) < every / 2


def test_bounds_hold_for_every_pair() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, _ = strip(300)
    cells = torch.randint(0, 500, (300, 2), generator=generator)
    item = item_of(q, k, v, cells)
    rows, columns = blocks_of(301, 64, 1), blocks_of(301, 32, 1)
    reach = Reach(item, rows, columns)
    distance = torch.cdist(item.cells.T, item.cells.T)
    full = torch.zeros(301, 301, dtype=torch.float64)
    full[1:, 1:] = distance
    scores = item.scale * item.q @ item.k.transpose(1, 2) * math.log2(math.e)
    assert float(scores.abs().max()) <= reach.score_bound
    weights = scores - SLOPES[:, None, None] * math.log2(math.e) * full
    for r, row in enumerate(rows):
        blocks = list(reach.key_blocks(r))
        assert sorted(b.columns.start for b in blocks) == [c.start for c in columns]
        for n, block in enumerate(blocks):
            assert (
                weights[:, row, block.columns].amin((1, 2))
                >= torch.tensor(block.lowest_scores)
            ).all()
            left = [
                weights[:, row, b.columns].exp2().sum(2).amax(1) for b in blocks[n:]
            ]
            assert (
                torch.stack(left).sum(0).log2() <= torch.tensor(block.remaining_sums)
            ).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_far_value_that_is_not_finite_still_reaches_every_row(value: float) -> None:
    q, k, v, cells = strip(1_000)
    v[0, 0, 1_000, 3] = value
    out = forward_chunked(item_of(q, k, v, cells), PLAN)[0]
    assert not bool(out[0, :, 3].isfinite().any())
    assert bool(out[0, :, 4].isfinite().all())


class NormedSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sizes of what is squared for norms: in another dtype that is a copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "aten.pow" in str(func):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_bounds_of_bfloat16_input_copy_one_block_at_a_time() -> None:
    q, k, v, cells = strip(500)
    item = item_of(q.bfloat16(), k.bfloat16(), v.bfloat16(), cells)
    with NormedSizes() as seen:
        forward_chunked(item, PLAN)
    assert max(seen.sizes) <= 3 * PLAN.queries * 16
    assert len(seen.sizes) > 500 // PLAN.queries
