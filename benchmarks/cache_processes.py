"""What `bench_cache` runs in processes of their own: features made, written, read, trained on."""

import hashlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinsection.store.cache import CacheKey, CacheWriter, FeatureCache
from thinsection.types import GIB, MIB

BATCH, CLASSES, WIDTH, BLOCK = 16, 6, 256, 8
Batches = Iterator[torch.Tensor]


def prepare(**_: Any) -> None:
    """Threads and first-use allocations that are not the measured function's."""
    torch.set_num_threads(1)
    train(torch.randn(1, 8, 8) for _ in range(2))
    with tempfile.TemporaryDirectory() as root:
        write(None, n=8, row=[8, 8], kind="fp32", root=root, budget=MIB)
        read_cache(
            None, n=8, row=[8, 8], kind="fp32", root=root, budget=MIB, trains=False
        )


def encoded(n: int, row: tuple[int, ...], kind: str) -> Iterator[np.ndarray]:
    """Stands in for an encoder: seeded features, 8 images at a time."""
    for start in range(0, n, BLOCK):
        rng = np.random.default_rng(start)
        x = rng.standard_normal((min(BLOCK, n - start), *row), dtype=np.float32)
        if kind == "bf16":
            x.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
        yield x


def key(kind: str) -> CacheKey:
    return CacheKey(
        encoder=f"bench-{kind}", weights_hash="0", preprocessing="", data_hash="0"
    )


def generate(_: None, *, n: int, row: list[int], kind: str) -> int:
    """The stand-in alone, for the cost of writing."""
    return sum(len(x) for x in encoded(n, tuple(row), kind))


def write(_: None, *, n: int, row: list[int], kind: str, root: str, budget: int) -> int:
    """Encode and cache."""
    with CacheWriter(Path(root), key(kind), (n, *row), budget_bytes=budget) as writer:
        for x in encoded(n, tuple(row), kind):
            writer.append(x)
        return writer.finish().data_bytes


def read_cache(
    _: None, *, n: int, row: list[int], kind: str, root: str, budget: int, trains: bool
) -> dict[str, Any]:
    """Every row in a shuffled order from the cache: read, or trained on."""
    del row
    cache = FeatureCache.find(Path(root), key(kind), budget_bytes=budget)
    assert cache is not None
    with cache:
        found = consume(lambda order: cache.batches(order, BATCH), n, trains)
        return {**found, "in_ram": cache.in_ram, "prefetch": cache.prefetch}


def read_memmap(
    _: None, *, n: int, row: list[int], kind: str, root: str, reuses: bool
) -> dict[str, Any]:
    """Every row in a shuffled order from `np.memmap`, into new arrays or always into one."""
    path = Path(root) / f"{kind}.bin"
    with path.open("wb") as file:
        for x in encoded(n, tuple(row), kind):
            x.tofile(file)
    whole = np.memmap(path, dtype=np.float32, mode="r", shape=(n, *row))
    buffer = np.empty((BATCH, *row), dtype=np.float32)

    def batches(order: np.ndarray) -> Batches:
        for start in range(0, n, BATCH):
            rows = order[start : start + BATCH]
            out = buffer[: len(rows)] if reuses else None
            yield torch.from_numpy(np.take(whole, rows, axis=0, out=out, mode="clip"))

    return consume(batches, n, trains=False)


def read_ram(
    _: None, *, n: int, row: list[int], kind: str, dtype: str, trains: bool
) -> dict[str, Any]:
    """The way that kills hosts: a list of chunks, concatenated, kept; gathered batch by batch."""
    chunks = [x.astype(dtype) for x in encoded(n, tuple(row), kind)]
    whole = torch.from_numpy(np.concatenate(chunks))
    del chunks

    def batches(order: np.ndarray) -> Batches:
        for rows in torch.from_numpy(order).split(BATCH):
            yield whole[rows].float()

    return consume(batches, n, trains)


def model_alone(_: None, *, n: int, row: list[int], kind: str) -> dict[str, Any]:
    """The same training on one batch again and again: what the model itself takes."""
    del kind
    batch = torch.randn(BATCH, *row, generator=torch.Generator().manual_seed(0))
    return train(batch for _ in range(min(n, 64) // BATCH))


def consume(batches: Any, n: int, trains: bool) -> dict[str, Any]:
    """An epoch of training; or a hash of the shuffled features and the rate of reading alone."""
    order = np.random.default_rng(1).permutation(n)
    if trains:
        for _batch in batches(
            order[: 2 * BATCH]
        ):  # the page cache is warm, buffers are there
            pass
        return train(batches(order))
    digest, size = hashlib.sha256(), 0
    for batch in batches(order):
        digest.update(batch.numpy().data)
        size += batch.nbytes
    reads = []
    for _ in range(3 if size < 4 * GIB else 1):
        start, cpu = time.perf_counter(), time.process_time()
        for _batch in batches(order):
            pass
        reads.append((time.perf_counter() - start, time.process_time() - cpu))
    read_s, read_cpu_s = min(reads)
    return {
        "sha256": digest.hexdigest(),
        "read_mb_per_s": size / read_s / 1e6,
        "read_mb_per_cpu_s": size / read_cpu_s / 1e6,
    }


def train(batches: Batches) -> dict[str, Any]:
    """One epoch of a two-layer head over the batches: losses, times, time spent waiting."""
    first: torch.Tensor | None = None
    losses, wait, steps = [], 0.0, 0
    cpu, begin = time.process_time(), time.perf_counter()
    parameters: list[torch.Tensor] = []
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited = time.perf_counter() - asked
        if batch is None:
            break
        if (
            first is None
        ):  # the pipe is empty at the first batch of an epoch: reported apart
            first, first_wait = batch, waited
            g = torch.Generator().manual_seed(0)
            shapes = ((WIDTH, batch.shape[2]), (CLASSES, WIDTH))
            parameters = [
                torch.randn(s, generator=g).mul_(0.02).requires_grad_() for s in shapes
            ]
            optimizer = torch.optim.Adam(parameters, lr=1e-3)
        else:
            wait += waited
        scores = torch.relu(batch @ parameters[0].T) @ parameters[1].T
        loss = scores.log_softmax(-1)[..., 0].mean().neg()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        steps += 1
    return {
        "losses": losses,
        "train_s": time.perf_counter() - begin,
        "train_cpu_s": time.process_time() - cpu,
        "first_wait_s": first_wait,
        "wait_s": wait,
        "steps": steps,
    }
