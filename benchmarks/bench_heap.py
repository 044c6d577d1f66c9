"""What does keeping freed memory save an encoder on a CPU, and what does its peak grow by?

The same batches with malloc's defaults and with `keep_freed_memory`, each in a fresh process of one
thread; embeddings are compared before times are.
"""

import hashlib
import resource
from typing import Any

import torch

from benchmarks.harness import arguments, finish
from thinsection.encode import load_encoder
from thinsection.encode.heap import keep_freed_memory
from thinsection.testing import run_and_measure

ENCODERS = {"efficientnet_lite0": 256, "timm:resnet18": 224, "timm:vit_small_patch16_224": 224}
BATCHES = (32, 32, 11, 32, 32)  # as a slide ends with a smaller one


def set_up(*, encoder: str, tile_px: int, keep: bool, scale: int) -> Any:
    """The loaded encoder after one batch, which touches what every later one uses."""
    torch.set_num_threads(1)
    if keep:
        keep_freed_memory()
    found = load_encoder(encoder, device="cpu", precision="fp32", pretrained=False)
    found.encode(tiles(32 // scale, tile_px))
    return found


def tiles(count: int, tile_px: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    shape = (count, tile_px, tile_px, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def encode(found: Any, *, encoder: str, tile_px: int, keep: bool, scale: int) -> dict[str, Any]:
    """Hash of the embeddings, system seconds and page faults of the batches."""
    del encoder, keep
    before = resource.getrusage(resource.RUSAGE_SELF)
    digest = hashlib.sha256()
    with torch.inference_mode():
        for count in BATCHES:
            digest.update(found.encode(tiles(max(1, count // scale), tile_px)).numpy().tobytes())
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "sha256": digest.hexdigest(),
        "system_s": after.ru_stime - before.ru_stime,
        "page_faults": after.ru_minflt - before.ru_minflt,
    }


def compare(encoder: str, tile_px: int, scale: int) -> dict[str, Any]:
    """One encoder, both ways."""
    rows = {}
    for name, keep in (("default", False), ("kept", True)):
        options = {"encoder": encoder, "tile_px": tile_px, "keep": keep, "scale": scale}
        run = run_and_measure("benchmarks.bench_heap", "encode", setup="set_up", **options)
        peak = {"cpu_s": run.cpu_seconds, "peak_rss_mb": run.peak_bytes / 1e6}
        rows[name] = {**run.result, **peak}
    if rows["default"].pop("sha256") != rows["kept"].pop("sha256"):
        raise AssertionError(f"embeddings must be equal to the bit, they differ for {encoder}")
    ratios = {
        "cpu_ratio": rows["default"]["cpu_s"] / rows["kept"]["cpu_s"],
        "peak_ratio": rows["kept"]["peak_rss_mb"] / rows["default"]["peak_rss_mb"],
    }
    return {**rows, **ratios}


def main() -> None:
    """All three encoders; `--smoke`: the default one on small batches."""
    args = arguments(__doc__ or "")
    chosen = dict(list(ENCODERS.items())[:1]) if args.smoke else ENCODERS
    scale = 8 if args.smoke else 1
    results = {name: compare(name, edge, scale) for name, edge in chosen.items()}
    finish("bench_heap", results, args)


if __name__ == "__main__":
    main()
