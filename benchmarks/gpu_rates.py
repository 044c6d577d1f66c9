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

from benchmarks.gpu_inputs import (
    NAMES,
    encoder_on,
    gigapath_of,
    precisions,
    tiles_of,
)
from thinsection.encode import TileEncoder
from thinsection.encode.embed import BatchEncoder, pinned_allocator
from thinsection.tiles import TileBatch
from thinsection.types import GIB, MIB

VITS = {"vit_s": "lunit_vits16", "vit_b": "dinov2_vitb14", "vit_l": "dinov2_vitl14"}
VITS |= {"vit_g": "dinov2_vitg14"}


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


def encoder_rate(name: str, device: str, smoke: bool) -> dict[str, Any]:
    """Tiles/s in half precision; of the largest network in one of the two only."""
    made = precisions(device)[-1 if name == VITS["vit_g"] else -2 :]
    return {
        p: _encoder_rate(NAMES[0] if smoke else name, device, p, smoke) for p in made
    }


def _encoder_rate(
    name: str, device: str, precision: str, smoke: bool
) -> dict[str, float]:
    """On tiles that lie on the device, through the queues, and one batch after the other on one
    queue, as before."""
    batch, count = (2, 2) if smoke else (256, 12)
    encoder = encoder_on(device, name, precision)
    tiles = pinned_allocator([encoder])((batch, 224, 224, 3))
    tiles[:] = tiles_of(batch)
    resident = torch.from_numpy(tiles).to(device)
    ways: dict[str, Callable[[], Any]] = {
        "resident": lambda: [encoder.encode(resident) for _ in range(count)],
        "queues": partial(_queued, encoder, tiles, count),
        "one_queue": lambda: [
            encoder.encode(torch.from_numpy(tiles).to(device)).float().cpu()
            for _ in range(count)
        ],
    }
    rows = {
        way: timed(device, call, times=1 if smoke else 3) for way, call in ways.items()
    }
    found = {way: batch * count / row["s"] for way, row in rows.items()}
    return {**found, "peak_mib": rows["queues"]["peak_mib"]}


def _queued(encoder: TileEncoder, tiles: np.ndarray, count: int) -> int:
    loop, places = BatchEncoder([encoder]), np.arange(len(tiles))
    coords, made = np.stack([places, places], 1), 0
    for number in range(count):
        batch = TileBatch(number, places, coords, tiles, _release=lambda: None)
        made += len([*loop.submit(batch)])
    return made + len([*loop.flush()])


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
    for count in (50,) if smoke else (8_000, 33_000, 62_000):
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


def whole_run(device: str, smoke: bool) -> dict[str, Any]:
    """A run of a ViT-L over slides: tiles/s with the start, and how busy the GPU was meanwhile."""
    from thinsection.run.run import run
    from thinsection.testing.synthetic import write_he_slide

    with tempfile.TemporaryDirectory() as folder:
        slides, out = Path(folder) / "slides", Path(folder) / "out"
        slides.mkdir()
        write_he_slide(
            slides / "s0.svs", (900, 700) if smoke else (20_000, 16_000), mpp=0.5
        )
        for number in range(1, 1 if smoke else 12):
            (slides / f"s{number}.svs").hardlink_to(slides / "s0.svs")
        settings = {"device": device, "pretrained": False, "tile_px": 256}
        settings["encoders"] = (NAMES[0] if smoke else VITS["vit_l"],)
        start = time.perf_counter()
        summary = run([slides], out=out, until="embeddings", **settings)
        seconds = time.perf_counter() - start
        assert all(result.status == "done" for result in summary.results)
        tiles = sum(int(result.facts["num_tiles"]) for result in summary.results)
        busy = _utilisation(out)
    return {"tiles": tiles, "tiles_per_s": tiles / seconds, "gpu_busy": busy}


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


_VIT_STEPS = {title: partial(encoder_rate, name) for title, name in VITS.items()}
STEPS = {
    "rate default encoder": partial(encoder_rate, NAMES[0]),
    "rate vit_s": _VIT_STEPS["vit_s"],
    "rate vit_l": _VIT_STEPS["vit_l"],
    "rate titan": partial(slide_encoder_rate, "titan"),
    "rate whole run": whole_run,
    "rate stream": stream_rate,
    "rate neighbors and frames": geometry_rate,
    "rate cache training": cache_training,
    "rate vit_b": _VIT_STEPS["vit_b"],
    "rate vit_g": _VIT_STEPS["vit_g"],
    "rate qc": qc_rate,
    "rate gigapath": partial(slide_encoder_rate, "gigapath"),
}
