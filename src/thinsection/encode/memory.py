"""How much memory a batch takes, known before it runs; and the heap of a process on the CPU.

A dry pass runs preprocessing and network on the meta device, where tensors have no data, and counts
every storage from its creation to its release. For scratch space inside operations a fixed
allowance is added to the peak of that sum.
"""

import ctypes
import functools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from thinsection.encode.encoder import CPU_TILES, NetworkTileEncoder, preprocess
from thinsection.errors import BudgetError, require
from thinsection.types import MIB, format_bytes

# of convolutions and the allocator: EfficientNet-Lite0 on a CPU took 8 MiB beyond its 4 tiles
SCRATCH_BYTES = 16 * MIB
HALF = (torch.float16, torch.bfloat16)
# of transformers, whose products pack their operands: ViT-S/16 took up to 1.37 times the count
TOKEN_MARGIN = 1.4
# OpenVINO's own code, and its graph of a network: 60 MiB for EfficientNet-Lite0 and for ViT-S/16
OPENVINO_BYTES = 64 * MIB
# a CPU's second part of a batch finds holes in the heap between what the first one freed: with them
# EfficientNet-Lite0 took 0.9 to 1.4 times the count and scratch, ViT-S and ResNets less
HOLES_MARGIN = 1.5

# numbers of glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of all storages that operations make, and remembers the highest sum."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # a view of a weight comes out of an operation too, but is no new storage
        self._live = {t.untyped_storage()._cdata: 0 for t in weights}
        self.peak_bytes: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._live:
            self._live[key] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, key, None)
            self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))


class _FusedAttention(TorchFunctionMode):
    """Attention that holds its output only, as the fused kernels of CPUs and GPUs do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args)) | (kwargs or {})
        return given["query"].new_empty(
            (*given["query"].shape[:-1], given["value"].shape[-1])
        )


def weights_bytes(encoder: NetworkTileEncoder, *, engine: str | None = None) -> int:
    """Bytes of the weights, with the half-precision copies that autocast makes of them.
    By OpenVINO with the library; loading takes as much again. `engine`: None: the encoder's own."""
    weights = encoder.backbone.state_dict().values()
    total: int = sum(t.nbytes for t in weights)
    if (engine or encoder.engine).startswith("openvino"):
        return total + OPENVINO_BYTES
    half = encoder.precision != "fp32"
    # those that are stored in half precision need no copy (`store_products_as`)
    to_copy: int = sum(t.nbytes for t in weights if t.dtype not in HALF)
    return total + half * to_copy // 2


def batch_bytes(
    encoder: NetworkTileEncoder,
    *,
    batch_size: int,
    tile_px: int | None = None,
    at_once: int | None = None,
    tokens: bool = False,
) -> int:
    """Peak bytes that `encode` holds for one batch, the uint8 tiles included, the weights not.

    On a CPU that is `CPU_TILES` tiles in the network, beside the other tiles and all embeddings.
    Counted in float32 also where half precision needs less, as PyTorch takes it: OpenVINO takes
    less. `tile_px`: None: of the encoder's tiles; `at_once`: tiles in the network at once, None: as
    on the encoder's device; `tokens`: for `encode_with_tokens` instead.
    """
    require(batch_size >= 1, "batch_size must be >= 1", batch_size)
    edge = tile_px or encoder.spec.tile_px
    at_once = at_once or encoder.tiles_at_once(batch_size)
    waiting = batch_size - at_once
    held, count, channels = dry_pass(encoder, at_once, edge)
    found = 4 * count * channels if tokens else 0
    held += at_once * found
    if not waiting:
        return held
    # on a CPU the tokens of all tiles lie beside those of the part that is in the network
    return int(held * HOLES_MARGIN) + waiting * (
        edge * edge * 3 + encoder.dim * 4 + found
    )


def dry_pass(
    encoder: NetworkTileEncoder, num_tiles: int, edge: int
) -> tuple[int, int, int]:
    """Peak bytes of so many tiles in the network together, and a tile's tokens (T, C)."""
    backbone = encoder.backbone
    weights = (*backbone.named_parameters(), *backbone.named_buffers())
    kinds = (torch.float32 if t.is_floating_point() else t.dtype for _, t in weights)
    counted = zip(weights, kinds)  # in float32 also where they are stored narrower
    state = {
        n: torch.empty_like(t, device="meta", dtype=kind) for (n, t), kind in counted
    }
    counter = _LiveStorages(state.values())
    with torch.no_grad(), counter, _FusedAttention():
        tiles = torch.empty(
            (num_tiles, edge, edge, 3), dtype=torch.uint8, device="meta"
        )
        _, tokens = functional_call(backbone, state, (preprocess(tiles, encoder.spec),))
    margin = TOKEN_MARGIN if backbone.num_prefix_tokens else 1.0
    return int(counter.peak_bytes * margin) + SCRATCH_BYTES, *tokens.shape[1:]


def largest_batch_size(
    encoder: NetworkTileEncoder, *, budget_bytes: int, tile_px: int | None = None
) -> int:
    """The largest batch whose `batch_bytes` fit into the budget; a BudgetError where none does."""
    bytes_of = functools.partial(batch_bytes, encoder, tile_px=tile_px)
    one, got = bytes_of(batch_size=1), f"{format_bytes(budget_bytes)}; raise --memory"
    rule = f"memory budget must hold one tile of {encoder.spec.name!r}, {format_bytes(one)}"
    require(one <= budget_bytes, rule, got, error=BudgetError)
    on_cpu, knee = (
        encoder.device.type == "cpu",
        CPU_TILES + 1,
    )  # from there on a tile costs less
    in_parts = on_cpu and bytes_of(batch_size=knee) <= budget_bytes
    start = knee if in_parts else 1
    held, next_held = (bytes_of(batch_size=n) for n in (start, start + 1))
    # linear in the batch, but for what the first tile holds beyond that
    found = start + (budget_bytes - held) // max(next_held - held, 1)
    return min(found, CPU_TILES) if on_cpu and not in_parts else found


def keep_freed_memory() -> bool:
    """Makes malloc keep what is freed, for the rest of this process; False where there is no glibc.

    By default each tensor above 32 MiB is mapped anew, its pages cleared at first touch: up to half
    of an encoder's CPU time (benchmarks/bench_heap.py). The heap then stays at its peak and grows
    by holes: for a whole process to decide. A run calls it, `load_encoder` does not.
    """
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * MIB))
    libc = _glibc()
    taken = [libc is not None and libc.mallopt(*option) == 1 for option in options]
    return all(taken)


@functools.cache
def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
