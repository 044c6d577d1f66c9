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


class _Descriptor:
    """An open file that closes when the last thread that reads from it has let it go."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):  # opening may have failed
            os.close(self.number)


class FileSource:
    """A local file through `pread`: no shared position, so no lock."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._descriptor: _Descriptor | None = _Descriptor(path)

    def read_at(self, offset: int, length: int) -> bytes:
        """See `ByteSource.read_at`."""
        descriptor = self._descriptor  # kept alive here while `close` runs elsewhere
        if descriptor is None:
            raise closed_error(self.name)
        data = os.pread(descriptor.number, length, offset)
        if len(data) != length:
            raise truncated_error(Path(self.name).name, offset, length, got=len(data))
        return data

    def close(self) -> None:
        """Lets go of the file; a second call does nothing."""
        self._descriptor = None


def truncated_error(name: str, offset: int, length: int, *, got: int) -> SlideReadError:
    """What a source raises that ends within a range."""
    return SlideReadError(
        f"segment must be whole, got {got} of {length} bytes at offset {offset} in {name!r}; "
        "the file is truncated"
    )


def closed_error(slide_path: str) -> SlideReadError:
    """What a read after `close` raises."""
    return SlideReadError(
        f"slide must be open, got a closed one in {Path(slide_path).name!r}; open it again"
    )
