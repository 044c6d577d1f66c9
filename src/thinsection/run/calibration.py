"""Rates of this machine and sizes of an encoder for the cost models, without its weights.

Rates are measured once, which takes seconds, and stored in ~/.cache/thinsection/plan.json
(XDG_CACHE_HOME is respected), by CPU, core count and library versions.
"""

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import simplejpeg
import torch
from torch.utils.flop_counter import FlopCounterMode

from thinsection.arrays import get_namespace
from thinsection.config import user_cache_dir
from thinsection.encode import NetworkTileEncoder, TileEncoder
from thinsection.encode.memory import batch_bytes, weights_bytes
from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.atomic import TMP_MARK, write_json
from thinsection.machine import cpu_count, cpu_model, keep_freed_memory
from thinsection.qc.checks.artefact_network import artefact_maps
from thinsection.types import Document

_FILE = "plan.json"
_DECODE_S = 0.5  # CPU-seconds for the measurement of decoding
_RATE_S = 2.0  # CPU-seconds for the measurement of an encoder
_TILE_PX = 256  # edge of the decoded tile in pixels
_RATE_TILES = 8  # tiles in the batch that is timed
_MAPS_PX = 512  # edge of the image for the artefact network in pixels
# number of tiles that `_PEAK_SCRIPT` encodes, in batches: 1 + 1/3 + 1, rounded up
_PEAK_BATCHES = 2.5
_PEAK_TIMES = 3  # processes whose peak memory is measured
_PEAK_FLOPS = 2e12  # most operations of all peak measurements that count as quick

Engine = Literal["torch", "openvino"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rates of one machine."""

    process_bytes: (
        int  # peak resident memory of a process that has loaded the libraries
    )
    start_s: float  # CPU-seconds until the libraries are loaded
    decode_px_per_s: float  # JPEG pixels decoded per CPU-second
    # pixels of the JPEG per CPU-second if it is decoded at half its size; 0 if not measured
    half_size_px_per_s: float = 0.0
    # CPU-seconds for a slide's tissue, polygons, pictures and files
    slide_s: float = 0.35
    # CPU-seconds of the artefact network per pixel of 4 µm
    maps_s_per_px: float = 2e-7
    # key of an encoder -> tiles per CPU-second
    encoders: dict[str, float] = field(default_factory=dict)
    # key of an encoder and batch size -> peak bytes of a process that encodes such batches
    peaks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSize:
    """Size of an encoder: memory and arithmetic."""

    weights_bytes: int  # memory of its weights
    batch_bytes: int  # bytes of one batch in progress, without the weights
    dim: int  # length of an embedding
    flops_per_tile: float  # multiply-adds count as two
    # measured peak of a process with libraries and weights
    cpu_peak_bytes: int | None = None


def machine_key() -> str:
    """Key for this machine and the versions on which its rates depend."""
    parts = [
        platform.machine(),
        platform.processor(),
        cpu_model(),
        str(cpu_count()),
    ]
    parts += [version(name) for name in ("thinsection", "torch", "simplejpeg", "numpy")]
    # version of the measured code: change a string when the code becomes faster or slower, so that
    # stored rates are measured again
    parts += ["half size", "three networks"]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def calibrate(measure: Callable[[], Calibration] | None = None) -> Calibration:
    """Stored measurements of this machine, or new ones if there are none."""
    if not is_calibrated():
        store_calibration((measure or measure_machine)())
    return Calibration(**_stored_calibrations()[machine_key()])


def is_calibrated(encoder_key: str | None = None) -> bool:
    """True if rates of this machine are stored, and with `encoder_key` also that encoder's rate.

    Its peak memory may still be missing.
    """
    stored = _stored_calibrations().get(machine_key())
    if stored is None:
        return False
    return encoder_key is None or encoder_key in stored["encoders"]


def encoder_measurement(
    table: Literal["encoders", "peaks"], key: str, measure: Callable[[], float]
) -> float:
    """A measured value of an encoder (rate or peak memory): the stored one, or measured now."""
    machine = calibrate()
    values: dict[str, float] = getattr(machine, table)
    if key not in values:
        values = {**values, key: measure()}
        store_calibration(replace(machine, **{table: values}))  # type: ignore[arg-type]
    return values[key]


def store_calibration(calibration: Calibration) -> None:
    """Adds this machine's measurements to the file, atomically."""
    document = _stored_calibrations() | {machine_key(): asdict(calibration)}
    write_json(user_cache_dir() / _FILE, document)


def _stored_calibrations() -> Document:
    """Calibrations in the file, by `machine_key`; empty if there is no readable file."""
    try:
        document = json.loads((user_cache_dir() / _FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a damaged cache is measured again
        return {}
    return document if isinstance(document, dict) else {}


def measure_machine() -> Calibration:
    """Measures memory in a fresh process, decoding and the artefact network in this one; 10 s."""
    seconds, peak = _run_script(_START_SCRIPT)
    return Calibration(
        process_bytes=int(peak),
        start_s=seconds,
        decode_px_per_s=measure_decoding(),
        half_size_px_per_s=measure_decoding(least_px=_TILE_PX // 2),
        maps_s_per_px=measure_maps(),
    )


def _run_script(code: str, *arguments: str) -> list[float]:
    """Numbers that a fresh process prints as JSON; it loads a run's libraries before `code`."""
    command = [sys.executable, "-c", _IMPORTS + code, *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise StoreError(f"calibration must run, got: {done.stderr.strip()[-500:]}")
    numbers: list[float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def measure_decoding(least_px: int = 0) -> float:
    """JPEG pixels per CPU-second of this thread, on a textured tile at quality 80.

    With `least_px` it is decoded at the smallest size whose edge has so many pixels. The pixels
    that count are still those of the whole JPEG.
    """
    rng = np.random.default_rng(0)
    coarse = rng.integers(90, 230, (_TILE_PX // 8, _TILE_PX // 8, 3), dtype=np.uint8)
    fine = rng.integers(0, 24, (_TILE_PX, _TILE_PX, 3), dtype=np.uint8)
    tile = coarse.repeat(8, axis=0).repeat(8, axis=1) + fine
    data = simplejpeg.encode_jpeg(tile, quality=80, colorsubsampling="420")
    simplejpeg.decode_jpeg(data, min_height=least_px, min_width=least_px)
    count = 0
    spent_s = 0.0
    start = time.thread_time()
    while spent_s < _DECODE_S:
        simplejpeg.decode_jpeg(data, min_height=least_px, min_width=least_px)
        count += 1
        spent_s = time.thread_time() - start
    return count * _TILE_PX**2 / spent_s


def measure_maps() -> float:
    """CPU-seconds of the artefact network per pixel of 4 µm."""
    rgb = np.random.default_rng(0).integers(
        90, 230, (_MAPS_PX, _MAPS_PX, 3), dtype=np.uint8
    )
    start = time.process_time()
    artefact_maps(get_namespace(), rgb, 4.0)
    return (time.process_time() - start) / _MAPS_PX**2


def encoder_size(
    encoder: TileEncoder,
    *,
    batch_size: int,
    tile_px: int,
    on_gpu: bool = False,
    engine: Engine = "torch",
) -> EncoderSize:
    """Size of the encoder for a batch on a CPU or a GPU, from forward passes on empty tiles.

    `engine` is the planned engine, not the one that the encoder runs on now.

    Raises InvalidInputError: an encoder of another package, whose forward pass cannot be simulated.
    """
    if not isinstance(encoder, NetworkTileEncoder):
        raise InvalidInputError(
            f"encoder must be part of thinsection to be planned, got {encoder.spec.name!r}; run "
            "it once and read 'thinsection efficiency'"
        )
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        encoder.encode(torch.zeros((1, tile_px, tile_px, 3), dtype=torch.uint8))
    return EncoderSize(
        weights_bytes=weights_bytes(encoder, engine=engine),
        batch_bytes=batch_bytes(
            encoder,
            batch_size=batch_size,
            tile_px=tile_px,
            at_once=batch_size if on_gpu else None,
        ),
        dim=encoder.dim,
        flops_per_tile=float(counter.get_total_flops()),
    )


def measure_rate(
    encoder: TileEncoder, *, tile_px: int, engine: Engine = "torch"
) -> float:
    """Tiles per CPU-second over all threads, after a warm-up.

    The allocator is set as in a run: it does not return freed memory to the system. For OpenVINO,
    the encoder with random weights is converted, and the graph is not stored.
    """
    if engine == "openvino" and isinstance(encoder, NetworkTileEncoder):
        with _temporary_graph_folder() as folder:
            encoder.to_openvino(folder)
    keep_freed_memory()
    tiles = torch.randint(0, 256, (_RATE_TILES, tile_px, tile_px, 3), dtype=torch.uint8)
    with torch.inference_mode():
        encoder.encode(tiles)
        count = 0
        spent_s = 0.0
        start = time.process_time()
        while spent_s < _RATE_S:
            encoder.encode(tiles)
            count += _RATE_TILES
            spent_s = time.process_time() - start
    return count / spent_s


def measure_cpu_peak(
    name: str, *, precision: str, batch_size: int, tile_px: int, engine: str = "torch"
) -> int:
    """Peak bytes of a fresh process that encodes batches as a run does, with random weights.

    Returns the mean of a few processes, since the layout of small objects in the heap is random and
    changes the peak.
    """
    with _temporary_graph_folder() as folder:
        arguments = (
            name,
            precision,
            str(tile_px),
            str(batch_size),
            engine,
            str(folder),
        )
        if engine == "openvino":
            # not measured: it converts the graph and stores it in `folder`; the later processes
            # load it, as all runs but the first do
            _run_script(_PEAK_SCRIPT, *arguments)
        peaks = [_run_script(_PEAK_SCRIPT, *arguments)[0] for _ in range(_PEAK_TIMES)]
    return int(statistics.mean(peaks))


@contextmanager
def _temporary_graph_folder() -> Iterator[Path]:
    """Temporary folder for graphs that are converted only for a measurement."""
    user_cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=user_cache_dir(), prefix=TMP_MARK) as folder:
        yield Path(folder)


def is_quick(size: EncoderSize, *, batch_size: int) -> bool:
    """True if `measure_cpu_peak` takes at most half a minute of one core."""
    return size.flops_per_tile * batch_size * _PEAK_BATCHES * _PEAK_TIMES <= _PEAK_FLOPS


_IMPORTS = """
import json, os, sys
import torch, h5py, tifffile, simplejpeg, PIL.Image, scipy.ndimage, skimage.morphology
import thinsection.pool, thinsection.encode, thinsection.slide, thinsection.tiles

def peak():
    lines = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]
    return int(lines[0].split()[1]) * 1024
"""
_START_SCRIPT = """
torch.nn.functional.conv2d(torch.zeros(1, 3, 64, 64), torch.zeros(8, 3, 3, 3))
torch.zeros(64, 64) @ torch.zeros(64, 64)
times = os.times()
print(json.dumps([times.user + times.system, peak()]))
"""
_PEAK_SCRIPT = """
from pathlib import Path
from thinsection.machine import keep_freed_memory
name, precision, edge, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
encoder = thinsection.encode.load_encoder(
    name, device='cpu', precision=precision, pretrained=False, engine='torch'
)
if sys.argv[5] == 'openvino':
    encoder.to_openvino(Path(sys.argv[6]))
keep_freed_memory()
for count in (batch, 1 + batch // 3, batch):
    with torch.inference_mode():
        encoder.encode(torch.randint(0, 256, (count, edge, edge, 3), dtype=torch.uint8))
print(json.dumps([peak()]))
"""
