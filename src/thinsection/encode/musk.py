"""MUSK's image tower: timm's BEiT-3 at two scales.

The authors' features for probes and slides are two class tokens beside each other: of the tile, and
the mean of those of the four quarters of the tile at twice its size. No declaration of a network
says this, so it is code.

Source: Xiang et al. 2025, doi:10.1038/s41586-024-08378-w; `MultiScaleForward` in
lilab-stanford/MUSK.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_PREFIX_TOKENS = 2  # of the tile and of its quarters
# names in the checkpoint that the image tower does not need
UNUSED = ("language_head.", "vision_head.", "logit_scale")

Foreign = Any  # a network of timm, which has no types


def two_scales(network: Foreign, pixels: Tensor) -> Tensor:
    """Tokens [B, 2 + T, C]: class token of the tile, mean of its quarters', patch tokens.

    The quarters pass one by one, so a pass takes the memory of one scale.
    """
    tokens: Tensor = network.forward_features(pixels)
    edge = pixels.shape[-1]
    twice = F.interpolate(pixels, size=2 * edge, mode="bicubic")
    quarters = torch.stack(
        [
            network.forward_features(twice[..., top : top + edge, left : left + edge])[
                :, :1
            ]
            for top in (0, edge)
            for left in (0, edge)
        ]
    )
    return torch.cat([tokens[:, :1], quarters.mean(0), tokens[:, 1:]], dim=1)


def two_class_tokens(tokens: Tensor) -> Tensor:
    """Embedding [B, 2 C] from the tokens."""
    return tokens[:, :NUM_PREFIX_TOKENS].flatten(1)
