"""Dilated attention in training: its gradient is that of the plain formula."""

import pytest
import torch
from tests.support.plain_gigapath import plain_dilated
from torch import Tensor

from thinsection.attention import Branch, dilated_attention
from thinsection.errors import BudgetError, InvalidInputError
from thinsection.types import MIB

PLAIN = ((8, 1), (22, 2), (64, 4))
BRANCHES = tuple(Branch(length=s, dilation=r) for s, r in PLAIN)


def qkv(
    tokens: int, *, batch: int = 1, dim: int = 5, dtype: torch.dtype = torch.float64
) -> Tensor:
    """q, k and v (3, B, 4, L, D)."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(3, batch, 4, tokens, dim, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def plain(x: Tensor, branches: tuple[tuple[int, int], ...] = PLAIN) -> Tensor:
    """[B, H, L, D] by the layout of the authors in memory, item by item."""
    items = [
        plain_dilated(*(t.transpose(0, 1) for t in item), branches=branches)
        for item in x.unbind(1)
    ]
    return torch.stack(items).transpose(1, 2)


def gradient(out: Tensor, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    (found,) = torch.autograd.grad((out.double() * weight).sum(), x)
    return found


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 22, 23, 45, 64, 65, 130])
def test_the_gradient_is_that_of_the_formula_around_every_segment(tokens: int) -> None:
    x = qkv(tokens)
    got = dilated_attention(*x, BRANCHES)
    torch.testing.assert_close(got, plain(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        gradient(got, x), gradient(plain(x), x), rtol=0, atol=1e-11
    )


def test_the_gradient_is_that_of_finite_differences() -> None:
    x = qkv(7, dim=2)
    branches = (Branch(length=4, dilation=1), Branch(length=8, dilation=2))
    assert torch.autograd.gradcheck(
        lambda *t: dilated_attention(*t, branches), tuple(x)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_stays_near_float64(dtype: torch.dtype) -> None:
    exact = qkv(65)
    x = exact.detach().to(dtype).requires_grad_()
    got = dilated_attention(*x, BRANCHES)
    assert got.dtype == dtype
    rounded = x.detach().double().requires_grad_()
    wanted = gradient(plain(rounded), rounded)
    error = (gradient(got, x).double() - wanted).abs().max() / wanted.abs().max()
    assert (
        error <= {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    )


def test_items_of_a_batch_do_not_see_each_other_and_views_are_taken() -> None:
    x = qkv(30, batch=3)
    together = dilated_attention(*x, BRANCHES)
    alone = torch.cat([dilated_attention(*x[:, i : i + 1], BRANCHES) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    # (B, L, H, D) as a projection gives it
    strided = x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    out = dilated_attention(*strided, BRANCHES)
    torch.testing.assert_close(out, together, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        gradient(out, strided), gradient(together, x), rtol=0, atol=1e-13
    )


def test_blocks_of_a_small_budget_give_the_same() -> None:
    x = qkv(300)
    branches = (Branch(length=256, dilation=1),)
    wide = dilated_attention(*x, branches)
    narrow = dilated_attention(*x, branches, budget_bytes=MIB // 16)
    torch.testing.assert_close(narrow, wide, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        gradient(narrow, x), gradient(wide, x), rtol=0, atol=1e-12
    )
    with pytest.raises(BudgetError, match="smallest blocks"):
        dilated_attention(*x, branches, budget_bytes=100)


def test_a_token_that_no_branch_covers_is_zero_and_has_no_gradient() -> None:
    x = qkv(9)
    out = dilated_attention(*x, (Branch(length=9, dilation=4),))
    wanted = plain(x, ((9, 4),))
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    assert (out[0, 0, 1] == 0).all()
    found = gradient(out, x)
    assert found.isfinite().all() and (found[:, 0, 0, 1] == 0).all()


def test_a_second_derivative_is_refused_and_so_is_what_does_not_fit() -> None:
    x = qkv(9)
    out = dilated_attention(*x, BRANCHES)
    with pytest.raises(InvalidInputError, match="differentiated only once"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(InvalidInputError, match="dilations that divide 4 heads"):
        dilated_attention(*x, [Branch(length=8, dilation=3)])
    with pytest.raises(
        InvalidInputError, match=r"k must have the shape, dtype and device of q"
    ):
        dilated_attention(x[0], x[1][:, :, :3], x[2], BRANCHES)
    with pytest.raises(InvalidInputError, match="branches must have lengths >= 1"):
        dilated_attention(*x, [])


def test_a_branch_of_another_type_is_refused_in_words() -> None:
    for branches, named in (([(8, 1)], r"\(8, 1\)"), ([BRANCHES[0], 22], "22")):
        message = (
            rf"branches must be of thinsection.attention.Branch, got {named}; pass"
        )
        with pytest.raises(InvalidInputError, match=message):
            dilated_attention(*qkv(9), branches)  # type: ignore[arg-type]
