"""EfficientNet-Lite0 in our own code is the published network, and the default works as is."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from thinsection.encode import backbone, load_encoder
from thinsection.encode.backbone import PACKAGED_WEIGHTS
from thinsection.encode.networks import CLASSIFIER
from thinsection.errors import WeightsError
from thinsection.weights.files import hash_state_dict, read_state_dict
from thinsection.weights.placement import importable_torchvision

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def encoder():
    return load_encoder(
        "efficientnet_lite0", device="cpu", precision="fp32", engine="torch"
    )


@pytest.fixture(scope="module")
def tiles_u8():
    return np.random.default_rng(0).integers(0, 256, (5, 256, 256, 3), dtype=np.uint8)


def test_features_equal_those_of_timm_under_the_same_weights(encoder) -> None:
    importable_torchvision()
    import timm

    theirs = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    # both list the layers in their order, under names of their own
    ours = encoder.backbone.network.state_dict()
    features = [n for n in theirs.state_dict() if not n.startswith("classifier.")]
    renamed = dict(zip(features, ours.values(), strict=True))
    theirs.load_state_dict(renamed, strict=False)
    pixels = torch.randn(3, 3, 224, 192, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected_map = theirs.forward_features(pixels)
        expected = theirs.forward_head(expected_map, pre_logits=True)
        torch.testing.assert_close(
            # 1e-5 with one thread; sums are split otherwise with more
            encoder.backbone.features(pixels),
            expected_map,
            rtol=0,
            atol=5e-5,
        )
        torch.testing.assert_close(
            encoder.backbone(pixels)[0], expected, rtol=0, atol=1e-5
        )


def test_it_gives_one_float32_vector_per_tile_that_tells_tiles_apart(
    encoder, tiles_u8
) -> None:
    out = encoder.encode(tiles_u8)
    assert out.shape == (5, 1280) and out.dtype == torch.float32
    assert torch.isfinite(out).all()
    assert (out[0] - out[1]).abs().max() > 1e-2


def test_weights_are_those_of_the_package_that_earlier_versions_needed(encoder) -> None:
    """Its hash is in the results of these versions, whose folders are continued."""
    published = "0ee0f4505e1b5474c4d4bd7d3684e30111935412a9b3f449d52e648c84863a0d"
    assert encoder.weights_hash == published
    assert hash_state_dict(read_state_dict(PACKAGED_WEIGHTS)) == published


def test_the_file_says_its_licence_and_source_and_is_in_the_notice() -> None:
    with safe_open(PACKAGED_WEIGHTS, "pt") as file:
        said = file.metadata()
    assert "Licence: Apache-2.0" in said["notice"]
    notice = (ROOT / "NOTICE").read_text()
    assert PACKAGED_WEIGHTS.relative_to(ROOT).as_posix() in notice
    for source in re.findall(r"https://[^\s,]+", said["notice"]):
        assert source in notice
    assert not any(
        name.startswith(CLASSIFIER) for name in read_state_dict(PACKAGED_WEIGHTS)
    )
    digest = hashlib.sha256(PACKAGED_WEIGHTS.read_bytes()).hexdigest()
    assert digest == backbone.PACKAGED_SHA256


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_damaged_weights_of_the_package_are_refused(
    damage: str, tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "efficientnet_lite0.safetensors"
    content = bytearray(PACKAGED_WEIGHTS.read_bytes())
    content[-1] ^= 1
    if damage != "missing":
        path.write_bytes(content if damage == "changed" else content[:-7])
    monkeypatch.setattr(backbone, "PACKAGED_WEIGHTS", path)
    with pytest.raises(
        WeightsError, match=r"must have sha256 dfd9b18e.*; install thinsec"
    ):
        load_encoder("efficientnet_lite0", device="cpu", engine="torch")
