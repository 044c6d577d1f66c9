"""Engine of CPUs beside PyTorch: OpenVINO, with the same graph converted.

A converted graph is stored in the user's cache by the weights' hash. For each kind of CPU, the
cache also stores how far its embeddings of random tiles (with a fixed seed) are from PyTorch's.

Shapes: pixels [B, 3, E, E] of E = `input_px`; embeddings [B, D] and tokens [B, T, C].
"""

import ctypes
import json
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from thinsection.config import user_cache_dir
from thinsection.encode.engine_choice import PRECISIONS, engine_version
from thinsection.encode.graphs import is_whole, write_graph
from thinsection.errors import InvalidInputError
from thinsection.extras import require_packages
from thinsection.files.atomic import write_json
from thinsection.files.lock import hold
from thinsection.machine import cpu_model

Network = Callable[[Tensor], tuple[Tensor, Tensor]]
Shape = tuple[int, int, int, int]

MAX_ERROR = 1e-5  # fp32: largest difference as a share of the embeddings' range
MAX_COSINE_DISTANCE = 5e-3  # bf16: largest cosine distance (1 - cosine) of an embedding
MAX_FP8_DISTANCE = 1e-2  # fp8: the same
# advice for madvise(2): pages of a shared mapping are read again on access
_MADV_DONTNEED = 4
_MODEL = "model.xml"
_WEIGHTS = "model.bin"
_FILES = (_MODEL, _WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """Difference of another network's embeddings of random tiles from PyTorch's in fp32.

    The tiles have a fixed seed. The fields are the keys of the stored file.
    """

    error: float  # largest difference, as a share of the range
    angle: float  # largest cosine distance (1 - cosine)

    def passes(self, precision: str) -> bool:
        """True if the difference is within the precision's tolerance."""
        if precision == "fp32":
            return self.error <= MAX_ERROR
        if precision == "fp8":
            return self.angle <= MAX_FP8_DISTANCE
        return self.angle <= MAX_COSINE_DISTANCE


class OpenVinoNetwork:
    """Converted network for batches of B tiles; smaller batches are padded. Thread-safe.

    The embedding of a tile does not depend on the other tiles of its batch.

    Memory: the weights in OpenVINO's layout (twice while they are converted), and activations of B
    tiles.
    """

    def __init__(self, model: Path, shape: Shape, precision: str) -> None:
        self.engine = engine_version("openvino")
        self._rows = shape[0]
        self._lock = threading.Lock()
        options = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": PRECISIONS[precision],
            # otherwise processes on one machine would share the first cores
            "ENABLE_CPU_PINNING": False,
        }
        compiled = _core().compile_model(model, "CPU", options)
        self._request = compiled.create_infer_request()
        _forget_pages(model.with_name(_WEIGHTS))

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(pixels)
        if rows < self._rows:
            filling = pixels.new_zeros(self._rows - rows, *pixels.shape[1:])
            pixels = torch.cat([pixels, filling])
        with self._lock:
            results = self._request.infer(
                [pixels.contiguous().numpy()], share_inputs=True, share_outputs=True
            )
            pooled, tokens = (
                torch.from_numpy(part[:rows].copy()) for part in results.values()
            )
        return pooled, tokens


def converted_network(
    network: nn.Module,
    make_pixels: Callable[[], Tensor],
    shape: Shape,
    precision: str,
    *,
    weights_hash: str,
    cache_dir: Path | None = None,
) -> tuple[OpenVinoNetwork, SelfCheck]:
    """Network (in fp32 on the CPU) for OpenVINO: from the cache, or converted and stored there.

    `make_pixels` is called only if the network must be converted or compared. Afterwards `network`
    is on the meta device: its weights are freed.

    Memory: for conversion, half of the weights in addition, and their size on disk; for
    compilation, twice the weights.
    Raises InvalidInputError: a precision or a network that OpenVINO does not support.
    """
    folder, check_path = _graph_files(cache_dir, weights_hash, shape, precision)
    if not is_whole(folder, _FILES):
        with hold(folder.with_suffix(".lock")):
            # another process may have made it while this one waited for the lock
            if not is_whole(folder, _FILES):
                _convert(network, make_pixels(), folder)
    pixels = None
    if not check_path.exists():
        pixels = make_pixels()
        with torch.no_grad():
            expected = network(pixels)[0]
    network.to("meta")
    converted = OpenVinoNetwork(folder / _MODEL, shape, precision)
    if pixels is not None:
        check = compared(converted(pixels)[0], expected)
        write_json(check_path, asdict(check))
    return converted, _read_check(check_path)


def stored_network(
    shape: Shape, precision: str, *, weights_hash: str, cache_dir: Path | None = None
) -> tuple[OpenVinoNetwork, SelfCheck]:
    """Network that `converted_network` has converted and compared on this CPU before.

    Memory: for compilation, twice the weights.
    Raises InvalidInputError: an unsupported precision, no such graph, or one that gives other
    embeddings than PyTorch.
    """
    folder, check_path = _graph_files(cache_dir, weights_hash, shape, precision)
    # without weights there is nothing to convert
    if not (is_whole(folder, _FILES) and check_path.exists()):
        raise InvalidInputError(
            "network must have weights, or a graph that was checked on this CPU, got neither"
        )
    check = _read_check(check_path)
    if not check.passes(precision):
        raise InvalidInputError("network must give PyTorch's embeddings, got others")
    return OpenVinoNetwork(folder / _MODEL, shape, precision), check


def _graph_files(
    cache_dir: Path | None, weights_hash: str, shape: Shape, precision: str
) -> tuple[Path, Path]:
    """Folder of the graph of these weights, this shape and these versions; file of its comparison.

    Graphs are compared with PyTorch for each precision and kind of CPU.

    Raises InvalidInputError: a precision in which OpenVINO does not compute here.
    """
    if precision not in PRECISIONS:
        raise InvalidInputError(
            f"precision must be fp32 or bf16 with OpenVINO, got {precision!r}"
        )
    _openvino()
    key = f"{weights_hash}|{shape}|{version('openvino')}|{torch.__version__}"
    graph_hash = sha256(key.encode()).hexdigest()[:32]
    cpu_hash = sha256(cpu_model().encode()).hexdigest()[:16]
    folder = (cache_dir or user_cache_dir()) / "openvino" / graph_hash
    return folder, folder / f"{precision}-{cpu_hash}.json"


def _read_check(path: Path) -> SelfCheck:
    return SelfCheck(**json.loads(path.read_text(encoding="utf-8")))


def _convert(network: nn.Module, pixels: Tensor, folder: Path) -> None:
    """Write the complete graph or nothing; `convert_model` is not used, as it sends usage data."""

    def write(unfinished: Path) -> None:
        _write_graph(network, pixels, unfinished / _MODEL)

    write_graph(folder, _FILES, write, remedy='pass engine="torch"')


def _write_graph(network: nn.Module, pixels: Tensor, path: Path) -> None:
    openvino = _openvino()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    frontend = FrontEndManager().load_by_framework("pytorch")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # tracing warns that shapes become fixed, which is intended
            warnings.simplefilter("ignore")
            traced = TorchScriptPythonDecoder(
                network,
                example_input=pixels,
                # the self-check compares embeddings instead
                trace_kwargs={"check_trace": False},
            )
            graph = frontend.convert(frontend.load(traced))
        graph.reshape(list(pixels.shape))
        openvino.save_model(graph, path, compress_to_fp16=False)
    except OSError:
        raise
    except Exception as error:  # tracing and conversion may raise any error
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise InvalidInputError(
            f"network must convert to OpenVINO, got {reason}"
        ) from error


def compared(embeddings: Tensor, expected: Tensor) -> SelfCheck:
    """Largest difference between two embeddings of each tile, [B, D] each."""
    embeddings = embeddings.double()
    expected = expected.double()
    value_range = (expected.max() - expected.min()).clamp_min(1e-12)
    error = (embeddings - expected).abs().max() / value_range
    angle = 1 - torch.nn.functional.cosine_similarity(embeddings, expected).min()
    return SelfCheck(
        error=float(error.nan_to_num(1.0)), angle=float(angle.nan_to_num(1.0))
    )


def _forget_pages(path: Path) -> None:
    """Release the pages of a mapped file after they were copied, so that they use no memory."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith(str(path.resolve())):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            length = ctypes.c_size_t(end - start)
            libc.madvise(ctypes.c_void_p(start), length, _MADV_DONTNEED)


@cache
def _core() -> Any:
    """OpenVINO's core, one for the life of the process.

    Its CPU plugin sets a stack for signals, and frees it when the core ends. Of two cores of which
    the older ends first, the thread is left with a freed stack, and the next signal kills the
    process.
    """
    return _openvino().Core()


def _openvino() -> ModuleType:
    require_packages("--engine openvino", "openvino")
    return import_module("openvino")
