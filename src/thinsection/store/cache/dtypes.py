"""Storage types of cached values: chooses the narrowest exact type, converts, measures errors.

NumPy has no bfloat16, so such a value is stored as two bytes: the upper half of a float32.
Whether a type is exact is decided by bits, so that -0.0 stays -0.0. Values that are not finite
are refused earlier.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

StoredDtype = Literal["fp32", "bf16", "fp16"]
Storage = Literal["lossless", "fp32", "bf16", "fp16"]
F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

ITEM_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "lossless": 4}
# torch computes an element-wise operation on at most this number of elements in the calling
# thread. So reader threads start no thread pools of their own beside the training step.
BLOCK = 32_768


def check_rows_finite(values: F32, *, first_row: int) -> None:
    """Raises InvalidInputError, with the row, if a value is NaN or infinite."""
    for row, row_values in enumerate(values, first_row):
        finite = np.isfinite(row_values)
        if not finite.all():
            raise InvalidInputError(
                f"features must be finite, got {row_values[~finite].flat[0]} in row {row}; "
                "check the image and the encoder's precision"
            )


def narrowest(values: F32) -> StoredDtype:
    """Returns bf16 if all values are exact in it, else fp16 if they are exact there, else fp32."""
    bits = values.reshape(-1).view(np.uint32)
    blocks = [bits[start : start + BLOCK] for start in range(0, bits.size, BLOCK)]
    if not any(int(np.bitwise_or.reduce(block)) & 0xFFFF for block in blocks):
        return "bf16"
    return "fp16" if all(map(_exact_in_fp16, blocks)) else "fp32"


def _exact_in_fp16(bits: npt.NDArray[np.uint32]) -> bool:
    widened = np.empty(bits.size, np.float32)
    widen_into(narrow(bits.view(np.float32), "fp16"), "fp16", widened)
    return np.array_equal(widened.view(np.uint32), bits)


def narrow(values: F32, dtype: StoredDtype) -> Bytes:
    """Converts values to bytes of a type; rounds half to even.

    Memory: half of that of the values.
    """
    flat = values.reshape(-1)
    if dtype == "fp32":
        return flat.view(np.uint8)
    import torch

    narrowed = torch.from_numpy(flat).to(_half(dtype))
    return narrowed.view(torch.int16).numpy().view(np.uint8)


def widen_into(stored: Bytes, dtype: StoredDtype, out: F32) -> None:
    """Writes stored values to `out` as float32; this is exact for every type.

    Memory: none.
    """
    flat = out.reshape(-1)
    if dtype == "fp32":
        np.copyto(flat.view(np.uint8), stored)
        return
    import torch

    source = torch.from_numpy(stored.view(np.int16)).view(_half(dtype))
    target = torch.from_numpy(flat)
    for start in range(0, flat.size, BLOCK):
        target[start : start + BLOCK].copy_(source[start : start + BLOCK])


def _half(dtype: StoredDtype) -> "torch.dtype":
    import torch

    return torch.bfloat16 if dtype == "bf16" else torch.float16


@dataclass(frozen=True, slots=True)
class Loss:
    """Error of values that were converted to a type that is not exact."""

    max_abs_error: float = 0.0
    max_rel_error: float = 0.0  # over values other than 0
    changed: int = 0  # values whose bits changed
    values: int = 0


def measure_loss(
    values: F32, stored: Bytes, dtype: StoredDtype, first_row: int, loss: Loss
) -> Loss:
    """Adds the error of the values, which begin at row `first_row`, to that of earlier rows.

    Raises:
        InvalidInputError: a value becomes infinite.
    """
    flat = values.reshape(-1)
    row_values = flat.size // len(values)
    item = ITEM_BYTES[dtype]
    for start in range(0, flat.size, BLOCK):
        exact = flat[start : start + BLOCK]
        rounded = np.empty_like(exact)
        widen_into(stored[start * item : (start + exact.size) * item], dtype, rounded)
        infinite = ~np.isfinite(rounded)
        if infinite.any():
            row = first_row + (start + int(infinite.argmax())) // row_values
            raise InvalidInputError(
                f"features must fit {dtype}, got {exact[infinite][0]:g} in row {row}, "
                'which becomes infinite; use cache_dtype="lossless"'
            )
        error = np.abs(rounded.astype(np.float64) - exact)
        size = np.abs(exact.astype(np.float64))
        relative = error[size > 0] / size[size > 0]
        changed = np.count_nonzero(rounded.view(np.uint32) != exact.view(np.uint32))
        loss = Loss(
            max_abs_error=float(error.max(initial=loss.max_abs_error)),
            max_rel_error=float(relative.max(initial=loss.max_rel_error)),
            changed=loss.changed + int(changed),
            values=loss.values + exact.size,
        )
    return loss
