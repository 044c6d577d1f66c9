"""FP8: equal to a plain reference, in the layers of the blocks alone, and said or refused."""

import logging
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.tiny_encoder import tiny_spec
from torch import Tensor, nn

from thinsection.encode import Workload, load_encoder, load_network, make_encoder
from thinsection.encode.agreement import TOLERANCE, distance
from thinsection.encode.backbone import build_backbone
from thinsection.encode.encoder import NetworkTileEncoder, arithmetic
from thinsection.encode.fingerprint import drawn_tile
from thinsection.encode.fp8 import Fp8Linear, quantise_blocks
from thinsection.encode.memory import batch_bytes, weights_bytes
from thinsection.encode.sizes import declared_size, weights_in_memory
from thinsection.encode.specs import find_spec
from thinsection.errors import InvalidInputError
from thinsection.extras import missing_of
from thinsection.weights import placement
from thinsection.weights.origin import Origin
from thinsection.weights.placement import Placement, place

CPU = torch.device("cpu")
TINY = tiny_spec(width=48, layers=3)
VIT_S = "lunit_vits16"
needs_timm = pytest.mark.skipif(bool(missing_of(("timm",))), reason="needs timm")
ROWS = torch.randint(
    0,
    256,
    (3, 80, 80, 3),
    dtype=torch.uint8,
    generator=torch.Generator().manual_seed(2),
)


def tiny(seed: int = 0) -> NetworkTileEncoder:
    backbone = build_backbone(TINY, seed=seed)
    return NetworkTileEncoder(TINY, backbone, Placement(CPU, "fp32"), Origin(seed=seed))


def rounded_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest numbers of 4 bits of exponent and 3 of mantissa, ties to even, in float64."""
    exponents = np.floor(np.log2(np.maximum(np.abs(values), 2.0**-20)))
    # below 2^-6 the distance of neighbours stays the same
    steps = 2.0 ** (np.maximum(exponents, -6) - 3)
    return np.clip(np.rint(values / steps) * steps, -448, 448)


def rounded_rows(values: Tensor) -> Tensor:
    """Rows as FP8 holds them, each with its own scale, multiplied out again; float32."""
    scales = values.abs().amax(dim=-1, keepdim=True) / 448
    codes = (values / scales.clamp_min(1e-12)).double().numpy()
    return torch.from_numpy(rounded_to_e4m3(codes)).float() * scales


class Reference(nn.Module):
    """Linear layer that rounds weights and activations in fp32, by NumPy."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = rounded_rows(layer.weight.detach())
        self.offset = layer.bias.detach().bfloat16().float()

    def forward(self, activations: Tensor) -> Tensor:
        rows = rounded_rows(activations.float())
        with torch.autocast("cpu", enabled=False):
            return F.linear(rows, self.weight, self.offset).bfloat16()


@pytest.mark.parametrize(("width", "length"), [(64, 48), (40, 16), (392, 96)])
def test_a_layer_equals_the_plain_reference(width, length):
    generator = torch.Generator().manual_seed(width)
    layer = nn.Linear(width, length)
    spread = torch.logspace(-3, 2, length)[:, None]
    weight = torch.randn((length, width), generator=generator) * spread
    layer.weight.data.copy_(weight)
    activations = torch.randn((2, 5, width), generator=generator)
    activations[0, 1] = 0
    activations[1, 2] *= 1000
    activations[1, 3] *= 1e-5
    ours = Fp8Linear(layer)(activations)
    expected = Reference(layer)(activations)
    assert ours.shape == (2, 5, length)
    assert ours.dtype == torch.bfloat16
    # one step of bfloat16: the sums have another order
    torch.testing.assert_close(ours.float(), expected.float(), rtol=2**-7, atol=1e-5)
    assert torch.equal(ours[0, 1], layer.bias.detach().bfloat16())


def test_each_layer_of_a_network_equals_its_reference_and_the_cosine_is_small():
    encoder = tiny()
    plain = dict(tiny().backbone.named_modules())
    check = encoder.to_fp8()
    passes: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in encoder.backbone.named_modules():
        if isinstance(layer, Fp8Linear):
            layer.register_forward_hook(
                lambda _, inputs, result, name=name: passes.update(
                    {name: (inputs[0], result)}
                )
            )
    ours = encoder.encode(ROWS)
    # in each of three blocks: the projection of attention, and two of the MLP
    assert len(passes) == 9
    for name, (activations, result) in passes.items():
        layer = plain[name]
        assert isinstance(layer, nn.Linear)
        expected = Reference(layer)(activations).float()
        assert (result.float() - expected).abs().max() <= 2**-7 * expected.abs().max()
        exact_result = layer(activations.float())
        # a reference without rounding would be noticed
        assert (expected - exact_result).abs().max() > 2**-7 * expected.abs().max()
    exact = tiny().encode(ROWS)
    in_bf16 = tiny()
    in_bf16.precision = "bf16"
    distance_to_exact = 1 - F.cosine_similarity(ours, exact).min()
    of_bf16 = 1 - F.cosine_similarity(in_bf16.encode(ROWS), exact).min()
    assert 2 * of_bf16 < distance_to_exact < 1e-2
    assert 0 < check.angle < 1e-2


def test_layers_outside_the_blocks_stay():
    encoder = tiny()
    before = dict(encoder.backbone.named_parameters())
    kinds = {name: type(layer) for name, layer in encoder.backbone.named_modules()}
    rounded, num_layers = quantise_blocks(encoder.backbone)
    assert (rounded, num_layers) == (9, 9)
    after = dict(encoder.backbone.named_modules())
    changed = [name for name, kind in kinds.items() if type(after[name]) is not kind]
    assert all(kinds[name] is nn.Linear for name in changed)
    kept = dict(encoder.backbone.named_parameters())
    assert all(before[name] is weight for name, weight in kept.items())
    assert any("norm" in name or "ln" in name for name in kept)
    assert any(weight.ndim == 4 for weight in kept.values())  # the patch embedding


class _Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32))] * 1)
        self.mixed = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        self.plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def test_a_network_without_a_stack_of_equal_blocks_is_left_alone():
    network = _Stacks()
    assert quantise_blocks(network) == (0, 6)
    network.blocks.append(nn.Sequential(nn.Linear(32, 24)))
    # 24 results are no multiple of 16
    assert quantise_blocks(network) == (1, 7)


@needs_timm
def test_a_weight_that_the_parent_reads_itself_stays():
    network = build_backbone(find_spec("dinov3_vits16"), device="meta")
    assert quantise_blocks(network) == (36, 48)
    names = [n for n, layer in network.named_modules() if type(layer) is nn.Linear]
    assert all(name.endswith(".qkv") for name in names)


@pytest.fixture(scope="module")
def vit_s() -> NetworkTileEncoder:
    if missing_of(("timm",)):
        pytest.skip("needs timm")
    encoder = load_encoder(VIT_S, device="cpu", precision="fp8", pretrained=False)
    assert isinstance(encoder, NetworkTileEncoder)
    return encoder


@pytest.fixture(scope="module")
def exact(vit_s) -> NetworkTileEncoder:
    encoder = load_encoder(VIT_S, device="cpu", precision="fp32", pretrained=False)
    assert isinstance(encoder, NetworkTileEncoder)
    return encoder


def test_the_cosine_is_said_and_is_part_of_the_record(vit_s, exact, caplog):
    with caplog.at_level(logging.WARNING):
        name = "timm:test_vit"
        load_encoder(name, device="cpu", precision="fp8", pretrained=False, seed=1)
    (line,) = [r.getMessage() for r in caplog.records if "fp8" in r.getMessage()]
    assert line.startswith("timm:test_vit on cpu: torch ")
    assert "fp8 in 24 of 24 linear layers, cosine 0.99" in line
    assert "a CPU has no FP8" in line
    assert "in 48 of 48 linear layers, cosine 0.99" in vit_s.provenance["engine"]
    assert vit_s.identity == exact.identity | {"precision": "fp8"}
    assert vit_s.label == f"{VIT_S}_fp8_seed0"
    assert vit_s.weights_hash == exact.weights_hash


def test_the_fingerprints_tolerance_holds_the_rounding_of_fp8(vit_s, exact):
    tile = drawn_tile()[None]
    expected = exact.encode(tile)[0].double()
    cosine, difference = distance(vit_s.encode(tile)[0].double(), expected)
    assert TOLERANCE["bf16"] / 10 < difference < TOLERANCE["fp8"] / 2
    assert 0.99 < cosine < 0.9999


def test_weights_take_half_of_bf16s_memory_and_the_plan_bounds_them(vit_s, exact):
    in_bf16 = sum(2 * weight.numel() for weight in exact.backbone.parameters())
    ours = weights_bytes(vit_s)
    assert 0.5 < ours / in_bf16 < 0.56
    size = declared_size(VIT_S, tile_px=256)
    assert size is not None
    stored = size.weights_bytes
    planned = weights_in_memory(
        stored, copied_bytes=stored, precision="fp8", engine="torch"
    )
    assert ours <= planned <= 0.5 * stored
    # a pass is counted as for fp32, and FP8 needs its codes on top
    assert (
        1 <= batch_bytes(vit_s, batch_size=2) / batch_bytes(exact, batch_size=2) < 1.3
    )


def test_a_copy_has_the_same_codes(vit_s):
    copied = pickle.loads(pickle.dumps(vit_s))  # noqa: S301
    tiles = torch.from_numpy(drawn_tile()[None].copy())
    assert torch.equal(copied.encode(tiles), vit_s.encode(tiles))
    assert copied.provenance == vit_s.provenance


def test_embeddings_too_far_from_fp32_are_refused(monkeypatch):
    monkeypatch.setattr("thinsection.encode.engine.MAX_FP8_DISTANCE", 1e-4)
    monkeypatch.setattr(load_network, "MAX_FP8_DISTANCE", 1e-4)
    with pytest.raises(
        InvalidInputError,
        match=r"in fp8 must have a cosine >= 0\.9999 to those in fp32",
    ):
        load_network._move_to_fp8(tiny())


def test_a_network_without_blocks_is_refused_by_name():
    with pytest.raises(
        InvalidInputError,
        match="bf16 for 'efficientnet_lite0', whose network has no linear layers in equal",
    ):
        load_encoder("efficientnet_lite0", device="cpu", precision="fp8")


def test_a_layer_that_does_not_compute_is_a_reason(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("scaled_mm is not there\nstack")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    with pytest.raises(InvalidInputError, match=r"got 'fp8': scaled_mm is not there$"):
        tiny().to_fp8()


@pytest.mark.parametrize(
    ("card", "is_refused"),
    [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)],
)
def test_a_card_without_fp8_is_refused_by_its_name(card, is_refused, monkeypatch):
    properties = SimpleNamespace(name="NVIDIA X", major=card[0], minor=card[1])
    cuda = torch.device("cuda", 1)
    monkeypatch.setattr(placement, "resolve_device", lambda device: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    if not is_refused:
        assert place("cuda:1", "fp8", has_fp8=True) == (cuda, "fp8")
        return
    with pytest.raises(
        InvalidInputError,
        match=f"on NVIDIA X, which has compute capability {card[0]}.{card[1]} and FP8 needs 8.9",
    ):
        place("cuda:1", "fp8", has_fp8=True)


def test_other_devices_and_networks_of_others_are_refused(monkeypatch):
    with pytest.raises(
        InvalidInputError, match="thinsection does not build, got 'fp8'"
    ):
        make_encoder(nn.Flatten(), name="mine", device="cpu", precision="fp8")
    mps = torch.device("mps")
    monkeypatch.setattr(placement, "resolve_device", lambda device: mps)
    with pytest.raises(InvalidInputError, match="fp16 or bf16 on mps, got 'fp8'"):
        place("mps", "fp8", has_fp8=True)
    assert place("mps", "fp32") == (mps, "fp32")


def test_no_choice_of_a_device_takes_fp8_by_itself():
    for half_precision in (True, False):
        chosen = place("cpu", "auto", half_precision=half_precision, has_fp8=True)
        assert chosen.precision in ("fp32", "bf16")


def test_openvino_is_not_tried():
    with pytest.raises(
        InvalidInputError, match="got openvino: precision must be fp32 or bf16 with"
    ):
        load_network._on_engine(
            lambda *args: _fp8(), "openvino", is_random=False, workload=Workload()
        )


def _fp8() -> NetworkTileEncoder:
    encoder = tiny()
    encoder.to_fp8()
    return encoder


def test_other_layers_compute_in_bfloat16():
    encoder = _fp8()
    types = {
        layer.weight.dtype
        for layer in encoder.backbone.modules()
        if type(layer) is nn.Conv2d
    }
    assert types == {torch.bfloat16}
    seen = []
    blocks = [m for m in encoder.backbone.modules() if isinstance(m, Fp8Linear)]
    blocks[0].register_forward_hook(
        lambda layer, inputs, result: seen.append(result.dtype)
    )
    with torch.no_grad(), arithmetic(CPU, "fp8"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    encoder.encode(ROWS)
    assert seen == [torch.bfloat16]
    assert encoder.spec == replace(TINY)
