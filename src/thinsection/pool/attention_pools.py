"""Published slide encoders that pool by gated attention: FEATHER, CHIEF, MADELEINE and TANGLE.

Each network scores every tile by itself and sums the tiles up by the softmax of their scores. The
positions of tiles do not matter. Parameters have the names of the authors' files.

Shapes: n tiles of a block, D channels of a tile embedding, A attention heads, E channels of a
head's weighted sum, D' channels of the slide embedding.

Source: Shao et al., "Do multiple instance learning models transfer?", 2025 (FEATHER); Wang et al.,
"A pathology foundation model for cancer diagnosis and prognosis prediction", 2024 (CHIEF); Jaume
et al., "Multistain pretraining for slide representation learning in pathology", 2024 (MADELEINE);
Jaume et al., "Transcriptomics-guided slide representation learning in computational pathology",
2024 (TANGLE). The attention is that of Ilse, Tomczak, Welling, 2018.
"""

import itertools
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from thinsection.attention.blocks import blocks_of
from thinsection.attention.products import fast_products
from thinsection.pool.abmil import SoftmaxSums
from thinsection.pool.encoder import Expects, LoadOptions, TileLayout
from thinsection.pool.published import PublishedSlideEncoder
from thinsection.types import CoordsL0

BLOCK_ROWS = 4096  # tiles a block: MADELEINE's widest activation, 4096 x 2048 float32, has 32 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Sizes of a network of this file."""

    tile_dim: int  # channels D of a tile embedding
    dim: int  # channels of a projected tile
    hidden: int  # channels between a projected tile and its score
    num_heads: int = 1


class Scores(nn.Module):
    """Score (n, 1) of each projected tile: c . (tanh(a x) * sigmoid(b x))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.attention_a = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh())
        self.attention_b = nn.Sequential(nn.Linear(dim, hidden), nn.Sigmoid())
        self.attention_c = nn.Linear(hidden, 1)

    def forward(self, tiles: Tensor) -> Tensor:
        hidden = self.attention_a(tiles) * self.attention_b(tiles)
        return cast(Tensor, self.attention_c(hidden))


class PoolNet(nn.Module):
    """A network that scores a block of tiles, and turns the weighted sums into an embedding."""

    def __init__(self, sizes: PoolSizes) -> None:
        super().__init__()
        self.sizes = sizes

    @abstractmethod
    def scored(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (n, A) of tiles (n, D), and the values (n, E) or (n, A, E) that they weight."""

    def embedding(self, sums: Tensor) -> Tensor:
        """Slide embedding (D',) of the weighted sums (A, E).

        By default it is the sums, flattened.
        """
        return sums.flatten()


class FeatherNet(PoolNet):
    """FEATHER, an ABMIL of MIL-Lab: sums of projected tiles."""

    def __init__(self, sizes: PoolSizes) -> None:
        super().__init__(sizes)
        self.patch_embed = nn.Sequential(
            nn.Linear(sizes.tile_dim, sizes.dim), nn.ReLU()
        )
        self.global_attn = Scores(sizes.dim, sizes.hidden)

    def scored(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.patch_embed(tiles)
        return self.global_attn(projected), projected


class ChiefNet(PoolNet):
    """CHIEF: scores of projected tiles, sums of the tiles themselves."""

    def __init__(self, sizes: PoolSizes) -> None:
        super().__init__(sizes)
        self.attention_net = nn.Sequential(
            nn.Linear(sizes.tile_dim, sizes.dim),
            nn.ReLU(),
            nn.Dropout(),
            Scores(sizes.dim, sizes.hidden),
        )

    def scored(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention_net(tiles), tiles


class ManyHeads(nn.Module):
    """Three layers, whose output channels are interleaved over the heads; each head has a score."""

    def __init__(self, sizes: PoolSizes) -> None:
        super().__init__()
        widths = [sizes.tile_dim, sizes.dim, sizes.dim, sizes.dim * sizes.num_heads]
        self.pre_attn = _layers(widths)
        self.attn = nn.ModuleList(
            Scores(sizes.dim, sizes.hidden) for _ in range(sizes.num_heads)
        )

    def scored(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (n, A) and values (n, A, E) of the heads."""
        projected = self.pre_attn(tiles)
        # channel E of head A is channel E * heads + A
        values = projected.unflatten(1, (-1, len(self.attn))).transpose(1, 2)
        # head by head: with one product for all heads, MADELEINE took 15 % longer on a CPU
        scores = [attn(values[:, head]) for head, attn in enumerate(self.attn)]
        return torch.cat(scores, 1), values


class MadeleineNet(PoolNet):
    """MADELEINE's slide encoder for H&E: a projection of the sums of four heads."""

    def __init__(self, sizes: PoolSizes) -> None:
        super().__init__(sizes)
        self.wsi_embedders = ManyHeads(sizes)
        self.projector = nn.Linear(sizes.dim * sizes.num_heads, sizes.dim)

    def scored(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        return self.wsi_embedders.scored(tiles)

    def embedding(self, sums: Tensor) -> Tensor:
        return cast(Tensor, self.projector(sums.T.flatten()))


class TangleNet(PoolNet):
    """TANGLE with several heads, as its second version: a projection of their sums."""

    def __init__(self, sizes: PoolSizes) -> None:
        super().__init__(sizes)
        self.wsi_embedder = ManyHeads(sizes)
        projection = nn.Linear(sizes.dim * sizes.num_heads, sizes.dim)
        self.wsi_embedder.proj_multihead = projection

    def scored(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        return self.wsi_embedder.scored(tiles)

    def embedding(self, sums: Tensor) -> Tensor:
        projection = cast(nn.Linear, self.wsi_embedder.proj_multihead)
        return cast(Tensor, projection(sums.T.flatten()))


class SingleTangleNet(PoolNet):
    """TANGLE with one head, as its first version: sums of projected tiles."""

    def __init__(self, sizes: PoolSizes) -> None:
        super().__init__(sizes)
        self.wsi_embedder = nn.ModuleDict(
            {
                "pre_attn": _layers([sizes.tile_dim, sizes.dim, sizes.dim]),
                "attn": Scores(sizes.dim, sizes.hidden),
            }
        )

    def scored(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.wsi_embedder["pre_attn"](tiles)
        return self.wsi_embedder["attn"](projected), projected


def _layers(widths: list[int]) -> nn.Sequential:
    """Linear layers of these widths, each with a layer norm and GELU.

    Their indices are those of the authors' state dict.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [
            nn.Linear(inputs, outputs),
            nn.LayerNorm(outputs),
            nn.GELU(),
            nn.Dropout(),  # counts in the indices; inference drops nothing
        ]
    return nn.Sequential(*layers)


class AttentionPoolSlideEncoder(PublishedSlideEncoder[PoolSizes]):
    """A slide encoder whose network is a `PoolNet`.

    Memory: the activations of BLOCK_ROWS tiles, 10 to 200 MiB, whatever the number of tiles.
    """

    net: PoolNet

    def __init__(self, net: PoolNet, *, options: LoadOptions) -> None:
        super().__init__(net, options=options)
        zero_tile = torch.zeros(1, net.sizes.tile_dim, device=self._device)
        self.dim = len(self._embedding(zero_tile))

    def embed(self, tiles: Tensor, coords_l0: CoordsL0, layout: TileLayout) -> Tensor:
        return self._embedding(tiles)

    @torch.inference_mode()
    @fast_products()
    def _embedding(self, tiles: Tensor) -> Tensor:
        sums = SoftmaxSums()
        for rows in blocks_of(len(tiles), BLOCK_ROWS):
            sums.add(*self.net.scored(tiles[rows].to(self._device).float()))
        return self.net.embedding(sums.result().float())


class FeatherSlideEncoder(AttentionPoolSlideEncoder):
    """FEATHER-24K on tiles of CONCH v1.5: the embedding (512,) before its classifier."""

    name = "feather"
    expects = Expects(
        tile_encoders=("conch_v15",), tile_dim=768, tile_px=512, tile_mpp=0.5
    )
    repository = "MahmoodLab/abmil.base.conch_v15.pc108-24k"
    revision = None
    files = ("model.safetensors", "pytorch_model.bin")
    unused = ("classifier.",)
    network = FeatherNet
    published_sizes = PoolSizes(tile_dim=768, dim=512, hidden=384)


class FeatherUniSlideEncoder(FeatherSlideEncoder):
    """FEATHER-24K on tiles of UNI."""

    name = "feather_uni"
    expects = Expects(
        tile_encoders=("uni", "uni_v1"), tile_dim=1024, tile_px=256, tile_mpp=0.5
    )
    repository = "MahmoodLab/abmil.base.uni.pc108-24k"
    published_sizes = PoolSizes(tile_dim=1024, dim=512, hidden=384)


class FeatherUni2SlideEncoder(FeatherSlideEncoder):
    """FEATHER-24K on tiles of UNI 2."""

    name = "feather_uni2_h"
    expects = Expects(
        tile_encoders=("uni2_h", "uni_v2"), tile_dim=1536, tile_px=256, tile_mpp=0.5
    )
    repository = "MahmoodLab/abmil.base.uni_v2.pc108-24k"
    published_sizes = PoolSizes(tile_dim=1536, dim=512, hidden=384)


class ChiefSlideEncoder(AttentionPoolSlideEncoder):
    """CHIEF's `WSI_feature` (768,) on tiles of its CTransPath.

    CHIEF's term for the organ, which comes from a text embedding, is not added.
    """

    name = "chief"
    expects = Expects(
        tile_encoders=("ctranspath", "chief_ctranspath"),
        tile_dim=768,
        tile_px=256,
        tile_mpp=1.0,
    )
    repository = None
    revision = None
    published_at = "https://github.com/hms-dbmi/CHIEF, as CHIEF_pretraining.pth"
    files = ("CHIEF_pretraining.safetensors", "CHIEF_pretraining.pth")
    unused = (
        "classifiers.",
        "instance_classifiers.",
        "att_head.",
        "text_to_vision.",
        "organ_embedding",
    )
    network = ChiefNet
    published_sizes = PoolSizes(tile_dim=768, dim=512, hidden=256)


class MadeleineSlideEncoder(AttentionPoolSlideEncoder):
    """MADELEINE's embedding (512,) of an H&E slide (`encode_he`), on tiles of CONCH."""

    name = "madeleine"
    expects = Expects(
        tile_encoders=("conch", "conch_v1"), tile_dim=512, tile_px=256, tile_mpp=1.0
    )
    repository = "MahmoodLab/madeleine"
    revision = None
    files = ("model.safetensors", "model.pt")
    unused = ("token_projector.",)
    network = MadeleineNet
    published_sizes = PoolSizes(tile_dim=512, dim=512, hidden=512, num_heads=4)


class TangleSlideEncoder(AttentionPoolSlideEncoder):
    """TANGLE's `get_features`, on tiles of UNI; the weights file decides the version."""

    name = "tangle"
    expects = Expects(
        tile_encoders=("uni", "uni_v1"), tile_dim=1024, tile_px=256, tile_mpp=0.5
    )
    repository = None
    revision = None
    published_at = "https://github.com/mahmoodlab/TANGLE, as model.pt"
    files = ("model.safetensors", "model.pt")
    unused = ("rna_embedder.", "rna_reconstruction.", "mean_projector.")
    network = TangleNet
    published_sizes = PoolSizes(tile_dim=1024, dim=512, hidden=512, num_heads=2)

    @classmethod
    def build(cls, config: PoolSizes | None = None) -> PoolNet:
        sizes = config or cls.published_sizes
        if sizes.num_heads == 1:
            return SingleTangleNet(sizes)
        return TangleNet(sizes)

    @classmethod
    def sizes_of(cls, state_dict: Mapping[str, Tensor]) -> PoolSizes | None:
        """Sizes from the shapes in a weights file.

        They are the number of heads, the channels of a projected tile, and the hidden channels of
        the scores.
        """
        shapes = {}
        for name, value in state_dict.items():
            shapes[re.sub(r"^(module\.)?wsi_embedder\.", "", name)] = value.shape
        first_layer = shapes.get("pre_attn.0.weight")
        if first_layer is None:
            return None
        dim, tile_dim = first_layer
        num_heads = 1
        scores = shapes.get("attn.attention_a.0.weight")
        if scores is None:
            # a file without scores is refused later, so any default will do
            scores = shapes.get("attn.0.attention_a.0.weight", torch.Size([dim, dim]))
            num_heads = sum(name.endswith("attention_c.weight") for name in shapes)
        return PoolSizes(
            tile_dim=tile_dim, dim=dim, hidden=scores[0], num_heads=num_heads
        )
