"""How fast and in how much memory is the default job done, next to other packages' ways?

256 px tiles at 0.5 µm/px from a scan of 0.252 µm/px with levels 1/4/16, and at native resolution:
the same coordinates, normalisation and network (a mean over pixels; ResNet-18 under the same
random weights) for every way, one decoding worker and one thread, each in a process of its own
from opening the slide to rows. Each first writes a sample of its tiles, to be compared with ours.

`python -m benchmarks.bench_job --peers-python PATH`: a Python that has the peers (CONTRIBUTING.md
says how it is made); without it only ours and OpenSlide with Pillow run, and the rest is listed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import arguments, finish
from benchmarks.job_ours import write_network
from benchmarks.job_work import Job
from thinsection.slide import open_slide
from thinsection.testing import Measured, run_and_measure
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import TilesConfig, tile_grid

MPP = 0.252  # of level 0
OURS, PLAIN = "thinsection", "openslide_pillow"
# way -> the distributions whose versions are told; TRIDENT is none
PEERS = {
    "trident": (),
    "slide2vec": ("slide2vec", "hs2p", "cucim-cu12"),
    "lazyslide": ("lazyslide", "wsidata"),
    "mussel": ("mussel-pathology", "tiffslide"),
    "atlaspatch": ("atlas-patch",),
    "tiatoolbox": ("tiatoolbox",),
}
SCALES = {  # size of the slide in px, how often all is timed, tiles for ResNet-18
    "full": ((20_000, 16_000), 3, 512),
    "quick": ((8_000, 6_400), 1, 48),  # for a busy machine
    "smoke": ((3072, 2048), 1, 24),
}
Row = dict[str, Any]


def through(way: str, python: str | None, job: Job) -> Measured | str:
    """What a way took in a process of its own, or why it does not run."""
    if way == OURS:
        return run_and_measure(
            "benchmarks.job_ours", "ours", setup="warm", **asdict(job)
        )
    if python is None:
        return "not installed: no --peers-python"
    described = Path(job.rows).with_suffix(".json")
    described.write_text(json.dumps(asdict(job)))
    script = Path(__file__).with_name("job_peers.py")
    command = [python, "-W", "ignore", str(script), way, str(described)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env
    )
    lines = child.stdout.splitlines()
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1]
        lacks = "ImportError" in last or "ModuleNotFoundError" in last
        return f"{'not installed' if lacks else 'failed'}: {last}"
    measured = next(line for line in lines if line.startswith("@measured "))
    return Measured(**json.loads(measured.removeprefix("@measured ")))


@dataclass(kw_only=True)
class Bench:
    """The ways that run here, and where their files are."""

    folder: Path
    pythons: dict[str, str | None]  # way -> its Python
    missing: Row  # way -> why it does not run

    def job(self, path: Path, tile_mpp: float, network: str, *, tiles: slice) -> Job:
        """A job on some of the tiles of our grid."""
        with open_slide(path) as slide:
            table = tile_grid(slide, TilesConfig(tile_mpp=str(tile_mpp)))
        coords = self.folder / "coords.npy"
        np.save(coords, table.coords_l0[tiles])
        known = {
            "path": str(path),
            "coords": str(coords),
            "rows": str(self.folder / "rows.npy"),
        }
        size = table.plan.size_l0[0]
        return Job(**known, mpp=MPP, tile_mpp=tile_mpp, size_l0=size, network=network)

    def run(self, job: Job) -> Iterator[tuple[str, Measured, np.ndarray]]:
        """Each way in turn, with the rows that it gave."""
        for way, python in self.pythons.items():
            if way in self.missing:
                continue
            found = through(way, python, job)
            if isinstance(found, str):
                self.missing[way] = found
            else:
                print(
                    way,
                    Path(job.path).name,
                    job.network,
                    found,
                    file=sys.stderr,
                    flush=True,
                )
                yield way, found, np.load(job.rows).astype(np.float32)

    def rates(self, job: Job, times: int) -> Row:
        """What each way takes, in turns, and how far from ours its tiles and rows are."""
        runs: dict[str, list[Measured]] = {}
        apart: dict[str, Row] = {}
        reference = pixels = np.empty(0)
        for _ in range(times):
            for way, measured, rows in self.run(job):
                tiles = np.load(job.pixels).astype(np.float32).ravel()
                reference, pixels = (
                    (rows, tiles) if way == OURS else (reference, pixels)
                )
                levels = np.abs(tiles - pixels)
                assert levels.mean() < 6, (
                    f"{way} reads other tiles"
                )  # from elsewhere: some 20
                grey = {
                    "mean": round(float(levels.mean()), 4),
                    "max": float(levels.max()),
                }
                far = rms(rows - reference) / rms(reference)
                apart[way] = {"grey_levels_from_ours": grey, "rows_from_ours": far}
                runs.setdefault(way, []).append(measured)
        found: Row = {
            way: described(measured) | apart[way] for way, measured in runs.items()
        }
        mine = found[OURS]
        if peers := [found[way] for way in PEERS if way in found]:
            best = max(row["tiles_per_cpu_s"] for row in peers)
            found["ours_over_the_best_peer"] = round(mine["tiles_per_cpu_s"] / best, 2)
            least = min(row["peak_rss_mb"] for row in peers)
            found["our_peak_over_the_least_of_peers"] = round(
                mine["peak_rss_mb"] / least, 2
            )
        return found


def rms(values: np.ndarray) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def described(runs: list[Measured]) -> Row:
    """Medians of one way."""
    rates = [run.result / run.cpu_seconds for run in runs]
    return {
        "tiles": runs[0].result,
        "tiles_per_cpu_s": round(statistics.median(rates), 1),
        "tiles_per_cpu_s_all": [round(rate, 1) for rate in rates],
        "tiles_per_s": round(
            statistics.median(run.result / run.seconds for run in runs), 1
        ),
        "peak_rss_mb": round(max(run.peak_bytes for run in runs) / 1e6, 1),
        "beyond_imports_mb": round(max(run.growth_bytes for run in runs) / 1e6, 1),
    }


def versions(python: str) -> Row:
    """Of the peers and of torch, in their Python."""
    names = [
        "torch",
        "openslide-python",
        "pillow",
        *(n for peer in PEERS.values() for n in peer),
    ]
    code = "import sys, importlib.metadata as m; n = {d.name: d.version for d in m.distributions()}"
    code += "; import json; print(json.dumps({k: n.get(k) for k in sys.argv[1:]}))"
    told = subprocess.run(
        [python, "-c", code, *names], capture_output=True, text=True, check=True
    )
    return dict(json.loads(told.stdout))


def compare(bench: Bench, path: Path, big: Path, *, times: int, some: int) -> Row:
    """All figures; ResNet-18 on `some` tiles."""
    half, every = 0.5, slice(None)
    found: Row = {}
    for name, mpp in {"0.5": half, "native": MPP}.items():
        found[f"mean_{name}"] = bench.rates(
            bench.job(path, mpp, "mean", tiles=every), times
        )
    resnet = write_network(bench.folder / "resnet18")
    found["resnet18_0.5"] = bench.rates(
        bench.job(path, half, resnet, tiles=slice(some)), times
    )
    large = bench.rates(bench.job(big, half, "mean", tiles=every), 1)
    small = found["mean_0.5"]
    grown = {
        w: large[w]["peak_rss_mb"] / small[w]["peak_rss_mb"]
        for w in bench.pythons
        if w in large
    }
    ratios = {way: round(ratio, 3) for way, ratio in grown.items()}
    found["four_times_the_area"] = {**large, "peak_over_the_smaller": ratios}
    return found


def main() -> None:
    """Generates the slides, compares, writes."""
    known = {"peers_python": "a Python that has the peers", "scale": ", ".join(SCALES)}
    args = arguments(__doc__ or "", **known)
    size, times, some = SCALES["smoke" if args.smoke else args.scale or "full"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pythons = {OURS: sys.executable, PLAIN: sys.executable}
        pythons |= dict.fromkeys(PEERS, args.peers_python)
        path, big = folder / "slide.svs", folder / "big.svs"
        write_he_slide(path, size, seed=1, mpp=MPP)
        write_he_slide(big, (size[0] * 2, size[1] * 2), seed=1, mpp=MPP)
        bench = Bench(folder=folder, pythons=pythons, missing={})
        results: Row = {"slide_px": size, "slide_mpp": MPP, "times": times}
        results |= compare(bench, path, big, times=times, some=some)
        results["not_run"] = bench.missing
    if args.peers_python:
        results["peers_versions"] = versions(args.peers_python)
    finish("bench_job", results, args)


if __name__ == "__main__":
    main()
