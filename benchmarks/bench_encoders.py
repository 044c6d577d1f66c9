"""Is half precision worth it on this CPU, and is a batch's memory known beforehand?

Tiles per CPU-second in fp32 and bf16 with the lowest cosine between their embeddings, and the
estimated against the measured peak memory of a batch. One thread; the vision transformer has seeded
random weights. Run: `python -m benchmarks.bench_encoders [--smoke]`.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.harness import arguments, finish
from thinsection.encode import NetworkTileEncoder, batch_bytes, load_encoder
from thinsection.testing import run_and_measure
from thinsection.types import MIB

ENCODERS = ("efficientnet_lite0", "lunit_vits16")
TILE_PX = 256


def stained_tiles(count: int) -> np.ndarray:
    """uint8 (count, 256, 256, 3): seeded blobs of dark purple on pink, with fine noise."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.random((count, 1, 24, 24), dtype=np.float32))
    blobs = (
        F.interpolate(coarse, size=TILE_PX, mode="bicubic")
        .clamp(0, 1)
        .numpy()[:, 0, ..., None]
    )
    pink, purple = np.array([235.0, 190, 215]), np.array([95.0, 60, 140])
    noise = rng.normal(0, 8, (count, TILE_PX, TILE_PX, 3))
    return (pink + (purple - pink) * blobs**2 + noise).clip(0, 255).astype(np.uint8)


def load(*, name: str, precision: str = "fp32", **_: Any) -> NetworkTileEncoder:
    """The encoder on one CPU thread, run once."""
    torch.set_num_threads(1)
    pretrained = name == "efficientnet_lite0"
    encoder = load_encoder(
        name, device="cpu", precision=precision, pretrained=pretrained
    )
    assert isinstance(encoder, NetworkTileEncoder)
    encoder.encode(np.zeros((1, TILE_PX, TILE_PX, 3), np.uint8))
    return encoder


def encode(encoder: NetworkTileEncoder, *, batch_size: int, **_: Any) -> float:
    """One batch, made here so that its bytes count; measured in a process of its own."""
    return float(
        encoder.encode(np.full((batch_size, TILE_PX, TILE_PX, 3), 7, np.uint8)).sum()
    )


def rate(
    encoder: NetworkTileEncoder, tiles: np.ndarray, times: int
) -> dict[str, float]:
    """Tiles per CPU-second: the median over `times` runs, and the extremes."""
    rates = []
    for _ in range(times):
        start = time.process_time()
        encoder.encode(tiles)
        rates.append(len(tiles) / (time.process_time() - start))
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


def main() -> None:
    args = arguments(__doc__ or "")
    count, times = (8, 2) if args.smoke else (32, 5)
    batch_sizes = (16,) if args.smoke else (16, 24, 32, 48)
    tiles = stained_tiles(count)
    results: dict[str, Any] = {}
    for name in ENCODERS[:1] if args.smoke else ENCODERS:
        full, half = load(name=name), load(name=name, precision="bf16")
        cosine = F.cosine_similarity(full.encode(tiles), half.encode(tiles)).min()
        fp32, bf16 = rate(full, tiles, times), rate(half, tiles, times)
        memory = []
        for batch_size in batch_sizes:
            measured = run_and_measure(
                "benchmarks.bench_encoders",
                "encode",
                setup="load",
                name=name,
                batch_size=batch_size,
            )
            estimate = batch_bytes(full, batch_size=batch_size, tile_px=TILE_PX)
            memory.append(
                {
                    "batch_size": batch_size,
                    "estimated_mib": estimate / MIB,
                    "measured_mib": measured.growth_bytes / MIB,
                    "ratio": estimate / measured.growth_bytes,
                }
            )
        results[name] = {
            "fp32_tiles_per_cpu_s": fp32,
            "bf16_tiles_per_cpu_s": bf16,
            "bf16_ratio": bf16["median"] / fp32["median"],
            "lowest_cosine_bf16_to_fp32": float(cosine),
            "batch_memory": memory,
        }
    finish("bench_encoders", results, args)


if __name__ == "__main__":
    main()
