"""Runs every benchmark at its smoke size: `python -m benchmarks.smoke`."""

import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Exits with 1 and the benchmark's own output if one fails."""
    failed = []
    here = Path(__file__).parent
    for path in (*sorted(here.glob("bench_*.py")), here / "gpu_proof.py"):
        start = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.{path.stem}", "--smoke"]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        word = "ok" if child.returncode == 0 else "FAILED"
        print(f"{path.stem}: {word} in {time.perf_counter() - start:.1f} s", flush=True)
        if child.returncode != 0:
            failed.append(path.stem)
            print(child.stdout[-4000:], child.stderr[-4000:], sep="\n")
    if failed:
        sys.exit(f"benchmarks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
