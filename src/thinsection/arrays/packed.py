"""Arrays that lie compressed in memory: masks of a slide, and pictures that are mostly flat."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.arrays.bands import BAND_ROWS, row_bands
from thinsection.arrays.namespace import Array, ArrayNamespace

# zlib's fastest level: pictures with large flat parts are as small as at the others.
_LEVEL = 1
# Pictures of at most this number of pixels are kept as they are: 24 MiB for twelve of them are
# cheaper than their compression, which takes a twentieth of the CPU time of a small slide.
_FEW_PX = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedArray:
    """An array on the host, (H, W, ...), bool or uint8, as compressed bands of rows."""

    shape: tuple[int, ...]
    is_mask: bool  # True packs eight values into a byte
    bands: tuple[bytes, ...]

    @classmethod
    def of(cls, array: npt.NDArray[np.bool_] | npt.NDArray[np.uint8]) -> "PackedArray":
        """Packs an array."""
        is_mask = array.dtype == bool
        bands = []
        for band in row_bands(len(array)):
            rows = array[band.inside]
            values = np.packbits(rows) if is_mask else rows.view(np.uint8)
            bands.append(_compressed(values))
        return cls(shape=array.shape, is_mask=is_mask, bands=tuple(bands))

    def unpacked(self) -> npt.NDArray[np.bool_] | npt.NDArray[np.uint8]:
        """A new array with the same values."""
        array = np.empty(self.shape, dtype=bool if self.is_mask else np.uint8)
        for band, data in zip(row_bands(len(array)), self.bands, strict=True):
            rows = array[band.inside]
            values = np.frombuffer(zlib.decompress(data), dtype=np.uint8)
            if self.is_mask:
                values = np.unpackbits(values, count=rows.size).view(bool)
            rows[...] = values.reshape(rows.shape)
        return array


def _compressed(values: npt.NDArray[np.uint8]) -> bytes:
    return zlib.compress(np.ascontiguousarray(values).data, _LEVEL)


class PackedArrays(MutableMapping[str, Array]):
    """Arrays by name, compressed: reading one makes a new array, which is the reader's own."""

    def __init__(self) -> None:
        self._packed: dict[str, PackedArray] = {}

    def __getitem__(self, name: str) -> Array:
        return self._packed[name].unpacked()

    def __setitem__(self, name: str, array: Array) -> None:
        self.add(name, PackedArray.of(array))

    def add(self, name: str, array: PackedArray) -> None:
        """Adds an array that is packed already."""
        self._packed[name] = array

    def __delitem__(self, name: str) -> None:
        del self._packed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, name: object) -> bool:
        # the default unpacks the array
        return name in self._packed


def packed_arrays(ns: ArrayNamespace) -> MutableMapping[str, Array]:
    """An empty mapping for arrays of a device: compressed on a CPU, as they are on a GPU."""
    return PackedArrays() if ns.xp is np else {}


def packed_rows(
    ns: ArrayNamespace,
    names: Sequence[str],
    shape: tuple[int, int],
    blocks: Iterable[Array],
) -> Mapping[str, Array]:
    """Pictures by name, uint8 (H, W), from blocks of their rows; large ones compressed on a CPU.

    They may be shared by all readers, so they must not be changed.

    Args:
        ns: device.
        names: of the pictures.
        shape: (H, W) of a picture.
        blocks: rows of all pictures, (names, rows, W), from top to bottom.

    Memory: 256 rows of all pictures, and the compressed ones; all small pictures.
    """
    height, width = shape
    is_packed = ns.xp is np and height * width > _FEW_PX
    num_rows = BAND_ROWS if is_packed else height
    held = ns.xp.empty((len(names), num_rows, width), dtype=ns.xp.uint8)
    bands: list[list[bytes]] = [[] for _ in names]
    done = 0
    for block in blocks:
        first = 0
        while first < block.shape[1]:
            top = done % num_rows
            count = min(block.shape[1] - first, num_rows - top)
            held[:, top : top + count] = block[:, first : first + count]
            first += count
            done += count
            if is_packed and done in (height, done // num_rows * num_rows):
                for rows, of_name in zip(held, bands, strict=True):
                    of_name.append(_compressed(rows[: top + count]))
    if not is_packed:
        if ns.xp is np:
            held.flags.writeable = False
        return dict(zip(names, held))
    arrays = PackedArrays()
    for name, of_name in zip(names, bands, strict=True):
        arrays.add(name, PackedArray(shape=shape, is_mask=False, bands=tuple(of_name)))
    return arrays
