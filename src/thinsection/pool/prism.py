"""PRISM's slide encoder, a Perceiver: 513 latents that attend to all tiles eight times.

One attention of the latents to the tiles, with the blocks after it, is called a look.

Shapes: N tiles of D channels, M latents of C channels, H heads of the attention to tiles.

Source: Shaikovski et al., "PRISM: a multi-modal generative foundation model for slide-level
histopathology", 2024; Jaegle et al., "Perceiver: general perception with iterative attention",
2021. Parameters have the names of the authors' file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.attention.blocks import blocks_of
from thinsection.errors import WeightsError, rewording
from thinsection.files.atomic import read_json
from thinsection.pool.abmil import SoftmaxSums
from thinsection.pool.encoder import Expects, TileLayout
from thinsection.pool.published import (
    PublishedSlideEncoder,
    check_heads,
    stated_int,
)
from thinsection.types import CoordsL0

TABLE = "perceiver_config"  # table of the authors' config with the sizes
# tiles a block: scores of 513 latents, 2048 x 513 float64, have 8 MiB
BLOCK_ROWS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PerceiverSizes:
    """Sizes; the defaults are those of the published configuration."""

    tile_dim: int = 2560
    dim: int = 1280
    num_latents: int = 513  # the first becomes the slide embedding
    depth: int = 8  # number of looks at the tiles
    # index of a look; all later looks have its weights of the attention to tiles
    shared_from: int = 1
    num_blocks: int = 6  # self-attention blocks after each look; all looks share them
    tile_heads: int = 1
    latent_heads: int = 8


class TileAttention(nn.Module):
    """Attention of latents to tiles, without keys and values of the tiles.

    q . (W_k x) is (W_k^T q) . x, and the weighted sum of W_v x is W_v of the weighted sum of x. So
    a look costs 4 N M D products, less than the 4 N D C of keys and values, and nothing is stored.
    """

    def __init__(self, sizes: PerceiverSizes) -> None:
        super().__init__()
        self.num_heads = sizes.tile_heads
        self.x_norm = nn.LayerNorm(sizes.dim)
        self.to_q = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.to_kv = nn.Linear(sizes.tile_dim, 2 * sizes.dim, bias=False)
        self.to_out = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, latents: Tensor, tiles: Tensor) -> Tensor:
        """Attention output (M, C) of latents (M, C) to tiles (N, D)."""
        num_latents = len(latents)
        q = self.to_q(self.x_norm(latents)).view(num_latents, self.num_heads, -1)
        w_k, w_v = self.to_kv.weight.view(2, self.num_heads, -1, tiles.shape[1])
        scale = q.shape[-1] ** -0.5
        directions = torch.einsum("mhc,hcd->hmd", q, w_k).flatten(0, 1) * scale
        sums = SoftmaxSums()
        for rows in blocks_of(len(tiles), BLOCK_ROWS):
            block = tiles[rows].to(latents.device).float()
            sums.add(block @ directions.T, block)
        means = sums.result().float().view(self.num_heads, num_latents, -1)
        read = torch.einsum("hcd,hmd->mhc", w_v, means)
        return cast(Tensor, self.to_out(read.flatten(1)))


class LatentAttention(nn.Module):
    """Self-attention of the latents."""

    def __init__(self, sizes: PerceiverSizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.dim)
        self.mha = nn.MultiheadAttention(sizes.dim, sizes.latent_heads, bias=False)

    def forward(self, latents: Tensor) -> Tensor:
        normed = self.norm(latents)
        attended, _ = self.mha(normed, normed, normed, need_weights=False)
        return cast(Tensor, attended)


class GatedMlp(nn.Module):
    """Layer norm, one hidden layer of the same width with a GELU gate."""

    def __init__(self, sizes: PerceiverSizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.dim)
        # indices of the authors' modules; their module 1 has no weights
        self.net = nn.ModuleDict(
            {
                "0": nn.Linear(sizes.dim, 2 * sizes.dim),
                "2": nn.Linear(sizes.dim, sizes.dim),
            }
        )

    def forward(self, latents: Tensor) -> Tensor:
        hidden, gates = self.net["0"](self.norm(latents)).chunk(2, dim=-1)
        return cast(Tensor, self.net["2"](hidden * F.gelu(gates)))


class PerceiverNet(nn.Module):
    """The slide encoder; parameter names are those of the file without `image_resampler.`."""

    def __init__(self, sizes: PerceiverSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.cls_norm = nn.LayerNorm(sizes.dim)
        self.perceiver = nn.Module()
        self.perceiver.latents = nn.Parameter(torch.zeros(sizes.num_latents, sizes.dim))
        # looks after the last of these share its weights
        self.perceiver.layers = nn.ModuleList(
            _look(sizes, has_blocks=look == 0) for look in range(sizes.shared_from + 1)
        )

    def forward(self, tiles: Tensor) -> Tensor:
        """Slide embedding (C,) of tiles (N, D)."""
        looks = cast(list[nn.ModuleDict], list(self.perceiver.layers))  # type: ignore[arg-type]
        blocks = cast(list[nn.ModuleDict], looks[0]["tf"])
        x = cast(Tensor, self.perceiver.latents)
        for number in range(self.sizes.depth):
            own = min(number, self.sizes.shared_from)
            look = cast(nn.ModuleDict, looks[own]["xattn"])
            x = look["xattn"](x, tiles) + x
            x = look["ff"](x) + x
            for block in blocks:
                x = block["mhsa"](x) + x
                x = block["ff"](x) + x
        return cast(Tensor, self.cls_norm(x[0]))


def _look(sizes: PerceiverSizes, *, has_blocks: bool) -> nn.ModuleDict:
    """Weights of one look; the first look also has the self-attention blocks of all looks."""
    tile_attention = {"xattn": TileAttention(sizes), "ff": GatedMlp(sizes)}
    look: dict[str, nn.Module] = {"xattn": nn.ModuleDict(tile_attention)}
    if has_blocks:
        blocks = nn.ModuleList()
        for _ in range(sizes.num_blocks):
            block = {"mhsa": LatentAttention(sizes), "ff": GatedMlp(sizes)}
            blocks.append(nn.ModuleDict(block))
        look["tf"] = blocks
    return nn.ModuleDict(look)


class PrismSlideEncoder(PublishedSlideEncoder[PerceiverSizes]):
    """PRISM's `image_embedding` (1280,) on tiles of Virchow; its text decoder is not loaded.

    Memory: 100 MiB, whatever the number of tiles.
    """

    name = "prism"
    dim = 1280
    expects = Expects(
        tile_encoders=("virchow", "virchow_v1"),
        tile_dim=2560,
        tile_px=224,
        tile_mpp=0.5,
    )
    repository = "paige-ai/Prism"
    revision = "adeb3376909b4fb3fba5a5243a1df05d42d57fdd"
    files = ("model.safetensors", "pytorch_model.bin")
    config_file = "config.json"
    prefix: ClassVar[str] = "image_resampler."
    unused = ("img_norm.",)
    network = PerceiverNet
    published_sizes = PerceiverSizes()

    net: PerceiverNet

    @classmethod
    def stated_sizes(
        cls, path: Path, state_dict: Mapping[str, Tensor]
    ) -> PerceiverSizes | None:
        """Sizes of `perceiver_config` in the config beside the weights, if there is one.

        The shapes do not show the numbers of heads and looks, and which looks share weights.
        """
        config_path = path.with_name(cls.config_file)
        if not config_path.is_file():
            return None
        rule = "config must be JSON"
        with rewording(rule, config_path, ValueError, error=WeightsError):
            config = read_json(config_path)
        table = config.get(TABLE) if isinstance(config, dict) else None
        if table is None:
            return None
        sizes = _sizes_of_table(table, str(config_path))
        # number of looks in the names of the weights; a file without repeated weights has fewer
        pattern = re.compile(r"image_resampler\.perceiver\.layers\.(\d+)\.")
        matches = filter(None, map(pattern.match, state_dict))
        looks = max((int(match[1]) for match in matches), default=-1) + 1
        if looks > sizes.shared_from + 1 and looks != sizes.depth:
            raise WeightsError(
                f"{TABLE}.perceiver_depth must agree with the weights, got {sizes.depth} where "
                f"their names show {looks} in {str(config_path)!r}"
            )
        return sizes

    @classmethod
    def first_name(cls, name: str, config: PerceiverSizes | None) -> str:
        """First name of a weight: all looks share their blocks, and later looks their attention."""
        parts = name.split(".")
        if re.match(r"perceiver\.layers\.\d+\.\w", name):
            shared_from = (config or PerceiverSizes()).shared_from
            last_of_own = 0 if parts[3] == "tf" else shared_from
            parts[2] = str(min(int(parts[2]), last_of_own))
        return ".".join(parts)

    def embed(self, tiles: Tensor, coords_l0: CoordsL0, layout: TileLayout) -> Tensor:
        return cast(Tensor, self.net(tiles))


def _sizes_of_table(table: object, place: str) -> PerceiverSizes:
    """Sizes from the authors' table; missing sizes are the published ones.

    Raises WeightsError: a value is no size, or describes a network that is not built here.
    """
    if not isinstance(table, dict):
        raise WeightsError(f"{TABLE} must be a table, got {table!r} in {place!r}")
    fixed = {"share_tf_start_layer": 0, "mlp_mult": 1, "mlp_activation": "geglu"}
    for name, value in fixed.items():
        if table.get(name, value) != value:
            raise WeightsError(
                f"{TABLE}.{name} must be {value!r}, the published one, got {table[name]!r} in "
                f"{place!r}; no other is built here"
            )
    published = PerceiverSizes()

    def size(name: str, default: int) -> int:
        return stated_int(table, name, TABLE, default=default)

    sizes = PerceiverSizes(
        tile_dim=size("context_dim", published.tile_dim),
        dim=size("latent_dim", published.dim),
        # the authors' number does not count the latent that becomes the slide embedding
        num_latents=size("latent_seq", published.num_latents - 1) + 1,
        depth=size("perceiver_depth", published.depth),
        shared_from=size("share_xattn_start_layer", published.shared_from),
        num_blocks=size("transformer_depth", published.num_blocks),
        tile_heads=size("xattn_heads", published.tile_heads),
        latent_heads=size("mhsa_heads", published.latent_heads),
    )
    check_heads(sizes.dim, sizes.tile_heads, f"{TABLE}.xattn_heads")
    check_heads(sizes.dim, sizes.latent_heads, f"{TABLE}.mhsa_heads")
    return sizes
