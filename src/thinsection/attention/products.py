"""fp32 matrix products at the CPU's real rate: through oneDNN where that is faster here.

PyTorch multiplies fp32 matrices by MKL, which takes half the rate of oneDNN on some CPUs. Its one
switch for oneDNN (from 2.9 on) is leave to compute in bfloat16, which oneDNN uses where the CPU has
a matrix unit for it. So it is tried once a process: the switch counts only if products stay
float32 and are clearly faster. Every other product (float64, bfloat16, CUDA) is computed as always.

The switch is one of the process: while a block runs, products of other threads go the same way, and
`torch.get_float32_matmul_precision()` raises. Blocks are therefore kept around our own arithmetic
alone. Layers with few outputs (the linear probe's) are not in one: oneDNN is slower there.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from timeit import timeit
from typing import Any

import torch
from torch import Tensor

MIN_GAIN = 1.25  # over MKL; a smaller gain is not worth other bytes than PyTorch's
MAX_ERROR = 4e-6  # of the largest value; float32 is at 1e-6, bfloat16 at 3e-3
_TRIAL_EDGE = 384  # rows and columns of the trial matrices: about 1 ms a product
_TRIAL_TURNS = 7  # each way, alternating


@contextmanager
def fast_products() -> Iterator[None]:
    """Lets fp32 matrix products on the CPU use the faster library in a block or function.

    Rounding errors stay those of float32. Blocks may be nested, and open in several threads: the
    last block to end restores the setting from before the first.
    """
    if not onednn_is_faster():
        yield
        return
    with _SWITCH:
        yield


@cache
def onednn_is_faster() -> bool:
    """True where oneDNN multiplies fp32 in fp32 and clearly faster than PyTorch's own way here."""
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (is_built and hasattr(torch.backends.mkldnn, "matmul")):
        return False
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, _TRIAL_EDGE, _TRIAL_EDGE, generator=generator)
    with _SWITCH:
        error = product_error(a, b)
    multiply = partial(torch.matmul, a, b)
    own_s = []
    onednn_s = []
    for _ in range(_TRIAL_TURNS):
        own_s.append(timeit(multiply, number=1))
        with _SWITCH:
            onednn_s.append(timeit(multiply, number=1))
    return is_worth_it(error, own_s, onednn_s)


def is_worth_it(
    error: float, own_s: Sequence[float], onednn_s: Sequence[float]
) -> bool:
    """True where oneDNN's products are float32's, and its quickest turn is faster by MIN_GAIN."""
    return error <= MAX_ERROR and min(own_s) > MIN_GAIN * min(onednn_s)


def product_error(a: Tensor, b: Tensor) -> float:
    """Largest error, of the largest value, over the forms that the house multiplies a and b in."""
    exact = a.double() @ b.double()
    batches = a.view(6, -1, len(b))
    products = (
        torch.mm(a, b.T.contiguous().T),
        torch.ones_like(exact, dtype=a.dtype).addmm_(a, b).sub_(1),
        torch.bmm(batches, b.expand(6, -1, -1)).view_as(exact),
        torch.nn.functional.linear(a, b.T),
        torch.mm(a[:, :64], b[:64]).add_(torch.mm(a[:, 64:], b[64:])),
    )
    errors = torch.stack([(product - exact).abs().max() for product in products])
    return float(errors.max() / exact.abs().max())


class _Switch:
    """Lets PyTorch multiply fp32 on the CPU through oneDNN while at least one block is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open_blocks = 0
        self._previous = ""

    def __enter__(self) -> None:
        with self._lock:
            if self._open_blocks == 0:
                self._previous = _set_precision("bf16")
            self._open_blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open_blocks -= 1
            if self._open_blocks == 0:
                _set_precision(self._previous)


def _set_precision(precision: str) -> str:
    """Set PyTorch's switch, and return its previous value."""
    switch: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - unknown to mypy
    previous = str(switch.fp32_precision)
    switch.fp32_precision = precision
    return previous


_SWITCH = _Switch()
