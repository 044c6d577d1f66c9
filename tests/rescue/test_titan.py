"""The rescue gives the model's own numbers without the bias, refuses others, leaves no trace."""

from collections.abc import Callable

import pytest
import torch
from tests.rescue.stand_in import DIM, Titan

from thinsection import rescue
from thinsection.errors import RescueError
from thinsection.testing.memory import run_and_measure


def model() -> Titan:
    torch.manual_seed(0)
    return Titan().eval()


def slide(num_tiles: int = 60) -> tuple[torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(1)
    spots = torch.randperm(9 * 17, generator=generator)[:num_tiles]
    coords = torch.stack([spots // 17, spots % 17], 1) * 512 + 77
    return torch.randn(1, num_tiles, DIM, generator=generator), coords[None], 512


@torch.inference_mode()
def test_the_same_states_without_a_bias() -> None:
    titan = model()
    wanted = titan.encode_slide_from_patch_features(*slide())
    with rescue.titan(titan) as rescued:
        titan.vision_encoder.built = 0
        got = rescued.encode_slide_from_patch_features(*slide())
        assert titan.vision_encoder.built == 0
    assert rescued is titan
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)


@torch.inference_mode()
def test_everything_is_as_before_after_the_block_and_after_an_error() -> None:
    titan = model()
    names = [sorted(m.__dict__) for m in titan.modules()]
    with rescue.titan(titan):
        assert "forward" in titan.vision_encoder.blocks.modules_list[0].attn.__dict__
        titan.encode_slide_from_patch_features(*slide())
    assert [sorted(m.__dict__) for m in titan.modules()] == names

    def fail_inside() -> None:
        with rescue.titan(titan):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert [sorted(m.__dict__) for m in titan.modules()] == names
    titan.vision_encoder.built = 0
    titan.encode_slide_from_patch_features(*slide())
    assert titan.vision_encoder.built == 1


@torch.inference_mode()
def test_batches_take_the_models_own_way() -> None:
    titan = model()
    grid = torch.randn(2, DIM, 4, 5, generator=torch.Generator().manual_seed(2))
    wanted = titan.vision_encoder.forward_features(grid)
    with rescue.titan(titan):
        titan.vision_encoder.built = 0
        got = titan.vision_encoder.forward_features(grid)
        assert titan.vision_encoder.built == 1
        titan.encode_slide_from_patch_features(*slide())
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_rescue_at_the_same_time_is_refused() -> None:
    titan = model()
    with (
        rescue.titan(titan),
        pytest.raises(RescueError, match="not be changed by another rescue"),
    ):
        titan.encode_slide_from_patch_features(*slide())
        with rescue.titan(titan):
            pass


def other_signature(titan: Titan) -> None:
    attention = titan.vision_encoder.blocks.modules_list[1].attn

    class Other(type(attention)):  # type: ignore[misc]
        def forward(self, x, bias):  # type: ignore[no-untyped-def]
            return x

    attention.__class__ = Other


def other_slopes(titan: Titan) -> None:
    encoder = titan.vision_encoder

    class Other(type(encoder)):  # type: ignore[misc]
        def get_alibi(self, w, h, bg_mask=None):  # type: ignore[no-untyped-def]
            return 2 * super().get_alibi(w, h, bg_mask)

    encoder.__class__ = Other


def other_position(titan: Titan) -> None:
    titan.vision_encoder.pos_encode_type = "abs"


def not_a_number(titan: Titan) -> None:
    with torch.no_grad():
        titan.vision_encoder.blocks.modules_list[1].attn.proj.bias[3] = torch.nan


def no_projection(titan: Titan) -> None:
    del titan.vision_encoder.blocks.modules_list[0].attn.qkv


def with_dropout(titan: Titan) -> None:
    titan.vision_encoder.blocks.modules_list[0].attn.attn_drop_prob = 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            other_signature,
            r"attention forward must have the parameters \(x, attn_bias, bg_mask\), got \(x, bias",
        ),
        (
            other_slopes,
            r"must equal those by 2-D ALiBi attention, got a difference of .* another revision",
        ),
        (other_position, "pos_encode_type must be 'alibi', got 'abs'"),
        (
            not_a_number,
            r"weights must be finite, got NaN or .* in blocks.modules_list.1.attn.proj",
        ),
        (no_projection, "attention must have qkv"),
        (with_dropout, r"attn_drop_prob must be 0, got 0\.1"),
    ],
)
def test_other_code_is_refused_and_left_alone(
    change: Callable[[Titan], None], message: str
) -> None:
    titan = model()
    change(titan)
    names = [sorted(m.__dict__) for m in titan.modules()]
    with pytest.raises(RescueError, match=message), rescue.titan(titan):
        pass
    assert [sorted(m.__dict__) for m in titan.modules()] == names


def test_something_else_is_refused() -> None:
    with (
        pytest.raises(
            RescueError, match="must be a loaded TITAN, got a Linear without"
        ),
        rescue.titan(torch.nn.Linear(1, 1)),
    ):
        pass


@torch.inference_mode()
def test_batches_alone_are_no_rescue_and_an_error_inside_is_not_covered_up() -> None:
    titan = model()
    grid = torch.randn(2, DIM, 4, 5, generator=torch.Generator().manual_seed(2))
    unused = pytest.raises(RescueError, match="got no call, so nothing was rescued")
    with unused, rescue.titan(titan):
        titan.vision_encoder.forward_features(grid)
    with pytest.raises(KeyError, match="boom"), rescue.titan(titan):
        raise KeyError("boom")


def encode_large(num_tiles: int) -> None:
    """Encodes under the rescue; run in a process of its own."""
    side = int(num_tiles**0.5)

    tiles = torch.randn(1, side * side, DIM)
    with torch.inference_mode(), rescue.titan(model(), budget_bytes=32 << 20) as titan:
        titan.vision_encoder.forward_features(
            tiles.transpose(1, 2).view(1, DIM, side, side)
        )


@pytest.mark.check
def test_memory_grows_with_the_tiles_not_with_their_square() -> None:
    """4 times the tiles: the bias alone would take 12 * N^2 * 4 bytes, 0.4 and 6.6 GB."""
    peaks = [
        run_and_measure(__name__, "encode_large", num_tiles=n).growth_bytes
        for n in (2916, 11664)
    ]
    assert peaks[1] - peaks[0] < 11664 * DIM * 4 * 24, peaks
