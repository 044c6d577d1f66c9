"""The size and the rate of a tile encoder, without its weights being downloaded."""

import statistics
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from thinsection.encode import NetworkTileEncoder, TileEncoder
from thinsection.encode.memory import batch_bytes, keep_freed_memory, weights_bytes
from thinsection.errors import InvalidInputError
from thinsection.planning.calibration import run_probe
from thinsection.planning.cost import EncoderSize

_PROBE_TILES = 8
_PROBE_S = 2.0


def encoder_size(
    encoder: TileEncoder, *, batch_size: int, tile_px: int, on_gpu: bool = False
) -> EncoderSize:
    """What the encoder takes for a batch, by dry passes on a CPU's or a GPU's behalf.

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
        batch_bytes=batch_bytes(
            encoder,
            batch_size=batch_size,
            tile_px=tile_px,
            at_once=batch_size if on_gpu else None,
        ),
        dim=encoder.dim,
        flops_per_tile=_flops(encoder, tile_px),
    )


def measure_rate(encoder: TileEncoder, *, tile_px: int) -> float:
    """Tiles per CPU-second, over all threads, after a warm-up; memory is kept as in a run."""
    keep_freed_memory()
    tiles = torch.randint(0, 256, (_PROBE_TILES, tile_px, tile_px, 3), dtype=torch.uint8)
    with torch.inference_mode():
        encoder.encode(tiles)
        count, start = 0, time.process_time()
        while (spent := time.process_time() - start) < _PROBE_S:
            encoder.encode(tiles)
            count += _PROBE_TILES
    return count / spent


def measure_cpu_peak(name: str, *, precision: str, batch_size: int, tile_px: int) -> int:
    """Peak bytes of a fresh process that encodes batches as a run does, with random weights.

    The mean of a few: where small objects end up in the heap is chance, and moves the peak.
    """
    arguments = (name, precision, str(tile_px), str(batch_size))
    peaks = [run_probe(_PEAK_PROBE, *arguments)[0] for _ in range(_PEAK_TIMES)]
    return int(statistics.mean(peaks))


def is_quick(size: EncoderSize, *, batch_size: int) -> bool:
    """Whether `measure_cpu_peak` takes half a minute of one core at most."""
    return size.flops_per_tile * batch_size * _PEAK_BATCHES * _PEAK_TIMES <= _PEAK_FLOPS


_PEAK_BATCHES, _PEAK_TIMES, _PEAK_FLOPS = 2.5, 3, 2e12
_PEAK_PROBE = """
from thinsection.encode.memory import keep_freed_memory
keep_freed_memory()
name, precision, edge, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
encoder = thinsection.encode.load_encoder(
    name, device='cpu', precision=precision, pretrained=False
)
for count in (batch, 1 + batch // 3, batch):
    with torch.inference_mode():
        encoder.encode(torch.randint(0, 256, (count, edge, edge, 3), dtype=torch.uint8))
print(json.dumps([peak()]))
"""


def _flops(encoder: NetworkTileEncoder, tile_px: int) -> float:
    tiles = torch.zeros((1, tile_px, tile_px, 3), dtype=torch.uint8)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        encoder.encode(tiles)
    return float(counter.get_total_flops())
