"""Prov-GigaPath as a slide encoder, without flash-attn and fairscale, in bounded memory.

Source: Xu et al., "A whole-slide foundation model for digital pathology from real-world data",
2024; the architecture is written from its description.
"""

import numpy as np
import numpy.typing as npt
import torch

from thinsection.pool.encoder import Expects, LoadOptions, SlideEmbedding, TileEmbeddings
from thinsection.pool.gigapath_net import GigaPathNet, LongNetConfig
from thinsection.pool.inputs import checked_coords, checked_embeddings, checked_tile_px
from thinsection.pool.published import PublishedSlideEncoder
from thinsection.types import CoordsL0
from thinsection.weights.placement import resolve_device


class GigaPathSlideEncoder(PublishedSlideEncoder):
    """Prov-GigaPath's slide embedding (768,): the normed cls token after the last layer.

    With `global_pool`, the normed mean over tiles instead of the cls token.
    """

    name = "gigapath"
    expects = Expects(
        tile_encoders=("gigapath", "prov_gigapath"), tile_dim=1536, tile_px=256, tile_mpp=0.5
    )
    repository = "prov-gigapath/prov-gigapath"
    revision = "64f9e26c15019f2d4f6d9113c6822f88bb16b01b"
    files = ("slide_encoder.safetensors", "slide_encoder.pth")

    def __init__(
        self, net: GigaPathNet, *, options: LoadOptions, global_pool: bool = False
    ) -> None:
        self.net = net.to(resolve_device(options.device, mps=False)).eval().requires_grad_(False)
        self.dim = net.config.dim
        self._budget_bytes, self._global_pool = options.budget_bytes, global_pool
        if options.precision == "bf16":
            self.precision = "bf16"
            self.net.to_low_precision()

    @classmethod
    def build(cls, config: LongNetConfig | None = None) -> GigaPathNet:
        """The network, of the published sizes by default."""
        return GigaPathNet(config or LongNetConfig())

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
