"""Runs every benchmark at its smoke size: `python -m benchmarks.smoke [PROCESSES]`."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
PROCESSES = 2  # at a time, of one thread per operation each


def main() -> None:
    """Runs them side by side; exits with 1, after their output, if any fails."""
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else PROCESSES
    names = sorted(path.stem for path in HERE.glob("bench_*.py"))
    names.append("gpu_proof")
    with ThreadPoolExecutor(processes) as pool:
        succeeded = list(pool.map(run_smoke, names))
    failed = [name for name, success in zip(names, succeeded) if not success]
    if failed:
        sys.exit(f"benchmarks failed: {', '.join(failed)}")


def run_smoke(name: str) -> bool:
    """Runs one benchmark and prints how it ended; True if it succeeded."""
    start = time.perf_counter()
    command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke"]
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
