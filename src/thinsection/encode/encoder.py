"""Tile encoders: the protocol that the pipeline knows, and the one that runs a torch network."""

import contextlib
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.encode.backbone import Backbone
from thinsection.encode.placement import DTYPES, Placement, Precision
from thinsection.encode.preprocess import as_uint8_batch, preprocess
from thinsection.encode.spec import EncoderSpec
from thinsection.encode.weights import hash_state_dict
from thinsection.errors import InvalidInputError

TileBatch = Tensor | npt.NDArray[Any]  # uint8 [B, H, W, 3]

# tiles that a CPU puts through the network at once: some per cent slower than 32 at most, in a
# fraction of the memory, and with a peak that hardly varies (benchmarks/bench_heap.py)
CPU_TILES = 4


@runtime_checkable
class TileEncoder(Protocol):
    """Tiles in, one vector per tile out. The same batch gives the same bytes."""

    @property
    def spec(self) -> EncoderSpec:
        """What was declared."""

    @property
    def dim(self) -> int:
        """Length of an embedding."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def precision(self) -> str:
        """fp32, fp16 or bf16: what matrix products are computed in."""

    @property
    def weights_hash(self) -> str:
        """sha256 of the weights' names and bytes."""

    def encode(self, tiles_u8: TileBatch) -> Tensor:
        """float32 [B, D] on `device`."""

    def encode_tokens(self, tiles_u8: TileBatch) -> Tensor:
        """float32 [B, T, C] on `device`: patch tokens in row-major order, without prefix tokens."""


class NetworkTileEncoder:
    """A `Backbone` with its preprocessing, on one device, in one precision."""

    def __init__(self, spec: EncoderSpec, backbone: Backbone, placement: Placement) -> None:
        self._spec = spec
        self._placement = placement
        self.backbone = backbone.eval().requires_grad_(False)
        # convolutions are up to twice as fast with channels last; linear layers do not care
        self.backbone.to(placement.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def __repr__(self) -> str:
        return f"<{self.spec.name}: {self.dim}-d, {self.precision} on {self.device}>"

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    @property
    def dim(self) -> int:
        return self._spec.dim

    @property
    def device(self) -> torch.device:
        return self._placement.device

    @property
    def precision(self) -> Precision:
        return self._placement.precision

    @property
    def placement(self) -> Placement:
        """Device and precision with the reason for them."""
        return self._placement

    @cached_property
    def weights_hash(self) -> str:
        return hash_state_dict(self.backbone.network.state_dict())

    def encode(self, tiles_u8: TileBatch) -> Tensor:
        """float32 [B, D] embeddings on `device`.

        Memory:
            `thinsection.encode.batch_bytes` says how much a batch takes. On a CPU the network sees
            `CPU_TILES` at once, so that a larger batch costs its tiles and embeddings only.

        Raises:
            InvalidInputError: tiles are not uint8 [B, H, W, 3], or too small.
        """
        return self._through(self.backbone, tiles_u8)

    def encode_tokens(self, tiles_u8: TileBatch) -> Tensor:
        """float32 [B, T, C] patch tokens on `device`.

        Raises:
            InvalidInputError: the encoder has no dense map, or the tiles are of the wrong form.
        """
        if not self._spec.supports_tokens:
            raise InvalidInputError(f"encoder must have patch tokens, got {self._spec.name!r}")
        return self._through(self.backbone.tokens, tiles_u8)

    def tiles_at_once(self, batch_size: int) -> int:
        """How many tiles of a batch the network sees at once on this device."""
        return min(batch_size, CPU_TILES) if self.device.type == "cpu" else batch_size

    def _through(self, network: Callable[[Tensor], Tensor], tiles_u8: TileBatch) -> Tensor:
        """What the network makes of a batch, float32, part by part."""
        batch = as_uint8_batch(tiles_u8)
        step = max(1, self.tiles_at_once(len(batch)))
        with torch.no_grad(), self._arithmetic():
            first = network(self._pixels(batch[:step])).float()
            if len(batch) <= step:
                return first
            found = first.new_empty((len(batch), *first.shape[1:]))
            found[:step] = first
            for start in range(step, len(batch), step):
                found[start : start + step] = network(self._pixels(batch[start : start + step]))
        return found

    def _pixels(self, tiles_u8: Tensor) -> Tensor:
        return preprocess(tiles_u8.to(self.device, non_blocking=True), self._spec)

    @contextlib.contextmanager
    def _arithmetic(self) -> Any:
        """Autocast to the precision; on CUDA also one cuDNN algorithm, and no TF32 in fp32."""
        with contextlib.ExitStack() as stack:
            if self.precision != "fp32":
                stack.enter_context(torch.autocast(self.device.type, DTYPES[self.precision]))
            if self.device.type == "cuda":
                exact = self.precision == "fp32"
                stack.enter_context(
                    torch.backends.cudnn.flags(
                        enabled=True, deterministic=True, allow_tf32=not exact
                    )
                )
            yield
