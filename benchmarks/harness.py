"""What every benchmark shares: arguments, environment, medians, and the JSON that it leaves."""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "numpy",
    "torch",
    "openslide-python",
    "tifffile",
    "simplejpeg",
    "cucim-cu12",
)
PACKAGES += ("openvino", "imagecodecs", "tiffslide", "fastslide", "pyvips")
RESULTS = Path(__file__).parent / "results"


def arguments(question: str, **own: str) -> argparse.Namespace:
    """`--smoke` (seconds, for CI; writes no JSON unless --out), `--out FILE`; own: name=help."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for CI")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    for name, text in own.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, help=text)
    return parser.parse_args()


def environment() -> dict[str, Any]:
    """Commit, versions and device, so that a figure can be placed."""
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
    path = args.out or (None if args.smoke else RESULTS / f"{name}.json")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def _commit() -> str:
    """The commit, '-dirty' where a file differs from it that is no earlier benchmark's result."""
    changed = _git(
        "status", "--porcelain", "-uno", "--", ":(top)", f":(exclude){RESULTS}"
    )
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False
    ).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [
        line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()
