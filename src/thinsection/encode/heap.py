"""The C library's heap between batches."""

import ctypes
import functools
import sys
from collections.abc import Callable


def give_back_free_memory() -> None:
    """Returns free pages of the heap to the system; does nothing where there is no glibc.

    The holes that a batch leaves do not always fit the next one: without this call a process that
    encodes batches of 32 with EfficientNet-Lite0 peaks 15 to 25 % higher than the sum of what is
    alive, and differently in each run. The call costs that encoder 5 % of its time, transformers
    none that can be measured.
    """
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
