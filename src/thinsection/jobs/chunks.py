"""Chunks: the entries that one job works on."""

import math
from collections.abc import Sequence
from typing import TypeVar

from thinsection.jobs.executor import ExecutorConfig

Item = TypeVar("Item")

# largest number of entries that one lost job can cost
MAX_CHUNK_ENTRIES = 16
# Slurm's default MaxArraySize is 1001, the first index that Slurm refuses
MAX_ARRAY = 1000
# jobs at the same time in a batch system, if --workers is not set
ARRAY_WORKERS = 8
# several chunks per worker, so that one slow chunk does not leave the others idle at the end
_CHUNKS_PER_WORKER = 4


def chunked(entries: Sequence[Item], size: int) -> list[tuple[Item, ...]]:
    """Cuts the entries into chunks of `size`; the last one may be shorter."""
    return [tuple(entries[i : i + size]) for i in range(0, len(entries), size)]


def chunk_size(num_entries: int, workers: int) -> int:
    """Entries per chunk: several chunks for each worker, at most `MAX_CHUNK_ENTRIES`."""
    even = math.ceil(num_entries / (workers * _CHUNKS_PER_WORKER))
    return max(1, min(MAX_CHUNK_ENTRIES, even))


def weighted_chunks(
    entries: Sequence[Item], work: Sequence[float], workers: int
) -> list[tuple[Item, ...]]:
    """Cuts the entries into chunks, those with most work first, and the last ones small.

    So no worker begins a large entry while the others have nothing left to do. A chunk has a
    share of the work that is left, and at most `MAX_CHUNK_ENTRIES` entries.

    Source: guided self-scheduling, Polychronopoulos and Kuck 1987.
    """
    order = sorted(range(len(entries)), key=lambda index: -work[index])
    chunks: list[tuple[Item, ...]] = []
    work_left = float(sum(work))
    chunk: list[Item] = []
    chunk_work = 0.0
    for index in order:
        chunk.append(entries[index])
        chunk_work += work[index]
        share = work_left / (workers * _CHUNKS_PER_WORKER)
        if chunk_work >= share or len(chunk) == MAX_CHUNK_ENTRIES:
            chunks.append(tuple(chunk))
            work_left -= chunk_work
            chunk = []
            chunk_work = 0.0
    if chunk:
        chunks.append(tuple(chunk))
    return chunks


def make_chunks(
    entries: Sequence[Item], config: ExecutorConfig, *, workers: int = 0
) -> list[tuple[Item, ...]]:
    """Cuts the entries into chunks, at most as many as a Slurm array may have tasks.

    Args:
        entries: entries to work on.
        config: settings; `chunk_slides` sets the size if it is given.
        workers: workers that will run chunks; 0 means those of a batch array.
    """
    workers = workers or config.workers or ARRAY_WORKERS
    size = config.chunk_slides or chunk_size(len(entries), workers)
    least = math.ceil(len(entries) / MAX_ARRAY)
    return chunked(entries, max(size, least))
