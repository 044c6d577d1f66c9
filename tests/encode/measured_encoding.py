"""Functions that tests measure in a process of their own; JSON in, JSON out."""

import numpy as np
import torch

from thinsection.encode import (
    NetworkTileEncoder,
    encoder_spec,
    load_encoder,
    preprocess,
)
from thinsection.machine import keep_freed_memory
from thinsection.weights.placement import optional_package


def load(*, name: str, tile_px: int, batch_size: int, threads: int = 1) -> tuple:
    """An encoder that ran once on a tiny batch, and a batch of tiles."""
    torch.set_num_threads(threads)
    pretrained = name == "efficientnet_lite0"
    encoder = load_encoder(
        name, device="cpu", precision="fp32", pretrained=pretrained, engine="torch"
    )
    assert isinstance(encoder, NetworkTileEncoder)
    encoder.encode(np.zeros((1, tile_px, tile_px, 3), np.uint8))
    return encoder


def encode(
    encoder: NetworkTileEncoder, *, tile_px: int, batch_size: int, **_: object
) -> float:
    """Encodes one batch, made here so that its bytes count."""
    tiles = np.full((batch_size, tile_px, tile_px, 3), 7, np.uint8)
    return float(encoder.encode(tiles).sum())


def libraries(**_: object) -> None:
    """What a process has loaded before its encoder."""
    optional_package("timm")
    torch.set_num_threads(1)
    torch.nn.functional.conv2d(torch.zeros(1, 3, 64, 64), torch.zeros(8, 3, 3, 3))


def load_and_encode(_: None, *, name: str, tile_px: int, batch_size: int) -> float:
    """An encoder by OpenVINO from a kept graph, and two batches."""
    pretrained = name == "efficientnet_lite0"
    encoder = load_encoder(
        name, device="cpu", precision="fp32", pretrained=pretrained, engine="openvino"
    )
    keep_freed_memory()
    assert isinstance(encoder, NetworkTileEncoder)
    return sum(
        encode(encoder, tile_px=tile_px, batch_size=batch_size) for _ in range(2)
    )


def first_batch(*, count: int) -> list[np.ndarray]:
    """Batches of 32 tiles that lie there, and one that was prepared."""
    batches = [np.full((32, 256, 256, 3), 7, np.uint8)] * count
    preprocess(batches[0], encoder_spec("uni"))
    return batches


def prepare(batches: list[np.ndarray], **_: object) -> float:
    """A loop as the documentation has it."""
    spec, buffer, total = encoder_spec("uni"), None, 0.0
    for tiles_u8 in batches:
        pixels = preprocess(tiles_u8, spec, out=buffer)
        buffer = pixels if buffer is None else buffer
        total += float(pixels[0, 0, 0, 0])
    return total
