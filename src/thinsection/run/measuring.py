"""Measurements of this machine and of encoders with random weights; a plan stores their results.

It imports torch, which a plan with stored measurements does without.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
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
from thinsection.run.calibration import Calibration, Engine
from thinsection.types import TileArray
from thinsection.weights.origin import Origin
from thinsection.weights.placement import Placement, cpu_has_bf16

_DECODE_S = 0.5  # CPU-seconds for the measurement of decoding
_RATE_S = 2.0  # CPU-seconds for the measurement of an encoder
_TILE_PX = 256  # edge of the decoded tile in pixels
_RATE_TILES = 8  # tiles in the batch that is timed
_MAPS_PX = 512  # edge of the image for the artefact network in pixels
_PEAK_TIMES = 3  # processes whose peak memory is measured
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
    """Measures memory in a fresh process, decoding and the artefact network in this one; 10 s."""
    seconds, peak = _run_script(_START_SCRIPT)
    return Calibration(
        measured_on=datetime.now(UTC).date().isoformat(),
        process_bytes=int(peak),
        start_s=seconds,
        has_bf16=cpu_has_bf16(),
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
    placement = Placement(torch.device("cpu"), precision)  # type: ignore[arg-type]
    encoder = NetworkTileEncoder(_TRANSFORMER, backbone, placement, Origin(seed=0))
    tile_px = _TRANSFORMER.input_px
    size = count_size(_TRANSFORMER, tile_px=tile_px)
    return size.flops_per_tile * measure_rate(encoder, tile_px=tile_px, engine=engine)


def measure_rate(
    encoder: TileEncoder, *, tile_px: int, engine: Engine = "torch"
) -> float:
    """Tiles per CPU-second over all threads, after a warm-up.

    The allocator is set as in a run: it does not return freed memory to the system. For OpenVINO,
    the encoder with random weights is converted, and the graph is not stored.
    """
    if engine == "openvino" and isinstance(encoder, NetworkTileEncoder):
        # a network that does not convert stays on PyTorch, as in a run
        with _temporary_graph_folder() as folder, suppress(InvalidInputError):
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


_IMPORTS = """
import json, os, sys
import torch, h5py, tifffile, simplejpeg, PIL.Image
import thinsection.pool, thinsection.encode, thinsection.slide, thinsection.tiles

def peak():
    lines = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]
    return int(lines[0].split()[1]) * 1024
"""
# what a command with an encoder loads besides: the command line, OpenVINO and the page
_START_SCRIPT = """
from contextlib import suppress
import typer, rich.console, jinja2, thinsection.run.run, thinsection.report.index
with suppress(ImportError):
    import openvino
torch.nn.functional.conv2d(torch.zeros(1, 3, 64, 64), torch.zeros(8, 3, 3, 3))
torch.zeros(64, 64) @ torch.zeros(64, 64)
times = os.times()
print(json.dumps([times.user + times.system, peak()]))
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
