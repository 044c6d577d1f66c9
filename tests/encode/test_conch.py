"""CONCH v1.5 in our own code: timm's vision transformer, a plain pooler, an interpolated table."""

import pytest
import torch
import torch.nn.functional as F

from thinsection.encode.networks import AttentionalPooler, ConchConfig, ConchV15, Trunk
from thinsection.weights.placement import importable_torchvision

SMALL = ConchConfig(
    width=64, depth=3, heads=4, table_px=64, init_values=0.5, embed_dim=48
)


@pytest.fixture(scope="module")
def seeded():
    torch.manual_seed(0)
    model = ConchV15(SMALL).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def test_the_trunk_is_timms_vision_transformer_name_by_name(seeded) -> None:
    importable_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    theirs = VisionTransformer(
        img_size=64,
        patch_size=16,
        embed_dim=64,
        depth=3,
        num_heads=4,
        init_values=0.5,
        num_classes=0,
    ).eval()
    theirs.load_state_dict(seeded.trunk.state_dict(), strict=True)
    pixels = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            seeded.trunk(pixels), theirs.forward_features(pixels)
        )


def test_the_pooler_is_a_softmax_over_all_tokens(seeded) -> None:
    pooler: AttentionalPooler = seeded.attn_pool_contrast
    tokens = torch.randn(2, 7, 64)
    with torch.no_grad():
        q = pooler.to_q(pooler.ln_q(pooler.query))
        k, v = pooler.to_kv(pooler.ln_k(tokens)).split(48, dim=-1)
        heads = []
        for h in range(8):
            part = slice(6 * h, 6 * h + 6)
            logits = q[:, part] @ k[:, :, part].transpose(1, 2) / 6**0.5
            heads.append(logits.softmax(-1) @ v[:, :, part])
        expected = torch.cat(heads, -1) @ pooler.to_out.weight.T
        torch.testing.assert_close(pooler(tokens), expected)


def test_a_larger_input_interpolates_the_table_by_a_scale_factor(seeded) -> None:
    trunk: Trunk = seeded.trunk
    table = trunk.pos_embed[:, 1:].reshape(1, 4, 4, 64).permute(0, 3, 1, 2)
    by_scale = F.interpolate(table, scale_factor=(8.1 / 4, 8.1 / 4), mode="bicubic")
    by_size = F.interpolate(table, size=(8, 8), mode="bicubic")
    positions = trunk.positions(8, 8)
    assert positions.shape == (1, 65, 64)
    assert torch.equal(positions[:, 1:], by_scale.flatten(2).transpose(1, 2))
    assert (by_scale - by_size).abs().max() > 1e-3  # a size instead would be seen here
    assert torch.equal(positions[:, :1], trunk.pos_embed[:, :1])


def test_the_state_dict_has_the_published_names() -> None:
    with torch.device("meta"):
        names = set(ConchV15(ConchConfig()).state_dict())
    assert {
        "trunk.cls_token",
        "trunk.pos_embed",
        "trunk.patch_embed.proj.weight",
        "trunk.blocks.23.attn.qkv.bias",
        "trunk.blocks.0.ls1.gamma",
        "trunk.norm.bias",
        "attn_pool_contrast.query",
        "attn_pool_contrast.to_kv.weight",
        "ln_contrast.weight",
    } <= names
