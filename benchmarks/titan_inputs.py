"""Inputs and measured calls of bench_titan; every call runs in a fresh process of one thread."""

import ctypes
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.support.plain_titan import plain_bias, plain_titan
from threadpoolctl import threadpool_limits

from thinsection.attention import alibi2d_attention, alibi_slopes
from thinsection.attention.products import fast_products, onednn_is_faster
from thinsection.pool import LoadOptions, TitanSlideEncoder
from thinsection.pool.titan import NUM_BLOCKS
from thinsection.testing import run_and_measure
from thinsection.types import GIB, MIB

MODULE = "benchmarks.titan_inputs"
TILE_PX_L0 = 512
HEADS, DIM = 12, 64


def tissue_cells(num_tiles: int, *, seed: int = 0) -> np.ndarray:
    """Cells (num_tiles, 2) of three elongated fragments that fill about 40 % of their frame."""
    rng = np.random.default_rng(seed)
    side = int((num_tiles / 0.35) ** 0.5) + 8
    rows, columns = np.mgrid[0:side, 0:side] / side
    inside = np.full((side, side), -np.inf)
    for y, x, tall, wide, turn in (
        (0.25, 0.3, 0.22, 0.3, 0.4),
        (0.55, 0.7, 0.4, 0.2, -0.3),
        (0.8, 0.25, 0.15, 0.22, 0.1),
    ):
        a = (rows - y) * np.cos(turn) - (columns - x) * np.sin(turn)
        b = (rows - y) * np.sin(turn) + (columns - x) * np.cos(turn)
        inside = np.maximum(inside, 1 - (a / tall) ** 2 - (b / wide) ** 2)
    inside += rng.normal(0, 0.05, inside.shape)  # ragged edges, single missing tiles
    chosen = np.sort(np.argpartition(-inside.ravel(), num_tiles - 1)[:num_tiles])
    return np.stack([chosen // side, chosen % side], 1).astype(np.int64)


def slide(num_tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """Tile embeddings (N, 768) float32 and coords_l0 (N, 2)."""
    tiles = np.random.default_rng(1).standard_normal((num_tiles, 768), dtype=np.float32)
    return tiles, tissue_cells(num_tiles) * TILE_PX_L0 + 301


def titan_of(
    precision: str = "auto", *, budget_bytes: int = GIB, device: str = "cpu"
) -> TitanSlideEncoder:
    """Seeded random weights."""
    options = LoadOptions(device=device, precision=precision, budget_bytes=budget_bytes)  # type: ignore[arg-type]
    return TitanSlideEncoder.from_state_dict(
        TitanSlideEncoder.random_weights(seed=0), options=options
    )


def set_up(
    *, num_tiles: int, way: str, blocks: int, budget_bytes: int
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Weights and inputs, outside the measured time and memory; ours with the first `blocks`."""
    torch.set_num_threads(1)
    if way in ("published", "slide2vec"):
        weights = TitanSlideEncoder.random_weights(seed=0)
        tiles, coords = slide(num_tiles)
        give_back_freed_memory()
        return weights, tiles, coords
    titan = titan_of(way, budget_bytes=budget_bytes)
    del titan.net.blocks.modules_list[blocks:]  # type: ignore[union-attr]
    tiles, coords = slide(num_tiles)
    give_back_freed_memory()
    return titan, tiles, coords


def give_back_freed_memory() -> None:
    """Or what setting up has freed would hide what the measured call takes (glibc keeps it)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def embed(
    state: tuple[Any, np.ndarray, np.ndarray], *, num_tiles: int, way: str, **_: int
) -> list[float]:
    """Slide embedding: `way` is 'published', 'slide2vec', or the precision of ours."""
    model, tiles, coords = state
    if way in ("published", "slide2vec"):
        attend_of = slide2vec_rows if way == "slide2vec" else None
        tensors = torch.from_numpy(tiles), torch.from_numpy(coords)
        options: Any = {
            "dtype": torch.float32,
            "bias_way": "float32",
            "attend_of": attend_of,
        }
        with torch.inference_mode():
            return plain_titan(model, *tensors, TILE_PX_L0, **options).tolist()
    return model.encode(tiles, coords, tile_px_l0=TILE_PX_L0).tolist()


def slide2vec_source() -> Path | None:
    """slide2vec's TITAN in the folder of unpacked wheels that THINSECTION_TEST_PEERS names."""
    folder = os.environ.get("THINSECTION_TEST_PEERS")
    found = (
        Path(folder).rglob("slide2vec/encoders/models/titan.py") if folder else iter(())
    )
    return next(found, None)


def slide2vec_rows(cells: torch.Tensor) -> Any:
    """slide2vec's own attention in row chunks: the way it takes where the full bias does not fit.

    Its file runs as it is; what it imports for the hub and for its registry is stood in for.
    """
    source = slide2vec_source()
    assert source is not None
    spec = importlib.util.spec_from_file_location("slide2vec_titan", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    around = ("transformers", "slide2vec.encoders.base", "slide2vec.encoders.registry")
    names = ("slide2vec", "slide2vec.encoders", *around)
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names}):
        spec.loader.exec_module(module)
    rows, columns = (cells.amax(0) + 1).tolist()
    tissue = torch.zeros(1, rows, columns, dtype=torch.bool)
    tissue[0, cells[:, 0], cells[:, 1]] = True
    like = SimpleNamespace(num_heads=HEADS)
    bias = module._ChunkedAlibiBias(
        like, rows, columns, tissue, cells.device, torch.float32
    )
    return bias.attend


def set_up_layer(*, num_tiles: int, heads: int, way: str) -> tuple[torch.Tensor, ...]:
    """q, k, v [1, heads, T, 64] and cells of one attention layer; unit normal, as after a norm."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(2)
    shape = (1, heads, num_tiles + 1, DIM)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    cells = torch.from_numpy(tissue_cells(num_tiles))
    give_back_freed_memory()
    return q, k, v, cells


def layer(
    state: tuple[torch.Tensor, ...], *, num_tiles: int, heads: int, way: str
) -> dict[str, float]:
    """One layer: 'ours', or SDPA with its bias built in float32 and timed apart."""
    q, k, v, cells = state
    if way == "ours":
        out = alibi2d_attention(q, k, v, cells, alibi_slopes(HEADS)[:heads])
        return {"checksum": float(out.double().sum())}
    start = time.process_time()
    bias = plain_bias(cells, heads, dtype=torch.float32, way="float32")
    built = time.process_time()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    end = time.process_time()
    return {
        "checksum": float(out.double().sum()),
        "build_cpu_s": built - start,
        "sdpa_cpu_s": end - built,
    }


def matmul_rates() -> dict[str, float]:
    """Float32 GFLOP/s of one thread: the median of 2048 x 2048 products of each library.

    oneDNN counts only where its products stay float32.
    """
    torch.set_num_threads(1)
    a = torch.randn(2048, 2048)
    array = a.numpy()
    ways: dict[str, Any] = {"mkl": lambda: a @ a, "numpy": lambda: array @ array}
    if onednn_is_faster():
        ways["onednn"] = fast_products()(lambda: a @ a)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with threadpool_limits(1):
        for _ in range(9):
            for name, product in ways.items():
                start = time.process_time()
                product()
                seconds[name].append(time.process_time() - start)
    return {
        name: 2 * 2048**3 / statistics.median(runs) / 1e9
        for name, runs in seconds.items()
    }


def matmul_rate() -> float:
    """The machine's rate: that of the quickest library."""
    return max(matmul_rates().values())


def measured(
    num_tiles: int, way: str, *, blocks: int = NUM_BLOCKS, budget_bytes: int = GIB
) -> dict[str, Any]:
    """Time and memory of one embedding in a fresh process, weights and inputs not counted."""
    options: dict[str, Any] = {"num_tiles": num_tiles, "way": way, "blocks": blocks}
    options["budget_bytes"] = budget_bytes
    run = run_and_measure(
        MODULE, "embed", setup="set_up", timeout_s=2 * 3600, **options
    )
    row = {
        **options,
        "cpu_s": run.cpu_seconds,
        "wall_s": run.seconds,
        "peak_beyond_inputs_mib": run.growth_bytes / MIB,
        "peak_rss_mib": run.peak_bytes / MIB,
    }
    print(
        {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()},
        flush=True,
    )
    return row


def arithmetic(row: dict[str, Any], gflops: float) -> dict[str, float]:
    """Operations of the whole forward pass, and how much of the matrix rate they reach.

    Attention: 4 T² C a block for q kᵀ and weights v; per score and head four cheap passes over a
    cache-resident block, and per score 1/12 of six for the distance. Linears: 24 T C² a block.
    """
    tokens, channels, blocks = row["num_tiles"] + 1, HEADS * DIM, row["blocks"]
    attention = 4 * tokens**2 * channels * blocks
    linears = 24 * tokens * channels**2 * blocks + 2 * tokens * channels**2
    scores = tokens**2 * HEADS * blocks
    floor = (attention + linears) / (gflops * 1e9)
    return {
        "matmul_gflop": (attention + linears) / 1e9,
        "scores_1e9": scores / 1e9,
        "cached_pass_bytes_1e9": scores * 4 * (8 + 9 / HEADS) / 1e9,
        "matmul_floor_s": floor,
        "fraction_of_matmul_rate": floor / row["cpu_s"],
    }
