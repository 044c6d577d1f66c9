"""What the attention says and refuses, how its memory grows, and its slopes."""

import math

import numpy as np
import pytest
import torch

from thinsection.attention import alibi2d_attention, alibi_slopes, explain
from thinsection.attention.api import Impl
from thinsection.attention.blocks import plan_blocks
from thinsection.attention.checks import checked_items
from thinsection.attention.chunked import MAX_BOUND, forward_chunked
from thinsection.attention.reach import Reach
from thinsection.errors import BudgetError, ConfigError, DeviceError, InvalidInputError
from thinsection.testing import run_and_measure
from thinsection.types import GIB, MIB


def inputs(num_tokens: int = 20, heads: int = 2, dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, num_tokens + 1, dim, generator=generator).unbind(
        0
    )
    cells = torch.stack(
        [torch.arange(num_tokens) // 7, torch.arange(num_tokens) % 7], 1
    )
    return [q, k, v, cells, alibi_slopes(heads)]


def test_slopes_of_eight_and_twelve_heads_are_the_published_ones() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    odd = [2.0 ** -(i / 2) for i in (1, 3, 5, 7)]
    torch.testing.assert_close(
        alibi_slopes(12),
        torch.cat([alibi_slopes(8), torch.tensor(odd, dtype=torch.float64)]),
    )
    assert alibi_slopes(1).tolist() == [2.0**-8]
    with pytest.raises(InvalidInputError, match="num_heads must be >= 1, got 0"):
        alibi_slopes(0)


def test_explain_names_the_choice_and_the_reason() -> None:
    q = torch.empty(1, 12, 62_001, 64, device="meta")
    decision = explain(q)
    assert decision.impl == "chunked"
    assert (
        decision.why
        == "'triton' needs a CUDA device, got meta; blocks of 2048 queries x 4096 keys"
    )
    cpu = explain(torch.empty(1, 12, 3000, 64))
    assert cpu.why.endswith("blocks of 1024 queries x 512 keys")
    assert cpu.working_bytes < 32 * MIB
    assert explain(q, impl="reference").working_bytes > 500 * GIB


def test_the_reference_refuses_what_does_not_fit_the_budget() -> None:
    args = inputs(2000)
    with pytest.raises(
        BudgetError, match=r"'reference' needs .* GiB|MiB for T=2001.*use 'chunked'"
    ):
        alibi2d_attention(*args, impl="reference", budget_bytes=100 * MIB)


def test_chunked_refuses_a_budget_below_its_smallest_blocks() -> None:
    with pytest.raises(
        BudgetError, match=r"'chunked' needs .* for its smallest blocks.*1\.0 KiB"
    ):
        alibi2d_attention(*inputs(), impl="chunked", budget_bytes=1024)


@pytest.mark.parametrize("budget_bytes", [1 * MIB, 4 * MIB, 64 * MIB])
def test_a_plan_keeps_within_its_budget(budget_bytes: int) -> None:
    plan = plan_blocks(torch.zeros(1).expand(12, 60_000, 64), budget_bytes=budget_bytes)
    assert plan.working_bytes <= budget_bytes
    assert plan.queries >= 16
    assert plan.keys >= 16


def test_triton_without_cuda_says_so() -> None:
    with pytest.raises(
        DeviceError, match="'triton' needs a CUDA device, got cpu; use 'chunked'"
    ):
        alibi2d_attention(*inputs(), impl="triton")
    with pytest.raises(
        ConfigError, match="one of auto, reference, chunked, triton, flex, got 'flash'"
    ):
        alibi2d_attention(*inputs(), impl="flash")  # type: ignore[arg-type]


def test_bad_input_is_named() -> None:
    q, k, v, cells, slopes = inputs()
    with pytest.raises(
        InvalidInputError, match=r"cells must be int of shape \(20, 2\).*float32"
    ):
        alibi2d_attention(q, k, v, cells.float(), slopes)
    with pytest.raises(
        InvalidInputError, match=r"cells must be int .*got torch.int64 \(19, 2\)"
    ):
        alibi2d_attention(q, k, v, cells[1:], slopes)
    with pytest.raises(
        InvalidInputError, match="k must have the shape, dtype and device of q"
    ):
        alibi2d_attention(q, k.double(), v, cells, slopes)
    with pytest.raises(
        InvalidInputError, match=r"slopes must be of shape \(2,\), got \(3,\)"
    ):
        alibi2d_attention(q, k, v, cells, alibi_slopes(3))
    with pytest.raises(InvalidInputError, match="slopes must be finite and >= 0"):
        alibi2d_attention(q, k, v, cells, -slopes)
    with pytest.raises(InvalidInputError, match="slopes must not require a gradient"):
        alibi2d_attention(q, k, v, cells, slopes.requires_grad_())
    far = torch.tensor([[0, 0], [1 << 24, 0]])
    with pytest.raises(
        InvalidInputError, match="span fewer than 16777216 rows and columns"
    ):
        alibi2d_attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], far, alibi_slopes(2))
    mask = torch.ones(1, 21, dtype=torch.bool)
    mask[0, 0] = False
    with pytest.raises(
        InvalidInputError, match="key_mask must be True for prefix tokens"
    ):
        alibi2d_attention(q, k, v, cells, alibi_slopes(2), key_mask=mask)


def test_a_nan_in_an_input_stays_visible() -> None:
    q, k, v, cells, slopes = inputs()
    k[0, 0, 3, 0] = math.nan
    out = alibi2d_attention(q, k, v, cells, slopes, impl="chunked")
    assert bool(out[0, 0].isnan().all())
    assert bool(out[0, 1].isfinite().all())


@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_both_sides_of_the_score_bound_give_the_same(factor: float) -> None:
    """Just below the bound no running maximum is taken, just above one is."""
    q, k, v, cells, slopes = (
        x.double() if x.is_floating_point() else x for x in inputs(60)
    )

    def item_of(q: torch.Tensor):  # type: ignore[no-untyped-def]
        return checked_items(q, k, v, cells, slopes)[0][0]

    whole = [slice(0, 61)]
    scaled = q * (MAX_BOUND * factor / Reach(item_of(q), whole, whole).score_bound)
    item = item_of(scaled)
    assert (Reach(item, whole, whole).score_bound <= MAX_BOUND) == (factor < 1)
    plan = plan_blocks(q, budget_bytes=MIB)
    wanted = alibi2d_attention(scaled, k, v, cells, slopes, impl="reference")
    torch.testing.assert_close(
        forward_chunked(item, plan)[0][None], wanted, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_output_can_take_the_place_of_q(impl: str) -> None:
    q, k, v, cells, slopes = inputs(70)
    fresh = alibi2d_attention(q, k, v, cells, slopes, impl=impl)  # type: ignore[arg-type]
    packed = torch.stack(
        [q, k, v], 3
    )  # [B, H, T, 3, D]: as views of one qkv projection
    q, k, v = packed.unbind(3)
    given = alibi2d_attention(q, k, v, cells, slopes, impl=impl, out=q)  # type: ignore[arg-type]
    assert given.data_ptr() == packed.data_ptr()
    torch.testing.assert_close(given, fresh, rtol=0, atol=1e-6)
    with pytest.raises(
        InvalidInputError,
        match=r"out must have the shape, dtype and device of q, got "
        r"torch.float64",
    ):
        alibi2d_attention(q, k, v, cells, slopes, out=q.double())
    with pytest.raises(
        InvalidInputError, match="out must be None when a gradient is needed"
    ):
        alibi2d_attention(q.clone().requires_grad_(), k, v, cells, slopes, out=q)


def run_layer(num_tokens: int, backward: bool) -> None:
    """One call in a fresh process, for its peak memory."""
    torch.set_num_threads(1)
    args = inputs(num_tokens, heads=2, dim=16)
    if backward:
        args[:3] = [x.requires_grad_() for x in args[:3]]
    out = alibi2d_attention(*args, impl="chunked", budget_bytes=16 * MIB)
    if backward:
        out.sum().backward()


@pytest.mark.check
@pytest.mark.parametrize("backward", [False, True])
def test_peak_memory_grows_linearly(backward: bool) -> None:
    """From 2k to 8k tokens the inputs grow by 6k x 32 x 3 floats; N² of one head by 229 MiB."""
    module = "tests.attention.test_api"
    small, large = (
        run_and_measure(
            module, "run_layer", num_tokens=n, backward=backward
        ).growth_bytes
        for n in (2_000, 8_000)
    )
    inputs_bytes = 6_000 * 2 * 16 * 4
    assert large - small <= (16 if backward else 8) * inputs_bytes + 16 * MIB


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("other", ["k", "v"])
def test_out_that_shares_memory_with_keys_or_values_is_refused(
    impl: Impl, other: str
) -> None:
    q, k, v, cells, slopes = inputs(40)
    whole = torch.zeros(3, *q.shape)
    q, k, v = (part.copy_(x) for part, x in zip(whole, (q, k, v), strict=True))
    taken = {"k": k, "v": v}[other]
    with pytest.raises(
        InvalidInputError, match=f"out must not share memory with {other}, got .*copy"
    ):
        alibi2d_attention(q, k, v, cells, slopes, impl=impl, out=taken)
    more = torch.zeros(q.numel() + 16)
    shifted = more[16:].view_as(q)
    q = more[:-16].view_as(q).copy_(q)
    with pytest.raises(InvalidInputError, match="out must be q itself or share no"):
        alibi2d_attention(q, k, v, cells, slopes, impl=impl, out=shifted)
    with pytest.raises(InvalidInputError, match="not share memory with k"):
        alibi2d_attention(q, q, v, cells, slopes, impl=impl, out=q)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_beside_keys_and_values_in_one_tensor_gives_the_same(
    impl: Impl, dtype: torch.dtype
) -> None:
    """q, k and v lie in turns, as of one projection: q's own memory is still free."""
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(41, 3, 2, 16, generator=generator).to(dtype)
    cells, slopes = inputs(40)[3:]
    q, k, v = qkv.permute(1, 2, 0, 3)[:, None]
    wanted = alibi2d_attention(q, k, v, cells, slopes, impl=impl)
    got = alibi2d_attention(q, k, v, cells, slopes, impl=impl, out=q)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert got.data_ptr() == qkv.data_ptr()


def test_a_gradient_of_the_gradient_is_refused_where_none_is_computed() -> None:
    q, k, v, cells, slopes = inputs(12)
    q = q.double().requires_grad_()
    k, v = k.double(), v.double()

    def penalty(impl: Impl) -> torch.Tensor:
        out = alibi2d_attention(q, k, v, cells, slopes, impl=impl)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return grad.square().sum()

    with pytest.raises(InvalidInputError, match=r"create_graph=True.*impl='reference'"):
        penalty("chunked")
    (second,) = torch.autograd.grad(penalty("reference"), q)
    step = torch.zeros_like(q)
    step[0, 1, 3, 5] = 1e-5
    with torch.no_grad():
        higher, lower = q + step, q - step
    values = []
    for moved in (higher, lower):
        q = moved.requires_grad_()
        values.append(float(penalty("reference").detach()))
    slope = (values[0] - values[1]) / 2e-5
    assert abs(slope - float(second[0, 1, 3, 5])) <= 1e-6 * max(1.0, abs(slope))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_cells_may_be_an_array_of_numpy(dtype: type) -> None:
    q, k, v, cells, slopes = inputs()
    expected = alibi2d_attention(q, k, v, cells, slopes)
    array = cells.numpy().astype(dtype)
    assert torch.equal(alibi2d_attention(q, k, v, array, slopes), expected)
    fortran = np.asfortranarray(array)
    assert torch.equal(alibi2d_attention(q, k, v, fortran, slopes), expected)
    array.flags.writeable = False
    assert torch.equal(alibi2d_attention(q, k, v, array[None], slopes), expected)


def test_cells_of_another_type_are_refused_in_words() -> None:
    q, k, v, cells, slopes = inputs()
    for wrong, kind in ((cells.tolist(), "list"), (cells.numpy() / 2, "float64")):
        message = f"cells must be a tensor or a NumPy array of integers, got {kind}"
        with pytest.raises(InvalidInputError, match=message):
            alibi2d_attention(q, k, v, wrong, slopes)
