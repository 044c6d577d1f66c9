"""Rates of tile encoders for gpu_proof: by PyTorch and compiled, beside the peers' loop.

A step takes the device ('cpu' for --smoke) and whether sizes are tiny; it returns figures. The
weights are random. Each way encodes the same uint8 tiles of 224 px in half precision:

    loader     the peers' way: a DataLoader with workers gives normalised batches in fp32, the
               network computes under autocast, and each batch is read back
    torch      the package with PyTorch's launches: one batch on the device again and again
               ('resident'), and through the queues
    compiled   the same after `to_compiled`
"""

import copy
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu_inputs import NAMES, encoder_on, precisions, tiles_of
from thinsection.encode import NetworkTileEncoder, TileEncoder
from thinsection.encode.embed import BatchEncoder, pinned_allocator
from thinsection.encode.engine_choice import why_not_compiled
from thinsection.encode.sizes import declared_size
from thinsection.errors import InvalidInputError
from thinsection.tiles import TileBatch
from thinsection.types import MIB
from thinsection.weights.placement import DTYPES, Placement

VITS = {
    "vit_s": "lunit_vits16",
    "vit_b": "dinov2_vitb14",
    "vit_l": "dinov2_vitl14",
    "vit_h": "virchow2",
    "vit_g": "dinov2_vitg14",
}
TILES_PX = 224
BATCH = 256
SECONDS = 1.5  # of each rate, after one batch to warm up
WORKERS = 12  # of the peers' DataLoader
_CHECKED = 16  # tiles whose embeddings are compared
_PRODUCT_EDGE = 8192
SMALLEST = "timm:test_vit"  # stands for all networks in --smoke


def product_rate(device: str, smoke: bool) -> dict[str, Any]:
    """TFLOP/s of one large product in half precision: what a network could reach at most."""
    edge = 64 if smoke else _PRODUCT_EDGE
    precision = precisions(device)[-1]
    a, b = torch.randn((2, edge, edge), device=device).to(DTYPES[precision])
    count, seconds = _repeated(lambda: a @ b, device, seconds=0 if smoke else 2)
    return {"precision": precision, "tflops": count * 2 * edge**3 / seconds / 1e12}


def encoder_rate(name: str, device: str, smoke: bool) -> dict[str, Any]:
    """Tiles/s of each way, memory, watts, and cosines to fp32, by precision."""
    precision = precisions(device)[-1]
    batch = 2 if smoke else BATCH
    exact = encoder_on(device, name)
    assert isinstance(exact, NetworkTileEncoder)
    size = declared_size(name, tile_px=TILES_PX)
    few = tiles_of(_CHECKED if not smoke else 2, edge=TILES_PX)
    in_fp32 = exact.encode(few).cpu()
    row: dict[str, Any] = {
        "encoder": name,
        "flops_per_tile": None if size is None else size.flops_per_tile,
        "batch": batch,
        "loader": _loader_rate(exact, device, precision, batch, smoke=smoke),
    }
    half = NetworkTileEncoder(
        exact.spec,
        copy.deepcopy(exact.backbone),
        Placement(torch.device(exact.device), precision),  # type: ignore[arg-type]
        exact.origin,
        exact.weights_hash,
    )
    row |= rates(half, device, batch, smoke=smoke)
    row["cosine_fp32"] = lowest_cosine(half.encode(few).cpu(), in_fp32)
    row["compiled"] = compiled_row(half, exact, device, batch, smoke=smoke)
    if "not_compiled" not in row["compiled"]:
        row["compiled"]["cosine_fp32"] = lowest_cosine(half.encode(few).cpu(), in_fp32)
    return {precision: row}


def compiled_row(
    half: NetworkTileEncoder,
    exact: NetworkTileEncoder,
    device: str,
    batch: int,
    *,
    smoke: bool,
) -> dict[str, Any]:
    """Rates of the encoder after it is compiled, or why it is not."""
    reason = why_not_compiled(device)
    if reason:
        return {"not_compiled": reason}
    try:
        check = half.to_compiled(batch_size=batch, load_exact=lambda: exact)
    except InvalidInputError as error:
        return {"not_compiled": str(error).splitlines()[0]}
    if not check.passes(half.precision):
        return {"not_compiled": f"the output differs: {check}"}
    return {
        "engine": half.engine,
        "rows": check.rows,
        "compile_s": check.compile_s,
        "cosine_torch": check.cosine,
        **rates(half, device, batch, smoke=smoke),
    }


def rates(
    encoder: TileEncoder, device: str, batch: int, *, smoke: bool
) -> dict[str, Any]:
    """Tiles/s on tiles that lie on the device and through the queues; peak memory; watts."""
    seconds = 0 if smoke else SECONDS
    tiles = pinned_allocator([encoder])((batch, TILES_PX, TILES_PX, 3))
    tiles[:] = tiles_of(batch)
    on_device = torch.from_numpy(tiles).to(device)
    count, spent = _repeated(lambda: encoder.encode(on_device), device, seconds=seconds)
    resident = count * batch / spent
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    batches = 2 if smoke else max(4, int(resident * SECONDS / batch))
    _queued(encoder, tiles, 2)
    with _Watts(device) as watts:
        start = time.perf_counter()
        done = _queued(encoder, tiles, batches)
        queued_s = time.perf_counter() - start
    assert done == batches
    peak = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
    return {
        "resident": resident,
        "queues": batches * batch / queued_s,
        "peak_mib": peak / MIB,
        "watts": watts.mean,
    }


def _queued(encoder: TileEncoder, tiles: np.ndarray, count: int) -> int:
    """Number of batches that come back through the queues."""
    loop: BatchEncoder[Any, Any] = BatchEncoder([encoder])
    places = np.arange(len(tiles))
    coords = np.stack([places, places], 1)
    done = 0
    for number in range(count):
        batch: Any = TileBatch(number, places, coords, tiles, _release=lambda: None)
        done += len([*loop.submit(batch)])
    return done + len([*loop.flush()])


class _Normalised(Dataset[Tensor]):
    """Tiles as the peers' transforms give them: float32 (3, E, E), normalised."""

    def __init__(self, tiles: np.ndarray, spec: Any, length: int) -> None:
        self._tiles = tiles
        self._mean = torch.tensor(spec.mean)[:, None, None]
        self._std = torch.tensor(spec.std)[:, None, None]
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        tile = torch.from_numpy(self._tiles[index % len(self._tiles)])
        pixels = tile.permute(2, 0, 1).float() / 255
        return (pixels - self._mean) / self._std


def _loader_rate(
    exact: NetworkTileEncoder, device: str, precision: str, batch: int, *, smoke: bool
) -> float:
    """Tiles/s of a plain loop over a DataLoader under autocast, from its second batch on."""
    workers = 0 if smoke else WORKERS
    batches = 3 if smoke else 3 + 2 * WORKERS
    data = _Normalised(tiles_of(batch), exact.spec, batches * batch)
    loader: DataLoader[Tensor] = DataLoader(
        data, batch_size=batch, num_workers=workers, pin_memory=device != "cpu"
    )
    autocast = torch.autocast(
        torch.device(device).type, DTYPES[precision], enabled=precision != "fp32"
    )
    start = 0.0
    done = 0
    for number, pixels in enumerate(loader):
        with torch.inference_mode(), autocast:
            exact.backbone(pixels.to(device, non_blocking=True))[0].float().cpu()
        if number == 0:
            start = time.perf_counter()
        else:
            done += len(pixels)
    return done / (time.perf_counter() - start)


def _repeated(
    call: Callable[[], Any], device: str, *, seconds: float
) -> tuple[int, float]:
    """Number of calls, and the seconds that they took together, after one to warm up."""

    def synchronise() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    call()
    synchronise()
    start = time.perf_counter()
    call()
    synchronise()
    one_s = time.perf_counter() - start
    count = max(1, int(seconds / one_s))
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronise()
    return count, time.perf_counter() - start


def lowest_cosine(embeddings: Tensor, expected: Tensor) -> float:
    return float(F.cosine_similarity(embeddings, expected).min())


class _Watts:
    """Mean power of the first card while a block runs; None without nvidia-smi."""

    def __init__(self, device: str) -> None:
        self._is_on = device != "cpu"
        self._samples: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    @property
    def mean(self) -> float | None:
        return fmean(self._samples) if self._samples else None

    def __enter__(self) -> "_Watts":
        if self._is_on:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._is_on:
            self._thread.join()

    def _sample(self) -> None:
        command = [
            "nvidia-smi",
            "--query-gpu=power.draw",
            "--format=csv,noheader,nounits",
        ]
        while not self._ended.wait(0.2):
            with suppress(OSError, ValueError, subprocess.SubprocessError):
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, timeout=5
                )
                self._samples.append(float(done.stdout.splitlines()[0]))


def _step(name: str) -> Callable[[str, bool], dict[str, Any]]:
    """Step of an encoder; in smoke the smallest network stands for all."""

    def rate(device: str, smoke: bool) -> dict[str, Any]:
        return encoder_rate(SMALLEST if smoke else name, device, smoke)

    return rate


PRODUCTS = {"rate products": product_rate}
STEPS = {f"rate {title}": _step(name) for title, name in VITS.items()}
DEFAULT = {"rate default encoder": _step(NAMES[0])}
