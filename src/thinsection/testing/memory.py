"""Peak memory of a function in a fresh interpreter, by its high-water mark; RSS has file pages."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one function call in a fresh process took."""

    result: Any  # what the function returned, through JSON
    seconds: float  # wall-clock time of the call, without imports
    cpu_seconds: float  # user plus system time of the call, all threads
    baseline_bytes: int  # RSS just before the call, after `setup`
    peak_bytes: int  # high-water RSS of the process after the call

    @property
    def growth_bytes(self) -> int:
        """Peak beyond the baseline: what the call itself needed."""
        return max(0, self.peak_bytes - self.baseline_bytes)


_CHILD = """
import contextlib, importlib, json, sys, time
import psutil
module, name, setup, kwargs = json.loads(sys.argv[1])
m = importlib.import_module(module)
state = getattr(m, setup)(**kwargs) if setup else None
f = getattr(m, name)
with contextlib.suppress(OSError):
    open('/proc/self/clear_refs', 'w').write('5')
rss = psutil.Process().memory_info().rss
c0, t0 = time.process_time(), time.perf_counter()
result = f(state, **kwargs) if setup else f(**kwargs)
t1, c1 = time.perf_counter(), time.process_time()
peak = max(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmHWM'))
found = {'result': result, 'seconds': t1 - t0, 'cpu_seconds': c1 - c0}
print('\\n@measured ' + json.dumps({**found, 'baseline_bytes': rss, 'peak_bytes': peak}))
"""


def run_and_measure(
    module: str,
    function: str,
    *,
    setup: str | None = None,
    timeout_s: float = 3600,
    **kwargs: Any,
) -> Measured:
    """Runs `module.function(**kwargs)` in a fresh interpreter and measures time and peak memory.

    With `setup`, `module.setup(**kwargs)` runs first, unmeasured, and its value is the function's
    first argument. Arguments and the result must be JSON. Linux only (VmHWM of /proc/self/status).
    A child that fails raises RuntimeError with its standard error.
    """
    command = [
        sys.executable,
        "-c",
        _CHILD,
        json.dumps([module, function, setup, kwargs]),
    ]
    told: dict[str, Any] = {"capture_output": True, "text": True}
    told["env"] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    child = subprocess.run(command, check=False, timeout=timeout_s, **told)
    marked = [
        line for line in child.stdout.splitlines() if line.startswith("@measured ")
    ]
    if child.returncode != 0 or not marked:
        raise RuntimeError(
            f"{module}.{function} failed ({child.returncode}):\n{child.stderr}"
        )
    return Measured(**json.loads(marked[-1].removeprefix("@measured ")))
