"""TITAN as a slide encoder: published weights in, slide embeddings out, in bounded memory.

Source: Ding et al., "A multimodal whole-slide foundation model for pathology", 2025; the
architecture is written from its description, without the hub's remote code.
"""

from typing import Any

import torch

from thinsection.pool.encoder import Expects, LoadOptions, SlideEmbedding, TileEmbeddings
from thinsection.pool.inputs import checked_coords, checked_embeddings, checked_tile_px
from thinsection.pool.published import PublishedSlideEncoder
from thinsection.pool.titan_net import DIM, TitanNet, plan_tokens
from thinsection.pool.token_grid import token_grid
from thinsection.types import CoordsL0
from thinsection.weights.placement import resolve_device


class TitanSlideEncoder(PublishedSlideEncoder):
    """TITAN's pooled slide embedding (768,), before the projection into the text space."""

    name = "titan"
    dim = DIM
    expects = Expects(tile_encoders=("conch_v15",), tile_dim=DIM, tile_px=512, tile_mpp=0.5)
    repository = "MahmoodLab/TITAN"
    revision = "dac6773d9961cfc75503440676ff157a2c6e8d2e"
    files = ("model.safetensors", "pytorch_model.bin")
    prefix = "vision_encoder."  # beside it lies the text tower

    def __init__(self, net: TitanNet, *, options: LoadOptions) -> None:
        self._device = resolve_device(options.device, mps=False)
        self._budget_bytes = options.budget_bytes
        self.net = net.to(self._device).eval().requires_grad_(False)
        self._element_bytes = 4
        if options.precision == "bf16":
            self.precision = "bf16"
            self.net.to_low_precision()
            self._element_bytes = 2

    @classmethod
    def build(cls, config: Any = None) -> TitanNet:
        """The network, which comes in one size."""
        return TitanNet()

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
