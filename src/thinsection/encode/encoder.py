"""Tile encoders: the contract that the pipeline knows, and the one that runs a torch network.

Tiles are resized, cropped and normalised as torchvision's `transforms.v2` does: on a CPU in uint8,
elsewhere in float32, which is rounded. These two and Pillow's differ by at most one grey level of
255 on smooth tiles; on white noise bicubic by up to six (0.14 in the mean).

Shapes: B tiles, [B, H, W, 3] uint8 in, [B, 3, input_px, input_px] float32 to the network.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from thinsection.encode.backbone import Backbone, store_products_as
from thinsection.encode.engine import Network, SelfCheck, converted_network
from thinsection.encode.registry import EncoderSpec, Rgb, declared_encoders
from thinsection.errors import InvalidInputError, require
from thinsection.weights.files import hash_state_dict
from thinsection.weights.origin import Origin
from thinsection.weights.placement import DTYPES, Placement

TileBatch = Tensor | npt.NDArray[Any]  # uint8 [B, H, W, 3]

# tiles that a CPU puts through the network at once: some per cent slower than 32 at most, in a
# fraction of the memory, and with a peak that hardly varies (benchmarks/bench_heap.py)
CPU_TILES = 4


class TileEncoder(ABC):
    """Tiles in, one vector per tile out. The same batch gives the same bytes.

    A package's own gives what stands here without a value; `encode_with_tokens` for a dense map.
    """

    spec: EncoderSpec  # what was declared
    device: torch.device  # where it computes
    precision: str  # fp32, fp16 or bf16: what matrix products are computed in
    origin: Origin = Origin()  # of the weights; `load_encoder` sets it
    # what computes, with its version, and why it is not another; for the record, no part of the
    # identity: in fp32 engines differ as sums in another order do
    engine: str = f"torch {torch.__version__}"

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
        feature map; an InvalidInputError where the encoder has no dense map.
        """
        names = ", ".join(
            n for n, spec in declared_encoders().items() if spec.supports_tokens
        )
        got = f"{self.spec.name!r}; these have: {names}"
        raise InvalidInputError(f"encoder must have patch tokens, got {got}")

    def encode_tokens(self, tiles_u8: TileBatch) -> Tensor:
        """float32 [B, T, C] on `device`: the tokens of `encode_with_tokens` alone."""
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
        found = self.origin.identity(
            name, precision=self.precision, weights_hash=weights
        )
        return found | {
            "preprocessing": json.dumps(self.spec.preprocessing, sort_keys=True)
        }

    @property
    def provenance(self) -> dict[str, str]:
        """What results and records say of the encoder: its identity, and what computed."""
        return self.identity | {"engine": self.engine}

    @property
    def label(self) -> str:
        """A readable name for a folder of results: 'uni2_h', 'uni2_h_bf16', 'uni_w1a2b3c'."""
        own = (
            self.weights_hash if self.origin.own_weights else None
        )  # hashing takes its time
        return self.origin.label(
            self.spec.name, precision=self.precision, weights_hash=own
        )


class NetworkTileEncoder(TileEncoder):
    """A `Backbone` with its preprocessing, on one device, in one precision."""

    def __init__(
        self,
        spec: EncoderSpec,
        backbone: Backbone,
        placement: Placement,
        origin: Origin,
    ) -> None:
        self.spec, self.origin = spec, origin
        self.device, self.precision = placement
        self.backbone = backbone.eval().requires_grad_(False)
        # convolutions are up to twice as fast with channels last; linear layers do not care
        self.backbone.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.device.type == "cuda" and self.precision != "fp32":
            _ = self.weights_hash  # of the weights as they came
            store_products_as(self.backbone, DTYPES[self.precision])
        self._network: Network = self.backbone

    def __repr__(self) -> str:
        return f"<{self.spec.name}: {self.dim}-d, {self.precision} on {self.device}, {self.engine}>"

    @cached_property
    def weights_hash(self) -> str:
        return hash_state_dict(self.backbone.network.state_dict())

    def to_openvino(self, cache_dir: Path | None = None) -> SelfCheck:
        """Computes by OpenVINO from now on; PyTorch's weights are let go of.

        What it says of the answers to seeded tiles is for the caller to judge. InvalidInputError
        where it does not compute in this precision, or cannot take this network.
        """
        pixels = preprocess(_seeded_tiles(self.spec.tile_px), self.spec)
        own = partial(
            converted_network, weights_hash=self.weights_hash, cache_dir=cache_dir
        )
        network, check = own(self.backbone, pixels, self.precision)
        self._network, self.engine = network, network.engine
        return check

    def encode(self, tiles_u8: TileBatch) -> Tensor:
        """float32 [B, D] embeddings on `device`; InvalidInputError for tiles that do not fit.

        Memory: `batch_bytes` says how much. On a CPU the network sees `CPU_TILES` at once, so that
            a larger batch costs its tiles and embeddings only.
        """
        return self._through(tiles_u8, slice(0, 1))[0]

    def encode_with_tokens(self, tiles_u8: TileBatch) -> tuple[Tensor, Tensor]:
        """Embeddings [B, D] and patch tokens [B, T, C], float32, from one pass.
        Memory: that of `encode`, and 4 B T C bytes; `batch_bytes(..., tokens=True)` counts it."""
        if not self.spec.supports_tokens:
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
        found, pixels = list[Tensor](), None
        with torch.no_grad(), self._arithmetic():
            for start in range(0, max(len(batch), 1), step):
                tiles = batch[start : start + step].to(self.device, non_blocking=True)
                pixels = preprocess(tiles, self.spec, out=pixels)
                answer = self._network(pixels)
                parts = [out.float() for out in answer[wanted]]
                if len(batch) <= step:
                    return parts
                found = found or [
                    out.new_empty((len(batch), *out.shape[1:])) for out in parts
                ]
                for whole, part in zip(found, parts, strict=True):
                    whole[start : start + step] = part
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


def _seeded_tiles(edge: int) -> Tensor:
    """uint8 [CPU_TILES, edge, edge, 3]: patches of 16 px in any colour, under fine noise."""
    seeded, patches = torch.Generator().manual_seed(0), -(-edge // 16)
    coarse = torch.randint(0, 225, (CPU_TILES, patches, patches, 3), generator=seeded)
    wide = coarse.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :edge, :edge]
    return (wide + torch.randint(0, 31, wide.shape, generator=seeded)).to(torch.uint8)


def as_uint8_batch(tiles_u8: TileBatch) -> Tensor:
    """A uint8 tensor [B, H, W, 3] of the tiles, without a copy where that is possible."""
    if isinstance(tiles_u8, np.ndarray):
        # a tensor cannot be read-only: torch would warn and let it be written
        writable = tiles_u8 if tiles_u8.flags.writeable else tiles_u8.copy()
        tiles_u8 = torch.from_numpy(np.ascontiguousarray(writable))
    fits = (
        tiles_u8.dtype == torch.uint8 and tiles_u8.ndim == 4 and tiles_u8.shape[-1] == 3
    )
    got = f"{str(tiles_u8.dtype).removeprefix('torch.')} {tuple(tiles_u8.shape)}"
    require(fits, "tiles_u8 must be uint8 of shape (B, H, W, 3)", got)
    return tiles_u8


def resized_size(height: int, width: int, resize_px: int) -> tuple[int, int]:
    """(height, width) when the shorter side becomes `resize_px` (torchvision's rounding)."""
    short, long = sorted((height, width))
    scaled = int(resize_px * long / short)
    return (resize_px, scaled) if height <= width else (scaled, resize_px)


def resize(pixels: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """uint8 [B, 3, H, W] resized to `size` with antialias, still uint8."""
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    if pixels.device.type != "cpu":
        return resize_in_float(pixels, size, interpolation)
    return F.interpolate(
        pixels, size=size, mode=interpolation, align_corners=False, antialias=True
    )


def resize_in_float(
    pixels: Tensor, size: tuple[int, int], interpolation: str
) -> Tensor:
    """The resize where uint8 kernels are missing: float32, then rounded back to uint8."""
    wide = pixels.float()
    out = F.interpolate(
        wide, size=size, mode=interpolation, align_corners=False, antialias=True
    )
    return out.clamp_(0, 255).round_().to(torch.uint8)


def centre_crop(pixels: Tensor, input_px: int) -> Tensor:
    """The middle `input_px` square of [B, 3, H, W], which must not be smaller."""
    height, width = pixels.shape[-2:]
    rule = f"tiles_u8 must be at least {input_px} px a side for this encoder"
    require(
        min(height, width) >= input_px, rule, f"{width} x {height}; use larger tiles"
    )
    top, left = round((height - input_px) / 2.0), round((width - input_px) / 2.0)
    return pixels[..., top : top + input_px, left : left + input_px]


def preprocess(
    tiles_u8: TileBatch, spec: EncoderSpec, *, out: Tensor | None = None
) -> Tensor:
    """Tiles resized, cropped, normalised: float32 [B, 3, input_px, input_px], channels last.

    Args:
        tiles_u8: uint8 [B, H, W, 3], of any device, where the result is too.
        spec: of the encoder (`encoder.spec`, `encoder_spec(name)`).
        out: of an earlier call for as many tiles or more, to be written over, not made again.

    Memory: B * 3 * input_px² * 4 bytes, and resized uint8 tiles: of `CPU_TILES` on a CPU.
    Raises InvalidInputError: tiles are not uint8 [B, H, W, 3], or too small.
    """
    tiles = as_uint8_batch(tiles_u8)
    edge, count, where = spec.input_px, len(tiles), tiles.device
    last = torch.channels_last
    if out is None:
        out = torch.empty((count, 3, edge, edge), device=where, memory_format=last)
    fits = (
        out.shape[1:] == (3, edge, edge) and len(out) >= count and out.device == where
    )
    fits = fits and out.is_contiguous(memory_format=last)
    require(fits, "out must be of an earlier call for as many tiles", tuple(out.shape))
    out = out[:count]
    rows = out.permute(0, 2, 3, 1).view(count, edge, edge * 3)
    # a row of px is one run of numbers: four times as fast as three channels at a time
    mean, std = _rows_of(spec.mean, spec.std, edge, where)
    step = CPU_TILES if where.type == "cpu" else max(count, 1)
    for start in range(0, count, step):
        part = slice(start, start + step)
        rows[part].copy_(_cropped(tiles[part], spec)).div_(255.0).sub_(mean).div_(std)
    return out


def _cropped(tiles: Tensor, spec: EncoderSpec) -> Tensor:
    """uint8 [B, input_px, input_px * 3]: the tiles' centres, after resizing."""
    pixels = tiles.permute(0, 3, 1, 2)
    if spec.resize_px is not None:
        size = resized_size(pixels.shape[-2], pixels.shape[-1], spec.resize_px)
        pixels = resize(pixels, size, spec.interpolation)
    return centre_crop(pixels, spec.input_px).permute(0, 2, 3, 1).flatten(2)


@lru_cache(maxsize=64)
def _rows_of(
    mean: Rgb, std: Rgb, edge: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """[3 edge] each, there once: to send them with each batch makes a GPU's host wait."""
    first, second = torch.tensor((mean, std), device=device).repeat(1, edge)
    return first, second
