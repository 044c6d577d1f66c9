"""Does the plan hold? Predicted against measured peak memory and time, over twelve configurations.

They run on mosaics of real tissue (`benchmarks/mosaic.py`), and the default one on generated slides
too. Without the real test slide all run on generated slides, and the JSON says so.

Each run happens in a fresh process whose high-water mark and CPU-seconds are taken. Time is
compared in CPU-seconds, which other work on the machine hardly changes; wall-clock time is beside.
It takes 4 to 5 minutes of one idle core, and 2 more where `thinsection plan` never ran.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness, mosaic

DEFAULT = "default"  # name of the case with no setting changed
# name -> (slides, settings by field name)
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    DEFAULT: (("a", "b"), {}),
    "batch 8": (("a", "b"), {"batch_size": 8}),
    "batch 64, 2 decode workers": (("a", "b"), {"batch_size": 64, "decode_threads": 2}),
    "tiles of 512 px": (("a", "b"), {"tile_px": 512, "batch_size": 8}),
    "1 µm/px": (("large",), {"tile_mpp": "1.0"}),
    "quality control": (("wide",), {"tile_mpp": "4.0", "qc": "auto", "batch_size": 8}),
    "resnet18": (
        ("b",),
        {"encoders": ["timm:resnet18"], "pretrained": False, "tile_px": 224},
    ),
    "one tiny slide": (("tiny",), {}),
    "tile grids alone": (("a", "b"), {"until": "tiles"}),
    "bf16": (("a", "b"), {"precision": "bf16"}),
    "two resolutions": (("large",), {"tile_mpp": ["1.0", "2.0"]}),
    "three slides, PyTorch": (("a", "b", "large"), {"engine": "torch"}),
}
SIZES = {
    "a": (5000, 4000),
    "b": (4000, 5500),
    "large": (9000, 8000),
    "wide": (9000, 8000),
    "tiny": (1500, 1200),
}
SMOKE_SIZES = {
    "a": (2000, 1600),
    "b": (1000, 1300),
    "large": (1800, 1500),
    "wide": (1800, 1500),
    "tiny": (1000, 800),
}
WIDE_MPP = 2.0  # µm/px of that slide, of 18 x 16 mm
# planned / measured, as the goal has it
MEMORY_RANGE = (0.85, 1.15)
TIME_RANGE = (0.7, 1.4)


def settings(overrides: dict[str, Any]) -> Any:
    """The run's configuration, one decoding thread unless the case says otherwise."""
    from thinsection.config import replace_flat
    from thinsection.stages.config import RunConfig

    return replace_flat(
        RunConfig(), {"decode_threads": 1, "precision": "fp32", **overrides}
    )


def measured_run(slides: list[str], out: str, overrides: dict[str, Any]) -> list[int]:
    """What the fresh process does; imports are part of it."""
    from thinsection.run.run import run

    if overrides.get("until") != "tiles":
        import torch

        torch.set_num_threads(1)
    summary = run(slides, out=out, config=settings(overrides))
    return [summary.counts["done"], summary.counts["failed"]]


def compare(slides: list[str], out: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """One case: the plan, then the run."""
    from thinsection.run.plan import plan
    from thinsection.testing import run_and_measure

    planned = plan(slides, config=settings({**overrides, "job_cpus": 1}))
    found = run_and_measure(
        "benchmarks.bench_plan",
        "measured_run",
        slides=slides,
        out=str(out),
        overrides=overrides,
    )
    if found.result != [len(slides), 0]:
        raise RuntimeError(f"the run must finish every slide, got {found.result}")
    return {
        "tiles": sum(s.num_tiles for s in planned.slides),
        "planned_bytes": planned.memory.host_bytes,
        "measured_bytes": found.peak_bytes,
        "memory_ratio": planned.memory.host_bytes / found.peak_bytes,
        "planned_cpu_s": planned.time.cpu_s,
        "measured_cpu_s": found.cpu_seconds,
        "time_ratio": planned.time.cpu_s / found.cpu_seconds,
        "measured_wall_s": found.seconds,
    }


def _is_within(ratio: float, bounds: tuple[float, float]) -> bool:
    least, most = bounds
    return least <= ratio <= most


def main() -> None:
    """Runs all cases; the default one alone with --smoke."""
    args = harness.arguments(__doc__ or "")
    sizes = SMOKE_SIZES if args.smoke else SIZES
    cases = dict(list(CASES.items())[:1]) if args.smoke else CASES
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for seed, (name, size) in enumerate(sizes.items()):
            mpp = WIDE_MPP if name == "wide" else 0.5
            paths[name] = mosaic.write_slides(
                Path(folder), name, size, mpp=mpp, seed=seed
            )
        kinds = list(paths["a"])
        known = mosaic.described(paths["a"], sizes["a"])["slides"]
        for kind in kinds:
            # all cases on the first kind, the default one on the other
            chosen = cases if kind == kinds[0] else {DEFAULT: cases[DEFAULT]}
            results[kind] = {}
            for number, (case, (names, overrides)) in enumerate(chosen.items()):
                slides = [str(paths[name][kind]) for name in names]
                out = Path(folder) / f"out-{kind}-{number}"
                results[kind][case] = compare(slides, out, overrides)
                print(kind, case, results[kind][case], file=sys.stderr, flush=True)
    rows = [row for of_kind in results.values() for row in of_kind.values()]
    memory = [row["memory_ratio"] for row in rows]
    seconds = [row["time_ratio"] for row in rows]
    held = {
        "memory_within_0.85_to_1.15": all(_is_within(r, MEMORY_RANGE) for r in memory),
        "time_within_0.7_to_1.4": all(_is_within(r, TIME_RANGE) for r in seconds),
    }
    harness.finish(
        "bench_plan", {"slides": known, "cases": results, "held": held}, args
    )


if __name__ == "__main__":
    main()
