"""fp32 matrix products at the CPU's real rate: through oneDNN where that is faster here.

PyTorch multiplies fp32 matrices by MKL, which takes half the rate of oneDNN on some CPUs. Its one
switch for oneDNN (from 2.9 on) is leave to compute in bfloat16, which oneDNN uses where the CPU has
a matrix unit for it. So it is tried once a process: the switch counts only if products stay
float32 and are clearly faster. Every product of another kind (float64, bfloat16, CUDA) is as ever.

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

MIN_GAIN = 1.25  # over MKL; below it the switch is not worth other bytes than PyTorch's
MAX_ERROR = 4e-6  # of the largest value; float32 is at 1e-6, bfloat16 at 3e-3
_EDGE = 384  # rows and columns of the matrices that are tried: about 1 ms a product
_TURNS = 7  # each way, alternating


@contextmanager
def fast_products() -> Iterator[None]:
    """Within the block (or decorated function) the CPU's fp32 products go the faster way.

    Errors stay float32's. Blocks may be nested, and open in several threads: the last one to end
    restores what the first one found.
    """
    if not onednn_is_faster():
        yield
        return
    with _SWITCH:
        yield


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies fp32 in fp32 and clearly faster than PyTorch's own way here."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (built and hasattr(torch.backends.mkldnn, "matmul")):
        return False
    a, b = torch.rand(2, _EDGE, _EDGE, generator=torch.Generator().manual_seed(0))
    with _SWITCH:
        error = product_error(a, b)
    own, onednn, product = list[float](), list[float](), partial(torch.matmul, a, b)
    for _ in range(_TURNS):
        own.append(timeit(product, number=1))
        with _SWITCH:
            onednn.append(timeit(product, number=1))
    return is_worth_it(error, own, onednn)


def is_worth_it(
    error: float, own_s: Sequence[float], onednn_s: Sequence[float]
) -> bool:
    """Whether oneDNN's products are float32's, and its quickest turn is faster by MIN_GAIN."""
    return error <= MAX_ERROR and min(own_s) > MIN_GAIN * min(onednn_s)


def product_error(a: Tensor, b: Tensor) -> float:
    """Largest error, of the largest value, over the forms that the house multiplies a and b in."""
    exact, parts = a.double() @ b.double(), a.view(6, -1, len(b))
    found = (
        torch.mm(a, b.T.contiguous().T),
        torch.ones_like(exact, dtype=a.dtype).addmm_(a, b).sub_(1),
        torch.bmm(parts, b.expand(6, -1, -1)).view_as(exact),
        torch.nn.functional.linear(a, b.T),
        torch.mm(a[:, :64], b[:64]).add_(torch.mm(a[:, 64:], b[64:])),
    )
    errors = torch.stack([(x - exact).abs().max() for x in found])
    return float(errors.max() / exact.abs().max())


class _Switch:
    """Lets PyTorch multiply fp32 on the CPU through oneDNN while at least one block is open."""

    def __init__(self) -> None:
        self._lock, self._open, self._found = threading.Lock(), 0, ""

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._found = _set("bf16")
            self._open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                _set(self._found)


def _set(precision: str) -> str:
    """Sets PyTorch's switch, and says what it was."""
    switch: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - unknown to mypy
    found = str(switch.fp32_precision)
    switch.fp32_precision = precision
    return found


_SWITCH = _Switch()
