"""Does the cache change the segmentation probe's score, and does a PanNuke-sized one fit in 2 GiB?

Three layouts of data on which the head learns: features in RAM (float32), in the lossless cache
(must agree to the bit) and in a float16 cache (its difference). Then the tokens that PanNuke gives
a large encoder, 5,179 x 1024 x 3072, generated on the fly: peak RSS of writing and of an epoch.
"""

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.support.segmentation import MAKERS, RamFeatures, StubEncoder, settings

from benchmarks import cache_processes
from benchmarks.harness import arguments, finish
from thinsection.probe import NANOPATH, Protocol
from thinsection.probe.protocol import SegmentSettings
from thinsection.probe.result import ProbeResult
from thinsection.probe.segment.data import SEGMENT_DATASETS, SegmentSet
from thinsection.probe.segment.probe import centre, segment_features, segment_probe
from thinsection.store.cache import Storage
from thinsection.testing import run_and_measure
from thinsection.types import GIB, MIB

PANNUKE = (5_179, 1024, 3072)
ON_DISK_BYTES = 2  # a value: bf16-exact features, as an encoder in bf16 gives them


def compare(name: str, folder: Path, protocol: Protocol) -> dict[str, Any]:
    """One layout: scores and losses from RAM, the lossless cache and the float16 cache."""
    data = SEGMENT_DATASETS[name](MAKERS[name](folder / "data"))
    plain = segment_probe(data, RamFeatures(tokens_in_ram(data)), protocol=protocol)
    lossless = from_cache(data, folder, protocol, "lossless")
    half = from_cache(data, folder, protocol, "fp16")
    if (lossless.details, lossless.score) != (plain.details, plain.score):
        raise AssertionError(
            f"losses and scores must agree to the bit, they differ on {name}"
        )
    background = plain.details["all_background_score"]
    if plain.score <= background:
        raise AssertionError(
            f"the head must beat all-background, got {plain.score} on {name}"
        )
    return {
        "images": len(data),
        "score_ram_float32": plain.score,
        "score_lossless_cache": lossless.score,
        "score_float16_cache": half.score,
        "float16_minus_float32": half.score - plain.score,
        "largest_loss_difference_float16": largest_difference(plain, half),
        "all_background_score": background,
        "first_loss": plain.details["first_batch_losses"][0],
        "last_loss": plain.details["train_losses"][0][-1],
    }


def tokens_in_ram(data: SegmentSet) -> torch.Tensor:
    """The plain way: a list of batches, concatenated."""
    encoder = StubEncoder()
    chunks = [
        encoder.encode_tokens(centre(b, settings())) for b in data.image_batches(0, 16)
    ]
    return torch.cat(chunks)


def from_cache(
    data: SegmentSet, folder: Path, protocol: Protocol, storage: Storage
) -> ProbeResult:
    """The probe on a cache whose budget holds two small batches, so that it stays on disk."""
    budget = 4 * protocol.require("segment", SegmentSettings).batch_size * 196 * 24 * 4
    options: dict[str, Any] = {"budget_bytes": budget, "storage": storage}
    root = folder / "cache"
    with segment_features(
        data, StubEncoder(), settings(), root=root, **options
    ) as cache:
        result = segment_probe(data, cache, protocol=protocol)
        if cache.in_ram:
            raise AssertionError("the cache must be read from disk here")
        return result


def largest_difference(a: ProbeResult, b: ProbeResult) -> float:
    """Over the training losses of all folds and epochs."""
    pairs = zip(a.details["train_losses"], b.details["train_losses"], strict=True)
    return max(abs(x - y) for one, two in pairs for x, y in zip(one, two, strict=True))


def pannuke_sized(shape: tuple[int, int, int], budget: int) -> dict[str, Any]:
    """Peak RSS of writing the cache, and of reading it once in a shuffled order."""
    parent = os.environ.get("THINSECTION_BENCH_DIR")
    n, *row = shape
    with tempfile.TemporaryDirectory(dir=parent) as root:
        needed, free = n * row[0] * row[1] * ON_DISK_BYTES, shutil.disk_usage(root).free
        if free < 1.2 * needed:
            raise OSError(
                f"{root} must have {1.2 * needed / GIB:.0f} GiB free, got {free / GIB:.0f}"
            )
        options: dict[str, Any] = {"n": n, "row": row, "kind": "bf16", "root": root}
        module, common = (
            cache_processes.__name__,
            {"setup": "prepare", "budget": budget, **options},
        )
        written = run_and_measure(module, "write", **common)
        read = run_and_measure(module, "read_cache", trains=False, **common)
    growth = max(written.growth_bytes, read.growth_bytes)
    if growth > 1.1 * budget:
        raise AssertionError(
            f"peak must be <= the budget + 10 %, got {growth / budget:.2f} of it"
        )
    return {
        "shape": shape,
        "float32_gib": 2 * needed / GIB,
        "file_gib": written.result / GIB,
        "budget_mib": budget / MIB,
        "write_peak_beyond_imports_mib": written.growth_bytes / MIB,
        "write_s": written.seconds,
        "read_peak_beyond_imports_mib": read.growth_bytes / MIB,
        "read_peak_rss_mib": read.peak_bytes / MIB,
        "read_mb_per_s": read.result["read_mb_per_s"],
        "in_ram": read.result["in_ram"],
        "prefetch": read.result["prefetch"],
    }


def main() -> None:
    """Scores first, then the large one; `--smoke` has one layout and a small large one."""
    args = arguments(__doc__ or "")
    torch.set_num_threads(1)
    changes = {"epochs": 2 if args.smoke else 8, "batch_size": 2, "lr": 1e-2}
    protocol = dataclasses.replace(NANOPATH, segment=settings(**changes))
    results: dict[str, Any] = {"probe": {}}
    for name in ("consep",) if args.smoke else sorted(MAKERS):
        with tempfile.TemporaryDirectory() as folder:
            results["probe"][name] = compare(name, Path(folder), protocol)
        print(name, results["probe"][name], flush=True)
    if args.smoke:
        results["pannuke_sized"] = pannuke_sized((60, 256, 256), 32 * MIB)
    else:
        results["pannuke_sized"] = pannuke_sized(PANNUKE, 2 * GIB)
    finish("bench_segment_probe", results, args)


if __name__ == "__main__":
    main()
