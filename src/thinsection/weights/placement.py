"""Where and how precisely an encoder computes, decided once, on metadata."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from thinsection.errors import DeviceError, InvalidInputError

Precision = Literal["fp32", "fp16", "bf16"]
PrecisionChoice = Literal["auto", "fp32", "fp16", "bf16"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A device, a precision, and why.

    Attributes:
        device: with an index for CUDA.
        precision: of matrix products and convolutions; weights and embeddings stay float32.
        reason: one line that says what `auto` looked at.
    """

    device: torch.device
    precision: Precision
    reason: str


def resolve_device(device: str | torch.device, *, mps: bool = True) -> torch.device:
    """The device that was asked for; `auto` takes CUDA, then MPS, then the CPU.

    Args:
        device: a torch device or its name, or 'auto'.
        mps: False where the caller's code does not run there.

    Raises:
        DeviceError: it is not there; another one is never taken instead.
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
    if wanted.type not in ("cpu", "cuda", *(["mps"] if mps else [])):
        raise unknown
    if wanted.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (wanted.index or 0) >= count:
            found = f"{count} CUDA devices" if count else "no CUDA device"
            raise DeviceError(
                f"device must be one that is there, got {str(device)!r} with {found}; "
                "use --device cpu, or install a CUDA build of torch"
            )
        return torch.device("cuda", wanted.index or 0)
    if wanted.type == "mps" and not mps_is_there:
        raise DeviceError("device must be one that is there, got 'mps' without MPS; use cpu")
    return wanted


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively (AMX or AVX-512 BF16); without, bf16 is slower."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def place(device: str | torch.device, precision: str, *, half_precision: bool = True) -> Placement:
    """Device and precision of an encoder.

    Args:
        device: as in `resolve_device`.
        precision: auto, fp32, fp16 or bf16.
        half_precision: whether `auto` may go below fp32 for this encoder.

    Raises:
        DeviceError: the device is not there.
        InvalidInputError: no such precision.
    """
    if precision not in get_args(PrecisionChoice):
        raise InvalidInputError(f"precision must be auto, fp32, fp16 or bf16, got {precision!r}")
    where = resolve_device(device)
    if precision != "auto":
        return Placement(device=where, precision=precision, reason="as asked")  # type: ignore[arg-type]
    if not half_precision:
        return Placement(device=where, precision="fp32", reason="half precision harms this encoder")
    chosen, reason = _auto_precision(where)
    return Placement(device=where, precision=chosen, reason=reason)


def _auto_precision(device: torch.device) -> tuple[Precision, str]:
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "CUDA device with bf16"
        return "fp16", "CUDA device without bf16"
    if device.type == "cpu" and cpu_has_bf16():
        # ViT-S/16, tiles per CPU-second: 1.7 times fp32's with AVX-512 BF16, 3 times with AMX
        return "bf16", "CPU with native bf16"
    return "fp32", f"no native bf16 on {device.type}"
