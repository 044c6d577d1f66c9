"""Prov-GigaPath without FlashAttention: the same states, its own code back, others refused."""

import os
import sys
from types import ModuleType

import pytest
import torch
from tests.rescue import stand_in_gigapath
from tests.rescue.stand_in_gigapath import DIM, DilatedAttention, encoder
from tests.support.plain_flash import plain_attention

from thinsection import rescue
from thinsection.errors import RescueError
from thinsection.testing.memory import run_and_measure


def states(tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, DIM, generator=torch.Generator().manual_seed(tokens))


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 150, 600])
def test_the_same_states_where_flash_attention_is_missing(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder()
    with pytest.raises(AssertionError):
        model(states(tokens))
    with rescue.gigapath():
        got = model(states(tokens))
        assert stand_in_gigapath.flash_attn_func is None
    monkeypatch.setattr(stand_in_gigapath, "flash_attn_func", plain_attention)
    torch.testing.assert_close(got, model(states(tokens)), rtol=0, atol=5e-6)


def test_modules_have_their_own_forward_after_the_block_and_after_an_error() -> None:
    model = encoder()

    def fail_inside() -> None:
        with rescue.gigapath(), torch.inference_mode():
            model(states(40))
            assert "forward" in model[0].self_attn.__dict__
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_inside()
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert model[0].self_attn.args.segment_length == [32, 91, 512]


def test_training_goes_to_the_authors_code_and_is_no_rescue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stand_in_gigapath, "flash_attn_func", plain_attention)
    model = encoder()
    with (
        pytest.raises(
            RescueError, match=r"got no call, .* looked for DilatedAttention"
        ),
        rescue.gigapath(),
    ):
        model(states(40)).sum().backward()
    assert model[0].self_attn.q_proj.weight.grad is not None


@torch.inference_mode()
def test_other_attention_is_refused_at_its_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = DilatedAttention._branch

    def other(self: DilatedAttention, qkv: object, size: int, ratio: int) -> object:
        out, sums = original(self, qkv, size, ratio)  # type: ignore[no-untyped-call]
        return out, sums + ratio  # mixes the branches otherwise

    monkeypatch.setattr(DilatedAttention, "_branch", other)
    with (
        pytest.raises(RescueError, match="dilated attention must equal ours, got a"),
        rescue.gigapath(),
    ):
        encoder()(states(40))


@torch.inference_mode()
def test_half_precision_under_autocast() -> None:
    model = encoder()
    with rescue.gigapath():
        wanted = model(states(150))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model(states(150))
    torch.testing.assert_close(got.float(), wanted, rtol=0, atol=5e-2)


@torch.inference_mode()
def test_tridents_check_for_flash_attn_passes_in_the_block_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TRIDENT's `_build` asserts a version of a package that it does not use."""
    names = (
        "trident",
        "trident.slide_encoder_models",
        "trident.slide_encoder_models.load",
    )
    modules = [ModuleType(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        module.__spec__ = type(os.__spec__)(name, None)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, name, module)

    class GigaPathSlideEncoder:
        def _build(self) -> str:
            import flash_attn  # type: ignore[import-not-found]

            return str(flash_attn.__version__)

    modules[-1].GigaPathSlideEncoder = GigaPathSlideEncoder  # type: ignore[attr-defined]
    with rescue.gigapath():
        assert GigaPathSlideEncoder()._build() == "2.5.8"
        assert "flash_attn" not in sys.modules
        encoder()(states(40))
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        GigaPathSlideEncoder()._build()


def encode_large(num_tokens: int) -> None:
    """Encodes under the rescue; run in a process of its own."""
    with torch.inference_mode(), rescue.gigapath(budget_bytes=8 << 20):
        encoder()(torch.randn(1, num_tokens, DIM))


@pytest.mark.check
def test_memory_grows_with_the_tokens_not_with_their_square() -> None:
    peaks = [
        run_and_measure(__name__, "encode_large", num_tokens=n).growth_bytes
        for n in (4_000, 16_000)
    ]
    assert peaks[1] - peaks[0] < 12_000 * DIM * 4 * 24, peaks
