"""STAMP's attention by blocks: the same numbers, training untouched, others refused."""

import pytest
import torch
from tests.rescue.stand_in_stamp import DIM, Head, dense_calls, model

from thinsection import rescue
from thinsection.errors import RescueError
from thinsection.testing.memory import run_and_measure


def slide(tiles: int, bags: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tiles)
    x = torch.randn(bags, tiles, DIM, generator=generator)
    return x, torch.rand(bags, tiles, 2, generator=generator) * 20_000


@torch.inference_mode()
@pytest.mark.parametrize("tiles", [1, 39, 41, 300])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_same_states_without_dense_matrices(tiles: int, is_masked: bool) -> None:
    stamp = model()
    x, coords = slide(tiles, bags=2)
    mask = None
    if is_masked:
        mask = torch.arange(tiles).expand(2, -1) >= torch.tensor([[tiles // 2], [5]])
    wanted = stamp(x, coords, mask)
    with rescue.stamp(budget_bytes=2 * tiles * 16 * 7):
        stamp(x[:, :40], coords[:, :40])  # with the check of the first call
        before = dense_calls(stamp)
        got = stamp(x, coords, mask)
        assert dense_calls(stamp) == before
    scale = float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6 * scale)
    assert not any("forward" in m.__dict__ for m in stamp.modules())


def test_training_and_gradients_go_to_stamps_own_code_and_are_no_rescue() -> None:
    stamp = model()
    x, coords = slide(60)
    with (
        pytest.raises(RescueError, match=r"got no call, .* looked for MultiHeadALiBi"),
        rescue.stamp(),
    ):
        stamp(x, coords).sum().backward()
        with torch.no_grad():
            stamp.train()(x, coords)
    assert dense_calls(stamp) == 2 * 2 * 4
    assert float(stamp.layers[0].attentions[0].scale_distance.running_mean) > 5000


@torch.inference_mode()
def test_a_bias_before_the_softmax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ALiBi's paper has it, and as STAMP may have it one day."""

    def forward(  # type: ignore[no-untyped-def]
        self, *, q, k, v, coords_q, coords_k, attn_mask, alibi_mask
    ):
        steps = coords_q[:, :, None] - coords_k[:, None]
        bias = self.scale_distance(steps.norm(dim=-1)) * self.bias_scale
        return torch.softmax(q @ k.mT * k.shape[-1] ** -0.5 - bias, -1) @ v

    monkeypatch.setattr(Head, "forward", forward)
    with (
        pytest.raises(RescueError, match="softmax weights less scaled distances, got"),
        rescue.stamp(),
    ):
        model()(*slide(60))


def encode_large(num_tiles: int) -> None:
    """Encodes under the rescue; run in a process of its own."""
    with torch.inference_mode(), rescue.stamp(budget_bytes=8 << 20):
        model()(*slide(num_tiles))


@pytest.mark.check
def test_memory_grows_with_the_tiles_not_with_their_square() -> None:
    """4 times the tiles: one dense matrix alone would take 4 N^2 bytes, 16 and 256 MB."""
    peaks = [
        run_and_measure(__name__, "encode_large", num_tiles=n).growth_bytes
        for n in (2_000, 8_000)
    ]
    dense_growth = 4 * (8_000**2 - 2_000**2)
    assert peaks[1] - peaks[0] < dense_growth / 4, peaks
