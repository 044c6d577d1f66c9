"""Calls of tile encoders, which other packages bring too: each answer is checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinsection.encode.base import NUMPY, NumpyDevice, TileEncoder, random_tiles
from thinsection.encode.registry import ENCODERS, EncoderSpec
from thinsection.errors import InvalidInputError, naming_part
from thinsection.types import TileArray
from thinsection.weights.precision import check_precision, precision_on_cpu

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from thinsection.encode.preprocessing import TilePixels

_CALL_INIT = "call super().__init__(device=device, precision=precision) in __init__"
# relative distance of two answers to the same tiles: far above rounding, far below dropout
_SAME = 1e-3


def encoded(
    encoder: TileEncoder, tiles_u8: TilePixels, *, with_tokens: bool = False
) -> tuple[Tensor, ...]:
    """Embeddings [B, D], and tokens [B, T, C] if requested, as `encoder` gives them.

    Arrays of NumPy become tensors, and an encoder on NUMPY gets arrays. An error of an encoder of
    another package names the encoder.

    Raises:
        InvalidInputError: an answer is no array of floating-point numbers, or has another shape.
    """
    import torch

    if encoder.device is NUMPY:
        arrays = encoded_by_numpy(
            encoder, np.asarray(tiles_u8), with_tokens=with_tokens
        )
        return tuple(map(torch.from_numpy, arrays))
    given = f"tiles {tuple(getattr(tiles_u8, 'shape', ()))}"
    part = naming_part("encoder", encoder.spec.name, encoder, given)
    with part, torch.no_grad():
        answers, called = _answers(encoder, tiles_u8, with_tokens=with_tokens)
        tensors = tuple(_tensor(answer, called) for answer in answers)
        _check_shape(tensors[0], len(tiles_u8), encoder, called)
    return tensors


def encoded_by_numpy(
    encoder: TileEncoder, tiles_u8: TileArray, *, with_tokens: bool = False
) -> tuple[npt.NDArray[np.float32], ...]:
    """`encoded` for an encoder whose device is NUMPY: arrays in, float32 arrays out.

    Raises:
        InvalidInputError: an answer is no array of floating-point numbers, or has another shape.
    """
    given = f"tiles {tiles_u8.shape}"
    with naming_part("encoder", encoder.spec.name, encoder, given):
        answers, called = _answers(encoder, tiles_u8, with_tokens=with_tokens)
        arrays = tuple(_array(answer, called) for answer in answers)
        _check_shape(arrays[0], len(tiles_u8), encoder, called)
    return arrays


def _answers(
    encoder: TileEncoder, tiles_u8: TilePixels, *, with_tokens: bool
) -> tuple[tuple[object, ...], str]:
    """What the encoder returns, unchecked, and the name of the method that was called."""
    name = type(encoder).__name__
    if with_tokens:
        return encoder.encode_with_tokens(tiles_u8), f"{name}.encode_with_tokens"
    return (encoder.encode(tiles_u8),), f"{name}.encode"


def _array(answer: object, called: str) -> npt.NDArray[np.float32]:
    """An answer of an encoder on NUMPY, as float32."""
    if isinstance(answer, np.ndarray) and answer.dtype.kind == "f":
        return np.ascontiguousarray(answer, dtype=np.float32)
    kind = str(getattr(answer, "dtype", type(answer).__name__))
    raise InvalidInputError(
        f"{called} must return a NumPy array of floating-point numbers on the device NUMPY, got "
        f"{kind}; return float32, or leave the device out"
    )


def _tensor(answer: object, called: str) -> Tensor:
    """An answer as a tensor of floating-point numbers."""
    import torch
    from torch import Tensor

    if isinstance(answer, np.ndarray) and answer.dtype.kind == "f":
        return torch.from_numpy(np.ascontiguousarray(answer))
    if isinstance(answer, Tensor) and answer.is_floating_point():
        return answer
    kind = str(getattr(answer, "dtype", type(answer).__name__))
    raise InvalidInputError(
        f"{called} must return a tensor or a NumPy array of floating-point numbers, got "
        f"{kind.removeprefix('torch.')}; return float32"
    )


def _check_shape(
    embeddings: Tensor | npt.NDArray[np.float32],
    num_tiles: int,
    encoder: TileEncoder,
    called: str,
) -> None:
    shape = tuple(embeddings.shape)
    if shape == (num_tiles, encoder.dim):
        return
    remedy = "return one vector per tile, such as the mean over height and width"
    if len(shape) == 2 and shape[0] == num_tiles:
        remedy = (
            f"the EncoderSpec of {type(encoder).__name__} must have the dim {shape[1]}"
        )
    raise InvalidInputError(
        f"{called} must return shape ({num_tiles}, {encoder.dim}) for {num_tiles} tiles, got "
        f"{shape}; {remedy}"
    )


def check_attributes(encoder: TileEncoder) -> None:
    """Raises InvalidInputError: an attribute is missing, with its class and what sets it."""
    class_name = type(encoder).__name__
    spec = getattr(encoder, "spec", None)
    if not isinstance(spec, EncoderSpec):
        remedy = 'set spec = EncoderSpec(name="...", dim=...) in the class'
        raise _missing(class_name, "spec", "EncoderSpec", spec, remedy)
    device = getattr(encoder, "device", None)
    if not _is_device(device):
        raise _missing(class_name, "device", "device", device, _CALL_INIT)
    precision = getattr(encoder, "precision", None)
    if not isinstance(precision, str):
        raise _missing(class_name, "precision", "str", precision, _CALL_INIT)
    if encoder.dim < 1:
        raise InvalidInputError(
            f"dim in the EncoderSpec of {class_name} must be >= 1, got {encoder.dim}; it is the "
            "length of an embedding"
        )


def _missing(
    class_name: str, name: str, kind: str, value: object, remedy: str
) -> InvalidInputError:
    got = "none" if value is None else repr(value)
    return InvalidInputError(
        f"{class_name} must have the attribute {name}, {kind}, got {got}; {remedy}"
    )


def _is_device(value: object) -> bool:
    """True for NUMPY and for devices of PyTorch, which is not imported for the former."""
    if isinstance(value, NumpyDevice):
        return True
    import torch

    return isinstance(value, torch.device)


def load_from_package(
    name: str,
    *,
    device: str | torch.device,
    precision: str,
    weights: str | Path | None,
    pretrained: bool,
    seed: int,
) -> TileEncoder:
    """Encoder that another package registers, tried on four tiles.

    Its class or function gets those arguments that it takes.

    Raises InvalidInputError: it cannot be called so, takes no weights and some are given, or does
    not keep the contract of `TileEncoder`.
    """
    factory = ENCODERS.load(name)
    placed, precision = _place(factory, device, precision)
    offered: dict[str, object] = {
        "device": placed,
        "precision": precision,
        "weights": weights,
        "pretrained": pretrained,
        "seed": seed,
    }
    with naming_part("encoder", name, factory):
        encoder = factory(**_accepted(factory, name, offered))  # type: ignore[arg-type]
        if not isinstance(encoder, TileEncoder):
            raise InvalidInputError(
                f"entry point {name!r} must return a TileEncoder, got "
                f"{type(encoder).__name__}; subclass TileEncoder"
            )
        check_attributes(encoder)
        if encoder.spec.name != name:
            raise InvalidInputError(
                f"name in the EncoderSpec of {type(encoder).__name__} must be that of its entry "
                f"point, {name!r}, got {encoder.spec.name!r}; change one of the two"
            )
        if encoder.device.type != placed.type and str(device) != "auto":
            raise InvalidInputError(
                f"device must be {encoder.device.type} for encoder {name!r}, which runs on no "
                f"other device, got {str(device)!r}"
            )
    _try(encoder)
    return encoder


def _place(
    factory: object, device: str | torch.device, precision: str
) -> tuple[torch.device, str]:
    """Device and precision for an encoder; a class on NUMPY needs no PyTorch to be placed."""
    half_precision = declares_half(factory)
    is_numpy = getattr(factory, "device", None) is NUMPY
    if is_numpy and str(device) in ("auto", "cpu"):
        check_precision(precision)
        return NUMPY, precision_on_cpu(
            precision, half_precision=half_precision, has_bf16=False
        )
    from thinsection.weights.placement import place

    return place(device, precision, half_precision=half_precision)


def declares_half(factory: object) -> bool:
    """True if the `spec` of a class or function says that it computes in half precision itself."""
    spec = getattr(factory, "spec", None)
    return isinstance(spec, EncoderSpec) and spec.half_precision


def _signature(factory: Callable[..., object]) -> inspect.Signature | None:
    """Signature of a class or function; None if it has none, as built-in types."""
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError):
        return None


def _takes(signature: inspect.Signature | None, name: str) -> bool:
    """True if an argument may be passed by that name; unknown signatures take everything."""
    if signature is None or name in signature.parameters:
        return True
    parameters = signature.parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _accepted(
    factory: Callable[..., object], name: str, offered: dict[str, object]
) -> dict[str, object]:
    """The offered arguments that a class or function takes."""
    called = getattr(factory, "__name__", repr(factory))
    missing = sorted(getattr(factory, "__abstractmethods__", ()))
    if missing:
        raise InvalidInputError(
            f"encoder {name!r} must define {', '.join(missing)}, got none in {called}; see "
            "docs/encoders.md"
        )
    signature = _signature(factory)
    accepted = {key: v for key, v in offered.items() if _takes(signature, key)}
    if offered["weights"] is not None and "weights" not in accepted:
        raise InvalidInputError(
            f"weights must be left out for encoder {name!r}, which takes none, got "
            f"{str(offered['weights'])!r}"
        )
    if signature is not None:
        try:
            signature.bind(**accepted)
        except TypeError as error:
            raise InvalidInputError(
                f"encoder {name!r} must take no other arguments than {', '.join(offered)}, got "
                f"{called}{signature}: {error}; give the others a default"
            ) from None
    return accepted


def _try(encoder: TileEncoder) -> None:
    """Encodes four tiles twice. Raises InvalidInputError: the answers break the contract."""
    class_name = type(encoder).__name__
    if encoder.device is NUMPY:
        tiles = random_tiles(encoder.spec.tile_px)
        first, second = (encoded_by_numpy(encoder, tiles)[0] for _ in range(2))
    else:
        first, second = _encoded_twice(encoder)
    if not bool(np.isfinite(first).all()):
        raise InvalidInputError(
            f"{class_name}.encode must return finite numbers, got NaN or infinity for four "
            "coloured tiles; tiles have values from 0 to 255: divide them by 255"
        )
    exact = first.astype(np.float64)
    distance = float(np.linalg.norm(exact - second))
    if distance > _SAME * float(np.linalg.norm(exact)):
        raise InvalidInputError(
            f"{class_name}.encode must return the same for the same tiles, got other numbers at "
            "the second call; call .eval() on its network, and leave out random crops"
        )


def _encoded_twice(encoder: TileEncoder) -> list[npt.NDArray[np.float32]]:
    """Embeddings of four tiles, twice."""
    from thinsection.encode.encoder import seeded_tiles

    tiles = seeded_tiles(encoder.spec.tile_px)
    if encoder.device.type != "cpu":
        tiles = tiles.to(str(encoder.device))
    return [encoded(encoder, tiles)[0].float().cpu().numpy() for _ in range(2)]
