"""The C library's heap of a process that encodes on the CPU."""

import ctypes
import functools
import sys
from typing import Any

# numbers of glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_LARGEST_INT = 2**31 - 1
_TOP_PAD_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Makes malloc keep what is freed, for the rest of this process; False where there is no glibc.

    By default every tensor above 32 MiB is mapped anew and its pages are cleared one by one at
    first touch: up to half of an encoder's CPU time (benchmarks/bench_heap.py). The heap then
    stays at its peak, which grows by the holes between tensors of different sizes.

    For a whole process to decide: a run calls it, `load_encoder` does not.
    """
    libc = _glibc()
    if libc is None:
        return False
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST_INT), (_TOP_PAD, _TOP_PAD_BYTES))
    taken = [libc.mallopt(name, value) == 1 for name, value in options]
    return all(taken)


@functools.cache
def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
