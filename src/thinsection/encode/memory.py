"""Memory of a batch, predicted before it runs.

`simulate_pass` runs preprocessing and network on the meta device, where tensors have no data. It
adds up the bytes of every storage from its creation to its release. A fixed allowance for scratch
space inside operations is added to the peak of that sum.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from thinsection.deprecations import moved_names
from thinsection.encode.encoder import NetworkTileEncoder
from thinsection.encode.preprocessing import preprocess
from thinsection.encode.sizes import (
    CPU_TILES,
    TOKEN_MARGIN,
    batch_peak,
    weights_in_memory,
)
from thinsection.errors import BudgetError, InvalidInputError
from thinsection.types import MIB, format_bytes

# convolutions and the allocator: EfficientNet-Lite0 on a CPU took 8 MiB more than its 4 tiles
SCRATCH_BYTES = 16 * MIB
HALF = (torch.float16, torch.bfloat16)
# types of weights that autocast does not copy
_NOT_COPIED = (*HALF, torch.float8_e4m3fn)


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the bytes of all storages that operations create, and stores the highest sum."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # operations also return views of weights, which are not new storages
        self._live = {weight.untyped_storage()._cdata: 0 for weight in weights}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._live:
                self._live[key] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, key, None)
                self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return result


class _OnlyOutputs(TorchFunctionMode):
    """Attention and FP8 products that allocate only their output, in float32.

    The fused kernels of CPUs and GPUs do so.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch._scaled_mm:
            codes, weights = args
            assert isinstance(codes, Tensor)
            assert isinstance(weights, Tensor)
            return codes.new_empty((len(codes), weights.shape[1]), dtype=torch.float32)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = ("query", "key", "value")
        arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
        query = arguments["query"]
        value = arguments["value"]
        assert isinstance(query, Tensor)
        assert isinstance(value, Tensor)
        return query.new_empty((*query.shape[:-1], value.shape[-1]))


def weights_bytes(encoder: NetworkTileEncoder, *, engine: str | None = None) -> int:
    """Bytes of the weights, with the half-precision copies that autocast makes of them.

    With OpenVINO the library is included; loading takes the same amount again. By default `engine`
    is the engine of the encoder.
    """
    weights = encoder.backbone.state_dict().values()
    total: int = sum(weight.nbytes for weight in weights)
    # weights stored in half precision need no copy (`cast_matmul_weights`)
    copied: int = sum(
        weight.nbytes for weight in weights if weight.dtype not in _NOT_COPIED
    )
    if encoder.precision == "fp8":
        # `to_fp8` has rounded them
        return total + copied // 2
    return weights_in_memory(
        total,
        copied_bytes=copied,
        precision=encoder.precision,
        engine=engine or encoder.engine,
    )


def batch_bytes(
    encoder: NetworkTileEncoder,
    *,
    batch_size: int,
    tile_px: int | None = None,
    at_once: int | None = None,
    tokens: bool = False,
) -> int:
    """Peak bytes of `encode` for one batch, with the uint8 tiles and without the weights.

    On a CPU, `CPU_TILES` tiles are in the network at the same time; the other tiles and all
    embeddings are added. All numbers are counted in float32 for PyTorch; half precision and
    OpenVINO need less.

    Args:
        encoder: encoder of the batch.
        batch_size: tiles of the batch.
        tile_px: edge of a tile in pixels; None for the encoder's own tile size.
        at_once: number of tiles in the network at the same time; None for the number on the
            encoder's device.
        tokens: True counts `encode_with_tokens` instead.
    """
    if batch_size < 1:
        raise InvalidInputError(f"batch_size must be >= 1, got {batch_size}")
    edge = tile_px or encoder.spec.tile_px
    at_once = at_once or encoder.tiles_at_once(batch_size)
    network_bytes, num_tokens, channels = simulate_pass(encoder, at_once, edge)
    token_bytes = 4 * num_tokens * channels if tokens else 0
    in_network = network_bytes + at_once * token_bytes
    return batch_peak(
        in_network,
        num_waiting=batch_size - at_once,
        # on a CPU, the tokens of all tiles are in memory besides the tiles in the network
        waiting_bytes=edge * edge * 3 + encoder.dim * 4 + token_bytes,
    )


def simulate_pass(
    encoder: NetworkTileEncoder, num_tiles: int, edge: int
) -> tuple[int, int, int]:
    """Peak bytes for this number of tiles in the network, and shape (T, C) of a tile's tokens."""
    backbone = encoder.backbone
    state = {}
    for name, weight in (*backbone.named_parameters(), *backbone.named_buffers()):
        # counted in float32, also if weights are stored in a smaller type
        dtype = torch.float32 if weight.is_floating_point() else weight.dtype
        state[name] = torch.empty_like(weight, device="meta", dtype=dtype)
    shape = (num_tiles, edge, edge, 3)
    counter = _LiveStorages(state.values())
    # rows of mean and std are kept for all later passes, and are not counted
    preprocess(
        torch.empty((1, *shape[1:]), dtype=torch.uint8, device="meta"), encoder.spec
    )
    with torch.no_grad(), counter, _OnlyOutputs():
        tiles = torch.empty(shape, dtype=torch.uint8, device="meta")
        pixels = preprocess(tiles, encoder.spec)
        _, tokens = functional_call(backbone, state, (pixels,))
    margin = TOKEN_MARGIN if backbone.num_prefix_tokens else 1.0
    peak_bytes = int(counter.peak_bytes * margin) + SCRATCH_BYTES
    _, num_tokens, channels = tokens.shape
    return peak_bytes, num_tokens, channels


def largest_batch_size(
    encoder: NetworkTileEncoder, *, budget_bytes: int, tile_px: int | None = None
) -> int:
    """Largest batch whose `batch_bytes` are within the budget; BudgetError if there is none."""
    bytes_of = functools.partial(batch_bytes, encoder, tile_px=tile_px)
    one_tile = bytes_of(batch_size=1)
    if one_tile > budget_bytes:
        raise BudgetError(
            f"memory budget must be >= {format_bytes(one_tile)}, which one tile of "
            f"{encoder.spec.name!r} needs, got {format_bytes(budget_bytes)}; raise memory=..."
        )
    on_cpu = encoder.device.type == "cpu"
    # on a CPU, each tile beyond those in the network costs less
    first_in_parts = CPU_TILES + 1
    in_parts = on_cpu and bytes_of(batch_size=first_in_parts) <= budget_bytes
    start = first_in_parts if in_parts else 1
    start_bytes = bytes_of(batch_size=start)
    bytes_per_tile = bytes_of(batch_size=start + 1) - start_bytes
    # memory is linear in the batch size, except for memory that only the first tile needs
    largest = start + (budget_bytes - start_bytes) // max(bytes_per_tile, 1)
    return min(largest, CPU_TILES) if on_cpu and not in_parts else largest


# a documented name that was moved to another file
__getattr__ = moved_names(__name__)
