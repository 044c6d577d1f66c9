"""Engine that compiles a network once for a device, with PyTorch's AOTInductor.

The package takes uint8 tiles of the network's input size, so that normalisation is part of its
first kernel. It has a fixed number of rows; smaller batches are filled up. It holds no weights:
those that PyTorch loaded are handed to it. On CUDA its launches are recorded once as a CUDA graph.

A package is code. It is read only from the user's own cache, from folders that nobody else may
write, never from a results folder. It is named by a hash of the weights, the network, the versions
and the device; a manifest has the digest of its bytes.

Shapes: tiles [B, E, E, 3] of E = `input_px`; colours [2, 3]; embeddings [B, D], tokens [B, T, C].
"""

import errno
import json
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinsection.config import from_mapping, user_cache_dir
from thinsection.encode.backbone import Backbone
from thinsection.encode.engine import compared
from thinsection.encode.engine_choice import engine_version
from thinsection.encode.graphs import check_private, is_whole, write_graph
from thinsection.encode.preprocessing import colours_of
from thinsection.encode.registry import EncoderSpec
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.files.atomic import read_json, write_json
from thinsection.files.lock import hold
from thinsection.machine import cpu_model
from thinsection.types import counted
from thinsection.weights.origin import installed_version
from thinsection.weights.placement import DTYPES, Placement

MIN_COSINE = 0.9999  # half precision: to PyTorch in the same precision
MIN_COSINE_FP8 = 0.999  # fp8, where the last bit of an activation may change its code
MAX_ERROR = 1e-5  # fp32: largest difference as a share of the embeddings' range
_PACKAGE = "network.pt2"
_CONSTANTS = "constants.safetensors"  # of the graph, other than weights
_FILES = (_PACKAGE, _CONSTANTS)
_CHECK = "check.json"
# packages whose versions change a compiled network
_PACKAGES = ("thinsection", "torch", "triton", "timm", "transformers")
_OPTIONS = {"aot_inductor.package_constants_in_so": False}
# errors of the disk, in contrast to those of the compiler's own files and programs
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_WARM_UPS = 3  # passes before a CUDA graph is recorded, as PyTorch advises
_log = logging.getLogger(__name__)

Embed = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class CompiledCheck:
    """Comparison of a compiled network with PyTorch on seeded tiles, stored beside it.

    The fields are the keys of the stored file.
    """

    rows: int  # tiles of a pass
    compile_s: float
    cosine: float  # lowest cosine to PyTorch's embeddings in the same precision
    error: float  # largest difference to them, as a share of the range
    distance: float  # largest cosine distance to PyTorch's embeddings in fp32
    torch_distance: float  # the same of PyTorch in the precision of the network

    def passes(self, precision: str) -> bool:
        """True if the network gives PyTorch's embeddings, within the precision's tolerance."""
        if precision == "fp32":
            return self.error <= MAX_ERROR
        return self.cosine >= (MIN_COSINE_FP8 if precision == "fp8" else MIN_COSINE)

    def __str__(self) -> str:
        return (
            f"cosine {self.cosine:.6f} to PyTorch, cosine distance to fp32 {self.distance:.1e}, "
            f"PyTorch's {self.torch_distance:.1e}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Compilation:
    """A network, and the device and precision for which it is compiled.

    Args:
        backbone: network on its device, with its weights.
        spec: spec of the encoder.
        placement: device and precision.
        weights_hash: hash of the weights, before any rounding.
        batch_size: tiles of a batch of the caller; a pass has as many, or a part of them.
        cache_dir: folder in place of the user's cache.
    """

    backbone: Backbone
    spec: EncoderSpec
    placement: Placement
    weights_hash: str
    batch_size: int
    cache_dir: Path | None = None

    @property
    def root(self) -> Path:
        """Folder of all compiled networks."""
        return (self.cache_dir or user_cache_dir()) / "compiled"

    @property
    def folder(self) -> Path:
        """Folder of this network."""
        spec = self.spec
        parts = [
            self.weights_hash,
            str(spec.architecture),
            spec.pooling,
            spec.input_px,
            self.placement.precision,
            self.batch_size,
            device_kind(self.placement.device),
            [installed_version(name) for name in _PACKAGES],
        ]
        return self.root / sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def stored_check(self) -> CompiledCheck | None:
        """Comparison of the stored network; None if there is none with the bytes that were written.

        Raises InvalidInputError: others may write the folder.
        """
        if not self.folder.exists():
            return None
        self._check_private()
        with suppress(OSError, ValueError, ConfigError):
            check = from_mapping(CompiledCheck, read_json(self.folder / _CHECK))
            if is_whole(self.folder, _FILES):
                return check
        return None

    def build(
        self,
        num_rows: Callable[[], int],
        tiles: Tensor,
        *,
        in_torch: Embed,
        in_fp32: Embed,
    ) -> CompiledCheck:
        """Compiles and compares the network, unless another process has done so.

        The functions are called only if it is compiled here.

        Args:
            num_rows: returns the number of rows of a pass.
            tiles: uint8 tiles of the input size (N, E, E, 3), on the device.
            in_torch: returns their embeddings by PyTorch, in the precision of the network.
            in_fp32: returns them in fp32, of the weights as they were loaded.

        Memory: the weights once more in fp32, for `in_fp32`, and what the compiler takes.
        Raises InvalidInputError: the network does not compile. StoreError: the disk is full.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_private()
        with hold(self.folder.with_suffix(".lock"), on_wait=_log.warning):
            # another process may have made it while this one waited for the lock
            stored = self.stored_check()
            if stored is not None:
                return stored
            name = self.spec.name
            device = self.placement.device
            _log.warning("compiling %s for %s, once; this takes a minute", name, device)
            start = time.perf_counter()
            rows = num_rows()
            write_graph(
                self.folder,
                _FILES,
                lambda folder: self._compile(rows, folder),
                remedy='pass engine="torch"',
            )
            seconds = time.perf_counter() - start
            network = self.load(rows)
            colours = colours_of(self.spec.mean, self.spec.std, device)
            # every row of a pass is compared
            copies = -(-rows // len(tiles))
            whole = tiles.repeat(copies, 1, 1, 1)[:rows]
            embeddings = network(whole, colours)[0].float()
            expected = in_torch().repeat(copies, 1)[:rows]
            exact = in_fp32().repeat(copies, 1)[:rows]
            to_torch = compared(embeddings, expected)
            check = CompiledCheck(
                rows=rows,
                compile_s=round(seconds, 2),
                cosine=1 - to_torch.angle,
                error=to_torch.error,
                distance=compared(embeddings, exact).angle,
                torch_distance=compared(expected, exact).angle,
            )
            write_json(self.folder / _CHECK, asdict(check))
            _log.warning("compiled %s in %.0f s: %s", name, seconds, check)
            return check

    def load(self, rows: int) -> "CompiledNetwork":
        """The stored network, with the weights of the backbone.

        Raises InvalidInputError: it cannot be loaded here.
        """
        self._check_private()
        return CompiledNetwork(self, rows)

    def _check_private(self) -> None:
        """Raises InvalidInputError: others may write the network or the folder of all."""
        for folder in (self.root, self.folder):
            if folder.exists():
                check_private(folder)

    def _compile(self, rows: int, folder: Path) -> None:
        """Writes the package, and the constants that are no weights."""
        from safetensors.torch import save_file
        from torch._inductor import aoti_compile_and_package

        module = _WithNormalisation(self.backbone, self.placement)
        edge = self.spec.input_px
        device = self.placement.device
        tiles = torch.zeros((rows, edge, edge, 3), dtype=torch.uint8, device=device)
        inputs = (tiles, colours_of(self.spec.mean, self.spec.std, device))
        try:
            with torch.no_grad(), _private_compiler(folder):
                program = torch.export.export(module, inputs)
                aoti_compile_and_package(
                    program,
                    package_path=str(folder / _PACKAGE),
                    inductor_configs=_OPTIONS,
                )
        except Exception as error:  # tracing and compilation may raise any error
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise
            lines = str(error).splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise InvalidInputError(f"network must compile, got {reason}") from error
        weights = _weights_of(module)
        constants = {
            name: value.detach().cpu().contiguous()
            for name, value in program.constants.items()
            if isinstance(value, Tensor) and name not in weights
        }
        save_file(constants, folder / _CONSTANTS)


class CompiledNetwork:
    """Loaded package for batches of at most `rows` tiles. Thread-safe.

    The embedding of a tile does not depend on the other tiles of its batch.

    Memory: activations and results of `rows` tiles, kept on CUDA by the graph of launches; the
    weights are those of the backbone.
    """

    def __init__(self, compilation: Compilation, rows: int) -> None:
        self.engine = engine_version("compiled")
        self.rows = rows
        device = compilation.placement.device
        edge = compilation.spec.input_px
        self._lock = threading.Lock()
        self._run = _loaded_package(compilation)
        self._tiles = torch.zeros(
            (rows, edge, edge, 3), dtype=torch.uint8, device=device
        )
        self._colours = colours_of(
            compilation.spec.mean, compilation.spec.std, device
        ).clone()
        self._graph: _CudaGraph | None = None
        # of the last results, which the next pass overwrites, in whatever queue it is
        self._read: torch.cuda.Event | None = None
        self._device = device
        if device.type == "cuda":
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            try:
                self._graph = _CudaGraph(self._pass, device)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                self.engine += f" (no CUDA graph: {reason})"

    def __call__(
        self, tiles: Tensor, colours: Tensor, *, with_tokens: bool = False
    ) -> tuple[Tensor, ...]:
        """Embeddings, and tokens if requested, of uint8 tiles of the input size."""
        count = len(tiles)
        with self._lock:
            if self._read is not None:
                torch.cuda.current_stream(self._device).wait_event(self._read)
            self._tiles[:count].copy_(tiles)
            self._colours.copy_(colours)
            answers = self._pass() if self._graph is None else self._graph.replay()
            # the next pass writes into the same memory
            requested = answers if with_tokens else answers[:1]
            results = tuple(answer[:count].clone() for answer in requested)
            if self._read is not None:
                self._read.record(torch.cuda.current_stream(self._device))
        return results

    def _pass(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(self._run(self._tiles, self._colours))


class _CudaGraph:
    """Launches of a pass, recorded once and replayed with one call of the host.

    The device may be another one than the current device of this thread.

    Raises RuntimeError: they cannot be recorded, or give other numbers when they are replayed.
    """

    def __init__(
        self, one_pass: Callable[[], tuple[Tensor, ...]], device: torch.device
    ) -> None:
        current = torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                expected = one_pass()
        current.wait_stream(stream)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        # decode threads of this process may lock pages meanwhile; PyTorch's own queue for recording
        # is on the current device
        with torch.cuda.graph(
            self._graph, stream=stream, capture_error_mode="thread_local"
        ):
            self._answers = one_pass()
        # a graph without launches would leave what is there
        for answer in self._answers:
            answer.fill_(-1)
        self._graph.replay()
        torch.cuda.synchronize(device)
        pairs = zip(self._answers, expected, strict=True)
        if not all(torch.equal(replayed, plain) for replayed, plain in pairs):
            raise RuntimeError("replayed launches give other embeddings")

    def replay(self) -> tuple[Tensor, ...]:
        """Results of a pass, in memory that the next pass overwrites."""
        self._graph.replay()
        return self._answers


class _WithNormalisation(nn.Module):
    """Backbone with its normalisation and its arithmetic, for uint8 tiles."""

    def __init__(self, backbone: Backbone, placement: Placement) -> None:
        super().__init__()
        self.backbone = backbone
        self._placement = placement

    def forward(self, tiles: Tensor, colours: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = colours
        pixels = tiles.float().div(255.0).sub(mean).div(std).permute(0, 3, 1, 2)
        device, precision = self._placement
        is_half = precision != "fp32"
        dtype = DTYPES[precision]
        with torch.autocast(device.type, dtype) if is_half else nullcontext():
            embeddings, tokens = self.backbone(pixels)
        return embeddings.float(), tokens.float()


def device_kind(device: torch.device) -> str:
    """Text that tells devices apart that need other code."""
    if device.type != "cuda":
        return f"{device.type}|{cpu_model()}"
    card = torch.cuda.get_device_properties(device)
    return f"cuda {torch.version.cuda}|{card.name}|{card.major}.{card.minor}"


def _weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _loaded_package(compilation: Compilation) -> Callable[..., list[Tensor]]:
    """Package with the backbone's weights and the stored constants.

    Raises InvalidInputError: it cannot be loaded here.
    """
    from safetensors.torch import load_file
    from torch._inductor import aoti_load_package

    device, _ = compilation.placement
    module = _WithNormalisation(compilation.backbone, compilation.placement)
    index = -1 if device.index is None else device.index
    try:
        package: Any = aoti_load_package(
            str(compilation.folder / _PACKAGE), device_index=index
        )
        constants = load_file(compilation.folder / _CONSTANTS, device=str(device))
        values = _weights_of(module) | constants
        wanted = package.get_constant_fqns()
        missing = [name for name in wanted if name not in values]
        if missing:
            raise InvalidInputError(
                f"compiled network must find its constants, got no {missing[0]!r}"
            )
        # the package refers to these tensors, and the backbone keeps them
        package.load_constants(
            {name: values[name] for name in wanted},
            check_full_update=True,
            user_managed=True,
        )
        package.kept = values
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InvalidInputError(f"compiled network must load, got {reason}") from error
    return cast(Callable[..., list[Tensor]], package)


@contextmanager
def _private_compiler(folder: Path) -> Iterator[None]:
    """The compiler with its own files below `folder`, not in the folder of all temporary files.

    Those of the folder for temporary files have a name that others can guess.
    """
    from torch._inductor.async_compile import shutdown_compile_workers
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=str(folder)), warnings.catch_warnings():
        # PyTorch warns of its own deprecated calls
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            # otherwise processes of the compiler stay for the life of this one
            shutdown_compile_workers()


def rows_within(batch_size: int, rate: Callable[[int], float]) -> int:
    """Fewest rows of a pass at nearly the best rate: the batch, a half or a quarter of it.

    Args:
        batch_size: tiles of a batch of the caller.
        rate: measures tiles/s with so many rows; 0 where they do not fit.
    """
    sizes = [max(1, batch_size // parts) for parts in (4, 2, 1)]
    rates = {size: rate(size) for size in dict.fromkeys(sizes)}
    best = max(rates.values())
    if best == 0:
        raise InvalidInputError(
            f"a batch must fit the device, got none of {counted(sizes[0], 'tile')}"
        )
    return next(size for size in rates if rates[size] >= 0.98 * best)
