"""What the cost models need to know of this machine: measured once in some seconds, then kept.

Kept at ~/.cache/thinsection/plan.json (XDG_CACHE_HOME is respected), by CPU, core count and
library versions.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from thinsection.config import user_cache_dir
from thinsection.errors import StoreError
from thinsection.files.atomic import write_json
from thinsection.stream import cpu_count

# CPU-seconds per slide for tissue, polygons, pictures and files, beside decoding its thumbnail
SLIDE_S = 0.35
_DECODE_S = 0.5
_TILE_PX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rates of one machine.

    Attributes:
        process_bytes: resident memory of a process that has loaded the libraries.
        start_s: CPU-seconds until it has.
        decode_px_per_s: JPEG px decoded per CPU-second.
        slide_s: CPU-seconds of small work per slide.
        encoders: encoder's key -> tiles per CPU-second.
        peaks: encoder's key and batch size -> peak bytes of a process that encodes such batches.
    """

    process_bytes: int
    start_s: float
    decode_px_per_s: float
    slide_s: float = SLIDE_S
    encoders: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)


def calibration_path() -> Path:
    """Where the measurements are kept."""
    return user_cache_dir() / "plan.json"


def machine_key() -> str:
    """Names this machine and the versions that its rates depend on."""
    parts = [platform.machine(), platform.processor(), cpu_model(), str(cpu_count())]
    parts += [version(name) for name in ("thinsection", "torch", "simplejpeg", "numpy")]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def cpu_model() -> str:
    """The CPU's name, '' where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")


def calibrate(
    *, path: Path | None = None, measure: Callable[[], Calibration] | None = None
) -> Calibration:
    """The kept measurements of this machine, made now if there are none."""
    path = path or calibration_path()
    kept = _load(path)
    if machine_key() in kept:
        return Calibration(**kept[machine_key()])
    found = (measure or measure_machine)()
    keep(found, path=path)
    return found


def encoder_rate(
    key: str, measure: Callable[[], float], *, path: Path | None = None
) -> tuple[Calibration, float]:
    """Tiles per CPU-second of an encoder, kept or measured now; with the machine's calibration."""
    machine = calibrate(path=path)
    if key not in machine.encoders:
        machine = replace(machine, encoders={**machine.encoders, key: measure()})
        keep(machine, path=path or calibration_path())
    return machine, machine.encoders[key]


def encoder_peak(key: str, measure: Callable[[], int], *, path: Path | None = None) -> int:
    """Peak bytes of a process that encodes batches, kept or measured now."""
    machine = calibrate(path=path)
    if key not in machine.peaks:
        machine = replace(machine, peaks={**machine.peaks, key: measure()})
        keep(machine, path=path or calibration_path())
    return machine.peaks[key]


def keep(found: Calibration, *, path: Path) -> None:
    """Adds this machine's measurements to the file, atomically."""
    document = _load(path) | {machine_key(): asdict(found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, document)


def measure_machine() -> Calibration:
    """Measures in a fresh process (memory) and in this one (decoding); about 10 s."""
    seconds, resident = run_probe(_PROBE)
    return Calibration(
        process_bytes=int(resident), start_s=seconds, decode_px_per_s=measure_decoding()
    )


def run_probe(code: str, *arguments: str) -> list[float]:
    """What a fresh process prints as JSON, in which a run's libraries are loaded before `code`.

    Raises:
        StoreError: it failed; with the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    if done.returncode != 0:
        raise StoreError(f"calibration must run, got: {done.stderr.strip()[-500:]}")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_decoding() -> float:
    """JPEG px per CPU-second of this thread, on a textured tile at quality 80."""
    import numpy as np
    import simplejpeg

    rng = np.random.default_rng(0)
    coarse = rng.integers(90, 230, (_TILE_PX // 8, _TILE_PX // 8, 3), dtype=np.uint8)
    fine = rng.integers(0, 24, (_TILE_PX, _TILE_PX, 3), dtype=np.uint8)
    tile = coarse.repeat(8, axis=0).repeat(8, axis=1) + fine
    data = simplejpeg.encode_jpeg(tile, quality=80, colorsubsampling="420")
    simplejpeg.decode_jpeg(data)
    count, start = 0, time.thread_time()
    while (spent := time.thread_time() - start) < _DECODE_S:
        simplejpeg.decode_jpeg(data)
        count += 1
    return count * _TILE_PX**2 / spent


_IMPORTS = """
import json, os, sys
import torch, h5py, tifffile, simplejpeg, PIL.Image, scipy.ndimage, skimage.morphology
import thinsection.pool, thinsection.encode, thinsection.slide, thinsection.stream

def peak():
    lines = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]
    return int(lines[0].split()[1]) * 1024
"""
_PROBE = """
torch.nn.functional.conv2d(torch.zeros(1, 3, 64, 64), torch.zeros(8, 3, 3, 3))
torch.zeros(64, 64) @ torch.zeros(64, 64)
times = os.times()
print(json.dumps([times.user + times.system, peak()]))
"""


def _load(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a damaged cache is measured anew
        return {}
    return document if isinstance(document, dict) else {}
