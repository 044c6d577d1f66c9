"""Tile encoders of your own: a network or a function of this session, under a name.

Its results must never be taken for those of a changed model. Weights are hashed. Code cannot be
hashed soundly, so two things stand for it: a version that its author gives, and a sample, the
embeddings of four fixed tiles, which a run compares with the sample of stored results.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from thinsection.encode.base import TileEncoder
from thinsection.encode.encoder import arithmetic, seeded_tiles
from thinsection.encode.preprocessing import TilePixels, as_uint8_batch
from thinsection.encode.registry import ENCODERS, Architecture, EncoderSpec, our_name
from thinsection.encode.sizes import CPU_TILES
from thinsection.errors import InvalidInputError, WeightsError
from thinsection.weights.files import hash_networks
from thinsection.weights.origin import Origin, slug
from thinsection.weights.placement import (
    Placement,
    importable_torchvision,  # noqa: F401 - public as thinsection.encode's
    place,
)
from thinsection.weights.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

# one tile to a tensor (C, H, W), as torchvision's and timm's transforms do
TileTransform: TypeAlias = Callable[[Image.Image], Tensor]
# (B, C, H, W) to (B, D)
TileFunction: TypeAlias = Callable[[Tensor], "Tensor | npt.NDArray[np.floating]"]

# directions onto which the sample's embeddings are projected
_SAMPLE_NUMBERS = 8
# distance of two samples of one model, of the spread among their tiles, by precision: another
# device, library or order of sums stays far below, another activation or resize far above
_TOLERANCE = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.1}
_ROUNDING = (
    1e-5  # of the sample's length: embeddings that hardly differ from tile to tile
)


def make_encoder(
    network: nn.Module | TileFunction,
    *,
    name: str,
    version: str = "",
    transform: TileTransform | None = None,
    tile_px: int = 256,
    device: str | torch.device = "auto",
    precision: Precision = "fp32",
) -> OwnTileEncoder:
    """Makes a tile encoder of a network or a function, for `run` and `embed_tiles`.

    Args:
        network: turns tiles (B, C, H, W) into vectors (B, D): a function, or a `torch.nn.Module`,
            which is moved to the device and set to evaluation.
        name: begins the name of the results folder, `features_NAME_...`.
        version: stands for the code; needed with a function. Change it whenever the code changes.
        transform: turns one tile, a PIL image, into a tensor (C, H, W); it must not be random. None
            gives the network the pixels: uint8 (B, 3, H, W).
        tile_px: edge in pixels of the tiles that the network takes, for a first test.
        device: auto, cpu, cuda, cuda:N or mps. With auto, a function stays on the device of the
            networks that it uses, or on the CPU.
        precision: fp32, fp16 or bf16 (autocast).

    Memory: on a CPU the activations of 4 tiles, on a GPU those of a batch.

    Raises InvalidInputError: the name is taken, a function has no version, or a test with four
    tiles fails: an error, another shape than (B, D), numbers that are not finite or not the same
    twice.
    """
    if not callable(network):
        raise InvalidInputError(
            "network must be a torch.nn.Module or a function, got "
            f"{type(network).__name__}; load the weights into their network first"
        )
    _check_name(name, version)
    networks = _networks_of(network)
    if not isinstance(network, nn.Module):
        if not version:
            raise InvalidInputError(
                f"version must be given with a function, got none for {name!r}; pass "
                "version='1', and another one whenever the function changes"
            )
        if str(device) == "auto":
            device = _device_of(networks)
    placement = place(device, precision)
    if isinstance(network, nn.Module):
        network.to(placement.device)
    return OwnTileEncoder(
        network,
        networks,
        placement,
        name=name,
        version=version,
        transform=transform,
        tile_px=tile_px,
    )


class OwnTileEncoder(TileEncoder):
    """A network or function of this session; `make_encoder` makes it.

    Its hash and its sample are those of the time at which it was made; `current` makes it again.

    A copy or a pickle has the network, or the name of the function. Whoever receives it embeds the
    four fixed tiles, and refuses a function that has become another one there.
    """

    device: torch.device
    is_own = True

    def __init__(
        self,
        network: nn.Module | TileFunction,
        networks: Mapping[str, nn.Module],
        placement: Placement,
        *,
        name: str,
        version: str,
        transform: TileTransform | None,
        tile_px: int,
    ) -> None:
        self.device = placement.device
        self.precision = placement.precision
        self.origin = Origin(name=name, own_weights=bool(networks))
        self.version = version
        self._network = network
        self._networks = networks
        self._transform = transform
        # `current` hashes the weights again
        self.weights_hash = hash_networks([*networks.values()])
        self.spec = _spec(name, network, tile_px)
        embeddings = self._tested()
        self.spec = replace(self.spec, dim=embeddings.shape[1])
        self.sample = _projected(embeddings)

    def __repr__(self) -> str:
        kind = self.spec.architecture.model
        return (
            f"<{self.label}: {kind}, {self.dim}-d, {self.precision} on {self.device}>"
        )

    @cached_property
    def identity(self) -> dict[str, str]:
        """Name, hash of the weights, precision and version."""
        identity = self.origin.identity(
            self.spec.name, precision=self.precision, weights_hash=self.weights_hash
        )
        # `predict` compares this fact, too
        return identity | {"preprocessing": json.dumps({"version": self.version})}

    @property
    def provenance(self) -> dict[str, str]:
        numbers = " ".join(f"{number:.7g}" for number in self.sample.ravel())
        return super().provenance | {SAMPLE: numbers}

    @cached_property
    def label(self) -> str:
        """Name of the results folder: 'my_vit_w1a2b3c', 'mean_colour_v2'."""
        version = f"_v{self.version}" if self.version else ""
        named = Origin(
            name=f"{self.spec.name}{version}", own_weights=bool(self._networks)
        )
        return named.label("", precision=self.precision, weights_hash=self.weights_hash)

    def __getstate__(self) -> dict[str, object]:
        # the networks belong to `_network`, and are looked up again where the copy arrives
        return {
            name: value for name, value in vars(self).items() if name != "_networks"
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        """Takes the values of a copy, and compares its weights and its sample with the original's.

        Raises:
            WeightsError: they differ: a function is looked up by its name, and found another one.
        """
        vars(self).update(state)
        self._networks = _networks_of(self._network)
        embeddings = self.encode(seeded_tiles(self.spec.tile_px))
        sample = _projected(embeddings.double().cpu().numpy())
        has_weights = hash_networks([*self._networks.values()]) == self.weights_hash
        if has_weights and samples_agree(sample, self.sample, self.precision):
            return
        raise WeightsError(
            f"network must be the one of the original, got other weights or code for "
            f"{self.spec.name!r}; pass make_encoder the torch.nn.Module in place of a function, or "
            "send the encoder by cloudpickle"
        )

    def current(self) -> OwnTileEncoder:
        """The same encoder with the hash and the sample of its weights and code of now."""
        return OwnTileEncoder(
            self._network,
            self._networks,
            Placement(self.device, self.precision),  # type: ignore[arg-type]
            name=self.spec.name,
            version=self.version,
            transform=self._transform,
            tile_px=self.spec.tile_px,
        )

    def check_unchanged(self) -> None:
        """Raises InvalidInputError: the weights are others than when it was made."""
        if hash_networks([*self._networks.values()]) != self.weights_hash:
            raise InvalidInputError(
                f"weights must not change while they are in use, got others in {self.label!r}; "
                "its embeddings of this run may mix both: run again with overwrite=True"
            )

    def encode(self, tiles_u8: TilePixels) -> Tensor:
        """float32 [B, D] on `device`. Memory: see `make_encoder`."""
        batch = as_uint8_batch(tiles_u8)
        if not len(batch):
            return torch.empty((0, self.dim), device=self.device)
        step = CPU_TILES if self.device.type == "cpu" else len(batch)
        for network in self._networks.values():
            network.eval()  # someone may have trained it since
        parts = []
        with torch.no_grad(), arithmetic(self.device, self.precision):
            for start in range(0, len(batch), step):
                pixels = self._pixels(batch[start : start + step])
                answer = torch.as_tensor(self._network(pixels.to(self.device)))
                parts.append(answer.float())
        return torch.cat(parts)

    def _pixels(self, tiles: Tensor) -> Tensor:
        """Input of the network: tensors of the transform, or uint8 [B, 3, H, W]."""
        if self._transform is None:
            return tiles.permute(0, 3, 1, 2).contiguous()
        pictures = map(Image.fromarray, tiles.cpu().numpy())
        pixels = list(map(self._transform, pictures))
        if not isinstance(pixels[0], Tensor):
            raise InvalidInputError(
                f"transform must return a tensor (C, H, W), got {type(pixels[0]).__name__}; "
                "add torchvision's ToTensor"
            )
        return torch.stack(pixels)

    def _tested(self) -> npt.NDArray[np.float64]:
        """Embeddings (4, D) of the fixed tiles, computed twice and checked."""
        tiles = seeded_tiles(self.spec.tile_px)
        with _naming(self.spec.name, self.spec.tile_px):
            first, second = self.encode(tiles), self.encode(tiles)
        if first.ndim != 2 or len(first) != len(tiles) or not first.shape[1]:
            raise InvalidInputError(
                f"network must return (B, D), one vector per tile, got {tuple(first.shape)} for "
                f"{len(tiles)} tiles; return the pooled output, such as its class token"
            )
        embeddings = first.double().cpu().numpy()
        again = second.double().cpu().numpy()
        if not np.isfinite(embeddings).all():
            raise InvalidInputError(
                f"network must return finite numbers, got NaN or infinity of {self.spec.name!r}; "
                "check its input: without a transform it gets uint8 pixels"
            )
        if not samples_agree(_projected(embeddings), _projected(again), self.precision):
            raise InvalidInputError(
                "network must return the same for the same tiles, got other numbers at the "
                f"second call of {self.spec.name!r}; use the transform of validation, without "
                "random crops, and no dropout"
            )
        return embeddings


SAMPLE = "sample"  # fact of stored embeddings; it decides no key, see `samples_agree`


def samples_agree(
    sample: npt.NDArray[np.float64], other: npt.NDArray[np.float64], precision: str
) -> bool:
    """True if two samples (4, n) can come from one model on different machines."""
    if sample.shape != other.shape:
        return False
    spread = float(np.linalg.norm(other - other.mean(axis=0)))
    allowed = _TOLERANCE[precision] * spread + _ROUNDING * float(np.linalg.norm(other))
    return float(np.linalg.norm(sample - other)) <= allowed


def read_sample(text: str) -> npt.NDArray[np.float64]:
    """Sample (4, n) from the fact of stored embeddings."""
    numbers = np.array([float(word) for word in text.split()], dtype=np.float64)
    return numbers.reshape(CPU_TILES, -1)


def _projected(embeddings: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Embeddings (4, D) along fixed random directions, (4, n), with their length and mean."""
    dim = embeddings.shape[1]
    directions = np.random.default_rng(0).normal(size=(dim, _SAMPLE_NUMBERS - 1))
    length = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return np.concatenate([embeddings @ directions / np.sqrt(dim), length], axis=1)


def _check_name(name: str, version: str) -> None:
    for what, text in (("name", name), ("version", version or "1")):
        if not isinstance(text, str) or slug(text) != text:
            raise InvalidInputError(
                f"{what} must have letters, digits, '_', '-' and '.' only, got {text!r}; it is "
                "part of the name of a folder"
            )
    if name in ENCODERS or our_name(name) != name:
        raise InvalidInputError(
            f"name must not be that of a known encoder, got {name!r}; call it 'my_{name}'"
        )


def _spec(name: str, network: nn.Module | TileFunction, tile_px: int) -> EncoderSpec:
    """Spec of a network, whose `dim` is not known yet."""
    is_network = isinstance(network, nn.Module)
    model = type(network).__name__ if is_network else "function"
    return EncoderSpec(
        name=name,
        dim=0,
        architecture=Architecture(kind="custom", model=model),
        tile_px=tile_px,
        tile_mpp=None,
        input_px=tile_px,
        resize_px=None,
        pooling="head",
        supports_tokens=False,
        half_precision=False,
        source="defined in Python",
    )


def _networks_of(network: nn.Module | TileFunction) -> dict[str, nn.Module]:
    """Networks whose weights decide the result: itself, or those that a function names."""
    if isinstance(network, nn.Module):
        return {"": network}
    found: dict[str, object] = {"__self__": getattr(network, "__self__", None)}
    if inspect.ismethod(network) or inspect.isfunction(network):
        variables = inspect.getclosurevars(network)
        found |= {**variables.globals, **variables.nonlocals}
    else:
        found |= getattr(network, "__dict__", {})
    return {name: one for name, one in found.items() if isinstance(one, nn.Module)}


def _device_of(networks: Mapping[str, nn.Module]) -> torch.device:
    for network in networks.values():
        tensors: list[Tensor] = list(network.state_dict().values())
        if tensors:
            return tensors[0].device
    return torch.device("cpu")


@contextmanager
def _naming(name: str, tile_px: int) -> Iterator[None]:
    """Errors of somebody's network, with what it was given."""
    try:
        yield
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"network must take tiles of {tile_px} px, got {type(error).__name__}: {error} of "
            f"{name!r}; pass its transform, or another tile_px"
        ) from error
