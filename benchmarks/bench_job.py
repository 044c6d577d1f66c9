"""How fast and in how much memory is the default job done, next to other packages' ways?

A mosaic of real tissue comes first, a generated slide beside it (`benchmarks/mosaic.py`): 256 px
tiles at 0.5 µm/px from a scan of 0.252 µm/px with levels 1/4/16, and at native resolution. The same
coordinates, normalisation and network (a mean over pixels; ResNet-18 and ViT-S under the same
random weights) for every way, one decoding worker and one thread, each in a process of its own from
opening the slide to rows. Each peer reads with the fastest reader that it offers
(`job_work.READERS`). Beside the packages stand loops by an expert (`job_loops.py`), also at 1 µm/px
and on a mosaic as most 40x archives are stored: YCbCr 4:2:0 of quality 80. Each way first writes a
sample of its tiles, to be compared with ours. Then come the peaks of our job alone on 1, 4 and 16
times the area.

`python -m benchmarks.bench_job --peers-python PATH`: a Python that has the peers (CONTRIBUTING.md
says how it is made); without it only ours and OpenSlide with Pillow run, and the rest is listed.
It takes about 15 minutes of one idle core.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import conv2d
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import mosaic
from benchmarks.harness import arguments, finish
from benchmarks.job_ours import write_network
from benchmarks.job_work import READERS, TILE_PX, Job, ResNet18
from thinsection.slide import open_slide
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
# loops around a fast reader, by the distribution of the reader
LOOPS = {
    "cucim_loop": ("cucim-cu12",),
    "fastslide_loop": ("fastslide",),
    "microtome_loop": ("microtome-wsi",),
}
STORED_ONLY = "microtome_loop"  # it reads tiles that the file stores as they are
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is done."""

    size: tuple[int, int]  # of the slides, px
    areas: tuple[tuple[int, int], ...]  # px: 1, 4 and 16 times an area, for ours alone
    passes: int  # measurements of each way
    half: int  # tiles at 0.5 µm/px
    native: int  # tiles at native resolution
    network: int  # tiles for ResNet-18
    transformer: int  # tiles for ViT-S
    generated: int  # tiles of the generated slide


SCALES = {
    "full": Scale(
        size=(20_000, 16_000),
        areas=((10_000, 8_000), (20_000, 16_000), (40_000, 32_000)),
        passes=3,
        half=500,
        native=1200,
        network=24,
        transformer=16,
        generated=150,
    ),
    "smoke": Scale(
        size=(3072, 2048),
        areas=((1500, 1000), (3000, 2000)),
        passes=1,
        half=24,
        native=48,
        network=8,
        transformer=4,
        generated=12,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Passes of one way in a process of its own."""

    tiles: int
    seconds: list[float]
    cpu_seconds: list[float]
    baseline_bytes: int  # before the first pass, all imported
    peak_bytes: int  # of the first pass


def through(way: str, python: str | None, job: Job) -> Measured | str:
    """What a way took in a process of its own, or why it does not run."""
    if python is None:
        return "not installed: no --peers-python"
    described = Path(job.rows).with_suffix(".json")
    described.write_text(json.dumps(asdict(job)))
    if way == OURS:
        command = [python, "-m", "benchmarks.job_ours", str(described)]
        env = dict(os.environ)
    else:
        name = "job_loops.py" if way in LOOPS else "job_peers.py"
        script = Path(__file__).with_name(name)
        command = [python, "-W", "ignore", str(script), way, str(described)]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["OMP_NUM_THREADS"] = env["RAYON_NUM_THREADS"] = "1"
    child = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env
    )
    if child.returncode:
        last = (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[
            -1
        ]
        lacks = "ImportError" in last or "ModuleNotFoundError" in last
        return f"{'not installed' if lacks else 'failed'}: {last}"
    lines = child.stdout.splitlines()
    measured = next(line for line in lines if line.startswith("@measured "))
    return Measured(**json.loads(measured.removeprefix("@measured ")))


@dataclass(kw_only=True)
class Bench:
    """The ways that run here, and where their files are."""

    folder: Path
    pythons: dict[str, str | None]  # way -> its Python
    missing: Row  # way -> why it does not run
    passes: int  # measurements of each way

    def job(self, path: Path, tile_mpp: float, network: str, *, tiles: int) -> Job:
        """A job on so many tiles of our grid, from its middle rows."""
        with open_slide(path) as slide:
            table = tile_grid(slide, TilesConfig(tile_mpp=str(tile_mpp)))
        start = max(0, (len(table) - tiles) // 2)
        coords = self.folder / "coords.npy"
        np.save(coords, table.coords_l0[start : start + tiles])
        return Job(
            path=str(path),
            coords=str(coords),
            rows=str(self.folder / "rows.npy"),
            mpp=MPP,
            tile_mpp=tile_mpp,
            size_l0=table.plan.size_l0[0],
            level=table.plan.level,
            size_lv=table.plan.size_lv[0],
            network=network,
            passes=self.passes,
        )

    def run(
        self, job: Job, ways: Iterable[str]
    ) -> Iterator[tuple[str, Measured, np.ndarray]]:
        """Each way in turn, with the rows that it gave."""
        for way in ways:
            if way in self.missing:
                continue
            found = through(way, self.pythons[way], job)
            if isinstance(found, str):
                self.missing[way] = found
                continue
            rate = found.tiles / statistics.median(found.cpu_seconds)
            told = f"{Path(job.path).name}, {Path(job.network).name}: {rate:.1f} tiles per CPU-s"
            print(way, told, file=sys.stderr, flush=True)
            yield way, found, np.load(job.rows).astype(np.float32)

    def rates(self, job: Job, ways: Iterable[str] | None = None) -> Row:
        """What each way takes, and how far from ours its tiles and rows are.

        `ways` begin with ours; None takes all that can do the job.
        """
        found: Row = {}
        reference = pixels = np.empty(0)
        chosen = [*(self.pythons if ways is None else ways)]
        if (job.level or job.size_l0 != TILE_PX) and STORED_ONLY in chosen:
            chosen.remove(STORED_ONLY)
        for way, measured, rows in self.run(job, chosen):
            tiles = np.load(job.pixels).astype(np.float32).ravel()
            if way == OURS:
                reference = rows
                pixels = tiles
            levels = np.abs(tiles - pixels)
            # tiles from elsewhere: some 20
            assert levels.mean() < 6, f"{way} reads other tiles"
            grey = {
                "mean": round(float(levels.mean()), 4),
                "max": float(levels.max()),
            }
            far = rms(rows - reference) / rms(reference)
            found[way] = described(measured)
            found[way] |= {"grey_levels_from_ours": grey, "rows_from_ours": far}
        return found | beside_peers(found) | beside_loops(found)

    def areas(self, paths: Iterable[Path]) -> list[Row]:
        """Rate and peak of our job at 0.5 µm/px over whole slides of growing area."""
        found = []
        for path in paths:
            job = self.job(path, 0.5, "mean", tiles=10**9)
            for _, measured, _ in self.run(replace(job, passes=1), [OURS]):
                found.append(described(measured))
        for number, row in enumerate(found):
            row["times_the_area"] = 4**number
            growth = row["peak_rss_mb"] / found[0]["peak_rss_mb"]
            row["peak_over_the_first"] = round(growth, 3)
        return found


def beside_peers(found: Row) -> Row:
    """The fastest peer and the one of the least memory, and ours beside them."""
    peers = [way for way in PEERS if way in found]
    if not peers:
        return {}
    best = max(peers, key=lambda way: found[way]["tiles_per_cpu_s"])
    least = min(peers, key=lambda way: found[way]["peak_rss_mb"])
    ours = found[OURS]
    speed = ours["tiles_per_cpu_s"] / found[best]["tiles_per_cpu_s"]
    memory = ours["peak_rss_mb"] / found[least]["peak_rss_mb"]
    return {
        "best_peer": best,
        "ours_over_the_best_peer": round(speed, 2),
        "least_peer": least,
        "our_peak_over_the_least_of_peers": round(memory, 2),
    }


def beside_loops(found: Row) -> Row:
    """The fastest loop, and ours beside it."""
    loops = [way for way in LOOPS if way in found]
    if not loops:
        return {}
    best = max(loops, key=lambda way: found[way]["tiles_per_cpu_s"])
    speed = found[OURS]["tiles_per_cpu_s"] / found[best]["tiles_per_cpu_s"]
    return {"best_loop": best, "ours_over_the_best_loop": round(speed, 2)}


def rms(values: np.ndarray) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def described(measured: Measured) -> Row:
    """Medians of one way."""
    tiles = measured.tiles
    grown = measured.peak_bytes - measured.baseline_bytes
    return {
        "tiles": tiles,
        "tiles_per_cpu_s": round(tiles / statistics.median(measured.cpu_seconds), 1),
        "tiles_per_cpu_s_all": [round(tiles / s, 1) for s in measured.cpu_seconds],
        "tiles_per_s": round(tiles / statistics.median(measured.seconds), 1),
        "peak_rss_mb": round(measured.peak_bytes / 1e6, 1),
        "beyond_imports_mb": round(grown / 1e6, 1),
    }


def versions(python: str) -> Row:
    """Of the peers and of torch, in their Python."""
    names = [
        "torch",
        "openslide-python",
        "pillow",
        *(n for way in (PEERS | LOOPS).values() for n in way),
    ]
    code = "import sys, importlib.metadata as m; n = {d.name: d.version for d in m.distributions()}"
    code += "; import json; print(json.dumps({k: n.get(k) for k in sys.argv[1:]}))"
    told = subprocess.run(
        [python, "-c", code, *names], capture_output=True, text=True, check=True
    )
    return dict(json.loads(told.stdout))


def compare(bench: Bench, scale: Scale) -> Row:
    """All figures: every job on the first slide, the ordinary one on the other."""
    paths = mosaic.write_slides(bench.folder, "slide", scale.size, mpp=MPP)
    results: Row = mosaic.described(paths, scale.size)
    results |= {"slide_mpp": MPP, "times": scale.passes, "readers": READERS}
    if mosaic.REAL in paths:
        paths[mosaic.SUBSAMPLED] = bench.folder / f"slide-{mosaic.SUBSAMPLED}.svs"
        mosaic.write_mosaic(paths[mosaic.SUBSAMPLED], scale.size, mpp=MPP, ycbcr=True)
    first, *others = paths
    resnet18 = write_network(bench.folder / "resnet18")
    vit_s = write_network(bench.folder / "vit_s")
    jobs = {
        "mean_0.5": (0.5, "mean", scale.half),
        "mean_native": (MPP, "mean", scale.native),
        "resnet18_0.5": (0.5, resnet18, scale.network),
        "vit_s_0.5": (0.5, vit_s, scale.transformer),
    }
    results[first] = {}
    for name, (mpp, net, tiles) in jobs.items():
        job = bench.job(paths[first], mpp, net, tiles=tiles)
        results[first][name] = bench.rates(job)
    against_loops = (OURS, *LOOPS)
    job = bench.job(paths[first], 1.0, "mean", tiles=scale.half // 4)
    results[first]["mean_1.0"] = bench.rates(job, against_loops)
    for other in others:
        tiles = scale.half if other == mosaic.SUBSAMPLED else scale.generated
        job = bench.job(paths[other], 0.5, "mean", tiles=tiles)
        results[other] = {"mean_0.5": bench.rates(job)}
    if mosaic.SUBSAMPLED in paths:
        job = bench.job(paths[mosaic.SUBSAMPLED], MPP, "mean", tiles=scale.native)
        results[mosaic.SUBSAMPLED]["mean_native"] = bench.rates(job, against_loops)
    larger = []
    for number, size in enumerate(scale.areas):
        larger.append(bench.folder / f"area-{number}.svs")
        if first == mosaic.REAL:
            mosaic.write_mosaic(larger[-1], size, mpp=MPP)
        else:
            write_he_slide(larger[-1], size, seed=1, mpp=MPP)
    results[first]["areas"] = bench.areas(larger)
    results[first]["areas_px"] = scale.areas
    return results


def arithmetic() -> Row:
    """Operations of ResNet-18 for a tile, and what products of matrices reach on one thread."""
    torch.set_num_threads(1)
    tile = torch.zeros(1, 3, TILE_PX, TILE_PX)
    with torch.inference_mode():
        with FlopCounterMode(display=False) as counter:
            ResNet18().eval()(tile)
        left = torch.rand(1024, 1024)
        image, kernel = torch.rand(1, 512, 64, 64), torch.rand(512, 512, 1, 1)
        rates = {
            "mkl": 2 * 1024**3 / fastest_s(lambda: left @ left),
            # a product of (512, 512) and (512, 4096), by oneDNN
            "onednn": 2 * 512**2 * 64**2 / fastest_s(lambda: conv2d(image, kernel)),
        }
        product = openvino_product(left)
        if product is not None:
            rates["openvino"] = 2 * 1024**3 / fastest_s(product)
    gflop_per_s = {name: round(rate / 1e9, 1) for name, rate in rates.items()}
    return {
        "resnet18_gflop_per_tile": round(counter.get_total_flops() / 1e9, 3),
        "product_gflop_per_s": max(gflop_per_s.values()),
        "product_gflop_per_s_by": gflop_per_s,
    }


def openvino_product(left: torch.Tensor) -> Callable[[], object] | None:
    """The product of a square matrix with another one by OpenVINO; None where it is missing."""
    try:
        import openvino
    except ImportError:
        return None
    layer = torch.nn.Linear(len(left), len(left), bias=False)
    model = openvino.convert_model(layer, example_input=left)
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(model, "CPU", settings)
    array = left.numpy()
    return lambda: compiled(array)


def fastest_s(work: Callable[[], object], *, times: int = 20) -> float:
    """Fewest CPU-seconds of a call, after one that is not measured."""
    work()
    spent = []
    for _ in range(times):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def main() -> None:
    """Writes the slides, compares, writes the JSON."""
    known = {"peers_python": "a Python that has the peers"}
    args = arguments(__doc__ or "", **known)
    scale = SCALES["smoke" if args.smoke else "full"]
    with tempfile.TemporaryDirectory() as name:
        pythons = {OURS: sys.executable, PLAIN: sys.executable}
        pythons |= dict.fromkeys((*LOOPS, *PEERS), args.peers_python)
        bench = Bench(
            folder=Path(name), pythons=pythons, missing={}, passes=scale.passes
        )
        results = compare(bench, scale)
        results["not_run"] = bench.missing
        results |= arithmetic()
    if args.peers_python:
        results["peers_versions"] = versions(args.peers_python)
    finish("bench_job", results, args)


if __name__ == "__main__":
    main()
