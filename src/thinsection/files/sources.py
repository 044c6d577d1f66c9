"""Where bytes come from: a local file, or a URL by range requests through fsspec."""

import os
import threading
from pathlib import Path
from typing import Any

from thinsection.errors import MissingDependencyError, SlideOpenError, SlideReadError
from thinsection.types import KIB

URL_MARK = "://"


def is_url(slide_path: str) -> bool:
    """Whether a slide or folder is named by a URL (s3://, gs://, az://, https://, ...)."""
    return URL_MARK in slide_path


class _Descriptor(int):
    """An open file that closes when the last thread that reads from it has let it go."""

    def __del__(self) -> None:
        os.close(self)


class FileSource:
    """A local file through `pread`: no shared position, so no lock. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._descriptor: _Descriptor | None = _Descriptor(os.open(path, os.O_RDONLY))

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes.

        Raises:
            SlideReadError: the source ends before.
        """
        descriptor = self._descriptor  # kept alive here while `close` runs elsewhere
        if descriptor is None:
            raise closed_error(self.name)
        data = os.pread(descriptor, length, offset)
        if len(data) != length:
            raise truncated_error(Path(self.name).name, offset, length, got=len(data))
        return data

    def close(self) -> None:
        """Lets go of the file; a second call does nothing."""
        self._descriptor = None


class FsspecSource:
    """A file by range requests through fsspec, counted. Thread-safe.

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
        """See `FileSource.read_at`."""
        try:
            data: bytes = self._fs.cat_file(self._path, start=offset, end=offset + length)
        except (OSError, ValueError) as error:
            name = self.name
            raise SlideReadError(f"range of {name!r} must be readable, got {error!r}") from error
        with self._lock:
            self.fetched_bytes += len(data)
            self.requests += 1
        if len(data) != length:
            raise truncated_error(self.name, offset, length, got=len(data))
        return data

    def close(self) -> None:
        """Nothing is held open between requests."""


ByteSource = FileSource | FsspecSource  # random access to the bytes of a slide


def metadata_file(source: FsspecSource) -> Any:
    """A seekable binary file over a source, for readers of metadata.

    Memory: 4 MiB, the last 64 blocks of 64 KiB.
    """
    from fsspec.spec import AbstractBufferedFile

    class RangeFile(AbstractBufferedFile):  # type: ignore[misc]
        def _fetch_range(self, start: int, end: int) -> bytes:
            return source.read_at(start, min(end, source.size) - start)

    options = {"block_size": 64 * KIB, "cache_options": {"maxblocks": 64}}
    return RangeFile(None, source.name, size=source.size, cache_type="blockcache", **options)


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it."""
    try:
        import fsspec
    except ImportError as error:
        remedy = "pip install 'thinsection[cloud]'"
        raise MissingDependencyError(f"URLs need fsspec, got {error}; {remedy}") from None
    try:
        found, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        protocol = url.partition(URL_MARK)[0]
        raise MissingDependencyError(f"{protocol}:// needs a package: {error}") from None
    except ValueError as error:
        raise SlideOpenError(f"URL must have a known protocol, got {url!r}: {error}") from None
    return found, str(path)


def truncated_error(name: str, offset: int, length: int, *, got: int) -> SlideReadError:
    """What a source raises that ends within a range."""
    return SlideReadError(
        f"segment must be whole, got {got} of {length} bytes at offset {offset} in {name!r}; "
        "the file is truncated"
    )


def closed_error(slide_path: str) -> SlideReadError:
    """What a read after `close` raises."""
    name = Path(slide_path).name
    return SlideReadError(f"slide must be open, got a closed one in {name!r}; open it again")
