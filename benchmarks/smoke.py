"""Runs every benchmark at its smoke size: `python -m benchmarks.smoke [PROCESSES [NAME ...]]`.

They and the processes that they start are forks of one that has imported PyTorch and the like: two
to three CPU-seconds less for each. Their figures say nothing; that they are made is checked.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.support.warm_python import warm_python

HERE = Path(__file__).parent
PROCESSES = 2  # at a time, of one thread per operation each


def main() -> None:
    """Runs them side by side; exits with 1, after their output, if any fails."""
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else PROCESSES
    names = sys.argv[2:]
    if not names:
        # the first two take longest, so that no process is left alone with them
        others = sorted(path.stem for path in HERE.glob("bench_*.py"))
        names = list(dict.fromkeys(("gpu_proof", "bench_reading", *others)))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with warm_python() as python, ThreadPoolExecutor(processes) as pool:
        succeeded = list(pool.map(partial(run_smoke, python), names))
    failed = [name for name, success in zip(names, succeeded) if not success]
    if failed:
        sys.exit(f"benchmarks failed: {', '.join(failed)}")


def run_smoke(python: str, name: str) -> bool:
    """Runs one benchmark and prints how it ended; True if it succeeded."""
    start = time.perf_counter()
    command = [python, "-m", f"benchmarks.{name}", "--smoke"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if child.returncode == 0:
        print(f"{name}: ok in {seconds:.1f} s", flush=True)
        return True
    output = f"{child.stdout[-4000:]}\n{child.stderr[-4000:]}"
    print(f"{name}: FAILED in {seconds:.1f} s\n{output}", flush=True)
    return False


if __name__ == "__main__":
    main()
