"""Stored dtypes: the narrowest that keeps every bit, narrowing with its error, exact widening.

NumPy has no bfloat16: such values are uint16, the upper half of the float32's bits. Exactness is
judged on bits, so that -0.0 stays -0.0; values that are not finite are refused before (no NaN
payload is ever stored).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

StoredDtype = Literal["fp32", "bf16", "fp16"]
Storage = Literal["lossless", "fp32", "bf16", "fp16"]
F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

STORED: tuple[StoredDtype, ...] = ("fp32", "bf16", "fp16")
ITEM_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "lossless": 4}
# torch runs an element-wise operation of up to this many elements on the calling thread: reader
# threads do not wake a thread pool of their own beside the training step's
BLOCK = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a forced dtype did to the values; the relative error is over values that are not 0.

    `changed` of all `values` have other bits.
    """

    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    changed: int = 0
    values: int = 0


def check_rows_finite(values: F32, *, first_row: int) -> None:
    """Raises InvalidInputError, naming the row, where a value is NaN or infinite."""
    for i, row in enumerate(values):
        if not (finite := np.isfinite(row)).all():
            got = f"{row[~finite].flat[0]} in row {first_row + i}"
            remedy = "check that image and the encoder's precision"
            raise InvalidInputError(f"features must be finite, got {got}; {remedy}")


def narrowest(values: F32) -> StoredDtype:
    """bf16 if every value is exact in it, else fp16 if exact in that, else fp32.

    Stops at the first block that rules a dtype out, so that full mantissas cost next to nothing.

    Memory: a block of 128 KiB, twice.
    """
    bits = values.reshape(-1).view(np.uint32)
    blocks = [bits[i : i + BLOCK] for i in range(0, bits.size, BLOCK)]
    if not any(int(np.bitwise_or.reduce(block)) & 0xFFFF for block in blocks):
        return "bf16"
    if all(np.array_equal(_through_fp16(block), block) for block in blocks):
        return "fp16"
    return "fp32"


def narrow(values: F32, dtype: StoredDtype) -> Bytes:
    """The values as bytes of that dtype, rounded to nearest even where they do not fit.

    Memory: half of the values; fp32 is a view.
    """
    flat = values.reshape(-1)
    if dtype == "fp32":
        return flat.view(np.uint8)
    import torch

    narrowed = torch.from_numpy(flat).to(_torch_dtype(dtype))
    return narrowed.view(torch.int16).numpy().view(np.uint8)


def measure_loss(
    values: F32, stored: Bytes, dtype: StoredDtype, *, first_row: int, before: Loss
) -> Loss:
    """The error of forced values, together with that of the values before them.

    Memory: some blocks of 128 KiB.

    Raises:
        InvalidInputError: a finite value became infinite.
    """
    flat, loss = values.reshape(-1), before
    back, item = np.empty(BLOCK, np.float32), ITEM_BYTES[dtype]
    for i in range(0, flat.size, BLOCK):
        want = flat[i : i + BLOCK]
        got = back[: want.size]
        widen_into(stored[i * item : (i + want.size) * item], dtype, got)
        if (infinite := ~np.isfinite(got)).any():
            row = first_row + (i + int(infinite.argmax())) // (flat.size // len(values))
            raise InvalidInputError(
                f"features must fit {dtype}, got {want[infinite][0]:g} in row {row}, which becomes "
                "infinite; use --cache-dtype lossless"
            )
        error = np.abs(got.astype(np.float64) - want)
        nonzero = want != 0
        relative = error[nonzero] / np.abs(want[nonzero].astype(np.float64))
        changed = np.count_nonzero(got.view(np.uint32) != want.view(np.uint32))
        loss = Loss(
            max_abs_error=max(loss.max_abs_error, float(error.max(initial=0.0))),
            max_rel_error=max(loss.max_rel_error, float(relative.max(initial=0.0))),
            changed=loss.changed + int(changed),
            values=loss.values + want.size,
        )
    return loss


def widen_into(stored: Bytes, dtype: StoredDtype, out: F32) -> None:
    """Writes the stored values to `out` as float32; exact for every dtype.

    Memory: nothing.
    """
    flat = out.reshape(-1)
    if dtype == "fp32":
        np.copyto(flat.view(np.uint8), stored)
        return
    import torch

    source = torch.from_numpy(stored.view(np.int16)).view(_torch_dtype(dtype))
    target = torch.from_numpy(flat)
    for i in range(0, flat.size, BLOCK):
        target[i : i + BLOCK].copy_(source[i : i + BLOCK])


def _through_fp16(bits: npt.NDArray[np.uint32]) -> Any:
    import torch

    values = torch.from_numpy(bits.view(np.float32))
    return values.to(torch.float16).to(torch.float32).numpy().view(np.uint32)


def _torch_dtype(dtype: StoredDtype) -> "torch.dtype":
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
