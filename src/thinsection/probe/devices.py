"""Tensors on the device that was asked for, float32 all the way."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinsection.errors import BudgetError
from thinsection.types import GIB
from thinsection.units import format_bytes

if TYPE_CHECKING:
    import torch

DEFAULT_BUDGET_BYTES = 1 * GIB


def probe_device(name: str) -> "torch.device":
    """The device, checked; 'auto' is CUDA where there is one, else the CPU.

    Raises:
        DeviceError: no such device here.
    """
    from thinsection.encode.placement import resolve_device

    return resolve_device(name, mps=False)


def to_device(array: npt.NDArray, device: "torch.device") -> "torch.Tensor":
    """The array as a tensor; on the CPU it shares the array's memory and is only read."""
    import torch

    source = array if array.flags.writeable else array.copy()
    return torch.from_numpy(source).to(device)


def rows_within(
    budget_bytes: int, bytes_per_row: int, *, name: str, most: int, fixed_bytes: int = 0
) -> int:
    """How many rows of a block fit beside `fixed_bytes` into the budget: between 1 and `most`.

    Raises:
        BudgetError: not even one row fits.
    """
    rows = (budget_bytes - fixed_bytes) // bytes_per_row
    if rows < 1:
        raise BudgetError(
            f"budget_bytes must hold one {name} ({format_bytes(fixed_bytes + bytes_per_row)}), "
            f"got {format_bytes(budget_bytes)}"
        )
    return int(min(rows, max(1, most)))


def unit_rows(x: "torch.Tensor") -> "torch.Tensor":
    """Rows scaled to length 1 (a zero row stays zero)."""
    import torch

    return torch.nn.functional.normalize(x, dim=1, eps=float(np.float32(1e-12)))
