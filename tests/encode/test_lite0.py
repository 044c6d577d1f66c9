"""EfficientNet-Lite0 in our own code is the published network, and the default works as is."""

import numpy as np
import pytest
import torch

from thinsection.encode import load_encoder
from thinsection.encode.backbone import packaged_weights_path
from thinsection.weights.files import read_state_dict
from thinsection.weights.placement import importable_torchvision


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
    published = read_state_dict(packaged_weights_path())
    theirs.load_state_dict(
        dict(zip(theirs.state_dict(), published.values(), strict=True))
    )
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
