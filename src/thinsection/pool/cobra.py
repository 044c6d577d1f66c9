"""COBRA's slide encoder: Mamba-2 layers compute weights, by which tile embeddings are summed up.

The layers read the tiles in their order, once, and carry a state of fixed size from block to block.

Shapes: n tiles of a block, D channels of a tile embedding, C channels of a state, H heads of P
channels of a layer's state, S values for each of these channels.

Source: Lenz et al., "Unsupervised foundation model-agnostic slide-level representation learning",
2025 (COBRA); Dao, Gu, "Transformers are SSMs", 2024 (Mamba-2). Parameters have the names of the
authors' file.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.attention.blocks import blocks_of
from thinsection.errors import InvalidInputError
from thinsection.pool.abmil import SoftmaxSums
from thinsection.pool.attention_pools import Scores
from thinsection.pool.encoder import Expects, LoadOptions, TileLayout
from thinsection.pool.published import PublishedSlideEncoder
from thinsection.types import CoordsL0

# tiles a block: the weights of all pairs of tiles, 24 x 256 x 256, have 6 MiB
BLOCK_ROWS = 256
EXPANSION = 2  # channels inside a layer, for each of its input channels
CONV_TILES = 4  # tiles in a layer's convolution: the tile itself and three before it
# prefix of the averaged weights in a training checkpoint
TRAINED_NAMES = "momentum_enc."
# tile encoders that the authors trained on, by the number of channels of their embeddings
ENCODERS = {
    1280: ("virchow2", "virchow2_cls"),
    512: ("conch", "conch_v1"),
    768: ("ctranspath",),
    1024: ("uni", "uni_v1"),
    1536: ("h_optimus_0",),
}
# channels of Virchow2's class token and mean together -> channels of the class token, which come
# first
CLASS_TOKEN_DIMS = {2560: 1280}


@dataclass(frozen=True, slots=True, kw_only=True)
class CobraSizes:
    """Sizes; the defaults are those of COBRA II."""

    # channels of the tile encoders that COBRA was trained on
    tile_dims: tuple[int, ...] = (512, 1024, 1280, 1536)
    dim: int = 768
    num_layers: int = 1
    state: int = 128  # S, values for each channel of a layer's state
    state_heads: int = 24  # H, heads of a layer's state
    num_heads: int = 4  # heads of the scores
    hidden: int = 256  # channels between a head's channels and its score


class LayerState:
    """State that a layer passes from one block of tiles to the next."""

    def __init__(self, layer: "Mamba2Layer") -> None:
        device = layer.D.device
        conv_dim = layer.conv1d.weight.shape[0]
        # inputs of the convolution for the last tiles of the previous block
        self.inputs = torch.zeros(CONV_TILES - 1, conv_dim, device=device)
        heads, channels, values = layer.state_shape
        self.memory = torch.zeros(heads, channels, values, device=device)


class Mamba2Layer(nn.Module):
    """A selective state space: h_t = exp(dt a) h_(t-1) + dt x_t b_t, y_t = h_t c_t + D x_t."""

    def __init__(self, sizes: CobraSizes) -> None:
        super().__init__()
        inner = EXPANSION * sizes.dim
        conv_dim = inner + 2 * sizes.state
        heads = sizes.state_heads
        self.state_shape = (heads, inner // heads, sizes.state)
        self.in_proj = nn.Linear(sizes.dim, inner + conv_dim + heads, bias=False)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, CONV_TILES, groups=conv_dim)
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.zeros(heads))
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.out_proj = nn.Linear(inner, sizes.dim, bias=False)

    def forward_block(self, x: Tensor, state: LayerState) -> Tensor:
        """Output (n, C) for a block of inputs (n, C); updates `state` to the end of the block."""
        heads, channels, values = self.state_shape
        inner = heads * channels
        gates, mixed, steps = self.in_proj(x).split(
            [inner, inner + 2 * values, heads], 1
        )
        inputs = torch.cat([state.inputs, mixed])
        state.inputs = inputs[-(CONV_TILES - 1) :]
        convolved = F.silu(self.conv1d(inputs.T[None])[0].T)
        tiles, writes, reads = torch.split(convolved, [inner, values, values], 1)
        tiles = tiles.view(len(x), heads, channels)
        steps = F.softplus(steps + self.dt_bias)  # dt, (n, H)
        y = self._scan(tiles, steps, writes, reads, state)
        y = (y + self.D[:, None] * tiles).flatten(1)
        return cast(Tensor, self.out_proj(self.norm(y * F.silu(gates))))

    def _scan(
        self,
        tiles: Tensor,
        steps: Tensor,
        writes: Tensor,
        reads: Tensor,
        state: LayerState,
    ) -> Tensor:
        """Values (n, H, P) that are read from the memory after each tile has written to it."""
        # (n, H), logarithm of the memory's decay since the start of the block
        decay = (steps * -self.A_log.exp()).cumsum(0)
        # (n, n, H), logarithm of the decay at a tile since an earlier tile
        from_to = decay[:, None] - decay[None]
        is_later = (
            torch.ones(len(tiles), len(tiles), device=tiles.device).triu(1).bool()
        )
        kept = from_to.masked_fill(is_later[..., None], -torch.inf).exp()
        similarity = reads @ writes.T  # (n, n)
        written = tiles * steps[..., None]
        own_block = torch.einsum("ij,ijh,jhp->ihp", similarity, kept, written)
        earlier = torch.einsum("is,hps->ihp", reads, state.memory)
        y = own_block + decay.exp()[..., None] * earlier
        until_end = (decay[-1] - decay).exp()[..., None]
        new = torch.einsum("jhp,js->hps", written * until_end, writes)
        state.memory = decay[-1].exp()[:, None, None] * state.memory + new
        return y


class _Embed(nn.Module):
    """Layer norm and two layers, for embeddings with one number of channels."""

    def __init__(self, tile_dim: int, dim: int) -> None:
        super().__init__()
        self.head = nn.Sequential(
            nn.LayerNorm(tile_dim),
            nn.Linear(tile_dim, dim),
            nn.Dropout(),  # counts in the indices; inference drops nothing
            nn.SiLU(),
            nn.Linear(dim, dim),
        )


class HeadScores(nn.ModuleList):
    """Scores (n, A) of A heads of `Scores`, each for its own channels of a tile.

    One product computes a layer for all heads, from weights that are stacked when they are loaded.
    Names in the state dict are those of the heads: '0.attention_a.0.weight'.
    """

    def __init__(self, dim: int, hidden: int, *, num_heads: int) -> None:
        super().__init__(Scores(dim, hidden) for _ in range(num_heads))
        _stack_heads(self)
        self.register_load_state_dict_post_hook(_stack_heads)  # type: ignore[no-untyped-call]

    def forward(self, values: Tensor) -> Tensor:
        """Scores (n, A) of values (n, A, E)."""
        # (A, n, E); contiguous, or each product would copy it
        by_head = values.transpose(0, 1).contiguous()
        gates = self._layer("b", by_head).sigmoid()
        hidden = self._layer("a", by_head).tanh() * gates
        return self._layer("c", hidden)[..., 0].T

    def _layer(self, name: str, values: Tensor) -> Tensor:
        """Outputs (A, n, O) of a layer of all heads."""
        weight = cast(Tensor, getattr(self, f"weight_{name}"))
        bias = cast(Tensor, getattr(self, f"bias_{name}"))
        return torch.baddbmm(bias, values, weight)


def _stack_heads(scores: nn.Module, _: object = None) -> None:
    """Stacks the heads' weights, (A, inputs, outputs), and biases, (A, 1, outputs)."""
    heads = [cast(Scores, head) for head in scores.children()]
    layers: dict[str, list[nn.Module | Tensor]] = {
        "a": [head.attention_a[0] for head in heads],
        "b": [head.attention_b[0] for head in heads],
        "c": [head.attention_c for head in heads],
    }
    for name, modules in layers.items():
        linears = [cast(nn.Linear, module) for module in modules]
        weight = torch.stack([linear.weight.detach().T for linear in linears])
        bias = torch.stack([linear.bias.detach() for linear in linears])[:, None]
        scores.register_buffer(f"weight_{name}", weight, persistent=False)
        scores.register_buffer(f"bias_{name}", bias, persistent=False)


class CobraNet(nn.Module):
    """The slide encoder."""

    def __init__(self, sizes: CobraSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.ModuleDict(
            {str(tile_dim): _Embed(tile_dim, sizes.dim) for tile_dim in sizes.tile_dims}
        )
        self.norm = nn.LayerNorm(sizes.dim)
        layers = [
            nn.Sequential(nn.LayerNorm(sizes.dim), Mamba2Layer(sizes))
            for _ in range(sizes.num_layers)
        ]
        self.mamba_enc = nn.ModuleDict(
            {
                "_fc1": nn.Sequential(nn.Linear(sizes.dim, sizes.dim), nn.GELU()),
                "layers": nn.ModuleList(layers),
                "classifier": nn.Linear(sizes.dim, sizes.dim),
            }
        )
        head_dim = sizes.dim // sizes.num_heads
        self.attn = HeadScores(head_dim, sizes.hidden, num_heads=sizes.num_heads)

    def forward(self, tiles: Tensor, device: torch.device) -> Tensor:
        """Weighted sum (D,) float64 of tiles (N, D)."""
        embed = cast(_Embed, self.embed[str(tiles.shape[1])])
        layers = cast(list[nn.Sequential], self.mamba_enc["layers"])
        states = [LayerState(cast(Mamba2Layer, layer[1])) for layer in layers]
        sums = SoftmaxSums()
        for rows in blocks_of(len(tiles), BLOCK_ROWS):
            block = tiles[rows].to(device).float()
            x = self.mamba_enc["_fc1"](embed.head(block))
            for (norm, mamba), state in zip(layers, states, strict=True):
                x = x + cast(Mamba2Layer, mamba).forward_block(norm(x), state)
            x = self.norm(self.mamba_enc["classifier"](x))
            # a tile's score is the mean over the heads, whose channels are interleaved
            by_head = x.view(len(x), -1, len(self.attn)).transpose(1, 2)
            sums.add(self.attn(by_head).mean(1, keepdim=True), block)
        return sums.result()[0]


class CobraSlideEncoder(PublishedSlideEncoder[CobraSizes]):
    """COBRA II, or COBRA if its file is given: the weighted mean (D,) of the tile embeddings.

    With Virchow2 the authors use only the class token, which is the first half of an embedding of
    'virchow2' (2560 channels: class token, then mean of the other tokens). The second half is not
    used. The slide embedding depends on the order of the tiles.

    Memory: 50 MiB, whatever the number of tiles.
    """

    name = "cobra"
    # the authors extract tiles of 224 µm and draw heatmaps with tiles of 112 µm; 256 µm is the
    # default of STAMP, with which they make their tiles
    expects = Expects(
        tile_encoders=tuple(itertools.chain(*ENCODERS.values())),
        tile_px=224,
        tile_mpp=1.0,
        other_mpps=(0.5, 256 / 224),
    )
    repository = "KatherLab/COBRA"
    revision = None
    files = ("cobraII.safetensors", "cobraII.pth.tar")
    unused = ("mamba_enc.norm.",)
    network = CobraNet
    published_sizes = CobraSizes()

    net: CobraNet

    def __init__(self, net: CobraNet, *, options: LoadOptions) -> None:
        super().__init__(net, options=options)
        names = [name for dim in net.sizes.tile_dims for name in ENCODERS.get(dim, ())]
        self.expects = replace(self.expects, tile_encoders=tuple(names) or None)

    @property
    def tile_dim(self) -> None:
        """See `PublishedSlideEncoder`; `embed` checks the length."""

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        config: CobraSizes | None = None,
        options: LoadOptions = LoadOptions(),  # noqa: B008 - a frozen value
    ) -> Self:
        """See `PublishedSlideEncoder`; from a training checkpoint the averaged weights are used."""
        averaged = {}
        for name, value in state_dict.items():
            _, is_averaged, own_name = name.rpartition(TRAINED_NAMES)
            if is_averaged and not own_name.startswith("proj"):
                averaged[own_name] = value
        return super().from_state_dict(
            averaged or state_dict, config=config, options=options
        )

    @classmethod
    def sizes_of(cls, state_dict: Mapping[str, Tensor]) -> CobraSizes | None:
        """Sizes from the names and shapes in a weights file."""
        first = "mamba_enc.layers.0.1."
        needed = ("norm.weight", f"{first}A_log", f"{first}conv1d.bias")
        score = "attn.0.attention_a.0.weight"
        if not state_dict.keys() >= {*needed, score}:
            return None
        names = "\n".join(state_dict)
        dim = len(state_dict["norm.weight"])
        return CobraSizes(
            tile_dims=tuple(
                map(int, re.findall(r"^embed\.(\d+)\.head\.0\.bias$", names, re.M))
            ),
            dim=dim,
            num_layers=len(re.findall(r"^mamba_enc\.layers\.\d+\.1\.D$", names, re.M)),
            state=(len(state_dict[f"{first}conv1d.bias"]) - EXPANSION * dim) // 2,
            state_heads=len(state_dict[f"{first}A_log"]),
            num_heads=len(re.findall(r"^attn\.\d+\.attention_c\.bias$", names, re.M)),
            hidden=len(state_dict[score]),
        )

    @classmethod
    def random_weights(
        cls, config: CobraSizes | None = None, *, seed: int
    ) -> dict[str, Tensor]:
        """Random weights as for all encoders, but heads remember from one to some hundred tiles."""
        weights = super().random_weights(config, seed=seed)
        for name, value in weights.items():
            if name.endswith("dt_bias"):
                weights[name] = torch.linspace(-6, 0, len(value))
        return weights

    def embed(self, tiles: Tensor, coords_l0: CoordsL0, layout: TileLayout) -> Tensor:
        """Slide embedding (D,); 2560 channels are cut to the first 1280, Virchow2's class token.

        Raises InvalidInputError: no encoder that COBRA was trained on has D channels.
        """
        known = self.net.sizes.tile_dims
        class_token_dim = CLASS_TOKEN_DIMS.get(tiles.shape[1])
        if class_token_dim in known:
            tiles = tiles[:, :class_token_dim]
        if tiles.shape[1] not in known:
            raise InvalidInputError(
                f"tile_embeddings must have {', '.join(map(str, known))} channels for slide "
                f"encoder 'cobra', got {tiles.shape[1]}; check which tile encoder made them"
            )
        return cast(Tensor, self.net(tiles, self._device))
