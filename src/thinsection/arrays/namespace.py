"""One object that says where arrays live: NumPy and SciPy on a CPU, CuPy and cupyx on a GPU."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import DeviceError, InvalidInputError

Array = Any  # np.ndarray or cupy.ndarray: whatever the namespace's `xp` makes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayNamespace:
    """Where arrays live and what computes on them; passed in, never looked up."""

    device: str  # 'cpu' or 'cuda:<index>'
    xp: Any  # the array module, numpy or cupy
    ndimage: Any  # scipy.ndimage or cupyx.scipy.ndimage
    # how often an array crossed between host and device, by reason: work images in and masks out
    # are `upload` and `download`; any other is an operation without a counterpart on the device
    crossings: Counter[str] = field(default_factory=Counter, compare=False)

    def upload(self, array: npt.NDArray[Any], *, reason: str = "upload") -> Array:
        """The host array on the device; the same array on a CPU."""
        if self.xp is np:
            return array
        self.crossings[reason] += 1
        return self.xp.asarray(array)

    def download(self, array: Array, *, reason: str = "download") -> npt.NDArray[Any]:
        """The device array on the host; the same array on a CPU."""
        if self.xp is np:
            return np.asarray(array)
        self.crossings[reason] += 1
        return np.asarray(self.xp.asnumpy(array))


def get_namespace(device: str = "cpu") -> ArrayNamespace:
    """The namespace of a device: 'cpu', 'cuda' or 'cuda:<index>'.

    Raises DeviceError: it is not there, or CuPy is not; InvalidInputError: no such kind of device.
    """
    if device == "cpu":
        from scipy import ndimage

        return ArrayNamespace(device="cpu", xp=np, ndimage=ndimage)
    if not (named := re.fullmatch(r"cuda(?::(\d*))?", device)):
        raise InvalidInputError(
            f"device must be 'cpu', 'cuda' or 'cuda:<index>', got {device!r}"
        )
    number = int(named[1] or 0)
    device = f"cuda:{number}"
    try:
        import cupy
        from cupyx.scipy import ndimage
    except ImportError as error:
        rule = f"device must have CuPy, got {device!r} without it ({error})"
        raise DeviceError(
            f"{rule}; pip install cupy-cuda12x, or use device 'cpu'"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"device must be there, got {device!r}: {error}") from error
    if number >= count:
        raise DeviceError(f"device must be one of {count} CUDA devices, got {device!r}")
    cupy.cuda.Device(number).use()
    return ArrayNamespace(device=device, xp=cupy, ndimage=ndimage)
