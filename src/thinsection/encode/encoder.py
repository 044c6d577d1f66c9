"""Tile encoders: the contract that the pipeline knows, and the one that runs a torch network."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.encode.backbone import Backbone
from thinsection.encode.preprocess import as_uint8_batch, preprocess
from thinsection.encode.registry import EncoderSpec, declared_encoders
from thinsection.errors import InvalidInputError
from thinsection.weights.files import hash_state_dict
from thinsection.weights.origin import Origin
from thinsection.weights.placement import DTYPES, Placement, Precision

TileBatch = Tensor | npt.NDArray[Any]  # uint8 [B, H, W, 3]

# tiles that a CPU puts through the network at once: some per cent slower than 32 at most, in a
# fraction of the memory, and with a peak that hardly varies (benchmarks/bench_heap.py)
CPU_TILES = 4


class TileEncoder(ABC):
    """Tiles in, one vector per tile out. The same batch gives the same bytes.

    A package that brings one implements the abstract members, and `encode_with_tokens` where its
    network has a dense map.
    """

    origin: Origin = Origin()  # of the weights; `load_encoder` sets it

    @property
    @abstractmethod
    def spec(self) -> EncoderSpec:
        """What was declared."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    @abstractmethod
    def precision(self) -> str:
        """fp32, fp16 or bf16: what matrix products are computed in."""

    @property
    @abstractmethod
    def weights_hash(self) -> str:
        """sha256 of the weights' names and bytes."""

    @abstractmethod
    def encode(self, tiles_u8: TileBatch) -> Tensor:
        """float32 [B, D] on `device`."""

    def encode_with_tokens(self, tiles_u8: TileBatch) -> tuple[Tensor, Tensor]:
        """What `encode` gives, to the bit, and float32 [B, T, C], from one pass.

        Tokens are patch tokens in row-major order, without prefix tokens, or the positions of a
        feature map.

        Raises:
            InvalidInputError: the encoder has no dense map.
        """
        names = ", ".join(n for n, spec in declared_encoders().items() if spec.supports_tokens)
        raise InvalidInputError(
            f"encoder must have patch tokens, got {self.spec.name!r}; these have: {names}"
        )

    def encode_tokens(self, tiles_u8: TileBatch) -> Tensor:
        """float32 [B, T, C] on `device`: the tokens of `encode_with_tokens` alone.

        Raises:
            InvalidInputError: the encoder has no dense map.
        """
        return self.encode_with_tokens(tiles_u8)[1]

    @property
    def dim(self) -> int:
        """Length D of an embedding."""
        return self.spec.dim

    @property
    def identity(self) -> dict[str, str]:
        """What decides an embedding: name, weights_hash, precision, preprocessing as JSON; and the
        hub's `revision`. A checkpoint's folder says its preprocessing, whatever it is called."""
        name, weights = self.spec.name, self.weights_hash
        found = self.origin.identity(name, precision=self.precision, weights_hash=weights)
        return found | {"preprocessing": json.dumps(self.spec.preprocessing, sort_keys=True)}

    @property
    def label(self) -> str:
        """A readable name for a folder of results: 'uni2_h', 'uni2_h_bf16', 'uni_w1a2b3c'."""
        own = self.weights_hash if self.origin.own_weights else None  # hashing takes its time
        return self.origin.label(self.spec.name, precision=self.precision, weights_hash=own)


class NetworkTileEncoder(TileEncoder):
    """A `Backbone` with its preprocessing, on one device, in one precision."""

    def __init__(
        self, spec: EncoderSpec, backbone: Backbone, placement: Placement, origin: Origin
    ) -> None:
        self._spec, self.origin = spec, origin
        self._device, self._precision = placement
        self.backbone = backbone.eval().requires_grad_(False)
        # convolutions are up to twice as fast with channels last; linear layers do not care
        self.backbone.to(self._device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def __repr__(self) -> str:
        return f"<{self.spec.name}: {self.dim}-d, {self.precision} on {self.device}>"

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def precision(self) -> Precision:
        return self._precision

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
        return self._through(tiles_u8, slice(0, 1))[0]

    def encode_with_tokens(self, tiles_u8: TileBatch) -> tuple[Tensor, Tensor]:
        """Embeddings [B, D] and patch tokens [B, T, C], float32, from one pass.

        Memory:
            That of `encode`, and 4 B T C bytes; `batch_bytes(..., tokens=True)` counts it.

        Raises:
            InvalidInputError: the encoder has no dense map, or the tiles are of the wrong form.
        """
        if not self._spec.supports_tokens:
            return super().encode_with_tokens(tiles_u8)
        pooled, tokens = self._through(tiles_u8, slice(0, 2))
        return pooled, tokens

    def tiles_at_once(self, batch_size: int) -> int:
        """How many tiles of a batch the network sees at once on this device."""
        return min(batch_size, CPU_TILES) if self.device.type == "cpu" else batch_size

    def _through(self, tiles_u8: TileBatch, wanted: slice) -> list[Tensor]:
        """What is wanted of the backbone's answer to a batch, float32, part by part."""
        batch = as_uint8_batch(tiles_u8)
        step = max(1, self.tiles_at_once(len(batch)))
        with torch.no_grad(), self._arithmetic():
            first = [out.float() for out in self._answer(batch[:step])[wanted]]
            if len(batch) <= step:
                return first
            found = [out.new_empty((len(batch), *out.shape[1:])) for out in first]
            for whole, part in zip(found, first, strict=True):
                whole[:step] = part
            del first
            for start in range(step, len(batch), step):
                parts = self._answer(batch[start : start + step])[wanted]
                for whole, part in zip(found, parts, strict=True):
                    whole[start : start + step] = part
        return found

    def _answer(self, tiles_u8: Tensor) -> tuple[Tensor, ...]:
        pixels = preprocess(tiles_u8.to(self.device, non_blocking=True), self._spec)
        found: tuple[Tensor, ...] = self.backbone(pixels)
        return found

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Autocast to the precision; on CUDA also one cuDNN algorithm, and no TF32 in fp32."""
        half, where = self.precision != "fp32", self.device.type
        flags = {"enabled": True, "deterministic": True, "allow_tf32": half}
        with (
            torch.autocast(where, DTYPES[self.precision]) if half else nullcontext(),
            torch.backends.cudnn.flags(**flags) if where == "cuda" else nullcontext(),
        ):
            yield
