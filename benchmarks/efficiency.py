"""Runs the benchmarks of speed and memory, two at a time: `python -m benchmarks.efficiency`.

`--peers-python PATH` is that of `bench_job`. Each writes its JSON to `benchmarks/results`, and then
`python -m benchmarks.readme` writes the figures of README and paper. With `--smoke` no JSON is
written. On two idle cores it takes about 25 minutes: two sequences of processes run side by side,
as each benchmark keeps one core busy. Their CPU-seconds are therefore those of a machine whose
second core works too. Without the real slide (THINSECTION_TEST_SLIDES) it stops before it begins.
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.mosaic import SOURCE, source

# two sequences of about the same length
SEQUENCES = (
    ("bench_job", "bench_plan"),
    ("bench_reading", "bench_train", "bench_scale"),
)


def main() -> None:
    """Runs the sequences; exits with 1, after their output, if any benchmark fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peers-python", required=True, help="a Python that has the peers"
    )
    parser.add_argument(
        "--logs", type=Path, required=True, help="folder for the output"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, without JSON")
    args = parser.parse_args()
    if source() is None:
        parser.error(f"THINSECTION_TEST_SLIDES must be the folder of {SOURCE}")
    args.logs.mkdir(parents=True, exist_ok=True)

    def run(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if not run_one(name, args)]

    with ThreadPoolExecutor(len(SEQUENCES)) as pool:
        failed = [name for names in pool.map(run, SEQUENCES) for name in names]
    if failed:
        sys.exit(f"benchmarks failed: {', '.join(failed)}; see {args.logs}")


def run_one(name: str, args: argparse.Namespace) -> bool:
    """Runs one benchmark and prints how it ended; True if it succeeded."""
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    if name == "bench_job":
        command += ["--peers-python", args.peers_python]
    if args.smoke:
        command.append("--smoke")
    start = time.perf_counter()
    with (args.logs / f"{name}.log").open("w") as log:
        child = subprocess.run(command, stdout=log, stderr=log, check=False)
    ended = "ok" if child.returncode == 0 else "FAILED"
    print(f"{name}: {ended} in {time.perf_counter() - start:.0f} s", flush=True)
    return child.returncode == 0


if __name__ == "__main__":
    main()
