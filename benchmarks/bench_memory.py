"""How does the memory of each command grow with the tiles of a slide, and what do readers take?

Folders in TRIDENT's form, with a slide of N tiles and one of N / 10, random embeddings of 384
values in float32 and one small picture for both. Each whole command runs in a process of its own:
import, aggregate, predict, heatmap and all exports; then `view` while 1, 10 and 40 clients ask at
once for layers, pictures and similar tiles. Printed are the peak (high-water RSS, in MiB), the CPU
seconds, the slope of the peak from the second size to the last in bytes per tile of the larger
slide, and the peak that `plan --command` predicts.
"""

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h5py
import numpy as np

from benchmarks.harness import arguments, finish
from thinsection.cli.command_memory import COMMANDS, command_memory
from thinsection.run.rates import machine_rates
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import MIB, ignore_message

SIZES = (1_000, 15_000, 60_000, 250_000)
DIM = 384
EDGE = 256
SLIDE_PX = 8192
FEATURES = "features_conch_v15"
CLIENTS = (1, 10, 40)
VIEW_MEMORY = "512MiB"
THINSECTION = (sys.executable, "-m", "thinsection")
# A child's high-water mark begins with the memory of the process that started it, so a bare
# interpreter (10 MiB) starts the command and prints the KiB and the CPU seconds.
_LAUNCH = """
import os, sys
command = sys.argv[1:]
pid = os.posix_spawn(command[0], command, os.environ)
_, status, usage = os.wait4(pid, 0)
print()
print(usage.ru_maxrss, round(usage.ru_utime + usage.ru_stime, 2))
sys.exit(os.waitstatus_to_exitcode(status))
"""
ATTRIBUTES = {
    "patch_size": EDGE,
    "patch_size_level0": EDGE,
    "level0_magnification": 40,
    "target_magnification": 40,
    "overlap": 0,
    "level0_width": SLIDE_PX,
    "level0_height": SLIDE_PX,
}


def write_trident(
    grid: Path, slide_id: str, num_tiles: int, seed: int, *, dim: int = DIM
) -> None:
    """Writes coordinates and embeddings of a slide as TRIDENT does."""
    rng = np.random.default_rng(seed)
    columns = max(1, round(num_tiles**0.5))
    coords = np.stack(np.divmod(np.arange(num_tiles), columns)[::-1], axis=1) * EDGE
    for name in ("patches", FEATURES):
        (grid / name).mkdir(parents=True, exist_ok=True)
    files = (
        grid / "patches" / f"{slide_id}_patches.h5",
        grid / FEATURES / f"{slide_id}.h5",
    )
    for path in files:
        with h5py.File(path, "w") as file:
            stored = file.create_dataset("coords", data=coords.astype(np.int64))
            stored.attrs.update(ATTRIBUTES)
    with h5py.File(files[1], "a") as file:
        shape = (num_tiles, dim)
        data = file.create_dataset("features", shape, np.float32)
        for start in range(0, num_tiles, 4096):
            rows = min(4096, num_tiles - start)
            data[start : start + rows] = rng.standard_normal((rows, dim), np.float32)


def measured(*words: object, log: Path) -> dict[str, Any]:
    """Runs a command to its end: its high-water RSS and CPU seconds, without its children."""
    command = [*THINSECTION, *map(str, words)]
    with log.open("w+") as out:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, *command],
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            check=False,
        )
    if child.returncode:
        message = log.read_text()[-2000:]
        raise RuntimeError(f"{words} ended with {child.returncode}:\n{message}")
    peak_kib, cpu_s = child.stdout.split()[-2:]
    return {"peak_mib": round(int(peak_kib) / 1024, 1), "cpu_s": float(cpu_s)}


def trained_model(folder: Path, slides: Path, log: Path) -> Path:
    """Trains a small model on 12 slides of 100 tiles; only its file is used."""
    rows = ["slide_id,target"]
    for number in range(12):
        write_trident(folder / "t" / "20x", f"t{number}", 100, number)
        rows.append(f"t{number},{'ab'[number % 2]}")
    labels = folder / "labels.csv"
    labels.write_text("\n".join(rows) + "\n")
    measured("import", "trident", folder / "t", "--out", folder / "tr", log=log)
    settings = ("--epochs", 2, "--hidden-dim", 32, "--attention-dim", 16)
    measured(
        "train",
        folder / "tr",
        "--labels",
        labels,
        "--target",
        "target",
        "--out",
        folder / "model",
        *settings,
        log=log,
    )
    return folder / "model" / "model.safetensors"


def commands(folder: Path, model: Path, slides: Path) -> dict[str, tuple[object, ...]]:
    """Words of every command that reads stored tiles, in the order in which they are run."""
    results = folder / "results"
    words: dict[str, tuple[object, ...]] = {
        "import": (
            "import", "trident", folder / "job", "--out", results, "--slides", slides,
        ),
        "aggregate": ("aggregate", results),
        "predict": ("predict", model, results),
        "heatmap": ("heatmap", model, results, "--top-tiles", 0),
    }  # fmt: skip
    tools = ["anndata", "qupath", "trident", "clam", "stamp"]
    if find_spec("spatialdata"):
        tools.append("spatialdata")
    for tool in tools:
        target = folder / f"for_{tool}"
        if tool == "anndata":
            target = target.with_suffix(".h5ad")
        words[f"export {tool}"] = ("export", tool, results, "--out", target)
    words["export slide2vec"] = (
        "export", "slide2vec", results, "--out", folder / "for_s2v",
    )  # fmt: skip
    return words


def viewed(results: Path, num_clients: int) -> dict[str, Any]:
    """Peak of the viewer while clients ask at once, each for everything of the larger slide."""
    process = subprocess.Popen(
        [*THINSECTION, "view", str(results), "--memory", VIEW_MEMORY],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        at = urlsplit(process.stdout.readline().strip())
        failures: list[str] = []

        def ask(number: int) -> None:
            connection = http.client.HTTPConnection(at.hostname or "", at.port)
            names = ["", *(f"/layers/{layer}" for layer in range(3))]
            names += ["/similar/0/0/0", "/thumbnail"]
            for turn in range(len(names)):
                name = names[(turn + number) % len(names)]
                connection.request("GET", f"{at.path}slides/large{name}")
                answer = connection.getresponse()
                data = answer.read()
                if answer.status != 200:
                    failures.append(f"{name}: {data[:200]!r}")

        threads = [
            threading.Thread(target=ask, args=[number]) for number in range(num_clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status = Path(f"/proc/{process.pid}/status").read_text()
        if failures:
            raise RuntimeError("\n".join(failures[:5]))
    finally:
        os.kill(process.pid, signal.SIGTERM)
        _, _, usage = os.wait4(process.pid, 0)
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"peak_mib": round(peak / MIB, 1), "cpu_s": round(cpu_s, 2)}


# words of the benchmark -> command, and the paths that the plan takes, of a model and a folder
PLANNED_PATHS: dict[str, tuple[str, ...]] = {
    "import": ("{folder}/job",),
    "predict": ("{model}", "{folder}/results"),
    "heatmap": ("{model}", "{folder}/results"),
}


def planned(command: str, folder: Path, model: Path) -> dict[str, float]:
    """Peak that `plan` predicts for a command of this benchmark."""
    name, _, _ = command.partition(",")
    paths = PLANNED_PATHS.get(name, ("{folder}/results",))
    _, plan = command_memory(
        name,
        [path.format(folder=folder, model=model) for path in paths],
        memory=VIEW_MEMORY if name == "view" else None,
        process_bytes=lambda: machine_rates(ignore_message).process_bytes,
    )
    return {"planned_mib": round(plan.host_bytes / MIB, 1)}


def slope(peaks: dict[str, Any], sizes: tuple[int, ...]) -> int:
    """Growth of the peak from the second size to the last, in bytes per tile."""
    first = sizes[min(1, len(sizes) - 2)]
    growth = peaks[str(sizes[-1])]["peak_mib"] - peaks[str(first)]["peak_mib"]
    return round(growth * MIB / (sizes[-1] - first))


def main() -> None:
    """Writes the folders, runs every command, and prints peaks and slopes."""
    args = arguments(
        __doc__ or "",
        only="commands to run, separated by commas",
        tiles="numbers of tiles, separated by commas",
    )
    sizes = (500, 2_000) if args.smoke else SIZES
    if args.tiles:
        sizes = tuple(int(word) for word in args.tiles.split(","))
    only = args.only.split(",") if args.only else None
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench_memory") as temporary:
        root = Path(temporary)
        log = root / "log"
        slides = root / "slides"
        slides.mkdir()
        write_he_slide(slides / "large.svs", (SLIDE_PX, SLIDE_PX), seed=1)
        shutil.copy(slides / "large.svs", slides / "small.svs")
        model = trained_model(root, slides, log)
        for num_tiles in sizes:
            folder = root / str(num_tiles)
            write_trident(folder / "job" / "20x", "large", num_tiles, 1)
            write_trident(folder / "job" / "20x", "small", num_tiles // 10, 2)
            for command, words in commands(folder, model, slides).items():
                if only is None or command in only or command == "import":
                    row = measured(*words, log=log)
                    if command in COMMANDS:
                        row |= planned(command, folder, model)
                    found.setdefault(command, {})[str(num_tiles)] = row
                    print(command, num_tiles, row, file=sys.stderr)
            for clients in CLIENTS if only is None or "view" in only else ():
                name = f"view, {clients} at once"
                row = viewed(folder / "results", clients)
                row |= planned(name, folder, model)
                found.setdefault(name, {})[str(num_tiles)] = row
                print("view", clients, num_tiles, row, file=sys.stderr)
            shutil.rmtree(folder)
    ratios = [
        row["planned_mib"] / row["peak_mib"]
        for peaks in found.values()
        for row in peaks.values()
        if "planned_mib" in row
    ]
    for peaks in found.values():
        peaks["bytes_per_tile"] = slope(peaks, sizes)
    results = {
        "embedding_bytes_per_tile": 4 * DIM,
        "view_memory": VIEW_MEMORY,
        "tiles": list(sizes),
        "commands": found,
        "least_planned_over_measured": round(min(ratios), 2),
        "most_planned_over_measured": round(max(ratios), 2),
    }
    finish("bench_memory", results, args)


if __name__ == "__main__":
    main()
