"""Dropout drops the share it should, scales the rest, and follows the seed of torch."""

import pytest
import torch

from thinsection.pool.dropout import Dropout


@pytest.mark.parametrize("share", [0.1, 0.25, 0.7])
def test_the_share_is_dropped_and_the_others_are_scaled(share: float) -> None:
    torch.manual_seed(0)
    drop = Dropout(share)
    x = torch.full((301, 997), 2.0)
    y = drop(x)
    assert y.unique().tolist() == pytest.approx([0.0, 2 / (1 - share)])
    is_dropped = (y == 0).double()
    error = (share * (1 - share) / is_dropped.numel()) ** 0.5
    assert is_dropped.mean().item() == pytest.approx(share, abs=4 * error)
    # no value depends on its neighbours, which share a random number
    for step in (1, 2, 3, 4):
        flat = is_dropped.flatten() - share
        both = (flat[step:] * flat[:-step]).mean().item() / (share * (1 - share))
        assert abs(both) < 4 / flat.numel() ** 0.5


def test_a_seed_gives_the_same_values_and_another_seed_others() -> None:
    drop = Dropout(0.5)
    x = torch.ones(3, 7)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(torch.stack([drop(x), drop(x)]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_gradients_pass_where_values_do() -> None:
    torch.manual_seed(0)
    x = torch.ones(5, 9, requires_grad=True)
    y = Dropout(0.3)(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert (y == 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_dropped_in_inference_or_without_a_share(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5).to(dtype)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert Dropout(0.5)(x).dtype == dtype
