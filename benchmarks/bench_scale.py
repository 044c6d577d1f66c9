"""What does a slide cost among many: tiny ones computed by each executor, finished ones looked at?

A run over 300 tiny generated slides with each executor: CPU-seconds a slide, those of workers and
of the executor's own processes included. Then 5,000 and 30,000 slides that are finished (records
of one computed slide under other ids, see `fabricated.py`): CPU-seconds, seconds and peak memory
of `ls`, of a run with nothing to do, of the index after one more slide that sorts first, of the
viewer's start, and of the labels' join that `train` makes. Last, one slide of 1, 4 and 16 times an
area, tiles at 0.5 µm/px from 0.252 with an encoder of means: peak memory of the whole run beside
that of the smallest. Each step is a process of its own. The results are checked before a time
counts: every slide is done, skipped, listed or joined. It takes about 6 minutes of an idle machine.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import mosaic
from benchmarks.fabricated import MODEL, SETTINGS, fabricate
from benchmarks.harness import arguments, finish
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import read_cohort
from thinsection.files.atomic import read_table, write_table
from thinsection.report.index import THUMBNAILS, write_index
from thinsection.results.folder import open_results
from thinsection.run.run import run
from thinsection.testing.synthetic import write_he_slide
from thinsection.view.shown import ShownSlides, ViewConfig

EXECUTORS = ("inline", "pool", "dask", "ray")
# goals: CPU-seconds of a tiny slide, and of a run over 5,000 finished slides with its page
GOAL_TINY_CPU_S = 0.35
GOAL_FINISHED_CPU_S = 15.0
TINY_PX = (700, 600)
# tiny slides that are generated, which takes a second each; the others are copies of them
NUM_GENERATED = 10
# slides of a fabricated folder with a picture
NUM_PICTURES = 500
# 1, 4 and 16 times an area, px
AREAS = ((10_000, 8_000), (20_000, 16_000), (40_000, 32_000))
SMOKE_AREAS = ((1500, 1000), (3000, 2000))
AREA_MPP = 0.252  # µm/px of these slides
GOAL_PEAK_RATIO = 1.05  # of any area to the smallest
# environment variable that all processes of a measured run inherit
MARK = "THINSECTION_BENCH_SCALE"
_POLL_S = 0.2


class FamilyClock:
    """CPU-seconds of all processes that inherit a variable; daemons of Ray have other parents."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._known: dict[tuple[int, float], bool] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "FamilyClock":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        """Sum over processes, each at the last look at it."""
        return sum(self._cpu_s.values())

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_S):
            for process in psutil.process_iter(["create_time"]):
                key = (process.pid, process.info["create_time"])
                try:
                    if key not in self._known:
                        environment = process.environ()
                        self._known[key] = environment.get(MARK) == self._mark
                    if self._known[key]:
                        times = process.cpu_times()
                        self._cpu_s[key] = times.user + times.system
                except psutil.Error:
                    continue


def make_tiny_slides(folder: Path, count: int) -> None:
    """Writes so many small slides; no two files have the same content."""
    for number in range(count):
        path = folder / f"t{number:03d}.svs"
        if number < NUM_GENERATED:
            write_he_slide(path, TINY_PX, seed=number, downsamples=(1,))
        else:
            model = folder / f"t{number % NUM_GENERATED:03d}.svs"
            # bytes behind the last directory of a TIFF are not read
            path.write_bytes(model.read_bytes() + path.name.encode())


def measure_executor(executor: str, slides: Path, out: Path) -> dict[str, float]:
    """CPU-seconds a slide and wall seconds of a run by one executor."""
    settings = ["--no-pretrained", "--device", "cpu", "--engine", "torch"]
    workers = [] if executor == "inline" else ["--workers", "2", "--threads", "1"]
    command = [sys.executable, "-m", "thinsection", "run", str(slides)]
    command += ["--out", str(out), "--executor", executor, *settings, *workers]
    mark = f"{os.getpid()}-{executor}"
    began = time.perf_counter()
    with FamilyClock(mark) as clock:
        child = subprocess.run(
            command,
            env={**os.environ, MARK: mark},
            capture_output=True,
            text=True,
            check=False,
        )
    seconds = time.perf_counter() - began
    num_slides = len(list(slides.iterdir()))
    done = [row for row in read_table(out / "summary.csv") if row["status"] == "done"]
    assert len(done) == num_slides, child.stderr[-2000:]
    return {
        "slides": num_slides,
        "cpu_s_per_slide": round(clock.cpu_s / num_slides, 3),
        "wall_s": round(seconds, 1),
    }


def step_ls(folder: Path) -> int:
    results = open_results(folder / "results")
    assert results.failures() == {}
    return min(row.num_slides for row in results.folders)


def step_run(folder: Path) -> int:
    summary = run([folder / "slides"], out=folder / "results", **SETTINGS)
    return summary.counts["skipped"]


def step_index(folder: Path) -> int:
    """One more slide, which sorts first, changes one sheet and at most two parts."""
    out = folder / "results"
    rows = read_table(out / "summary.csv")
    name = f"a{len(list((out / 'slides').iterdir())):05d}"
    shutil.copytree(out / "slides" / MODEL, out / "slides" / name)
    before = {path.name for path in (out / THUMBNAILS).iterdir()}
    write_table(out / "summary.csv", [rows[0] | {"slide_id": name}, *rows])
    write_index(out)
    new = {path.name for path in (out / THUMBNAILS).iterdir()} - before
    assert len(new) <= 4, new
    shutil.rmtree(out / "slides" / name)
    return len(rows)


def step_view(folder: Path) -> int:
    shown = ShownSlides([folder / "results"], ViewConfig())
    assert shown.facts(MODEL)["layers"]
    assert shown.thumbnail(MODEL)[:2] == b"\xff\xd8"
    return len(shown.listed())


def step_join(folder: Path) -> int:
    config = LabelsConfig(labels=folder / "labels.csv", target=("label",))
    cohort = read_cohort(folder / "results", config)
    return sum(len(paths) for paths in cohort.paths)


def step_area(folder: Path) -> int:
    """One run over the slide of the folder, with an encoder that does the least."""
    from thinsection.encode import NUMPY, EncoderSpec, TileEncoder

    class Means(TileEncoder):
        """Means of red, green and blue."""

        spec = EncoderSpec(name="means", dim=3)
        device, precision = NUMPY, "fp32"

        def encode(self, tiles_u8: Any) -> Any:
            rows = [tile.reshape(-1, 3).mean(axis=0) for tile in tiles_u8]
            return np.array(rows, dtype=np.float32)

    summary = run(
        [folder / "slide.svs"],
        out=folder / "results",
        encoder=Means(),
        tile_mpp="0.5",
        decode_threads=1,
    )
    return summary.counts["done"]


STEPS = {
    "ls": step_ls,
    "run": step_run,
    "index": step_index,
    "view": step_view,
    "join": step_join,
}
AREA_STEP = "area"


def measure_step(name: str, folder: Path, count: int) -> dict[str, float]:
    """CPU-seconds, seconds and peak memory of a step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_scale"]
    began = time.perf_counter()
    child = subprocess.Popen([*command, "--step", name, "--folder", str(folder)])
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, name
    said = json.loads((folder / f"{name}.json").read_text())
    assert said["count"] == count, (name, said)
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "wall_s": round(seconds, 2),
        "peak_mib": said["peak_mib"],
    }


def own_peak_mib() -> int:
    """Peak memory of this process; `ru_maxrss` also has that of the process which forked it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def measure_finished(
    folder: Path, count: int, *, present: int, names: Sequence[str]
) -> dict[str, Any]:
    """Some steps over so many finished slides, of which `present` are there already."""
    began = time.perf_counter()
    fabricate(folder, count, pictures=NUM_PICTURES, present=present)
    print(f"{count} slides after {time.perf_counter() - began:.0f} s", flush=True)
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("slide_id", "label"))
        for number, path in enumerate(sorted((folder / "slides").iterdir())):
            table.writerow((path.stem, "ab"[number % 2]))
    # draws the thumbnails, which later commands find
    first = measure_step("run", folder, count)
    steps: dict[str, Any] = {"first run": first}
    for name in names:
        steps[name] = measure_step(name, folder, count)
        print(name, steps[name], flush=True)
    return steps


def measure_areas(
    folder: Path, areas: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Peak memory of a run over one slide of each area, beside that of the first."""
    rows: list[dict[str, Any]] = []
    for number, size in enumerate(areas):
        place = folder / f"area-{number}"
        place.mkdir()
        if mosaic.source() is not None:
            mosaic.write_mosaic(place / "slide.svs", size, mpp=AREA_MPP)
        else:
            write_he_slide(place / "slide.svs", size, seed=1, mpp=AREA_MPP)
        row = {"slide_px": size} | measure_step(AREA_STEP, place, 1)
        first = rows[0]["peak_mib"] if rows else row["peak_mib"]
        row["peak_over_the_first"] = round(row["peak_mib"] / first, 3)
        rows.append(row)
        shutil.rmtree(place)
        print("area", row, flush=True)
    return rows


def main() -> None:
    args = arguments(__doc__, step="a step, in its own process", folder="its folder")
    if args.step:
        folder = Path(args.folder)
        step = step_area if args.step == AREA_STEP else STEPS[args.step]
        count = step(folder)
        said = {"count": count, "peak_mib": own_peak_mib()}
        (folder / f"{args.step}.json").write_text(json.dumps(said))
        return
    num_tiny, counts = (4, (20, 40)) if args.smoke else (300, (5_000, 30_000))
    results: dict[str, Any] = {
        "goals": {
            "tiny_cpu_s": GOAL_TINY_CPU_S,
            "finished_cpu_s": GOAL_FINISHED_CPU_S,
            "peak_over_the_first": GOAL_PEAK_RATIO,
        },
        # processes that wanted a CPU, over the last minute; other work makes times longer
        "load_before": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as scratch:
        slides = Path(scratch, "tiny")
        slides.mkdir()
        make_tiny_slides(slides, num_tiny)
        results["tiny"] = {}
        for executor in EXECUTORS[: 2 if args.smoke else None]:
            out = Path(scratch, f"out-{executor}")
            results["tiny"][executor] = measure_executor(executor, slides, out)
            print(executor, results["tiny"][executor], flush=True)
        results["finished"] = {}
        folder = Path(scratch, "finished")
        present = 0
        for count in counts:
            # in a smoke run, one step shows that the folder has grown
            names = ["join"] if args.smoke and present else list(STEPS)
            results["finished"][str(count)] = measure_finished(
                folder, count, present=present, names=names
            )
            present = count
        areas = SMOKE_AREAS if args.smoke else AREAS
        results["areas"] = measure_areas(Path(scratch), areas)
    results["load_after"] = os.getloadavg()[0]
    finish("bench_scale", results, args)


if __name__ == "__main__":
    main()
