"""What every benchmark shares: arguments, environment, medians, and the JSON that it leaves."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# packages whose versions stand beside the figures
PACKAGES = (
    "numpy",
    "torch",
    "openslide-python",
    "tifffile",
    "simplejpeg",
    "cucim-cu12",
    "openvino",
    "imagecodecs",
    "tiffslide",
    "fastslide",
    "pyvips",
)
RESULTS = Path(__file__).parent / "results"


def arguments(question: str, **own: str) -> argparse.Namespace:
    """Parses the command line of a benchmark.

    Args:
        question: what the benchmark asks; the description in `--help`.
        own: options of this benchmark, name=help.

    Returns:
        `smoke` (tiny sizes, for CI; no JSON without --out), `out` (JSON file), and its own.
    """
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for CI")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    for name, text in own.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, help=text)
    parsed = parser.parse_args()
    # one thread of arithmetic for each process: threads that wait for each other count as CPU time
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not parsed.smoke and parsed.out is None and _commit().endswith("-dirty"):
        parser.error(
            "files must be committed first, as the JSON names a commit; or pass --out"
        )
    return parsed


def environment() -> dict[str, Any]:
    """Commit, versions and machine on which figures were measured."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "versions": versions,
    }


def repeat(
    function: Callable[[], Any], *, times: int = 5, warmup: int = 1
) -> dict[str, float]:
    """Median, lowest and highest seconds of `times` calls after `warmup` unmeasured ones."""
    for _ in range(warmup):
        function()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "times": times,
    }


def finish(name: str, results: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints the results and writes them beside the environment to benchmarks/results/NAME.json."""
    document = {
        "benchmark": name,
        "smoke": args.smoke,
        **environment(),
        "results": results,
    }
    text = json.dumps(document, indent=2)
    print(text)
    path = args.out
    if path is None and not args.smoke:
        path = RESULTS / f"{name}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def _commit() -> str:
    """Commit, with '-dirty' where a file differs from it; results of benchmarks do not count."""
    changed = _git(
        "status", "--porcelain", "-uno", "--", ":(top)", f":(exclude){RESULTS}"
    )
    commit = _git("rev-parse", "--short", "HEAD")
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    child = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=False
    )
    return child.stdout.strip()


def _cpu_name() -> str:
    """Name of the CPU and its widest vectors: the rate of products depends on both."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    name = facts.get("model name", platform.processor())
    flags = facts.get("flags", "").split()
    for flag, vectors in (("avx512f", "AVX-512"), ("avx2", "AVX2")):
        if flag in flags:
            return f"{name}, {vectors}"
    return name
