"""Where a reader's bytes come from: the file, by `preadv`, or all of it, read once into RAM."""

import os
from pathlib import Path
from typing import Protocol

import numpy as np

from thinsection.errors import StoreError
from thinsection.store.cache.dtypes import Bytes
from thinsection.types import MIB

LOAD_BYTES = 64 * MIB  # of one read while loading


class Source(Protocol):
    """Bytes of features.bin."""

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fills `out` with the bytes at `offset`."""

    def bytes_at(self, offset: int, scratch: Bytes) -> Bytes:
        """As many bytes at `offset` as `scratch` has: in `scratch`, or a view of what is in RAM."""

    def close(self) -> None:
        """Lets go of file and memory."""


class FileSource:
    """Reads by `preadv` into the caller's buffers: no page of the file counts as RSS."""

    def __init__(self, path: Path, *, size: int) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"cache data must be readable, got {str(path)!r}: {error}") from error
        self._path, self.size = path, size
        found = os.fstat(self._file).st_size
        if found != size:
            os.close(self._file)
            raise StoreError(
                f"cache data must have {size} bytes, got {found} in {str(path)!r}; remove it "
                f"('thinsection cache rm {path.parent.name}') and compute it again"
            )

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fills `out`, over as many calls as the kernel makes of it.

        Raises:
            StoreError: the file ends before, or the disk fails.
        """
        view = out.data
        while view:
            try:
                count = os.preadv(self._file, [view], offset)
            except OSError as error:
                raise StoreError(
                    f"cache data must be readable, got {error} in {str(self._path)!r}"
                ) from error
            if count == 0:
                raise StoreError(
                    f"cache data must reach byte {offset + len(view)}, got its end before in "
                    f"{str(self._path)!r}; it was truncated while open"
                )
            view, offset = view[count:], offset + count

    def bytes_at(self, offset: int, scratch: Bytes) -> Bytes:
        self.read_into(offset, scratch)
        return scratch

    def close(self) -> None:
        os.close(self._file)


class RamSource:
    """The whole file in one array, as stored: narrow rows are widened straight out of it.

    Memory: the file's size.
    """

    def __init__(self, file: FileSource) -> None:
        self._data: Bytes = np.empty(file.size, dtype=np.uint8)
        for start in range(0, file.size, LOAD_BYTES):
            file.read_into(start, self._data[start : start + LOAD_BYTES])
        file.close()

    def read_into(self, offset: int, out: Bytes) -> None:
        np.copyto(out, self._data[offset : offset + out.size])

    def bytes_at(self, offset: int, scratch: Bytes) -> Bytes:
        return self._data[offset : offset + scratch.size]

    def close(self) -> None:
        self._data = np.empty(0, dtype=np.uint8)
