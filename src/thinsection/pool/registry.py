"""Slide encoders by name: ours, then those of other packages; built only when asked for."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

from thinsection.errors import ConfigError, InvalidInputError, UnknownEncoderError
from thinsection.pool.encoder import DEFAULT_BUDGET_BYTES, LoadOptions, Precision, SlideEncoder
from thinsection.registry import Entry, Registry

_OURS = {
    "mean": ("pooling:MeanSlideEncoder", "Mean over tiles."),
    "max": ("pooling:MaxSlideEncoder", "Largest value of each channel."),
    "abmil": (
        "pooling:AbmilSlideEncoder",
        "Attention pooling with weights of your own (weights=FILE).",
    ),
    "titan": ("titan:TitanSlideEncoder", "TITAN, 768-d, on tiles of conch_v15; CC-BY-NC-ND-4.0."),
    "gigapath": (
        "gigapath:GigaPathSlideEncoder",
        "Prov-GigaPath's LongNet, 768-d, on tiles of gigapath; Apache-2.0.",
    ),
}


def _entries() -> Iterator[Entry]:
    for name, (target, line) in _OURS.items():
        extra = "hub" if name in ("titan", "gigapath") else None
        yield Entry(name=name, help=line, target=f"thinsection.pool.{target}", extra=extra)


SLIDE_ENCODERS: Registry[type[SlideEncoder]] = Registry(
    "slide encoder", "thinsection.slide_encoders", _entries, error=UnknownEncoderError
)


def slide_encoder_names() -> tuple[str, ...]:
    """Names that `load_slide_encoder` takes."""
    return SLIDE_ENCODERS.names()


def check_slide_encoder(name: str) -> None:
    """Refuses a name that nobody declares, before anything is loaded.

    Raises:
        UnknownEncoderError: with the nearest known name.
    """
    SLIDE_ENCODERS.entry(name)


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
            repository at the pinned commit, where there is one (titan, gigapath).
        device: 'auto' (CUDA where there is one, else the CPU) or a torch device.
        precision: of matrix products; 'auto' is fp32. Softmax and sums stay in fp32.
        budget_bytes: working memory of one `encode` beyond weights and inputs.
        pretrained: False gives seeded random weights, for tests and dry runs only.

    Raises:
        UnknownEncoderError, ConfigError, DeviceError, WeightsError, MissingDependencyError.
    """
    from thinsection.weights.placement import resolve_device  # torch, which names do not need

    if precision not in get_args(Precision):
        allowed = ", ".join(get_args(Precision))
        raise ConfigError(f"precision must be one of {allowed}, got {precision!r}")
    if budget_bytes <= 0:
        raise ConfigError(f"budget_bytes must be > 0, got {budget_bytes}")
    encoder_class = SLIDE_ENCODERS.load(name)
    if not (isinstance(encoder_class, type) and issubclass(encoder_class, SlideEncoder)):
        raise InvalidInputError(
            f"slide encoder {name!r} must be a subclass of SlideEncoder, got {encoder_class!r}"
        )
    options = LoadOptions(
        weights=weights,
        device=str(resolve_device(device, mps=False)),
        precision=precision,
        budget_bytes=budget_bytes,
        pretrained=pretrained,
    )
    encoder = encoder_class.load(options)
    seed = 0 if not pretrained and encoder.weights_hash is not None else None
    encoder.origin = replace(encoder.origin, own_weights=weights is not None, seed=seed)
    return encoder
