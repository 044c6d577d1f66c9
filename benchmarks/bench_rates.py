"""How fast is every declared encoder on a CPU, and on the GPU of `gpu_proof`?

Tiles per CPU-second on one thread by PyTorch in fp32, with seeded random weights; encoders with the
same network and input have one row. Networks that need code of a hub are named as not measured. The
column of a GPU is what `make gpu-proof` measured in half precision, for networks that it has.
Run: `python -m benchmarks.bench_rates [--smoke]`.
"""

import json
import statistics
import time
from typing import Any

import torch

from benchmarks.bench_encoders import stained_tiles
from benchmarks.gpu_encoders import VITS
from benchmarks.gpu_inputs import NAMES
from benchmarks.harness import RESULTS, arguments, finish
from thinsection.encode import EncoderSpec, NetworkTileEncoder, load_encoder
from thinsection.encode.registry import declared_encoders
from thinsection.errors import ThinsectionError
from thinsection.machine import keep_freed_memory

# CPU-seconds for one network, after its first tile
SECONDS = 6.0


def networks() -> dict[tuple[Any, ...], list[str]]:
    """Names of declared encoders by network, the smallest network first."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, spec in sorted(declared_encoders().items(), key=_num_params):
        key = (spec.architecture.model, spec.input_px, spec.tile_px, spec.num_params)
        found.setdefault(key, []).append(name)
    return found


def _num_params(item: tuple[str, EncoderSpec]) -> int:
    return item[1].num_params or 0


def rate(name: str, *, seconds: float) -> dict[str, Any]:
    """Tiles per CPU-second of an encoder: the median of batches of one to eight tiles."""
    encoder = load_encoder(name, device="cpu", precision="fp32", pretrained=False)
    assert isinstance(encoder, NetworkTileEncoder)
    tiles = stained_tiles(8).repeat(2, axis=1).repeat(2, axis=2)
    edge = encoder.spec.tile_px
    tiles = tiles[:, :edge, :edge].copy()
    start = time.process_time()
    rows = encoder.encode(tiles[:1])
    assert rows.shape == (1, encoder.dim)
    assert torch.isfinite(rows).all()
    first_s = time.process_time() - start
    count = max(1, min(8, int(seconds / 2 / first_s)))
    speeds: list[float] = []
    spent_s = 0.0
    while spent_s < seconds or not speeds:
        start = time.process_time()
        encoder.encode(tiles[:count])
        took_s = time.process_time() - start
        speeds.append(count / took_s)
        spent_s += took_s
    return {
        "tiles_per_cpu_s": statistics.median(speeds),
        "min": min(speeds),
        "max": max(speeds),
        "tiles_at_once": encoder.tiles_at_once(count),
        "tile_px": edge,
        "engine": encoder.engine,
    }


def gpu_rates() -> dict[str, float]:
    """Tiles per second of encoders in `gpu_proof`, by name, the better of fp16 and bf16."""
    document = json.loads((RESULTS / "gpu_proof.json").read_text())
    steps = {"default encoder": NAMES[0], **VITS}
    rates = {}
    for step, name in steps.items():
        row = document["results"].get(f"rate {step}", {})
        queues = [way["queues"] for way in row.values() if isinstance(way, dict)]
        if queues:
            rates[name] = max(queues)
    return rates


def main() -> None:
    args = arguments(__doc__ or "")
    torch.set_num_threads(1)
    keep_freed_memory()
    on_gpu = gpu_rates()
    results: dict[str, Any] = {}
    rows = list(networks().values())
    for names in rows[:1] if args.smoke else rows:
        label = ", ".join(names)
        try:
            results[label] = rate(names[0], seconds=0.2 if args.smoke else SECONDS)
        except ThinsectionError as error:
            results[label] = {"not_measured": str(error).splitlines()[0]}
        gpu = [on_gpu[name] for name in names if name in on_gpu]
        results[label] |= {"gpu_tiles_per_s": gpu[0] if gpu else None}
        print(label, results[label], flush=True)
    finish("bench_rates", results, args)


if __name__ == "__main__":
    main()
