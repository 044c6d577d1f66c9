"""Placement of an encoder: device and precision; and the optional packages that it needs.

timm and transformers import torchvision, and PyPI's wheel of it is built for CUDA: beside torch's
CPU build `import torchvision` stops because `torchvision::nms` was never registered. Nobody here
calls that; so, in a process that asks `optional_package` for one of the two, and there only, two
operators are declared without an implementation where the native library, which is tried first,
does not load (docs/encoders.md).
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from thinsection.errors import DeviceError, InvalidInputError
from thinsection.extras import is_installed, require_packages
from thinsection.weights.precision import (
    Precision,
    check_precision,
    precision_on_cpu,
)

# type under autocast; layers in FP8 do not use it
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
_LEAST_FP8_CARD = (8, 9)  # compute capability: Ada
NEED_TORCHVISION = ("timm", "transformers")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class Placement(NamedTuple):
    """Device and precision of an encoder; weights and embeddings stay float32."""

    device: torch.device  # with an index for CUDA
    precision: Precision  # of matrix products and convolutions


def resolve_device(device: str | torch.device, *, mps: bool = True) -> torch.device:
    """Returns the device; `auto` takes CUDA, then MPS (if `mps` may be), then the CPU.

    DeviceError where it is not there: another one is never taken instead.
    """
    mps_is_there = mps and torch.backends.mps.is_available()
    if str(device) == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if mps_is_there else "cpu")
    names = "auto, cpu, cuda, cuda:N or mps" if mps else "auto, cpu, cuda or cuda:N"
    unknown = DeviceError(f"device must be {names}, got {str(device)!r}")
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise unknown from None
    if wanted.type not in ("cpu", "cuda", "mps") or (wanted.type == "mps" and not mps):
        raise unknown
    if wanted.type == "cuda":
        index = wanted.index or 0
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index < num_devices:
            return torch.device("cuda", index)
        devices = f"{num_devices} CUDA devices" if num_devices else "no CUDA device"
        raise DeviceError(
            f'device must be available, got {str(device)!r} with {devices}; use device="cpu", '
            "or install a CUDA build of torch"
        )
    if wanted.type == "mps" and not mps_is_there:
        raise DeviceError("device must be available, got 'mps' without MPS; use cpu")
    return wanted


def cpu_has_bf16() -> bool:
    """Tells whether this CPU multiplies bf16 itself (AMX, AVX-512 BF16); else bf16 is slower."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def place(
    device: str | torch.device,
    precision: str,
    *,
    half_precision: bool = True,
    has_fp8: bool = False,
) -> Placement:
    """Chooses device and precision of an encoder.

    Args:
        device: as in the settings.
        precision: as in the settings.
        half_precision: True if `auto` may go below fp32.
        has_fp8: True if the caller rounds the network's weights to FP8.

    Raises InvalidInputError: unknown precision, or one that encoder or device do not have.
    """
    check_precision(precision)
    resolved = resolve_device(device)
    if precision == "fp8":
        _check_fp8(resolved, has_fp8=has_fp8)
    if resolved.type == "cpu":
        has_bf16 = cpu_has_bf16()
        precision = precision_on_cpu(
            precision, half_precision=half_precision, has_bf16=has_bf16
        )
    elif precision == "auto":
        # the fastest whose embeddings are as good
        precision = "fp32"
        if half_precision and resolved.type == "cuda":
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            precision = "bf16" if has_bf16 else "fp16"
    return Placement(resolved, precision)  # type: ignore[arg-type]


def _check_fp8(device: torch.device, *, has_fp8: bool) -> None:
    """Raises InvalidInputError: the encoder or the device cannot compute in FP8."""
    rule = "precision must be auto, fp32, fp16 or bf16"
    if not has_fp8:
        raise InvalidInputError(
            f"{rule} for an encoder whose network thinsection does not build, got 'fp8'"
        )
    if device.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"{rule} on {device.type}, got 'fp8'")
    if device.type != "cuda":
        return
    card = torch.cuda.get_device_properties(device)
    if (card.major, card.minor) < _LEAST_FP8_CARD:
        needed = ".".join(map(str, _LEAST_FP8_CARD))
        raise InvalidInputError(
            f"{rule} on {card.name}, which has compute capability {card.major}.{card.minor} and "
            f"FP8 needs {needed}, got 'fp8'"
        )


def optional_package(package: str) -> ModuleType:
    """Returns the imported package, or a MissingDependencyError that says how to get it."""
    require_packages("this model", package)
    # transformers falls back to Pillow without torchvision; timm cannot be imported then
    if package in NEED_TORCHVISION and (
        package == "timm" or is_installed("torchvision")
    ):
        importable_torchvision()
    return import_module(package)


@cache
def importable_torchvision() -> torch.library.Library | None:
    """Imports torchvision, declaring two of its operators if its own library does not load.

    Call it before your own first import of timm, torchvision or transformers, where torchvision's
    library does not load beside this build of torch.

    Returns:
        The handle that keeps the declarations alive (the cache holds it); None where the library
        loaded.
    """
    try:
        import torchvision

        return None
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(operator + _SCHEMA)  # type: ignore[no-untyped-call]
    import torchvision  # noqa: F401

    return library
