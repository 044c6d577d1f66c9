"""What do keeping freed memory and few tiles at once save an encoder on a CPU?

The same batches as a run does them, with malloc's defaults instead of `keep_freed_memory`, and with
all 32 tiles through the network at once; each in a fresh process of one thread. Embeddings are
compared before times are.
"""

import hashlib
import resource
import statistics
from typing import Any

import torch

import thinsection.encode.encoder as encoder_module
import thinsection.encode.preprocessing as preprocess_module
from benchmarks.harness import arguments, finish
from thinsection.encode import load_encoder
from thinsection.machine import keep_freed_memory
from thinsection.testing import Measured, run_and_measure

ENCODERS = {
    "efficientnet_lite0": 256,
    "timm:resnet18": 224,
    "timm:resnet50": 256,
    "timm:vit_small_patch16_224": 224,
}
BATCHES = (32, 32, 11, 32, 32)  # as a slide ends with a smaller one
# name -> what differs from a run
WAYS: dict[str, dict[str, Any]] = {
    "run": {"keep": True, "at_once": None},
    "malloc's defaults": {"keep": False, "at_once": None},
    "32 at once": {"keep": True, "at_once": 32},
}


def set_up(
    *, encoder: str, tile_px: int, keep: bool, at_once: int | None, scale: int
) -> Any:
    """The loaded encoder after one batch, which touches what every later one uses."""
    torch.set_num_threads(1)
    if at_once:
        vars(encoder_module)["CPU_TILES"] = at_once
        vars(preprocess_module)["CPU_TILES"] = at_once
    if keep:
        keep_freed_memory()
    found = load_encoder(encoder, device="cpu", precision="fp32", pretrained=False)
    found.encode(tiles(32 // scale, tile_px))
    return found


def tiles(count: int, tile_px: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    shape = (count, tile_px, tile_px, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def encode(found: Any, *, tile_px: int, scale: int, **_: Any) -> dict[str, Any]:
    """The embeddings' hash and sum, system seconds and page faults of the batches."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    digest, total = hashlib.sha256(), 0.0
    with torch.inference_mode():
        for count in BATCHES:
            embeddings = found.encode(tiles(max(1, count // scale), tile_px))
            digest.update(embeddings.numpy().tobytes())
            total += float(embeddings.double().abs().sum())
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "sha256": digest.hexdigest(),
        "sum": total,
        "system_s": after.ru_stime - before.ru_stime,
        "page_faults": after.ru_minflt - before.ru_minflt,
    }


def compare(encoder: str, tile_px: int, *, scale: int, times: int) -> dict[str, Any]:
    """One encoder, every way, in turns: median CPU time, and each run's peak."""
    kwargs = {"encoder": encoder, "tile_px": tile_px, "scale": scale}
    runs: dict[str, list[Measured]] = {name: [] for name in WAYS}
    for _ in range(times):
        for name, way in WAYS.items():
            found = run_and_measure(
                "benchmarks.bench_heap", "encode", setup="set_up", **kwargs, **way
            )
            runs[name].append(found)
    check_equal({name: found[0].result for name, found in runs.items()}, encoder)
    rows = {
        name: {
            "cpu_s": statistics.median(run.cpu_seconds for run in found),
            "system_s": statistics.median(run.result["system_s"] for run in found),
            "page_faults": int(
                statistics.median(run.result["page_faults"] for run in found)
            ),
            "peak_rss_mb": [round(run.peak_bytes / 1e6) for run in found],
        }
        for name, found in runs.items()
    }
    ratios = {name: row["cpu_s"] / rows["run"]["cpu_s"] for name, row in rows.items()}
    return {**rows, "cpu_ratio_to_run": ratios}


def check_equal(results: dict[str, dict[str, Any]], encoder: str) -> None:
    """Malloc changes no bit; what goes through at once changes roundings only."""
    run = results["run"]
    if results["malloc's defaults"]["sha256"] != run["sha256"]:
        raise AssertionError(
            f"embeddings must be equal to the bit, they differ for {encoder}"
        )
    if abs(results["32 at once"]["sum"] / run["sum"] - 1) > 1e-5:
        raise AssertionError(
            f"embeddings must agree to 1e-5, got {results} for {encoder}"
        )


def main() -> None:
    """All encoders, three times; `--smoke`: the default one once, on small batches."""
    args = arguments(__doc__ or "")
    chosen = dict(list(ENCODERS.items())[:1]) if args.smoke else ENCODERS
    scale, times = (8, 1) if args.smoke else (1, 3)
    results = {
        n: compare(n, edge, scale=scale, times=times) for n, edge in chosen.items()
    }
    finish("bench_heap", results, args)


if __name__ == "__main__":
    main()
