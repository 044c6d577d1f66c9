"""Chunks: the entries that one job works on."""

import math
from collections.abc import Sequence
from typing import TypeVar

from thinsection.jobs.executor import ExecutorConfig

Item = TypeVar("Item")

# a job that is lost costs no more entries than these
MAX_CHUNK_ENTRIES = 16
# Slurm's default MaxArraySize is 1001, the first index that is refused
MAX_ARRAY = 1000
# jobs at once of a batch system, where --workers does not say it
ARRAY_WORKERS = 8
# enough that a slow chunk at the end does not leave the other workers idle
_CHUNKS_PER_WORKER = 4


def chunked(entries: Sequence[Item], size: int) -> list[tuple[Item, ...]]:
    """Cuts the entries into runs of `size`; the last one may be shorter."""
    return [tuple(entries[i : i + size]) for i in range(0, len(entries), size)]


def chunk_size(num_entries: int, workers: int) -> int:
    """Entries per chunk: several chunks for each worker, at most `MAX_CHUNK_ENTRIES`."""
    even = math.ceil(num_entries / (workers * _CHUNKS_PER_WORKER))
    return max(1, min(MAX_CHUNK_ENTRIES, even))


def make_chunks(
    entries: Sequence[Item], config: ExecutorConfig, *, workers: int = 0
) -> list[tuple[Item, ...]]:
    """Cuts the entries into at most as many chunks as a Slurm array may have tasks.

    Args:
        entries: what is to be worked on.
        config: settings; `chunk_slides` decides the size where it is given.
        workers: workers that will take chunks; 0: those of a batch array.
    """
    workers = workers or config.workers or ARRAY_WORKERS
    size = config.chunk_slides or chunk_size(len(entries), workers)
    least = math.ceil(len(entries) / MAX_ARRAY)
    return chunked(entries, max(size, least))
