"""Choice between the engines, by settings and installed packages; imports none of them."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from thinsection.errors import InvalidInputError
from thinsection.extras import is_installed

EngineChoice = Literal["auto", "torch", "openvino", "compiled"]

# precisions of OpenVINO on CPUs, with OpenVINO's names for them
PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
# place of the CUDA toolkit, if no variable names another
_CUDA_FOLDER = Path("/usr/local/cuda")
# Seconds to compile a network, and to load a stored one. Share of the time of PyTorch's launches
# that a compiled network is expected to save. All three are assumptions for the choice of `auto`.
COMPILE_S = 60.0
LOAD_S = 5.0
SAVED_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Work for which an encoder is loaded; by it `auto` decides whether compiling pays."""

    num_tiles: int | None = None  # tiles to encode, about; None: nobody knows
    batch_size: int = 256  # tiles of a batch


def why_torch(engine: EngineChoice, device: str, *, is_random: bool) -> str:
    """Reason why PyTorch is used without trying OpenVINO; '' if OpenVINO is to be tried.

    The reason 'torch': PyTorch or a compiled network was asked for, or the device is not a CPU.

    Raises InvalidInputError: unknown engine, or openvino on a device other than a CPU.
    """
    choices = get_args(EngineChoice)
    if engine not in choices:
        raise InvalidInputError(
            f"engine must be one of {', '.join(choices)}, got {engine!r}"
        )
    on_cpu = device.partition(":")[0] == "cpu"
    if engine == "openvino":
        if not on_cpu:
            raise InvalidInputError(
                f"engine must be auto, torch or compiled on a device that is not a CPU, got "
                f'{engine!r} on {device}; pass device="cpu"'
            )
        return ""
    if engine in ("torch", "compiled") or not on_cpu:
        return "torch"
    if is_random:
        return "random weights"
    return "" if is_installed("openvino") else "not installed"


def why_not_compiled(device: str) -> str:
    """Reason why no network can be compiled for the device here; '' if it can be tried."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        return f"nothing compiles for {kind}"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} is not on the PATH"
    if kind == "cuda" and not is_installed("triton"):
        return "triton is not installed"
    if kind == "cuda" and not _has_cuda_toolkit():
        return "no CUDA toolkit: CUDA_HOME is not set, and nvcc is not on the PATH"
    return ""


def _has_cuda_toolkit() -> bool:
    """True if PyTorch finds the headers of CUDA, which its own wheels do not have.

    Source: `_find_cuda_home` in torch/utils/cpp_extension.py.
    """
    is_named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(is_named or shutil.which("nvcc") or _CUDA_FOLDER.exists())


def why_not_worth(
    workload: Workload,
    *,
    tiles_per_s: Callable[[], float],
    is_stored: Callable[[], bool],
) -> str:
    """Reason why a compiled network would not pay for this work; '' if it would.

    Args:
        workload: tiles to encode.
        tiles_per_s: measures the rate of PyTorch's own launches; 0 if a batch does not fit.
        is_stored: tells whether the network was compiled before.
    """
    if workload.num_tiles is None:
        return "the number of tiles is not known"
    stored = is_stored()
    cost_s = LOAD_S if stored else COMPILE_S
    rate = tiles_per_s()
    if rate == 0:
        return f"a batch of {workload.batch_size} tiles does not fit the device"
    seconds = workload.num_tiles / rate
    if seconds * SAVED_SHARE > cost_s:
        return ""
    verb = "loading" if stored else "compiling"
    return (
        f"some {workload.num_tiles:,} tiles take about {seconds:.0f} s, and {verb} about "
        f"{cost_s:.0f} s"
    )


def engine_version(engine: str) -> str:
    """Engine and its installed version, such as 'torch 2.13.0'."""
    if engine == "compiled":
        return f"compiled torch {version('torch')}"
    return f"{engine} {version(engine)}"
