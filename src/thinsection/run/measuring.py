"""Measurements of this machine and of encoders with random weights; a plan stores their results.

It imports torch, which a plan with stored measurements does without.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch.nn.functional import cosine_similarity

from thinsection.arrays import get_namespace
from thinsection.config import user_cache_dir
from thinsection.encode import NetworkTileEncoder, TileEncoder, load_encoder
from thinsection.encode.backbone import build_backbone
from thinsection.encode.check import find_local_weights
from thinsection.encode.counting import count_size
from thinsection.encode.registry import Architecture, EncoderSpec, is_brought
from thinsection.encode.sizes import NetworkSize
from thinsection.encode.specs import find_spec
from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.atomic import TMP_MARK
from thinsection.machine import keep_freed_memory
from thinsection.qc.checks.artefact_network import artefact_maps
from thinsection.run.calibration import Calibration, Engine, load_per_cpu
from thinsection.slide.convert import (
    SEGMENT_PX,
    Picture,
    encoded_picture,
    write_ome_tiff,
)
from thinsection.types import TileArray
from thinsection.weights.origin import Origin
from thinsection.weights.placement import Placement, cpu_has_bf16

# A rate is the best of some trials: other work on the machine only lowers it.
_TRIALS = 3
_DECODE_S = 0.2  # CPU-seconds for a trial of decoding
_RATE_S = 0.7  # CPU-seconds for a trial of an encoder
_START_TRIALS = 2
_START_SLIDES = 3  # slides of the run that shows the seconds of a slide
_START_SIZE = (3000, 2400)  # size of a drawn slide in pixels
_START_SLIDE_MPP = 0.5
_START_MPP = "4.0"  # a slide has one or two tiles, so that encoding takes no time
_TILE_PX = 256  # edge of the decoded tile in pixels
_RATE_TILES = 8  # tiles in the batch that is timed
_MAPS_PX = 512  # edge of the image for the artefact network in pixels
_PEAK_TIMES = 3  # processes whose peak memory is measured
_START_ENCODER = "efficientnet_lite0"
# four layers of a ViT-L/14, whose rate stands for all vision transformers: 27 billion operations
_TRANSFORMER = EncoderSpec(
    name="four layers of ViT-L/14",
    dim=512,
    architecture=Architecture(
        kind="clip",
        model="four layers of ViT-L/14",
        options={
            "patch_px": 14,
            "vision": {"width": 1024, "layers": 4, "heads": 16, "quick_gelu": False},
        },
    ),
    pooling="head",
)


def measure_machine() -> Calibration:
    """Measures start and memory in fresh processes, and rates in this one; some 15 s."""
    load = load_per_cpu()
    (peak,) = _run_script(_IMPORTS + _MEMORY_SCRIPT)
    start = measure_start()
    return Calibration(
        measured_on=datetime.now(UTC).date().isoformat(),
        load=round(load, 2),
        process_bytes=int(peak),
        start_s=start.start_s,
        libraries_s=start.libraries_s,
        slide_s=start.slide_s,
        has_bf16=cpu_has_bf16(),
        decode_px_per_s=measure_decoding(),
        half_size_px_per_s=measure_decoding(least_px=_TILE_PX // 2),
        maps_s_per_px=measure_maps(),
    )


class StartCost(NamedTuple):
    """CPU-seconds of whole runs that decode and encode nearly nothing; see `Calibration`."""

    start_s: float
    libraries_s: float
    slide_s: float


def measure_start() -> StartCost:
    """Runs of a drawn slide, of several, and of one with a small network, in fresh processes."""
    with _temporary_folder() as folder:
        slides = [str(folder / f"{number}.tiff") for number in range(_START_SLIDES)]
        for number, slide in enumerate(slides):
            _write_slide(Path(slide), seed=number)
        tiles = {"tile_mpp": _START_MPP, "until": "tiles"}
        network = {
            "tile_mpp": _START_MPP,
            "encoders": [_START_ENCODER],
            "pretrained": False,
            "device": "cpu",
        }
        one_s = _least_run_s(folder, slides[:1], tiles)
        slide_s = (_least_run_s(folder, slides, tiles) - one_s) / (_START_SLIDES - 1)
        with_network_s = _least_run_s(folder, slides[:1], network)
    return StartCost(
        start_s=max(0.0, one_s - slide_s),
        libraries_s=max(0.0, with_network_s - one_s),
        slide_s=max(0.0, slide_s),
    )


def _write_slide(path: Path, *, seed: int) -> None:
    """Writes a slide with one piece of pink and purple texture on white, of two levels."""
    width, height = _START_SIZE
    rng = np.random.default_rng(seed)
    y, x = np.ogrid[:height, :width]
    is_tissue = (2 * x / width - 1) ** 2 + (2 * y / height - 1) ** 2 < 0.5
    rgb = np.full((height, width, 3), 243, np.uint8)
    spots = rng.random((-(-height // 16), -(-width // 16))) < 0.2
    is_nucleus = spots.repeat(16, 0).repeat(16, 1)[:height, :width]
    rgb[is_tissue] = (221, 160, 200)
    rgb[is_tissue & is_nucleus] = (110, 70, 150)
    noise = rng.integers(0, 12, rgb.shape[:2], dtype=np.uint8)
    rgb -= noise[..., None]

    def picture(level: npt.NDArray[np.uint8]) -> Picture:
        rows, columns = level.shape[:2]

        def read(place: tuple[int, int]) -> npt.NDArray[np.uint8]:
            left, top = place
            tile = np.full((SEGMENT_PX, SEGMENT_PX, 3), 243, np.uint8)
            part = level[top : top + SEGMENT_PX, left : left + SEGMENT_PX]
            tile[: len(part), : part.shape[1]] = part
            return tile

        return encoded_picture((columns, rows), read, quality=80)

    levels = [picture(rgb), picture(rgb[::4, ::4])]
    write_ome_tiff(path, levels, (_START_SLIDE_MPP, _START_SLIDE_MPP))


def _least_run_s(
    folder: Path, slides: Sequence[str], settings: Mapping[str, object]
) -> float:
    """Fewest CPU-seconds of a process that runs these slides."""
    seconds = []
    for _ in range(_START_TRIALS):
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        words = (str(out), json.dumps(settings), *slides)
        seconds.append(_run_script(_RUN_SCRIPT, *words)[0])
    return min(seconds)


def _run_script(code: str, *arguments: str) -> list[float]:
    """Numbers that a fresh process prints as JSON."""
    command = [sys.executable, "-c", code, *arguments]
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

    def decode() -> None:
        simplejpeg.decode_jpeg(data, min_height=least_px, min_width=least_px)

    return _TILE_PX**2 * _best_rate(decode, _DECODE_S, time.thread_time)


def _best_rate(
    call: Callable[[], object], trial_s: float, clock: Callable[[], float]
) -> float:
    """Calls per second of `clock`, after a warm-up, in the best of some trials."""
    call()
    rates = []
    for _ in range(_TRIALS):
        count = 0
        spent_s = 0.0
        start = clock()
        while spent_s < trial_s:
            call()
            count += 1
            spent_s = clock() - start
        rates.append(count / spent_s)
    return max(rates)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for networks: threads that wait for each other spend CPU-time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_maps() -> float:
    """CPU-seconds of the artefact network per pixel of 4 µm."""
    rgb = np.random.default_rng(0).integers(
        90, 230, (_MAPS_PX, _MAPS_PX, 3), dtype=np.uint8
    )
    seconds = []
    with _one_thread():
        for _ in range(_TRIALS):
            start = time.process_time()
            artefact_maps(get_namespace(), rgb, 4.0)
            seconds.append(time.process_time() - start)
    return min(seconds) / _MAPS_PX**2


def network_size(name: str, *, tile_px: int) -> NetworkSize:
    """Numbers of an encoder that are not declared, from passes without data.

    Raises InvalidInputError: an encoder of another package, whose pass cannot be simulated.
    """
    if is_brought(name):
        raise InvalidInputError(
            f"encoder must be part of thinsection to be planned, got {name!r}; run "
            "it once and read 'thinsection efficiency'"
        )
    return count_size(find_spec(name), tile_px=tile_px)


def measure_encoder(
    name: str, *, precision: str, tile_px: int, engine: Engine
) -> float:
    """Tiles per CPU-second of an encoder with random weights; see `measure_rate`."""
    encoder = load_encoder(name, device="cpu", precision=precision, pretrained=False)
    return measure_rate(encoder, tile_px=tile_px, engine=engine)


def measure_transformer(*, precision: str, engine: Engine) -> float:
    """Operations per CPU-second of a vision transformer on this engine."""
    backbone = build_backbone(_TRANSFORMER)
    is_fp8 = precision == "fp8"
    placed = Placement(torch.device("cpu"), "fp32" if is_fp8 else precision)  # type: ignore[arg-type]
    encoder = NetworkTileEncoder(_TRANSFORMER, backbone, placed, Origin(seed=0))
    if is_fp8:
        encoder.to_fp8()
    tile_px = _TRANSFORMER.input_px
    size = count_size(_TRANSFORMER, tile_px=tile_px)
    return size.flops_per_tile * measure_rate(encoder, tile_px=tile_px, engine=engine)


def measure_rate(
    encoder: TileEncoder, *, tile_px: int, engine: Engine = "torch"
) -> float:
    """Tiles per CPU-second on one thread, after a warm-up: the best of some trials.

    The allocator is set as in a run: it does not return freed memory to the system. For OpenVINO,
    the encoder with random weights is converted, and the graph is not stored.
    """
    with _one_thread():
        if engine == "openvino" and isinstance(encoder, NetworkTileEncoder):
            # a network that does not convert stays on PyTorch, as in a run
            with _temporary_folder() as folder, suppress(InvalidInputError):
                encoder.to_openvino(folder)
        keep_freed_memory()
        shape = (_RATE_TILES, tile_px, tile_px, 3)
        tiles = torch.randint(0, 256, shape, dtype=torch.uint8)

        def encode() -> None:
            with torch.inference_mode():
                encoder.encode(tiles)

        return _RATE_TILES * _best_rate(encode, _RATE_S, time.process_time)


def bf16_error(name: str, *, weights: str | None, tiles: TileArray) -> float | None:
    """Largest 1 - cosine of embeddings in bf16 to those in fp32; None without the weights.

    Random weights cannot be used: with them, the error of the default encoder is 100 times smaller.
    """
    if weights is None and find_local_weights(find_spec(name)) is None:
        return None
    load = partial(load_encoder, name, device="cpu", weights=weights, engine="torch")
    exact = load(precision="fp32").encode(tiles).double()
    rounded = load(precision="bf16").encode(tiles).double()
    return float(1 - cosine_similarity(exact, rounded).min())


def measure_cpu_peak(
    name: str, *, precision: str, batch_size: int, tile_px: int, engine: str = "torch"
) -> int:
    """Peak bytes of a fresh process that encodes batches as a run does, with random weights.

    Returns the mean of a few processes, since the layout of small objects in the heap is random and
    changes the peak.
    """
    with _temporary_folder() as folder:
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
            _run_script(_IMPORTS + _PEAK_SCRIPT, *arguments)
        peaks = [
            _run_script(_IMPORTS + _PEAK_SCRIPT, *arguments)[0]
            for _ in range(_PEAK_TIMES)
        ]
    return int(statistics.mean(peaks))


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Temporary folder for graphs and slides that only a measurement needs."""
    user_cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=user_cache_dir(), prefix=TMP_MARK) as folder:
        yield Path(folder)


_IMPORTS = """
import json, os, sys
import torch, h5py, tifffile, simplejpeg, PIL.Image
import thinsection.pool, thinsection.encode, thinsection.slide, thinsection.tiles

def peak():
    lines = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]
    return int(lines[0].split()[1]) * 1024
"""
# what a command with an encoder loads besides: the command line, OpenVINO and the page
_MEMORY_SCRIPT = """
from contextlib import suppress
import typer, rich.console, jinja2, thinsection.run.run, thinsection.report.index
with suppress(ImportError):
    import openvino
torch.nn.functional.conv2d(torch.zeros(1, 3, 64, 64), torch.zeros(8, 3, 3, 3))
torch.zeros(64, 64) @ torch.zeros(64, 64)
print(json.dumps([peak()]))
"""
_RUN_SCRIPT = """
import json, os, sys
from importlib import import_module
import typer, rich.console
out, settings, *slides = sys.argv[1:]
settings = json.loads(settings)
if settings.get('until') != 'tiles':
    try:
        import openvino
    except ImportError:
        pass
run = import_module('thinsection.run.run').run
summary = run(slides, out=out, **settings)
assert summary.counts['done'] == len(slides), summary
times = os.times()
print(json.dumps([times.user + times.system]))
"""
_PEAK_SCRIPT = """
from contextlib import suppress
from pathlib import Path
from thinsection.errors import InvalidInputError
from thinsection.machine import keep_freed_memory
name, precision, edge, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
encoder = thinsection.encode.load_encoder(
    name, device='cpu', precision=precision, pretrained=False, engine='torch'
)
if sys.argv[5] == 'openvino':
    with suppress(InvalidInputError):
        encoder.to_openvino(Path(sys.argv[6]))
keep_freed_memory()
for count in (batch, 1 + batch // 3, batch):
    with torch.inference_mode():
        encoder.encode(torch.randint(0, 256, (count, edge, edge, 3), dtype=torch.uint8))
print(json.dumps([peak()]))
"""
