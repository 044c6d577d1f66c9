"""The rates of gpu_proof: tiles and slides a second, peaks on the device, and how busy it is.

A step takes the device ('cpu' for --smoke) and whether sizes are tiny; it returns figures.
"""

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_encoders, gpu_fp8
from benchmarks.gpu_encoders import VITS
from benchmarks.gpu_inputs import NAMES, gigapath_of, precisions
from thinsection.types import GIB, MIB


def timed(device: str, call: Callable[[], Any], *, times: int) -> dict[str, float]:
    """Median seconds after a warm-up, and what the device held at its peak."""
    call()
    seconds = []
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(times):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
    return {"s": median(seconds), "peak_mib": peak / MIB}


def stream_rate(device: str, smoke: bool) -> dict[str, Any]:
    """Tiles/s from file to device, nothing computed; and the rate of the copy alone."""
    from thinsection.slide import open_slide
    from thinsection.testing.synthetic import write_he_slide
    from thinsection.tiles import iter_tiles, tile_grid

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.svs"
        write_he_slide(path, (1200, 900) if smoke else (10_000, 8_000), mpp=0.5)
        with open_slide(path) as slide:
            table = tile_grid(slide)

            def read() -> None:
                for batch in iter_tiles(slide, table, batch_size=64):
                    torch.from_numpy(batch.tiles).to(device)

            row = timed(device, read, times=1 if smoke else 3)
    host = torch.empty((8 if smoke else 256) * 256 * 256 * 3, dtype=torch.uint8)
    host = host.pin_memory() if device != "cpu" else host
    copied = timed(device, lambda: host.to(device, non_blocking=True), times=5)
    gb_per_s = host.numel() / max(copied["s"], 1e-9) / 1e9 if device != "cpu" else None
    return {
        "tiles": len(table),
        "tiles_per_s": len(table) / row["s"],
        "copy_gb_per_s": gb_per_s,
    }


def slide_encoder_rate(which: str, device: str, smoke: bool) -> dict[str, Any]:
    """Seconds and peak of a slide embedding, by the number of tiles; bf16 where there is one."""
    from benchmarks.titan_inputs import slide, titan_of

    precision, found = precisions(device)[-1], {}
    for count in (50,) if smoke else (1_000, 8_000, 33_000, 62_000, 120_000):
        tiles, coords = slide(count)
        if which == "titan":
            encoder: Any = titan_of(precision, budget_bytes=2 * GIB, device=device)
            px = 512
        else:
            tiles = np.random.default_rng(1).standard_normal(
                (count, 1536), dtype=np.float32
            )
            encoder, px = gigapath_of(device, precision, 1 if smoke else 12), 256
            coords = coords // 2
        on_device = torch.from_numpy(tiles).to(device)
        embed = partial(encoder.encode, on_device, coords, tile_px_l0=px)
        found[str(count)] = timed(device, embed, times=1)
    return {"precision": precision, **found}


def qc_rate(device: str, smoke: bool) -> dict[str, Any]:
    """Seconds of two presets on the device and on the CPU."""
    from thinsection.qc import run_qc
    from thinsection.slide import open_slide
    from thinsection.testing.synthetic import write_he_slide

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.svs"
        write_he_slide(path, (900, 700) if smoke else (10_000, 8_000), mpp=0.5)
        with open_slide(path) as slide:
            for preset in ("auto", "histoqc-light" if smoke else "histoqc-default"):
                found[preset] = {}
                for where in {device, "cpu"}:
                    call = partial(
                        run_qc, slide, preset, device=where, cache_dir=Path(folder)
                    )
                    found[preset][where] = timed(where, call, times=1)["s"]
    return found


def whole_run(title: str, engine: str, device: str, smoke: bool) -> dict[str, Any]:
    """A run over slides: tiles/s with its start and from the first batch to the last."""
    from thinsection.run.process import RunEvent
    from thinsection.run.run import run
    from thinsection.testing.synthetic import write_he_slide

    batches: list[tuple[float, int]] = []

    def note(event: RunEvent) -> None:
        if event.kind == "tiles":
            batches.append((time.perf_counter(), event.num_tiles))

    with tempfile.TemporaryDirectory() as folder:
        slides, out = Path(folder) / "slides", Path(folder) / "out"
        slides.mkdir()
        write_he_slide(
            slides / "s0.svs", (900, 700) if smoke else (20_000, 16_000), mpp=0.5
        )
        for number in range(1, 1 if smoke else 12):
            (slides / f"s{number}.svs").hardlink_to(slides / "s0.svs")
        start = time.perf_counter()
        summary = run(
            [slides],
            out=out,
            until="embeddings",
            on_event=note,
            device=device,
            pretrained=False,
            tile_px=256,
            encoders=(NAMES[0] if smoke else VITS[title],),
            engine="torch" if smoke else engine,  # type: ignore[arg-type]
            batch_size=4 if smoke else 0,
        )
        seconds = time.perf_counter() - start
        assert all(result.status == "done" for result in summary.results)
        tiles = sum(int(result.facts["num_tiles"]) for result in summary.results)
        busy = _utilisation(out)
    first_s, first_tiles = batches[0]
    return {
        "tiles": tiles,
        "engine": engine,
        "start_s": first_s - start,
        "tiles_per_s": tiles / seconds,
        "first_to_last": (tiles - first_tiles) / (batches[-1][0] - first_s),
        "gpu_busy": busy,
    }


def _utilisation(out: Path) -> float | None:
    """Mean of the monitor's samples from the first to the last in which the GPU worked.

    The start of CUDA and the copy of the weights are not counted: they are below a tenth.
    """
    samples = []
    for record in out.glob("records/*/usage/*.jsonl"):
        rows = [json.loads(line) for line in record.read_text().splitlines()]
        samples += [
            row[7] for row in rows if isinstance(row, list) and row[7] is not None
        ]
    at_work = [place for place, value in enumerate(samples) if value > 0.1]
    return fmean(samples[at_work[0] : at_work[-1] + 1]) if at_work else None


def geometry_rate(device: str, smoke: bool) -> dict[str, Any]:
    """Seconds of neighbours (k = 8) and of token frames."""
    from benchmarks.bench_frames import prepare
    from thinsection.frames import nearest_neighbors, token_frame_atoms

    count = 500 if smoke else 42_000
    points = torch.rand(count, 3).to(device)
    batch, positions, mask = prepare(count, False)
    on_device = {k: v.to(device) for k, v in batch.items()}
    frames = partial(
        token_frame_atoms, on_device, positions.to(device), mask.to(device)
    )
    near = timed(device, partial(nearest_neighbors, points, k=8), times=3)
    return {"count": count, "neighbors": near, "frames": timed(device, frames, times=3)}


def cache_training(device: str, smoke: bool) -> dict[str, Any]:
    """MB/s of an epoch of a linear head from the cache on disk, to the device, and from RAM."""
    from benchmarks.cache_processes import BATCH, encoded, key, write
    from thinsection.store.cache import FeatureCache

    n, row, budget = (32, (8, 16), MIB) if smoke else (512, (1024, 1024), GIB)
    whole = torch.from_numpy(np.concatenate(list(encoded(n, row, "fp32"))))
    order, found = np.random.default_rng(0).permutation(n), {}
    with tempfile.TemporaryDirectory() as root:
        write(None, n=n, row=list(row), kind="fp32", root=root, budget=budget)
        cache = FeatureCache.find(Path(root), key("fp32"), budget_bytes=budget)
        assert cache is not None
        with cache:
            ways = {
                "cache": lambda: cache.batches(order, BATCH),
                "ram": lambda: (whole[i] for i in torch.from_numpy(order).split(BATCH)),
            }
            losses = {}
            for name, batches in ways.items():
                start = time.perf_counter()
                losses[name] = _epoch(batches(), row[1], device)
                found[f"{name}_mb_per_s"] = (
                    whole.nbytes / (time.perf_counter() - start) / 1e6
                )
    assert losses["cache"] == losses["ram"], losses
    return {**found, "equal_losses": True}


def _epoch(batches: Any, dim: int, device: str) -> float:
    head = torch.zeros(dim, 6, device=device, requires_grad=True)
    optimizer, loss = torch.optim.Adam([head], lr=1e-3), torch.zeros(())
    for batch in batches:
        loss = (
            (batch.to(device, non_blocking=True) @ head)
            .log_softmax(-1)[..., 0]
            .mean()
            .neg()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


# what decides comes first; the compiler takes a minute for each of the largest networks
STEPS = {
    **gpu_encoders.PRODUCTS,
    **gpu_encoders.DEFAULT,
    "rate vit_s": gpu_encoders.STEPS["rate vit_s"],
    "rate vit_l": gpu_encoders.STEPS["rate vit_l"],
    "rate whole run": partial(whole_run, "vit_l", "torch"),
    "rate whole run compiled": partial(whole_run, "vit_l", "compiled"),
    "rate titan": partial(slide_encoder_rate, "titan"),
    "rate gigapath": partial(slide_encoder_rate, "gigapath"),
    "rate vit_b": gpu_encoders.STEPS["rate vit_b"],
    "rate whole run vit_b": partial(whole_run, "vit_b", "compiled"),
    "rate qc": qc_rate,
    "rate stream": stream_rate,
    "rate neighbors and frames": geometry_rate,
    "rate cache training": cache_training,
    **gpu_fp8.RATES,
    "rate vit_h": gpu_encoders.STEPS["rate vit_h"],
    "rate vit_g": gpu_encoders.STEPS["rate vit_g"],
}
