"""The place where arrays live: NumPy and SciPy on a CPU, CuPy and cupyx on a GPU."""

import re
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import DeviceError, InvalidInputError

# np.ndarray or cupy.ndarray: what the namespace's `xp` makes; CuPy has no types.
Array = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayNamespace:
    """The device of arrays and the modules that compute there; passed in, never looked up."""

    device: str  # 'cpu' or 'cuda:<index>'
    xp: ModuleType  # the array module, numpy or cupy
    # count of copies between host and device, by reason. Work images in and masks out are
    # `upload` and `download`; others are operations that the device lacks
    transfers: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def ndimage(self) -> ModuleType:
        """scipy.ndimage or cupyx.scipy.ndimage, for those filters that are not ours.

        It is imported when a filter is used.
        """
        if self.xp is np:
            from scipy import ndimage
        else:
            from cupyx.scipy import ndimage
        module: ModuleType = ndimage
        return module

    def upload(
        self, array: npt.NDArray[np.generic], *, reason: str = "upload"
    ) -> Array:
        """The host array on the device; the same array on a CPU."""
        if self.xp is np:
            return array
        self.transfers[reason] += 1
        return self.xp.asarray(array)

    def download(self, array: Array, *, reason: str = "download") -> npt.NDArray[Any]:
        """The device array on the host; the same array on a CPU."""
        if self.xp is np:
            return np.asarray(array)
        self.transfers[reason] += 1
        return np.asarray(self.xp.asnumpy(array))


def get_namespace(device: str = "cpu") -> ArrayNamespace:
    """The namespace of a device: 'cpu', 'cuda' or 'cuda:<index>'.

    Raises:
        DeviceError: the device or CuPy is not there.
        InvalidInputError: there is no such kind of device.
    """
    if device == "cpu":
        return ArrayNamespace(device="cpu", xp=np)
    match = re.fullmatch(r"cuda(?::(\d*))?", device)
    if match is None:
        raise InvalidInputError(
            f"device must be 'cpu', 'cuda' or 'cuda:<index>', got {device!r}"
        )
    return _cuda_namespace(int(match[1] or 0))


def _cuda_namespace(index: int) -> ArrayNamespace:
    device = f"cuda:{index}"
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"device {device!r} must have CuPy, got {error}; pip install cupy-cuda12x, or use "
            "device 'cpu'"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"device must be available, got {device!r}: {error}"
        ) from error
    if index >= count:
        raise DeviceError(
            f"device must be one of the {count} CUDA devices of this machine, got {device!r}"
        )
    cupy.cuda.Device(index).use()
    return ArrayNamespace(device=device, xp=cupy)


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """What NumPy reads, or a tensor of torch of any type and device, as an array of the host.

    Raises TypeError or ValueError: NumPy does not read it.
    """
    if not hasattr(values, "detach"):
        return np.asarray(values)
    tensor = values.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":  # a type that NumPy does not have
        tensor = tensor.float()
    return np.asarray(tensor)
