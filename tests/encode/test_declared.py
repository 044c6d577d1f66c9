"""Every declaration is consistent: it builds, its dimension and size are those that it states."""

import re

import pytest
import torch

from thinsection.encode import declared_encoders, encoder_spec
from thinsection.encode.backbone import build_backbone, unfilled_backbone
from thinsection.errors import UnknownEncoderError
from thinsection.extras import is_installed

SPECS = list(declared_encoders().values())
# sizes as their papers and model cards state them, in millions
PUBLISHED_MILLIONS = {
    **{"uni": 303, "uni2_h": 681, "conch_v15": 306, "virchow": 631, "virchow2": 631},
    **{"conch": 88, "plip": 88, "keep": 305},
    **{"gigapath": 1135, "h_optimus_0": 1135, "h_optimus_1": 1135, "h0_mini": 86},
    **{
        "phikon": 86,
        "phikon_v2": 303,
        "hibou_b": 86,
        "hibou_l": 304,
        "midnight_12k": 1136,
    },
    **{"kaiko_vits16": 22, "kaiko_vits8": 22, "kaiko_vitb16": 86, "kaiko_vitb8": 86},
    **{"kaiko_vitl14": 304, "lunit_vits16": 22, "lunit_vits8": 22},
    **{
        "dinov2_vits14": 22,
        "dinov2_vitb14": 86,
        "dinov2_vitl14": 304,
        "dinov2_vitg14": 1136,
        "dinov3_vits16": 21.6,
        "dinov3_vitb16": 86,
        "dinov3_vitl16": 304,
        "gpfm": 303,
        "mstar": 303,
        "gigapath_flash": 21.7,
        "openmidnight": 1135,
        "genbio_pathfm": 1134,
        "musk": 304,
        "isight": 305,
    },
}


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_the_declared_network_builds_with_the_declared_dimension_and_size(spec) -> None:
    for package in spec.needs:
        if not is_installed(package):
            pytest.skip(f"needs {package}")
    backbone = build_backbone(spec, device="meta").eval()
    pixels = torch.empty(2, 3, spec.input_px, spec.input_px, device="meta")
    with torch.no_grad():
        pooled, tokens = backbone(pixels)
    assert pooled.shape == (2, spec.dim)
    assert tokens.ndim == 3 and int(tokens.shape[1] ** 0.5) ** 2 == tokens.shape[1]
    assert sum(p.numel() for p in backbone.network.parameters()) == spec.num_params
    is_small = spec.num_params is not None and spec.num_params < 30e6
    if is_small:
        # what no checkpoint fills has its values already
        unfilled = unfilled_backbone(spec)
        stored = unfilled.state_dict()
        computed = {n: b for n, b in unfilled.named_buffers() if n not in stored}
        assert not any(buffer.is_meta for buffer in computed.values())
        assert bool(computed) == spec.name.startswith("dinov3")


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_the_size_is_the_published_one_within_two_percent(name: str) -> None:
    assert encoder_spec(name).num_params == pytest.approx(
        PUBLISHED_MILLIONS[name] * 1e6, rel=0.02
    )


def test_every_pathology_encoder_states_licence_source_and_resolution() -> None:
    for spec in SPECS:
        assert spec.licence != "unknown" and spec.source, spec.name
        assert spec.repo is not None or spec.architecture.kind == "lite0", spec.name
        is_for_any = spec.name.startswith("dino") or spec.name in (
            *("plip", "efficientnet_lite0"),
        )
        expected = 0.25 if spec.name == "gpfm" else 0.5
        assert spec.tile_mpp == (None if is_for_any else expected), spec.name


def test_public_records_of_files_belong_to_pinned_encoders() -> None:
    recorded = [spec for spec in SPECS if spec.published]
    assert len(recorded) >= 10
    for spec in recorded:
        assert spec.pin == "pinned", spec.name
        for file in spec.published:
            assert file.name in spec.weights_files
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            # float32 weights, with a header and at most a head beside them
            if file.size_bytes is not None and spec.num_params and spec.name != "conch":
                assert file.size_bytes == pytest.approx(4 * spec.num_params, rel=0.01)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownEncoderError, match="did you mean 'virchow2'"):
        encoder_spec("Virchow-2")
    with pytest.raises(UnknownEncoderError, match="did you mean 'uni2_h'"):
        encoder_spec("UNI-2 h")
    with pytest.raises(UnknownEncoderError, match="`thinsection models` lists all"):
        encoder_spec("zzzzzz")
