"""Peak memory of a function in a fresh interpreter, by its high-water mark; RSS has file pages."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from thinsection.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Time and memory of one function call in a fresh process.

    Attributes:
        result: what the function returned, through JSON.
        seconds: wall-clock time of the call, without imports.
        cpu_seconds: user plus system time of the call, all threads.
        baseline_bytes: RSS just before the call, after `setup`.
        peak_bytes: high-water RSS of the process after the call.
    """

    result: Json
    seconds: float
    cpu_seconds: float
    baseline_bytes: int
    peak_bytes: int

    @property
    def growth_bytes(self) -> int:
        """Peak beyond the baseline: memory that the call itself needed."""
        return max(0, self.peak_bytes - self.baseline_bytes)


_MARK = "@measured "  # begins the line of the child's output that holds the figures
_CHILD = """
import contextlib, importlib, json, sys, time
import psutil

module_name, function_name, setup_name, arguments, mark = json.loads(sys.argv[1])
module = importlib.import_module(module_name)
function = getattr(module, function_name)
positional = []
if setup_name:
    positional.append(getattr(module, setup_name)(**arguments))
with contextlib.suppress(OSError):
    open('/proc/self/clear_refs', 'w').write('5')  # resets the high-water mark
baseline = psutil.Process().memory_info().rss
cpu_before = time.process_time()
before = time.perf_counter()
result = function(*positional, **arguments)
after = time.perf_counter()
cpu_after = time.process_time()
for line in open('/proc/self/status'):
    if line.startswith('VmHWM'):
        peak = int(line.split()[1]) * 1024
figures = {
    'result': result,
    'seconds': after - before,
    'cpu_seconds': cpu_after - cpu_before,
    'baseline_bytes': baseline,
    'peak_bytes': peak,
}
print()
print(mark + json.dumps(figures))
"""


def run_and_measure(
    module: str,
    function: str,
    *,
    setup: str | None = None,
    timeout_s: float = 3600,
    **kwargs: object,
) -> Measured:
    """Runs `module.function(**kwargs)` in a fresh interpreter and measures time and peak memory.

    Linux only (VmHWM of /proc/self/status).

    Args:
        module: dotted name.
        function: a function of the module.
        setup: a function of the module that runs first with the same arguments, unmeasured; its
            value is the function's first argument.
        timeout_s: of the process.
        kwargs: arguments; they and the result must be JSON.

    Raises:
        RuntimeError: the child failed; the message holds its standard error.
    """
    call = json.dumps([module, function, setup, kwargs, _MARK])
    path = os.pathsep.join(entry for entry in sys.path if entry)
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, call],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    marked = [line for line in child.stdout.splitlines() if line.startswith(_MARK)]
    if child.returncode != 0 or not marked:
        raise RuntimeError(
            f"{module}.{function} failed ({child.returncode}):\n{child.stderr}"
        )
    return Measured(**json.loads(marked[-1].removeprefix(_MARK)))
