"""Slide encoders by name: a declared list, built only when asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from thinsection.config import nearest
from thinsection.encode.placement import resolve_device
from thinsection.errors import ConfigError, UnknownEncoderError, WeightsError
from thinsection.pool.pooling import AbmilSlideEncoder, MaxSlideEncoder, MeanSlideEncoder
from thinsection.pool.protocol import SlideEncoder
from thinsection.pool.weights import find_weights, read_state_dict
from thinsection.types import GIB
from thinsection.weights.origin import Origin

Precision = Literal["auto", "fp32", "bf16"]
DEFAULT_BUDGET_BYTES = GIB  # working memory of one `encode` beyond weights and inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What a slide encoder is built with; `load_slide_encoder` has the meaning of each."""

    weights: str | Path | None = None
    device: str = "auto"
    precision: Precision = "auto"
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    pretrained: bool = True


def slide_encoder_names() -> tuple[str, ...]:
    """Names that `load_slide_encoder` takes."""
    return tuple(_BUILDERS)


def check_slide_encoder(name: str) -> None:
    """Refuses a name that nobody declares, before anything is loaded.

    Raises:
        UnknownEncoderError: with the nearest known name.
    """
    if name not in _BUILDERS:
        hint = nearest(name, _BUILDERS)
        raise UnknownEncoderError(f"unknown slide encoder {name!r}{hint}")


def load_slide_encoder(
    name: str,
    *,
    weights: str | Path | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    pretrained: bool = True,
) -> SlideEncoder:
    """The slide encoder of that name, ready to encode.

    Args:
        name: one of `slide_encoder_names()`.
        weights: file, folder, or hub repository `owner/name@COMMIT`; None takes the published
            repository at the pinned commit, where one is known (titan).
        device: 'auto' (CUDA where there is one, else the CPU) or a torch device.
        precision: of matrix products; 'auto' is fp32. Softmax and sums stay in fp32.
        budget_bytes: working memory of one `encode` beyond weights and inputs.
        pretrained: False gives seeded random weights, for tests and dry runs only.

    Raises:
        UnknownEncoderError, ConfigError, DeviceError, WeightsError, MissingDependencyError.
    """
    check_slide_encoder(name)
    if precision not in get_args(Precision):
        allowed = ", ".join(get_args(Precision))
        raise ConfigError(f"precision must be one of {allowed}, got {precision!r}")
    if budget_bytes <= 0:
        raise ConfigError(f"budget_bytes must be > 0, got {budget_bytes}")
    options = LoadOptions(
        weights=weights,
        device=str(resolve_device(device, mps=False)),
        precision=precision,
        budget_bytes=budget_bytes,
        pretrained=pretrained,
    )
    encoder = _BUILDERS[name](options)
    random = not pretrained and encoder.weights_hash is not None
    encoder.origin = Origin(own_weights=weights is not None, seed=0 if random else None)
    return encoder


def _without_weights(encoder: Callable[[], SlideEncoder]) -> Callable[[LoadOptions], SlideEncoder]:
    def build(options: LoadOptions) -> SlideEncoder:
        built = encoder()
        if options.weights is not None:
            message = f"slide encoder {built.name!r} has no weights, got {str(options.weights)!r}"
            raise WeightsError(f"{message}; leave weights out")
        return built

    return build


def _abmil(options: LoadOptions) -> SlideEncoder:
    if options.weights is None:
        remedy = "pass weights=FILE (trained by you; names in AbmilSlideEncoder)"
        raise WeightsError(f"slide encoder 'abmil' has no published weights; {remedy}")
    path = find_weights(options.weights, files=("abmil.safetensors",), revision=None)
    return AbmilSlideEncoder(read_state_dict(path), device=options.device)


def _titan(options: LoadOptions) -> SlideEncoder:
    from thinsection.pool.titan import load_titan

    return load_titan(options)


def _gigapath(options: LoadOptions) -> SlideEncoder:
    from thinsection.pool.gigapath import load_gigapath

    return load_gigapath(options)


_BUILDERS: dict[str, Callable[[LoadOptions], SlideEncoder]] = {
    "mean": _without_weights(MeanSlideEncoder),
    "max": _without_weights(MaxSlideEncoder),
    "abmil": _abmil,
    "titan": _titan,
    "gigapath": _gigapath,
}
