"""What runs a network on a CPU: PyTorch, or the same graph converted for OpenVINO.

A converted graph is kept in the user's cache by the weights' hash, and with it how far its answers
to seeded tiles are from PyTorch's, on each kind of CPU.

Shapes: pixels [B, 3, E, E] of E = `input_px`; embeddings [B, D] and tokens [B, T, C].
"""

import ctypes
import json
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from thinsection.config import user_cache_dir
from thinsection.errors import (
    InvalidInputError,
    MissingDependencyError,
    StoreError,
    require,
)
from thinsection.files.atomic import TMP_MARK, write_json
from thinsection.files.lock import hold
from thinsection.machine import cpu_model
from thinsection.weights.placement import is_installed

EngineChoice = Literal["auto", "torch", "openvino"]
Network = Callable[[Tensor], tuple[Tensor, Tensor]]
Shape = tuple[int, int, int, int]

MAX_ERROR = 1e-5  # fp32: of the range of the embeddings
MAX_ANGLE = 5e-3  # bf16: 1 - cosine of an embedding
PRECISIONS = {
    "fp32": "f32",
    "bf16": "bf16",
}  # that it computes in on CPUs, in its words
_MADV_DONTNEED = (
    4  # of madvise(2): pages of a shared mapping are read again when asked for
)
_MODEL, _WEIGHTS, _MANIFEST = "model.xml", "model.bin", "manifest.json"


def why_torch(engine: EngineChoice, device: torch.device, *, is_random: bool) -> str:
    """Why torch computes without a try of OpenVINO; '' where that is tried, on a CPU only."""
    choices = get_args(EngineChoice)
    require(
        engine in choices, f"engine must be one of {', '.join(choices)}", repr(engine)
    )
    on_cpu = device.type == "cpu"
    if engine == "openvino":
        got = f"{engine!r} on {device}; pass --device cpu"
        require(on_cpu, "engine must be auto or torch but on a CPU", got)
        return ""
    if engine == "torch" or not on_cpu:
        return "torch"
    if is_random:
        return "random weights"
    return "" if is_installed("openvino") else "not installed"


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """How far a converted network's embeddings of seeded tiles are from PyTorch's in fp32."""

    error: float  # largest difference, as a share of the range
    angle: float  # largest 1 - cosine

    def passes(self, precision: str) -> bool:
        """Whether that is within what the precision may differ by."""
        return (
            self.error <= MAX_ERROR if precision == "fp32" else self.angle <= MAX_ANGLE
        )


class OpenVinoNetwork:
    """A converted network for batches of B tiles; smaller ones are filled up. Thread-safe.

    What a tile gives does not depend on the other tiles of its batch. Memory: the weights in
    OpenVINO's order (twice while they are put into it), and activations of B tiles.
    """

    def __init__(self, model: Path, shape: Shape, precision: str) -> None:
        self.engine, self._rows = engine_version("openvino"), shape[0]
        options = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        options["INFERENCE_PRECISION_HINT"] = PRECISIONS[precision]
        options["ENABLE_CPU_PINNING"] = (
            False  # processes of a machine would share the first cores
        )
        compiled = _openvino().Core().compile_model(model, "CPU", options)
        self._request, self._lock = compiled.create_infer_request(), threading.Lock()
        _forget_pages(model.with_name(_WEIGHTS))

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(pixels)
        if rows < self._rows:
            pixels = torch.cat(
                [pixels, pixels.new_zeros(self._rows - rows, *pixels.shape[1:])]
            )
        with self._lock:
            given = [pixels.contiguous().numpy()]
            found = self._request.infer(given, share_inputs=True, share_outputs=True)
            pooled, tokens = (
                torch.from_numpy(part[:rows].copy()) for part in found.values()
            )
        return pooled, tokens


def engine_version(engine: str) -> str:
    """'torch 2.13.0': an engine and the version that is installed."""
    return f"{engine} {version(engine)}"


def converted_network(
    network: nn.Module,
    pixels: Tensor,
    precision: str,
    *,
    weights_hash: str,
    cache_dir: Path | None = None,
) -> tuple[OpenVinoNetwork, SelfCheck]:
    """The network (in fp32 on the CPU) for OpenVINO: from the cache, or converted and put there.

    It is converted for, and compared on, `pixels`; afterwards it is on the meta device.
    Memory: converting, a half of the weights beside them, and their size on disk; compiling, twice
    the weights. Raises InvalidInputError for a precision or a network that it cannot take.
    """
    require(
        precision in PRECISIONS,
        "precision must be fp32 or bf16 in OpenVINO",
        repr(precision),
    )
    _openvino()
    shape: Shape = tuple(pixels.shape)  # type: ignore[assignment]
    key = f"{weights_hash}|{shape}|{version('openvino')}|{torch.__version__}"
    folder = (
        (cache_dir or user_cache_dir())
        / "openvino"
        / sha256(key.encode()).hexdigest()[:32]
    )
    if not _is_whole(folder):
        with hold(folder.with_suffix(".lock")):
            if not _is_whole(folder):  # else another process made it meanwhile
                _convert(network, pixels, folder)
    kept = folder / f"{precision}-{sha256(cpu_model().encode()).hexdigest()[:16]}.json"
    with torch.no_grad():
        wanted = None if kept.exists() else network(pixels)[0]
    network.to("meta")
    found = OpenVinoNetwork(folder / _MODEL, shape, precision)
    if wanted is not None:
        write_json(kept, asdict(_compared(found(pixels)[0], wanted)))
    return found, SelfCheck(**json.loads(kept.read_text(encoding="utf-8")))


def _is_whole(folder: Path) -> bool:
    """Whether a graph is there with the bytes that were written."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(
            manifest == {name: _digest(folder / name) for name in (_MODEL, _WEIGHTS)}
        )
    except (OSError, ValueError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _convert(network: nn.Module, pixels: Tensor, folder: Path) -> None:
    """Writes the graph whole or not at all; not by `convert_model`, which reports to a server."""
    made = folder.with_name(f"{folder.name}{TMP_MARK}")
    for leftover in (made, folder):  # of a process that was killed; damaged
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        _write_graph(network, pixels, made / _MODEL)
        write_json(
            made / _MANIFEST,
            {name: _digest(made / name) for name in (_MODEL, _WEIGHTS)},
        )
        made.rename(folder)
    except OSError as error:
        got = f"got {error}; free some space, or pass --engine torch"
        raise StoreError(f"graph must be writable to {str(folder)!r}, {got}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_graph(network: nn.Module, pixels: Tensor, path: Path) -> None:
    openvino = _openvino()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    frontend = FrontEndManager().load_by_framework("pytorch")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of shapes that tracing fixes: they are fixed here
            once = {
                "check_trace": False
            }  # the self-check is ours, and of the whole way
            traced = TorchScriptPythonDecoder(
                network, example_input=pixels, trace_kwargs=once
            )
            graph = frontend.convert(frontend.load(traced))
        graph.reshape(list(pixels.shape))
        openvino.save_model(graph, path, compress_to_fp16=False)
    except OSError:
        raise
    except Exception as error:  # tracing and converting raise what they like
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidInputError(
            f"network must convert for OpenVINO, got {why}"
        ) from error


def _compared(got: Tensor, wanted: Tensor) -> SelfCheck:
    got, wanted = got.double(), wanted.double()
    error = (got - wanted).abs().max() / (wanted.max() - wanted.min()).clamp_min(1e-12)
    angle = 1 - torch.nn.functional.cosine_similarity(got, wanted).min()
    return SelfCheck(
        error=float(error.nan_to_num(1.0)), angle=float(angle.nan_to_num(1.0))
    )


def _forget_pages(path: Path) -> None:
    """Gives back the pages of a file that is mapped: they were copied, and else would be read."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith(str(path.resolve())):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            libc.madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED
            )


def _openvino() -> Any:
    rule = "package 'openvino' must be installed for --engine openvino"
    if not is_installed("openvino"):
        raise MissingDependencyError(f"{rule}; pip install 'thinsection[openvino]'")
    return import_module("openvino")
