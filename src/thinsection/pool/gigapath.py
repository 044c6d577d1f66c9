"""Prov-GigaPath as a slide encoder, without flash-attn and fairscale, in bounded memory.

Source: Xu et al., "A whole-slide foundation model for digital pathology from real-world data",
2024; the architecture is written from its description.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from thinsection.encode.placement import resolve_device
from thinsection.errors import WeightsError
from thinsection.pool.gigapath_net import GigaPathNet, LongNetConfig
from thinsection.pool.inputs import checked_coords, checked_embeddings, checked_tile_px
from thinsection.pool.protocol import Expects, SlideEmbedding, SlideEncoder, TileEmbeddings
from thinsection.pool.registry import LoadOptions
from thinsection.pool.weights import (
    check_names,
    find_weights,
    read_state_dict,
    state_dict_hash,
)
from thinsection.types import CoordsL0

REPOSITORY = "prov-gigapath/prov-gigapath"
FILES = ("slide_encoder.safetensors", "slide_encoder.pth")


class GigaPathSlideEncoder(SlideEncoder):
    """Prov-GigaPath's slide embedding (768,): the normed cls token after the last layer.

    With `global_pool`, the normed mean over tiles instead of the cls token.
    """

    name = "gigapath"
    expects = Expects(
        tile_encoders=("gigapath", "prov_gigapath"), tile_dim=1536, tile_px=256, tile_mpp=0.5
    )

    def __init__(
        self, net: GigaPathNet, *, weights_hash: str, options: LoadOptions, global_pool: bool
    ) -> None:
        self.net = net.to(resolve_device(options.device, mps=False)).eval().requires_grad_(False)
        self.dim = net.config.dim
        self.weights_hash = weights_hash
        self._budget_bytes, self._global_pool = options.budget_bytes, global_pool
        if options.precision == "bf16":
            self.precision = "bf16"
            for layer in self.net.layers():
                attn, ffn = layer.self_attn, layer.ffn
                for linear in (attn.q_proj, attn.k_proj, attn.v_proj, attn.out_proj):
                    linear.to(torch.bfloat16)
                ffn.fc1.to(torch.bfloat16)
                ffn.fc2.to(torch.bfloat16)

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, torch.Tensor],
        *,
        config: LongNetConfig | None = None,
        options: LoadOptions | None = None,
        global_pool: bool = False,
    ) -> "GigaPathSlideEncoder":
        """The encoder with published weights; names must fit exactly.

        Raises:
            WeightsError: a name is missing or unexpected, or a shape is wrong.
        """
        net = GigaPathNet(config or LongNetConfig())
        wanted = {name: value.shape for name, value in net.state_dict().items()}
        check_names(state_dict, wanted, model="gigapath")
        net.load_state_dict(dict(state_dict), strict=True)
        options = options or LoadOptions()
        digest = state_dict_hash(state_dict)
        return cls(net, weights_hash=digest, options=options, global_pool=global_pool)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        config: LongNetConfig | None = None,
        options: LoadOptions | None = None,
        global_pool: bool = False,
    ) -> "GigaPathSlideEncoder":
        """The encoder from a file, a folder, or the hub as `owner/name@COMMIT`.

        Raises:
            WeightsError: nothing is there, it is not plain tensors, or it does not fit.
            MissingDependencyError: a hub repository, and huggingface_hub is not installed.
        """
        path = find_weights(path_or_repo, files=FILES, revision=None)
        return cls.from_state_dict(
            read_state_dict(path), config=config, options=options, global_pool=global_pool
        )

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Slide embedding (768,) float32 from embeddings (N, 1536), in the order as given.

        Memory: 7 to 25 KiB per tile, as the budget allows.

        Raises:
            InvalidInputError: shapes, dtypes, values or places do not fit.
            BudgetError: too many tiles for the budget.
        """
        last: SlideEmbedding = self.encode_layers(
            tile_embeddings, coords_l0, tile_px_l0=tile_px_l0
        )[-1]
        return last

    @torch.inference_mode()
    def encode_layers(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> npt.NDArray[np.float32]:
        """Slide embeddings (13, 768): of the embedding layer and of each layer after it."""
        tiles = checked_embeddings(tile_embeddings, tile_dim=self.net.config.tile_dim)
        coords = checked_coords(coords_l0, tiles.shape[0])
        checked_tile_px(tile_px_l0)
        rows = []
        for states in self.net.states_(tiles, coords, budget_bytes=self._budget_bytes):
            pooled = states[1:].mean(0) if self._global_pool else states[0]
            rows.append(self.net.norm(pooled).cpu().numpy())
        return np.stack(rows)


def load_gigapath(options: LoadOptions) -> GigaPathSlideEncoder:
    """The encoder for the registry; `pretrained=False` gives seeded random weights."""
    if not options.pretrained:
        if options.weights is not None:
            raise WeightsError("weights must be left out with pretrained=False, got both")
        weights = random_gigapath_weights(LongNetConfig(), seed=0)
        return GigaPathSlideEncoder.from_state_dict(weights, options=options)
    if options.weights is None:
        remedy = f"pass weights=FILE or weights={REPOSITORY}@COMMIT"
        raise WeightsError(f"slide encoder 'gigapath' has no pinned revision; {remedy}")
    return GigaPathSlideEncoder.from_pretrained(options.weights, options=options)


def random_gigapath_weights(config: LongNetConfig, *, seed: int) -> dict[str, torch.Tensor]:
    """A state dict with the published names and seeded random values; never for results."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, value in GigaPathNet(config).state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        is_norm = "norm" in name or "_ln." in name
        if is_norm and name.endswith("weight"):
            weights[name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            weights[name] = 0.05 * noise
        elif name == "cls_token":
            weights[name] = noise
        else:
            weights[name] = noise * value.shape[-1] ** -0.5
    return weights
