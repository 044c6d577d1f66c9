"""Where bytes come from: a local file, read at any offset by any thread."""

import os
from pathlib import Path
from typing import Protocol

from thinsection.errors import SlideReadError


class ByteSource(Protocol):
    """Random access to the bytes of a slide. Thread-safe."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        ...

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes.

        Raises:
            SlideReadError: the source ends before.
        """
        ...

    def close(self) -> None: ...


class FileSource:
    """A local file through `pread`: no shared position, so no lock."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._descriptor = os.open(path, os.O_RDONLY)

    def read_at(self, offset: int, length: int) -> bytes:
        """See `ByteSource.read_at`."""
        data = os.pread(self._descriptor, length, offset)
        if len(data) != length:
            raise SlideReadError(
                f"segment must be whole, got {len(data)} of {length} bytes at offset {offset} in "
                f"{Path(self.name).name!r}; the file is truncated"
            )
        return data

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
