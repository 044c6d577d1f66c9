"""TITAN as a slide encoder: published weights in, slide embeddings out, in bounded memory.

Source: Ding et al., "A multimodal whole-slide foundation model for pathology", 2025; the
architecture is written from its description, without the hub's remote code.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from thinsection.encode.placement import resolve_device
from thinsection.errors import WeightsError
from thinsection.pool.inputs import checked_coords, checked_embeddings, checked_tile_px
from thinsection.pool.protocol import Expects, SlideEmbedding, SlideEncoder, TileEmbeddings
from thinsection.pool.registry import LoadOptions
from thinsection.pool.titan_net import DIM, TitanNet, plan_tokens
from thinsection.pool.token_grid import token_grid
from thinsection.pool.weights import (
    check_names,
    find_weights,
    read_state_dict,
    state_dict_hash,
)
from thinsection.types import CoordsL0

REPOSITORY = "MahmoodLab/TITAN"
REVISION = "dac6773d9961cfc75503440676ff157a2c6e8d2e"
FILES = ("model.safetensors", "pytorch_model.bin")
PREFIX = "vision_encoder."


class TitanSlideEncoder(SlideEncoder):
    """TITAN's pooled slide embedding (768,), before the projection into the text space."""

    name = "titan"
    dim = DIM
    expects = Expects(tile_encoders=("conch_v15",), tile_dim=DIM, tile_px=512, tile_mpp=0.5)

    def __init__(self, net: TitanNet, *, weights_hash: str, options: LoadOptions) -> None:
        self._device = resolve_device(options.device, mps=False)
        self._budget_bytes = options.budget_bytes
        self.net = net.to(self._device).eval().requires_grad_(False)
        self.weights_hash = weights_hash
        self._element_bytes = 4
        if options.precision == "bf16":
            self.precision = "bf16"
            self.net.to_low_precision()
            self._element_bytes = 2

    @classmethod
    def from_state_dict(
        cls, state_dict: Mapping[str, torch.Tensor], *, options: LoadOptions | None = None
    ) -> "TitanSlideEncoder":
        """The encoder with published weights; names below `vision_encoder.` must fit exactly.

        What lies outside `vision_encoder.` (the text tower) is another model and left aside.

        Raises:
            WeightsError: a name is missing or unexpected, or a shape is wrong.
        """
        own = {k[len(PREFIX) :]: v for k, v in state_dict.items() if k.startswith(PREFIX)}
        net = TitanNet()
        wanted = {name: value.shape for name, value in net.state_dict().items()}
        check_names(own, wanted, model="titan")
        net.load_state_dict(dict(own), strict=True)
        return cls(net, weights_hash=state_dict_hash(own), options=options or LoadOptions())

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path = REPOSITORY,
        *,
        revision: str = REVISION,
        options: LoadOptions | None = None,
    ) -> "TitanSlideEncoder":
        """The encoder from a file, a folder, or the hub at a pinned revision.

        Raises:
            WeightsError: nothing is there, it is not plain tensors, or it does not fit.
            MissingDependencyError: a hub repository, and huggingface_hub is not installed.
        """
        path = find_weights(path_or_repo, files=FILES, revision=revision)
        return cls.from_state_dict(read_state_dict(path), options=options)

    @torch.inference_mode()
    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Slide embedding (768,) float32 from CONCH v1.5 embeddings (N, 768).

        Memory: about 12 KiB per tile in float32 (states, q, k, v), less as the budget demands.

        Raises:
            InvalidInputError: shapes, dtypes or values do not fit; BudgetError: too many tiles.
        """
        tiles = checked_embeddings(tile_embeddings, tile_dim=DIM)
        coords = checked_coords(coords_l0, tiles.shape[0])
        grid = token_grid(tiles, coords, tile_px_l0=checked_tile_px(tile_px_l0))
        plan = plan_tokens(
            len(grid) + 1, budget_bytes=self._budget_bytes, element_bytes=self._element_bytes
        )
        dtype = self.net.cls_token.dtype

        def tokens(rows: slice) -> torch.Tensor:
            return grid.features(tiles, rows, device=self._device, dtype=dtype)

        cells = torch.from_numpy(grid.cells).to(self._device)
        embedding: SlideEmbedding = (
            self.net.pooled_(tokens, len(grid) + 1, cells, plan).cpu().numpy()
        )
        return embedding


def load_titan(options: LoadOptions) -> TitanSlideEncoder:
    """The encoder for the registry; `pretrained=False` gives seeded random weights."""
    if options.pretrained:
        return TitanSlideEncoder.from_pretrained(options.weights or REPOSITORY, options=options)
    if options.weights is not None:
        raise WeightsError("weights must be left out with pretrained=False, got both")
    return TitanSlideEncoder.from_state_dict(random_titan_weights(seed=0), options=options)


def random_titan_weights(*, seed: int) -> dict[str, torch.Tensor]:
    """A state dict with the published names and shapes and seeded random values.

    Matrices are normal with deviation C^-0.5, so that every layer matters; for tests, dry runs
    and benchmarks, never for results.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, value in TitanNet().state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        is_norm = "norm" in name or ".ln_" in name
        if is_norm and name.endswith("weight"):
            weights[PREFIX + name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            weights[PREFIX + name] = 0.05 * noise
        elif name.endswith(("query", "cls_token")):
            weights[PREFIX + name] = noise
        else:
            weights[PREFIX + name] = noise * value.shape[-1] ** -0.5
    return weights
