"""Stored rates of this machine, and sizes of encoders, for the cost models.

Rates are measured once (`thinsection.run.measuring`), which takes seconds, and stored in
~/.cache/thinsection/plan.json (XDG_CACHE_HOME is respected), by CPU, core count and library
versions.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Literal, TypeVar

from thinsection.config import user_cache_dir
from thinsection.encode.sizes import declared_size
from thinsection.files.atomic import write_json
from thinsection.machine import cpu_count, cpu_model
from thinsection.types import Document

_FILE = "plan.json"
# number of tiles that `_PEAK_SCRIPT` encodes, in batches: 1 + 1/3 + 1, rounded up
_PEAK_BATCHES = 2.5
_PEAK_TIMES = 3  # processes whose peak memory is measured
# Load per CPU from which rates are marked as measured beside other work, which makes them too low:
# the cores share caches, memory and clock.
BUSY_LOAD = 0.75
_PEAK_FLOPS = 2e12  # most operations of all peak measurements that count as quick

Engine = Literal["torch", "openvino"]
# fields of `Calibration` with one value for each key
Table = Literal["encoders", "operations", "networks", "peaks", "bf16_errors", "qc"]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rates of one machine."""

    measured_on: str = ""  # day in UTC, such as 2026-11-29
    # processes per CPU that ran or waited for a CPU before the measurement
    load: float = 0.0
    # peak resident memory of a process that has loaded the libraries
    process_bytes: int
    # CPU-seconds of a run to the tile grid of a drawn slide, without `slide_s`
    start_s: float
    # further CPU-seconds of a run with an encoder: it loads PyTorch, OpenVINO and a small network
    libraries_s: float = 0.0
    decode_px_per_s: float  # JPEG pixels decoded per CPU-second
    # pixels of the JPEG per CPU-second if it is decoded at half its size; 0 if not measured
    half_size_px_per_s: float = 0.0
    # CPU-seconds for a slide's tissue, polygons, pictures and files
    slide_s: float = 0.35
    # CPU-seconds of the artefact network per pixel of 4 µm
    maps_s_per_px: float = 2e-7
    # True if the CPU multiplies bf16 itself, so that `auto` may choose it
    has_bf16: bool = False
    # key of an encoder -> tiles per CPU-second
    encoders: dict[str, float] = field(default_factory=dict)
    # precision and engine -> operations of vision transformers per CPU-second
    operations: dict[str, float] = field(default_factory=dict)
    # key of a network that is not declared -> fields of `NetworkSize`
    networks: dict[str, Document] = field(default_factory=dict)
    # key of an encoder and batch size -> peak bytes of a process that encodes such batches
    peaks: dict[str, int] = field(default_factory=dict)
    # key of an encoder -> sentence about the error of its embeddings in bf16
    bf16_errors: dict[str, str] = field(default_factory=dict)
    # key of a quality control pipeline and GPUs -> seconds of a slide, by device
    qc: dict[str, Document] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSize:
    """Size of an encoder: memory and arithmetic."""

    weights_bytes: int  # memory of its weights
    # memory of its weights while they are loaded, if that is more: float32 before FP8
    loading_bytes: int = 0
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
    parts += ["half size", "three networks", "operations", "whole runs", "one thread"]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def load_per_cpu() -> float:
    """Processes per CPU of this machine that run or wait for a CPU, over the last minute."""
    if not hasattr(os, "getloadavg"):
        return 0.0
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def rates_note(measured_on: str, load: float) -> str:
    """Sentence about the age of rates, and about the load under which they were measured."""
    note = (
        f"rates of this machine were measured on {measured_on}; a new version of "
        "thinsection or torch measures them again"
    )
    if load > BUSY_LOAD:
        note += (
            f". The machine was busy then ({load:.1f} processes per CPU), so they may be "
            "too low: a plan on a quieter machine measures them again"
        )
    return note


def is_outdated(machine: Calibration | None) -> bool:
    """True if the machine must be measured: never done, or done while it was busier than now."""
    if machine is None:
        return True
    return machine.load > BUSY_LOAD and load_per_cpu() < machine.load / 2


def calibrate(measure: Callable[[], Calibration]) -> Calibration:
    """Stored measurements of this machine, or new ones if they are outdated."""
    machine = stored_calibration()
    if machine is None or is_outdated(machine):
        machine = measure()
        store_calibration(machine)
    return machine


def stored_calibration() -> Calibration | None:
    """Stored measurements of this machine; None if there are none."""
    document = _stored_calibrations().get(machine_key())
    try:
        return None if document is None else Calibration(**document)
    except TypeError:  # a damaged cache is measured again
        return None


def is_stored(table: Table, key: str) -> bool:
    """True if this value was measured on this machine."""
    machine = stored_calibration()
    return machine is not None and key in getattr(machine, table)


def measurement(table: Table, key: str, measure: Callable[[], Value]) -> Value:
    """A value of a calibrated machine: the stored one, or measured now and stored."""
    machine = stored_calibration()
    assert machine is not None, "the machine is calibrated first"
    values: dict[str, Value] = getattr(machine, table)
    if key not in values:
        values = {**values, key: measure()}
        store_calibration(replace(machine, **{table: values}))  # type: ignore[arg-type]
    return values[key]


def refute_rate(
    name: str, *, precision: str, tile_px: int, engine: str, tiles_per_s: float
) -> bool:
    """Forgets the stored rate of an encoder that a whole run has exceeded; True if it did.

    A run also reads and decodes, so the encoder alone is faster than the run. The next plan
    measures the rate again.

    Args:
        name: encoder, as in the settings of a run.
        precision: precision of the run.
        tile_px: edge of its tiles.
        engine: engine with its version, such as 'openvino 2026.4.1'.
        tiles_per_s: encoded tiles of the run per CPU-second of its process.
    """
    machine = stored_calibration()
    if machine is None:
        return False
    key = encoder_key(name, precision=precision, tile_px=tile_px, engine=engine)
    arithmetic = f"{precision}|{engine}"
    size = declared_size(name, tile_px=tile_px)
    if machine.encoders.get(key, math.inf) < tiles_per_s:
        kept = {other: rate for other, rate in machine.encoders.items() if other != key}
        store_calibration(replace(machine, encoders=kept))
        return True
    if size is None or not size.is_transformer:
        return False
    operations = machine.operations.get(arithmetic, math.inf)
    if operations / size.flops_per_tile >= tiles_per_s:
        return False
    kept = {
        other: rate for other, rate in machine.operations.items() if other != arithmetic
    }
    store_calibration(replace(machine, operations=kept))
    return True


def encoder_key(name: str, *, precision: str, tile_px: int, engine: str) -> str:
    """Key of the measurements of an encoder; `engine` has its version."""
    return f"{name}|{precision}|{tile_px}|{engine}"


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


def is_quick(size: EncoderSize, *, batch_size: int) -> bool:
    """True if `measure_cpu_peak` takes at most half a minute of one core."""
    return size.flops_per_tile * batch_size * _PEAK_BATCHES * _PEAK_TIMES <= _PEAK_FLOPS
