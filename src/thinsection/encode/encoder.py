"""Tile encoders: the protocol that the pipeline knows, and the one that runs a torch network."""

import contextlib
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
            `thinsection.encode.batch_bytes` says how much a batch takes.

        Raises:
            InvalidInputError: tiles are not uint8 [B, H, W, 3], or too small.
        """
        with torch.no_grad(), self._arithmetic():
            out: Tensor = self.backbone(self._pixels(tiles_u8))
        return out.float()

    def encode_tokens(self, tiles_u8: TileBatch) -> Tensor:
        """float32 [B, T, C] patch tokens on `device`.

        Raises:
            InvalidInputError: the encoder has no dense map, or the tiles are of the wrong form.
        """
        if not self._spec.supports_tokens:
            raise InvalidInputError(f"encoder must have patch tokens, got {self._spec.name!r}")
        with torch.no_grad(), self._arithmetic():
            out = self.backbone.tokens(self._pixels(tiles_u8))
        return out.float()

    def _pixels(self, tiles_u8: TileBatch) -> Tensor:
        batch = as_uint8_batch(tiles_u8).to(self.device, non_blocking=True)
        return preprocess(batch, self._spec)

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
