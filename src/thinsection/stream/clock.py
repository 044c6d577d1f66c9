"""Where the time of a run goes: seconds each stage was busy and each stage waited."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Adds up seconds by name over all threads: 'decode_busy', 'decode_wait', 'encode_busy', ...

    Names used by the run: prepare_busy (open, tissue, grid), decode_busy, decode_wait (for a free
    batch), encode_wait (for a decoded batch), transfer_busy, encode_busy, write_busy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the block's wall-clock time to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds to `name`."""
        with self._lock:
            self._seconds[name] += seconds

    def seconds(self) -> dict[str, float]:
        """What was added up so far, by name."""
        with self._lock:
            return dict(sorted(self._seconds.items()))
