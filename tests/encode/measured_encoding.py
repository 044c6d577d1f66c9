"""Functions that tests measure in a process of their own; JSON in, JSON out."""

import numpy as np
import torch

from thinsection.encode import NetworkTileEncoder, load_encoder


def load(*, name: str, tile_px: int, batch_size: int, threads: int = 1) -> tuple:
    """An encoder that ran once on a tiny batch, and a batch of tiles."""
    torch.set_num_threads(threads)
    encoder = load_encoder(
        name, device="cpu", precision="fp32", pretrained=name == "efficientnet_lite0"
    )
    assert isinstance(encoder, NetworkTileEncoder)
    encoder.encode(np.zeros((1, tile_px, tile_px, 3), np.uint8))
    return encoder


def encode(encoder: NetworkTileEncoder, *, tile_px: int, batch_size: int, **_: object) -> float:
    """Encodes one batch, made here so that its bytes count."""
    tiles = np.full((batch_size, tile_px, tile_px, 3), 7, np.uint8)
    return float(encoder.encode(tiles).sum())
