"""Image and text towers of two-tower models, in plain torch, with open_clip's parameter names.

Both towers map into one space, where the cosine of a tile and a prompt says how well they fit.
A network here is one half of a checkpoint: `visual.` and the rest are loaded apart.

**CLIP**: two pre-norm transformers; an image is its class token, a text its end token, each times
a projection. Source: Radford et al., arXiv:2103.00020; open_clip's `model.py`.

**CONCH**: the trunk of a ViT-B/16 at 448 px with an attentional pooler; a text is a learned token
behind the prompt. Source: Lu et al., doi:10.1038/s41591-024-02856-4; mahmoodlab/CONCH.

**KEEP**: UNI's network with a head of two layers; PubMedBERT.
Source: Zhou et al., arXiv:2412.13126; the repository's `modeling_keep.py`.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinsection.encode.networks import ConchConfig, Trunk
from thinsection.weights.files import StateDict
from thinsection.weights.placement import optional_package

EPS = 1e-5  # of layer norms
# how the names of the other tower begin, which a checkpoint has and this one does not use
TEXT_NAMES = (
    "token_embedding.",
    "positional_embedding",
    "transformer.",
    "ln_final.",
    "text_projection",
    "logit_scale",
    "text.",
    "text_decoder.",
    "visual.proj_contrast",
    "visual.attn_pool_caption.",
    "visual.ln_caption.",
)
IMAGE_NAMES = ("visual.", "visual_head.", "text_decoder.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Sizes of a transformer."""

    width: int
    layers: int
    heads: int
    quick_gelu: bool = False  # x sigmoid(1.702 x) in place of the exact GELU
    mlp_ratio: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Sizes of a CLIP model; the defaults are those of ViT-B/32."""

    embed_dim: int = 512
    patch_px: int = 32
    image_px: int = 224
    vision: TransformerConfig = TransformerConfig(
        width=768, layers=12, heads=12, quick_gelu=True
    )
    text: TransformerConfig = TransformerConfig(
        width=512, layers=12, heads=8, quick_gelu=True
    )
    context: int = 77  # tokens of a prompt
    vocabulary: int = 49408


class _QuickGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[B, N, C] to [B, heads, N, C / heads]."""
    b, n, c = x.shape
    return x.view(b, n, heads, c // heads).transpose(1, 2)


class _SelfAttention(nn.Module):
    """Multi-head self-attention with the names of `nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) * width**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (_by_head(part, self.heads) for part in qkv.chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return cast(Tensor, self.out_proj(mixed.transpose(1, 2).flatten(2)))


class _Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        hidden = int(width * config.mlp_ratio)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            c_fc=nn.Linear(width, hidden),
            gelu=_QuickGelu() if config.quick_gelu else nn.GELU(),
            c_proj=nn.Linear(hidden, width),
        )
        self.ln_1 = nn.LayerNorm(width, eps=EPS)
        self.attn = _SelfAttention(width, config.heads)
        self.ln_2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = nn.Sequential(layers)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        return cast(Tensor, x + self.mlp(self.ln_2(x)))


class _Transformer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(_Block(config) for _ in range(config.layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class _ClipVision(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        width = config.vision.width
        patches = (config.image_px // config.patch_px) ** 2
        scale = width**-0.5
        self.class_embedding = nn.Parameter(scale * torch.randn(width))
        self.positional_embedding = nn.Parameter(
            scale * torch.randn(patches + 1, width)
        )
        self.proj = nn.Parameter(scale * torch.randn(width, config.embed_dim))
        self.conv1 = nn.Conv2d(3, width, config.patch_px, config.patch_px, bias=False)
        self.ln_pre = nn.LayerNorm(width, eps=EPS)
        self.transformer = _Transformer(config.vision)
        self.ln_post = nn.LayerNorm(width, eps=EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        of_class = self.class_embedding.expand(len(patches), 1, -1)
        x = torch.cat([of_class, patches], dim=1) + self.positional_embedding
        return cast(Tensor, self.transformer(self.ln_pre(x)))


class ClipImage(nn.Module):
    """Image tower of CLIP: [B, 3, H, W] to tokens, which `pool` makes [B, D]."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.visual = _ClipVision(config)

    def forward(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.visual(pixels))

    def pool(self, tokens: Tensor) -> Tensor:
        """Embedding [B, D] from the tokens [B, 1 + T, C]."""
        return cast(Tensor, self.visual.ln_post(tokens[:, 0]) @ self.visual.proj)


class ISightImage(ClipImage):
    """Image tower of iSight: CLIP's tokens before its last norm, projected.

    The mean over all of them is what its heads see of a slide of one tile.
    """

    def __init__(self, config: ClipConfig) -> None:
        super().__init__(config)
        width = config.vision.width
        self.visual_token_projection = nn.Linear(width, width)

    def forward(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.visual_token_projection(super().forward(pixels)))

    def pool(self, tokens: Tensor) -> Tensor:
        """Embedding [B, C] from the tokens [B, 1 + T, C]: their mean, the class token's too."""
        return tokens.mean(dim=1)


class TextTower(nn.Module):
    """Token ids [P, L] of prompts to vectors [P, D] beside those of tiles."""

    context: int  # L: longer prompts are refused
    pad_id: int = 0
    logit_scale: nn.Parameter  # logarithm of the factor of cosines before a softmax

    def project(self, tile_embeddings: Tensor) -> Tensor:
        """Tile embeddings (N, D) in the space of the texts."""
        return tile_embeddings


class ClipText(TextTower):
    """Text tower of CLIP; each token sees those before it."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        width = config.text.width
        self.context = config.context
        self.token_embedding = nn.Embedding(config.vocabulary, width)
        self.positional_embedding = nn.Parameter(
            0.01 * torch.randn(config.context, width)
        )
        self.transformer = _Transformer(config.text)
        self.ln_final = nn.LayerNorm(width, eps=EPS)
        self.text_projection = nn.Parameter(
            width**-0.5 * torch.randn(width, config.embed_dim)
        )
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.token_embedding(tokens) + self.positional_embedding[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        x = self.ln_final(self.transformer(x, mask))
        # the end token has the highest id
        last = x[torch.arange(len(x), device=x.device), tokens.argmax(dim=1)]
        return cast(Tensor, last @ self.text_projection)


class _QueryAttention(nn.Module):
    """Attention of queries to keys of another width, named as in `nn.MultiheadAttention`."""

    def __init__(self, dim: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj_weight = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.k_proj_weight = nn.Parameter(torch.randn(dim, width) * width**-0.5)
        self.v_proj_weight = nn.Parameter(torch.randn(dim, width) * width**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        q_bias, k_bias, v_bias = self.in_proj_bias.chunk(3)
        projected = (
            F.linear(queries, self.q_proj_weight, q_bias).expand(len(tokens), -1, -1),
            F.linear(tokens, self.k_proj_weight, k_bias),
            F.linear(tokens, self.v_proj_weight, v_bias),
        )
        q, k, v = (_by_head(part, self.heads) for part in projected)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.out_proj(mixed.transpose(1, 2).flatten(2)))


class _ConchPooler(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, dim))
        self.attn = _QueryAttention(dim, width, heads=8)
        self.ln_q = nn.LayerNorm(dim, eps=EPS)
        self.ln_k = nn.LayerNorm(width, eps=EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.attn(self.ln_q(self.query), self.ln_k(tokens))[:, 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConchTowersConfig:
    """Sizes of CONCH; the defaults are those of the published weights."""

    embed_dim: int = 512
    width: int = 768  # of both towers, as their layers and heads
    layers: int = 12
    heads: int = 12
    image_px: int = 448
    context: int = 128
    vocabulary: int = 32007


class _ConchVision(nn.Module):
    def __init__(self, config: ConchTowersConfig) -> None:
        super().__init__()
        trunk = ConchConfig(
            width=config.width,
            depth=config.layers,
            heads=config.heads,
            table_px=config.image_px,
            init_values=None,
        )
        self.trunk = Trunk(trunk)
        self.attn_pool_contrast = _ConchPooler(config.embed_dim, config.width)
        self.ln_contrast = nn.LayerNorm(config.embed_dim, eps=EPS)


class ConchImage(nn.Module):
    """Image tower of CONCH up to its projection, as TRIDENT and STAMP store it."""

    def __init__(self, config: ConchTowersConfig) -> None:
        super().__init__()
        self.visual = _ConchVision(config)

    def forward(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.visual.trunk(pixels))

    def pool(self, tokens: Tensor) -> Tensor:
        """Embedding [B, D] from the tokens [B, 1 + T, C]."""
        pooled = self.visual.attn_pool_contrast(tokens)
        return cast(Tensor, self.visual.ln_contrast(pooled))


class _ConchTextTransformer(nn.Module):
    def __init__(self, config: ConchTowersConfig) -> None:
        super().__init__()
        width = config.width
        transformer = TransformerConfig(
            width=width, layers=config.layers, heads=config.heads
        )
        self.text_projection = nn.Parameter(
            width**-0.5 * torch.randn(width, config.embed_dim)
        )
        self.cls_emb = nn.Parameter(0.01 * torch.randn(width))
        self.token_embedding = nn.Embedding(config.vocabulary, width)
        self.positional_embedding = nn.Parameter(
            0.01 * torch.randn(config.context, width)
        )
        self.transformer = _Transformer(transformer)
        self.ln_final = nn.LayerNorm(width, eps=EPS)

    def forward(self, tokens: Tensor, pad_id: int) -> Tensor:
        words = self.token_embedding(tokens)
        x = torch.cat([words, self.cls_emb.expand(len(words), 1, -1)], dim=1)
        length = x.shape[1]
        x = x + self.positional_embedding[:length]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = causal.expand(len(x), 1, -1, -1).clone()
        # The last token does not see padding. The weights were trained with a mask that is one
        # place too far right, so that it sees the first padding and not itself.
        mask[:, 0, -1, 1:] &= tokens != pad_id
        x = self.transformer(x, mask)
        return cast(Tensor, self.ln_final(x[:, -1]) @ self.text_projection)


class _ConchProjection(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj_contrast = nn.Parameter(dim**-0.5 * torch.randn(dim, dim))


class ConchText(TextTower):
    """Text tower of CONCH, and the projection of its tile embeddings."""

    def __init__(self, config: ConchTowersConfig) -> None:
        super().__init__()
        self.context = config.context - 1
        self.text = _ConchTextTransformer(config)
        self.visual = _ConchProjection(config.embed_dim)
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, tokens: Tensor) -> Tensor:
        # the place of the learned token depends on the length
        padding = (0, self.context - tokens.shape[1])
        tokens = F.pad(tokens, padding, value=self.pad_id)
        return cast(Tensor, self.text(tokens, self.pad_id))

    def project(self, tile_embeddings: Tensor) -> Tensor:
        return tile_embeddings @ self.visual.proj_contrast


class KeepImage(nn.Module):
    """Image tower of KEEP: timm's ViT-L/16 and a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        timm = optional_package("timm")
        self.visual = timm.create_model(
            "vit_large_patch16_224",
            img_size=224,
            init_values=1e-5,
            num_classes=0,
            dynamic_img_size=True,
        )
        dim = 768
        self.visual_head = nn.Sequential(
            nn.Linear(self.visual.num_features, dim), nn.GELU(), nn.Linear(dim, dim)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.visual.forward_features(pixels))

    def pool(self, tokens: Tensor) -> Tensor:
        """Embedding [B, D] from the tokens [B, 1 + T, C]."""
        return cast(Tensor, self.visual_head(self.visual.forward_head(tokens)))


class KeepText(TextTower):
    """Text tower of KEEP: BERT's pooled output."""

    context = 256

    def __init__(self) -> None:
        super().__init__()
        transformers = optional_package("transformers")
        # PubMedBERT has the sizes of BERT base
        self.text = transformers.BertModel(transformers.BertConfig())
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.04).log())

    def forward(self, tokens: Tensor) -> Tensor:
        is_word = (tokens != self.pad_id).long()
        answer = self.text(input_ids=tokens, attention_mask=is_word)
        return cast(Tensor, answer.pooler_output)


# beginning of a name in transformers' CLIP -> in open_clip's
_CLIP_NAMES = {
    "text_model.embeddings.token_embedding.": "token_embedding.",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.encoder.layers.": "transformer.resblocks.",
    "text_model.final_layer_norm.": "ln_final.",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.": "visual.conv1.",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.encoder.layers.": "visual.transformer.resblocks.",
    "vision_model.pre_layrnorm.": "visual.ln_pre.",
    "vision_model.post_layernorm.": "visual.ln_post.",
}
_LAYER_NAMES = {
    ".self_attn.out_proj.": ".attn.out_proj.",
    ".layer_norm1.": ".ln_1.",
    ".layer_norm2.": ".ln_2.",
    ".mlp.fc1.": ".mlp.c_fc.",
    ".mlp.fc2.": ".mlp.c_proj.",
}
_PROJECTIONS = {
    "text_projection.weight": "text_projection",
    "visual_projection.weight": "visual.proj",
}


def in_open_clip_names(state: StateDict) -> StateDict:
    """Weights of transformers' CLIPModel under open_clip's names; others as they are.

    Memory: the attention weights once more.
    """
    if "visual_projection.weight" not in state:
        return state
    renamed: StateDict = {}
    for name, tensor in state.items():
        if name.endswith(".position_ids"):
            continue
        if name in _PROJECTIONS:
            renamed[_PROJECTIONS[name]] = tensor.T.contiguous()
            continue
        new = name
        for old, ours in _CLIP_NAMES.items():
            if new.startswith(old):
                new = ours + new.removeprefix(old)
        for old, ours in _LAYER_NAMES.items():
            new = new.replace(old, ours)
        before, q, kind = new.partition(".self_attn.q_proj.")
        if q:
            layer = name.removesuffix(f"q_proj.{kind}")
            parts = [state.get(f"{layer}{part}_proj.{kind}") for part in "qkv"]
            whole = [part for part in parts if part is not None]
            renamed[f"{before}.attn.in_proj_{kind}"] = torch.cat(whole)
        elif ".self_attn." not in new:
            renamed[new] = tensor
    return renamed


def clip_config(options: Mapping[str, Any]) -> ClipConfig:
    """Sizes of a declaration, by the names of `ClipConfig`; the others are those of ViT-B/32."""
    changes = dict(options)
    for tower in ("vision", "text"):
        if tower in changes:
            changes[tower] = TransformerConfig(**changes[tower])
    return ClipConfig(**changes)
