"""Peak memory, measured: in this process by sampling, or in a fresh process by its high-water mark.

RSS counts file-backed pages too; `run_and_measure` gives a clean baseline because every measured
function runs in an interpreter of its own.
"""

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psutil


class PeakMemory:
    """Samples this process's RSS in a thread; `with PeakMemory() as peak: ...; peak.growth_bytes`.

    Attributes:
        start_bytes: RSS on entry.
        peak_bytes: highest RSS seen.
    """

    def __init__(self, interval_s: float = 0.002) -> None:
        self._interval_s = interval_s
        self._process = psutil.Process(os.getpid())
        self._stop = threading.Event()
        self.start_bytes = 0
        self.peak_bytes = 0

    @property
    def growth_bytes(self) -> int:
        """Peak minus start."""
        return self.peak_bytes - self.start_bytes

    def __enter__(self) -> Self:
        self.start_bytes = self.peak_bytes = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one function call in a fresh process took.

    Attributes:
        result: what the function returned, through JSON.
        seconds: wall-clock time of the call, without imports.
        cpu_seconds: user plus system time of the call, all threads.
        baseline_bytes: RSS just before the call, after `setup`.
        peak_bytes: high-water RSS of the process after the call.
    """

    result: Any
    seconds: float
    cpu_seconds: float
    baseline_bytes: int
    peak_bytes: int

    @property
    def growth_bytes(self) -> int:
        """Peak beyond the baseline: what the call itself needed."""
        return max(0, self.peak_bytes - self.baseline_bytes)


_CHILD = """
import importlib, json, os, resource, sys, time
import psutil
module, name, setup, kwargs = json.loads(sys.argv[1])
m = importlib.import_module(module)
state = getattr(m, setup)(**kwargs) if setup else None
f = getattr(m, name)
try:
    open('/proc/self/clear_refs', 'w').write('5')
except OSError:
    pass
rss = psutil.Process().memory_info().rss
c0, t0 = time.process_time(), time.perf_counter()
result = f(state, **kwargs) if setup else f(**kwargs)
t1, c1 = time.perf_counter(), time.process_time()
peak = max(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmHWM'))
cpu = c1 - c0
print('\\n@measured ' + json.dumps([result, t1 - t0, cpu, rss, peak]))
"""


def run_and_measure(
    module: str, function: str, *, setup: str | None = None, timeout_s: float = 3600, **kwargs: Any
) -> Measured:
    """Runs `module.function(**kwargs)` in a fresh interpreter and measures time and peak memory.

    With `setup`, `module.setup(**kwargs)` runs first, unmeasured, and its value is the function's
    first argument. Arguments and the result must be JSON. Linux only (VmHWM of /proc/self/status).

    Raises:
        RuntimeError: the child failed; its standard error is in the message.
    """
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps([module, function, setup, kwargs])],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    marked = [line for line in child.stdout.splitlines() if line.startswith("@measured ")]
    if child.returncode != 0 or not marked:
        raise RuntimeError(f"{module}.{function} failed ({child.returncode}):\n{child.stderr}")
    result, seconds, cpu_seconds, baseline, peak = json.loads(marked[-1].removeprefix("@measured "))
    return Measured(
        result=result,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        baseline_bytes=baseline,
        peak_bytes=peak,
    )
