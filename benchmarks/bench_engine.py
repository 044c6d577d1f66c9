"""What does OpenVINO gain over PyTorch on this CPU, in fp32 and in bf16, and what does it cost?

Each encoder four ways, alternating in one process on one thread, as a run has them (`encode` with
its preprocessing, four tiles at once, freed memory kept): tiles per CPU-second, the error to
torch's fp32, and the peak of a process that loads it and encodes two batches. The first load by
OpenVINO converts; its CPU-seconds and peak stand beside. All but the default have seeded random
weights. Run: `python -m benchmarks.bench_engine [--smoke] [--only NAME]`.
"""

import json
import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.bench_encoders import stained_tiles
from benchmarks.harness import RESULTS, arguments, finish
from thinsection.encode import DEFAULT_ENCODER, NetworkTileEncoder, load_encoder
from thinsection.machine import keep_freed_memory
from thinsection.testing import run_and_measure
from thinsection.types import MIB
from thinsection.weights.placement import optional_package

# name -> tiles of a round; the goals are ratios to torch's fp32: of fp32, and bf16 >= 4 for all
ENCODERS = {
    DEFAULT_ENCODER: 64,
    "timm:resnet50": 32,
    "timm:vit_small_patch16_224": 16,
    "timm:vit_base_patch16_224": 8,
    "timm:vit_large_patch16_224": 8,
}
GOALS = {DEFAULT_ENCODER: 2.5, "timm:resnet50": 1.8}
WAYS = [
    (engine, precision)
    for precision in ("fp32", "bf16")
    for engine in ("torch", "openvino")
]
REFERENCE = WAYS[0]
BATCH = 32


def load(name: str, engine: str, precision: str) -> NetworkTileEncoder:
    """The encoder on one CPU thread."""
    torch.set_num_threads(1)
    encoder = load_encoder(
        name,
        device="cpu",
        precision=precision,
        pretrained=name == DEFAULT_ENCODER,
        engine=engine,  # type: ignore[arg-type]
    )
    assert isinstance(encoder, NetworkTileEncoder)
    return encoder


def libraries(*, name: str, **_: Any) -> None:
    """What a process has loaded before its encoder."""
    if name.startswith("timm:"):
        optional_package("timm")


def load_and_encode(
    _: None, *, name: str, engine: str, precision: str, batch: int
) -> float:
    """Measured in a process of its own."""
    encoder = load(name, engine, precision)
    keep_freed_memory()
    tiles = np.full((batch, encoder.spec.tile_px, encoder.spec.tile_px, 3), 7, np.uint8)
    return sum(float(encoder.encode(tiles).sum()) for _ in range(2))


def memory(name: str, engine: str, precision: str, *, batch: int) -> dict[str, float]:
    """Peak and CPU-seconds of a process that loads the encoder and encodes."""
    measured = run_and_measure(
        "benchmarks.bench_engine",
        "load_and_encode",
        setup="libraries",
        name=name,
        engine=engine,
        precision=precision,
        batch=batch,
    )
    return {
        "peak_mib": measured.peak_bytes / MIB,
        "beyond_libraries_mib": measured.growth_bytes / MIB,
        "cpu_s": measured.cpu_seconds,
    }


def accuracy(got: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Of embeddings, to torch's fp32."""
    got, wanted = got.double(), wanted.double()
    return {
        "error_of_range": float(
            (got - wanted).abs().max() / (wanted.max() - wanted.min())
        ),
        "largest_1_minus_cosine": float(1 - F.cosine_similarity(got, wanted).min()),
    }


def rates(
    encoders: dict[Any, NetworkTileEncoder], tiles: np.ndarray, rounds: int
) -> Any:
    """Tiles per CPU-second of each way, round by round."""
    found: dict[Any, list[float]] = {way: [] for way in encoders}
    for _ in range(rounds):
        for way, encoder in encoders.items():
            start = time.process_time()
            encoder.encode(tiles)
            found[way].append(len(tiles) / (time.process_time() - start))
    return found


def compared(name: str, *, count: int, rounds: int, batch: int) -> dict[str, Any]:
    """One encoder all ways."""
    converting = memory(
        name, "openvino", "fp32", batch=batch
    )  # the graph is not kept before
    encoders = {way: load(name, *way) for way in WAYS}
    edge = encoders[REFERENCE].spec.tile_px
    tiles = np.ascontiguousarray(stained_tiles(count)[:, :edge, :edge])
    found = {
        way: encoder.encode(tiles) for way, encoder in encoders.items()
    }  # and a warm-up
    for way, encoder in encoders.items():
        assert torch.equal(encoder.encode(tiles), found[way]), (
            "not the same bytes twice"
        )
    speeds = rates(encoders, tiles, rounds)
    base = speeds[REFERENCE]
    result: dict[str, Any] = {"tile_px": edge, "first_load_by_openvino": converting}
    for way, speed in speeds.items():
        engine, precision = way
        ratios = [ours / theirs for ours, theirs in zip(speed, base, strict=True)]
        result[f"{engine} {precision}"] = {
            "engine": encoders[way].engine,
            "tiles_per_cpu_s": statistics.median(speed),
            "tiles_per_cpu_s_min_max": [min(speed), max(speed)],
            "ratio": statistics.median(ratios),
            **accuracy(found[way], found[REFERENCE]),
            "process": memory(name, engine, precision, batch=batch),
        }
    result["goal_fp32_ratio"] = GOALS.get(name, 2.2)
    return result


def main() -> None:
    args = arguments(__doc__ or "", only="one encoder; the others' results are kept")
    keep_freed_memory()
    names = (
        [DEFAULT_ENCODER]
        if args.smoke
        else [args.only]
        if args.only
        else list(ENCODERS)
    )
    kept = RESULTS / "bench_engine.json"
    results: dict[str, Any] = {}
    if args.only and kept.exists():
        results = json.loads(kept.read_text())["results"]
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in names:
            count, rounds = (8, 2) if args.smoke else (ENCODERS[name], 5)
            batch = 4 if args.smoke else BATCH
            results[name] = compared(name, count=count, rounds=rounds, batch=batch)
            ways = [" ".join(way) for way in WAYS]
            print(
                name,
                {way: round(results[name][way]["ratio"], 2) for way in ways},
                flush=True,
            )
    finish("bench_engine", results, args)


if __name__ == "__main__":
    main()
