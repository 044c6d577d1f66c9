"""The size and the rate of a tile encoder, without its weights being downloaded."""

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from thinsection.encode import NetworkTileEncoder, TileEncoder
from thinsection.encode.memory import batch_bytes, weights_bytes
from thinsection.errors import InvalidInputError
from thinsection.plan.memory import EncoderSize

_PROBE_TILES = 8
_PROBE_S = 2.0


def encoder_size(encoder: TileEncoder, *, batch_size: int, tile_px: int) -> EncoderSize:
    """What the encoder takes for a batch, by dry passes.

    Raises:
        InvalidInputError: another package's encoder, which cannot be looked into.
    """
    if not isinstance(encoder, NetworkTileEncoder):
        raise InvalidInputError(
            f"encoder must be one of ours to be planned, got {encoder.spec.name!r}; give it a "
            "first run and take 'thinsection efficiency'"
        )
    return EncoderSize(
        weights_bytes=weights_bytes(encoder),
        batch_bytes=batch_bytes(encoder, batch_size=batch_size, tile_px=tile_px),
        dim=encoder.dim,
        flops_per_tile=_flops(encoder, tile_px),
    )


def measure_rate(encoder: TileEncoder, *, tile_px: int) -> float:
    """Tiles per CPU-second, over all threads, after a warm-up."""
    tiles = torch.randint(0, 256, (_PROBE_TILES, tile_px, tile_px, 3), dtype=torch.uint8)
    with torch.inference_mode():
        encoder.encode(tiles)
        count, start = 0, time.process_time()
        while (spent := time.process_time() - start) < _PROBE_S:
            encoder.encode(tiles)
            count += _PROBE_TILES
    return count / spent


def _flops(encoder: NetworkTileEncoder, tile_px: int) -> float:
    tiles = torch.zeros((1, tile_px, tile_px, 3), dtype=torch.uint8)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        encoder.encode(tiles)
    return float(counter.get_total_flops())
