"""'uni:448px' is the encoder for another input size, computed as timm does."""

import numpy as np
import pytest
import torch

from thinsection.encode import NetworkTileEncoder, encoder_spec, load_encoder
from thinsection.encode.preprocessing import preprocess
from thinsection.encode.registry import split_input_px, with_input_px
from thinsection.encode.specs import find_spec
from thinsection.errors import InvalidInputError, UnknownEncoderError
from thinsection.weights.placement import optional_package

TILES = np.random.default_rng(0).integers(0, 256, (2, 300, 300, 3), dtype=np.uint8)


def loaded(name: str) -> NetworkTileEncoder:
    encoder = load_encoder(
        name, pretrained=False, seed=5, device="cpu", precision="fp32"
    )
    assert isinstance(encoder, NetworkTileEncoder)
    return encoder


@pytest.mark.parametrize(
    ("name", "model", "table_px", "input_px"),
    [
        ("lunit_vits16", "vit_small_patch16_224", 224, 288),
        ("kaiko_vits16", "vit_small_patch16_224", 224, 112),
        ("dinov2_vits14", "vit_small_patch14_dinov2", 518, 126),
    ],
)
def test_another_size_is_what_timm_computes_with_both_of_its_options(
    name: str, model: str, table_px: int, input_px: int
) -> None:
    timm = optional_package("timm")
    encoder = loaded(f"{name}:{input_px}px")
    weights = encoder.backbone.network.state_dict()
    pixels = preprocess(TILES, encoder.spec)
    assert pixels.shape == (2, 3, input_px, input_px)
    got = encoder.encode(TILES)
    tokens = encoder.encode_tokens(TILES)
    patch_px = 14 if "patch14" in model else 16
    assert tokens.shape[1] == (input_px // patch_px) ** 2

    dynamic = timm.create_model(
        model, img_size=table_px, dynamic_img_size=True, num_classes=0
    )
    dynamic.load_state_dict(weights)
    fixed = timm.create_model(model, img_size=input_px, num_classes=0)
    translate = timm.models.vision_transformer.checkpoint_filter_fn
    fixed.load_state_dict(translate(dict(weights), fixed))
    for network in (dynamic, fixed):
        with torch.no_grad():
            expected = network.eval().forward_features(pixels)[:, 0]
        assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()
    at_224 = loaded(name).encode(TILES)
    assert (got - at_224).abs().max() > 3e-5 * at_224.abs().max()


def test_the_size_is_part_of_identity_and_label_and_changes_no_weights() -> None:
    usual = loaded("lunit_vits16")
    larger = loaded("lunit_vits16:288px")
    assert larger.label == "lunit_vits16_288px_seed5"
    assert usual.label == "lunit_vits16_seed5"
    assert larger.weights_hash == usual.weights_hash
    assert larger.identity != usual.identity
    assert larger.identity["name"] == usual.identity["name"] == "lunit_vits16"
    same = loaded("lunit_vits16:224px")
    assert (same.label, same.identity) == (usual.label, usual.identity)


def test_resize_and_native_tiles_grow_by_the_same_factor() -> None:
    spec = encoder_spec("gigapath:448px")
    assert (spec.input_px, spec.resize_px, spec.tile_px) == (448, 512, 512)
    assert encoder_spec("hoptimus1:112px").resize_px == 112  # TRIDENT's name
    at_commit = encoder_spec(f"uni@{'a' * 40}:448px")
    assert (at_commit.revision, at_commit.input_px) == ("a" * 40, 448)
    assert with_input_px(spec, 224) == encoder_spec("gigapath")
    assert split_input_px("timm:resnet18:160px") == ("timm:resnet18", 160)
    assert split_input_px("timm:resnet18") == ("timm:resnet18", None)
    with pytest.raises(UnknownEncoderError, match="unknown encoder 'unu'"):
        encoder_spec("unu:448px")


@pytest.mark.parametrize(
    "name",
    [
        "efficientnet_lite0:160px",
        "timm:resnet18:160px",
        "dinov3_vits16:160px",
        "conch:224px",
    ],
)
def test_networks_without_a_fixed_table_take_other_sizes(name: str) -> None:
    assert find_spec(name).input_px in (160, 224)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lunit_vits16:230px", "16"),  # no multiple of the patch
        ("plip:448px", "50"),
        ("phikon:448px", "image size"),
        ("musk:224px", "384"),
        ("timm:mixer_s16_224:256px", "224"),
    ],
)
def test_a_network_of_one_size_refuses_another_and_names_its_own(
    name: str, reason: str
) -> None:
    base, input_px = split_input_px(name)
    own = find_spec(base).input_px
    rule = f"input size of .* must be one that its network takes, got {input_px} px"
    with pytest.raises(InvalidInputError, match=f"{rule}.*{reason}.*use {own} px"):
        find_spec(name)


def test_the_fingerprint_of_the_authors_size_says_nothing_about_another() -> None:
    other = load_encoder("efficientnet_lite0:160px", device="cpu", engine="torch")
    assert other.fingerprint == "none of this input size"
    usual = load_encoder("efficientnet_lite0:224px", device="cpu", engine="torch")
    assert usual.fingerprint.startswith("embeddings agree")
