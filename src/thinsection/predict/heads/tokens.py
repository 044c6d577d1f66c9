"""Heads in which tiles see each other: TransMIL, and a transformer with 2-D ALiBi attention.

Shapes: T tokens of C channels, h attention heads, m landmarks; N, D, H as in `head`.

Sources: Shao et al., "TransMIL", 2021; Xiong et al., "Nyströmformer", 2021. With the same weights
our TransMIL equals its authors' module, see docs/validation/predictions.md.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.attention import alibi2d_attention, alibi_slopes
from thinsection.encode.networks import mlp
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.pool.dropout import Dropout
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.heads.head import Head, HeadOutput
from thinsection.predict.heads.pooled import AbmilHead

# as published
PINV_ITERATIONS = 6
RESIDUAL_KERNEL = 33
NYSTROM_DROPOUT = 0.1
PLACE_KERNELS = (7, 5, 3)


def check_width(settings: HeadConfig) -> int:
    """The width of the tokens. Raises ConfigError: it does not fit the attention heads."""
    width = settings.hidden_dim
    step = 2 * settings.num_heads
    if width <= 0 or width % step:
        raise ConfigError(
            f"hidden_dim must be a multiple of {step} (twice num_heads), got {width}"
        )
    return width


class NystromAttention(nn.Module):
    """Attention through `width // 2` landmarks, each the mean of neighbours in the sequence."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.landmarks = width // 2
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Sequential(nn.Linear(width, width), Dropout(NYSTROM_DROPOUT))
        self.res_conv = nn.Conv2d(
            heads,
            heads,
            (RESIDUAL_KERNEL, 1),
            padding=(RESIDUAL_KERNEL // 2, 0),
            groups=heads,
            bias=False,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """States (T, C), and by head (h, T) the attention of the first token to each.

        Memory: 4 h (T (3 C / h + 2 landmarks) + 6 landmarks²) bytes beside the states.
        """
        tokens = len(x)
        m = self.landmarks
        x = F.pad(x, (0, 0, -tokens % m, 0))  # in front, as the authors do
        q, k, v = self.to_qkv(x).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        q = q * q.shape[-1] ** -0.5
        q_mark = q.unflatten(1, (m, -1)).mean(2)
        k_mark = k.unflatten(1, (m, -1)).mean(2)
        to_marks = (q @ k_mark.mT).softmax(-1)
        inverse = pseudo_inverse((q_mark @ k_mark.mT).softmax(-1))
        from_marks = (q_mark @ k.mT).softmax(-1)
        out = (to_marks @ inverse) @ (from_marks @ v) + self.res_conv(v[None])[0]
        first = (to_marks[:, -tokens, None] @ inverse) @ from_marks
        out = self.to_out(out.transpose(0, 1).flatten(1))
        return out[-tokens:], first[:, 0, -tokens:]


def pseudo_inverse(x: Tensor) -> Tensor:
    """Pseudo-inverse of each (h, m, m), by iteration; one scale for all heads, as published."""
    z = x.mT / (x.abs().sum(-1).max() * x.abs().sum(-2).max())
    eye = torch.eye(x.shape[-1], device=x.device, dtype=x.dtype)
    for _ in range(PINV_ITERATIONS):
        xz = x @ z
        z = 0.25 * z @ (13 * eye - (xz @ (15 * eye - (xz @ (7 * eye - xz)))))
    return z


class TransmilHead(Head):
    """A class token over tiles in the order that they come in, wrapped into a square.

    Its logits are no sum over tiles, so there is no evidence. Attention: of the class token in the
    last layer, mean over heads, which Nyström's approximation can make slightly negative.
    """

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        width = check_width(settings)
        self.embed = nn.Sequential(nn.Linear(dim, width), nn.ReLU())
        self.cls_token = nn.Parameter(torch.randn(1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.layers = nn.ModuleList(
            NystromAttention(width, settings.num_heads) for _ in range(2)
        )
        self.places = nn.ModuleList(
            nn.Conv2d(width, width, kernel, 1, kernel // 2, groups=width)
            for kernel in PLACE_KERNELS
        )
        self.classifier = nn.Linear(width, outputs)

    def forward(self, embeddings: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`. Memory: 4 N (D + 10 H + 2 num_heads H) bytes."""
        h = self.embed(embeddings)
        count = len(embeddings)
        side = math.isqrt(count - 1) + 1
        h = torch.cat([self.cls_token, h, h[: side * side - count]])
        h = h + self.layers[0](self.norms[0](h))[0]
        square = h[1:].T.unflatten(1, (side, side))
        placed = square + sum(conv(square[None])[0] for conv in self.places)
        h = torch.cat([h[:1], placed.flatten(1).T])
        out, first = self.layers[1](self.norms[1](h))
        states = self.norms[2](h + out)
        logits = self.classifier(states[0])
        if self.training:
            return HeadOutput(logits)
        # the first tiles fill up the square, so they are there twice
        by_place = first.mean(0)[1:]
        attention = by_place[:count, None].clone()
        attention[: len(by_place) - count] += by_place[count:, None]
        return HeadOutput(logits, attention)


class AlibiBlock(nn.Module):
    """x += attention(norm1(x)); x += mlp(norm2(x)); near tiles count more."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = mlp(width, 2 * width)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        """States (T, C) of tiles at cells (T, 2)."""
        qkv = self.qkv(self.norm1(x)).unflatten(1, (3, self.heads, -1))
        q, k, v = qkv.permute(1, 2, 0, 3)[:, None]
        slopes = alibi_slopes(self.heads)
        out = alibi2d_attention(q, k, v, cells, slopes, num_prefix_tokens=0)[0]
        x = x + self.drop(self.proj(out.transpose(0, 1).flatten(1)))
        return x + self.drop(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class TransformerHead(AbmilHead):
    """Tiles attend to each other, less with distance, then gated attention pools them as in ABMIL.

    Attention and evidence are those of the pooling, so evidence adds up to the logits; a tile's
    state has seen its neighbours, so its evidence is of the tile in its surroundings.
    """

    needs_cells = True

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        width = check_width(settings)
        self.blocks = nn.ModuleList(
            AlibiBlock(width, settings.num_heads, settings.dropout)
            for _ in range(settings.num_layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, embeddings: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`. Memory: 4 N (D + 8 H) bytes and the attention's 512 MiB."""
        shape = None if coords is None else tuple(coords.shape)
        if shape != (len(embeddings), 2):
            raise InvalidInputError(
                f"coords must be of shape ({len(embeddings)}, 2), got {shape}"
            )
        h = self.embed(embeddings)
        for block in self.blocks:
            h = block(h, coords)
        return self.pool(self.norm(h))
