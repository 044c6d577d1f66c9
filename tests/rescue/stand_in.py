"""A small stand-in for the hub's TITAN: the interface that its remote code shows, built plainly."""

import torch
from tests.support.plain_titan import plain_bias, plain_grid
from torch import nn
from torch.nn import functional as F

DIM, HEADS = 48, 12
NUM_BLOCKS = 2


class Attention(nn.Module):
    """Names and call of the published attention; dense SDPA."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.pos_encode = HEADS, dim // HEADS, "alibi"
        self.attn_drop_prob = 0.0
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm, self.proj_drop = (
            nn.Identity(),
            nn.Identity(),
            nn.Identity(),
        )

    def forward(self, x, attn_bias, bg_mask=None):  # type: ignore[no-untyped-def]
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_bias)
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim)

    def forward(self, x, attn_bias, bg_mask=None):  # type: ignore[no-untyped-def]
        return x + self.attn(self.norm1(x), attn_bias=attn_bias, bg_mask=bg_mask)


class Blocks(nn.Module):
    def __init__(self, dim: int, num_blocks: int) -> None:
        super().__init__()
        self.modules_list = nn.ModuleList(Block(dim) for _ in range(num_blocks))

    def forward(self, x, attn_mask, bg_mask=None):  # type: ignore[no-untyped-def]
        for block in self.modules_list:
            x = block(x, attn_mask, bg_mask)
        return x


class VisionEncoder(nn.Module):
    def __init__(self, dim: int, num_blocks: int) -> None:
        super().__init__()
        self.pos_encode_type, self.num_heads, self.built = "alibi", HEADS, 0
        self.masked_im_modeling = self.grad_checkpointing = False
        self.cls_token = nn.Parameter(torch.ones(1, 1, dim))
        self.patch_embed = nn.Sequential(nn.Linear(dim, dim), nn.GELU())
        self.norm_pre = nn.Identity()
        self.blocks = Blocks(dim, num_blocks)
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def get_alibi(self, w, h, bg_mask=None):  # type: ignore[no-untyped-def]
        self.built += 1
        shown = (
            torch.ones(w, h, dtype=torch.bool) if bg_mask is None else bg_mask[0].cpu()
        )
        return plain_bias(shown.nonzero(), HEADS, dtype=torch.float32, way="float32")

    def _pos_embed(self, x, coords, w, h):  # type: ignore[no-untyped-def]
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)

    def forward_features(self, x, coords=None, mask=None, bg_mask=None):  # type: ignore[no-untyped-def]
        batch, _, w, h = x.shape
        bias = self.get_alibi(w, h, bg_mask) if batch == 1 else self.get_alibi(w, h)
        bias = bias.repeat(batch, 1, 1, 1).type(x.dtype).to(x.device)
        tokens = self.patch_embed(x.flatten(2).transpose(1, 2))
        tokens = self.norm_pre(self._pos_embed(tokens, coords, w, h))
        if batch == 1 and bg_mask is not None:
            kept = torch.cat(
                [torch.ones(1, 1, dtype=torch.bool), bg_mask.flatten(1)], 1
            )
            tokens = tokens[kept][None]
        return self.norm(self.blocks(tokens, bias, bg_mask))


def preprocess_features(features, coords, patch_size_lv0):  # type: ignore[no-untyped-def]
    """Grid [1, C, rows, columns], None and which cells hold a tile; slide2vec replaces it."""
    grid, _ = plain_grid(features[0], coords[0], int(patch_size_lv0))
    return grid.permute(2, 0, 1)[None], None, (grid != 0).any(-1)[None]


class Titan(nn.Module):
    def __init__(self, dim: int = DIM, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.vision_encoder = VisionEncoder(dim, num_blocks)

    def encode_slide_from_patch_features(
        self, patch_features, patch_coords, patch_size_lv0
    ):  # type: ignore[no-untyped-def]
        grid, _, shown = preprocess_features(
            patch_features, patch_coords, patch_size_lv0
        )
        return self.vision_encoder.forward_features(grid, bg_mask=shown)
