"""Where bytes come from: a local file, or a URL by range requests through fsspec."""

import io
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

from thinsection.errors import MissingDependencyError, SlideOpenError, SlideReadError
from thinsection.types import KIB

URL_MARK = "://"
_MAX_BLOCKS = 64


def is_url(slide_path: str) -> bool:
    """Whether a slide or folder is named by a URL (s3://, gs://, az://, https://, ...)."""
    return URL_MARK in slide_path


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


class FsspecSource:
    """See `ByteSource`: range requests through fsspec, counted.

    Attributes:
        size: bytes of the file.
        fetched_bytes, requests: so far.
    """

    def __init__(self, url: str) -> None:
        self.name = url
        self._fs, self._path = filesystem(url)
        try:
            self.size = int(self._fs.size(self._path))
        except (OSError, ValueError, TypeError) as error:  # TypeError: a server without a size
            raise SlideOpenError(f"slide must be reachable, got {error!r} for {url!r}") from None
        self._lock = threading.Lock()
        self.fetched_bytes = self.requests = 0

    def read_at(self, offset: int, length: int) -> bytes:
        """See `ByteSource.read_at`."""
        try:
            data: bytes = self._fs.cat_file(self._path, start=offset, end=offset + length)
        except (OSError, ValueError) as error:
            raise SlideReadError(
                f"range of {self.name!r} must be readable, got {error!r}"
            ) from error
        with self._lock:
            self.fetched_bytes += len(data)
            self.requests += 1
        if len(data) != length:
            raise truncated_error(self.name, offset, length, got=len(data))
        return data

    def close(self) -> None:
        """Nothing is held open between requests."""


class RangeFile(io.RawIOBase):
    """A seekable binary file over a source, for readers of metadata; blocks of 64 KiB are kept.

    Memory: 4 MiB.
    """

    BLOCK = 64 * KIB  # that is fetched at once

    def __init__(self, source: FsspecSource) -> None:
        super().__init__()
        self._source, self._position = source, 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer from the blocks."""
        wanted = max(0, min(len(buffer), self._source.size - self._position))
        done = 0
        while done < wanted:
            index, inside = divmod(self._position, self.BLOCK)
            piece = self._block(index)[inside : inside + wanted - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
            self._position += len(piece)
        return done

    def _block(self, index: int) -> bytes:
        if index not in self._blocks:
            start = index * self.BLOCK
            length = min(self.BLOCK, self._source.size - start)
            self._blocks[index] = self._source.read_at(start, length)
            if len(self._blocks) > _MAX_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(index)
        return self._blocks[index]


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it."""
    try:
        import fsspec
    except ImportError as error:
        raise MissingDependencyError(
            f"URLs need fsspec, got {error}; pip install 'thinsection[cloud]'"
        ) from None
    try:
        found = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingDependencyError(
            f"{url.partition(URL_MARK)[0]}:// needs a package: {error}"
        ) from None
    except ValueError as error:
        raise SlideOpenError(f"URL must have a known protocol, got {url!r}: {error}") from None
    return found[0], str(found[1])


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
