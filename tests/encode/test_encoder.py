"""An encoder that runs: placement, determinism, independence of tiles, half precision."""

import numpy as np
import pytest
import torch
from tests.support.few_layers import few_layers

from thinsection.encode import (
    batch_bytes,
    encoder_spec,
    load_encoder,
    weights_bytes,
)
from thinsection.encode.backbone import cast_matmul_weights
from thinsection.encode.networks import SameConv2d
from thinsection.encode.preprocessing import _rows_of, preprocess
from thinsection.errors import DeviceError, InvalidInputError
from thinsection.weights import placement as placement_module
from thinsection.weights.placement import DTYPES, place

TILES = np.random.default_rng(3).integers(0, 256, (3, 224, 224, 3), dtype=np.uint8)
SPEC = encoder_spec("lunit_vits16")
ENCODERS = [("efficientnet_lite0", True), ("lunit_vits16", False)]


@pytest.fixture(scope="module", params=ENCODERS, ids=lambda p: p[0])
def encoder(request):
    name, pretrained = request.param
    return load_encoder(name, device="cpu", precision="fp32", pretrained=pretrained)


def test_the_same_batch_gives_the_same_bytes(encoder) -> None:
    first = encoder.encode(TILES).numpy().tobytes()
    assert encoder.encode(TILES).numpy().tobytes() == first
    assert encoder.encode(torch.from_numpy(TILES)).numpy().tobytes() == first


def test_an_embedding_does_not_depend_on_the_other_tiles_of_its_batch(encoder) -> None:
    other = TILES.copy()
    other[1:] = 255 - other[1:]
    a, b = encoder.encode(TILES), encoder.encode(other)
    assert a[0].numpy().tobytes() == b[0].numpy().tobytes()
    assert (a[1] - b[1]).abs().max() > 1e-3


def test_an_embedding_belongs_to_its_place_in_the_batch(encoder) -> None:
    order = [2, 0, 1]
    permuted = encoder.encode(TILES[order])
    torch.testing.assert_close(
        permuted, encoder.encode(TILES)[order], rtol=1e-4, atol=1e-5
    )


def test_embeddings_can_be_trained_on(encoder) -> None:
    out = encoder.encode(TILES[:2])
    head = torch.nn.Linear(encoder.dim, 1)
    head(out).sum().backward()  # an inference-mode tensor would raise here
    assert head.weight.grad is not None and not out.requires_grad


def test_tokens_are_in_row_major_order() -> None:
    encoder = load_encoder(
        "lunit_vits16", device="cpu", precision="fp32", pretrained=False
    )
    changed = TILES[:1].copy()
    changed[0, 16 * 2 : 16 * 3, 16 * 5 : 16 * 6] = (
        0  # row 2, column 5 of the 14 x 14 grid
    )
    difference = encoder.encode_tokens(changed) - encoder.encode_tokens(TILES[:1])
    assert difference.shape == (1, 196, 384)
    assert int(difference.norm(dim=-1).argmax()) == 2 * 14 + 5


def test_half_precision_of_a_vision_transformer_stays_close() -> None:
    full = load_encoder(
        "lunit_vits16", device="cpu", precision="fp32", pretrained=False
    )
    half = load_encoder(
        "lunit_vits16", device="cpu", precision="bf16", pretrained=False
    )
    a, b = full.encode(TILES), half.encode(TILES)
    assert b.dtype == torch.float32 and half.precision == "bf16"
    assert torch.nn.functional.cosine_similarity(a, b).min() > 0.9999
    assert not torch.equal(a, b)
    assert half.weights_hash == full.weights_hash  # the weights themselves stay float32


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "name", [*dict(ENCODERS), "h0_mini", "phikon", "timm:resnet18"]
)
@pytest.mark.check
def test_weights_that_are_rounded_once_give_the_bits_of_autocast(
    name: str, precision: str
) -> None:
    """What CUDA does; here on a CPU, whose autocast rounds the same layers; two of each kind."""
    encoder = few_layers(name, precision)
    expected, taken = encoder.encode_with_tokens(TILES[:2]), weights_bytes(encoder)
    cast_matmul_weights(encoder.backbone, DTYPES[precision])
    stored = {
        type(m) for m in encoder.backbone.modules() if _dtype(m) == DTYPES[precision]
    }
    assert stored <= {torch.nn.Linear, torch.nn.Conv2d, SameConv2d} and stored
    for found, before in zip(
        encoder.encode_with_tokens(TILES[:2]), expected, strict=True
    ):
        assert torch.equal(found, before)
    assert weights_bytes(encoder) < 0.7 * taken
    assert batch_bytes(encoder, batch_size=2) > 0  # its dry pass counts in float32


def _dtype(module: torch.nn.Module) -> torch.dtype | None:
    return getattr(getattr(module, "weight", None), "dtype", None)


def test_constants_are_made_once_for_each_device() -> None:
    first, again = (preprocess(torch.from_numpy(TILES), SPEC) for _ in range(2))
    assert torch.equal(first, again)
    made = [
        _rows_of(SPEC.mean, SPEC.std, SPEC.input_px, torch.device("cpu"))
        for _ in range(2)
    ]
    assert made[0][0] is made[1][0]


def test_auto_precision_looks_at_the_cpu_and_at_the_encoder(monkeypatch) -> None:
    monkeypatch.setattr(placement_module, "cpu_has_bf16", lambda: True)
    assert place("cpu", "auto").precision == "bf16"
    assert place("cpu", "auto", half_precision=False).precision == "fp32"
    assert place("cpu", "fp16", half_precision=False).precision == "fp16"
    monkeypatch.setattr(placement_module, "cpu_has_bf16", lambda: False)
    assert place("cpu", "auto").precision == "fp32"
    with pytest.raises(InvalidInputError, match="got 'int8'"):
        place("cpu", "int8")


def test_a_device_that_is_not_there_is_refused_not_replaced(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", "mps", "tpu", "meta"):
        with pytest.raises(DeviceError):
            load_encoder("efficientnet_lite0", device=device)
    assert place("auto", "fp32").device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="got 'cuda:2' with 2 CUDA devices"):
        place("cuda:2", "fp32")
    assert place("cuda:1", "fp32").device == torch.device("cuda", 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "auto"])
def test_cuda_agrees_with_the_cpu(precision: str) -> None:
    cpu = load_encoder("efficientnet_lite0", device="cpu", precision="fp32").encode(
        TILES
    )
    cuda = load_encoder("efficientnet_lite0", device="cuda", precision=precision)
    out = cuda.encode(TILES)
    assert out.device.type == "cuda"
    # resizing is in float there and in integers here, so grey levels differ by up to two
    assert torch.nn.functional.cosine_similarity(cpu, out.cpu()).min() > 0.999
    assert torch.equal(out, cuda.encode(TILES))
