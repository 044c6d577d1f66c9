"""Sources of bytes: a local file, a URL by range requests, a folder of a store.

The web client connects to an address of this machine only if the user named it. A host name in a
table may resolve to this machine or to the metadata service of a cloud, and a web server may
redirect there. So addresses are checked when the client connects, after DNS.
"""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from thinsection import errors
from thinsection.errors import SlideOpenError, SlideReadError, StoreError
from thinsection.extras import check_needs, importing, needs_of_path
from thinsection.files.atomic import TMP_MARK, atomic_path
from thinsection.files.urls import (
    STORE_SCHEMES,
    URL_MARK,
    hide_secret,
    whole_url,
    without_secrets,
)
from thinsection.types import KIB, MIB, Uncopied

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from thinsection.files.trust import is_local_address, is_local_host, may_be_local

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import ResolveResult

# share of a file that is streamed before a source that may keep a copy fetches it whole
_STREAMED_SHARE = 0.03
_COPY_BYTES = 8 * MIB  # bytes that a copy fetches at once
# names under which the stores of fsspec state the version of a file
_VERSIONS = (
    "ETag",
    "etag",
    "Content-MD5",
    "md5Hash",
    "Last-Modified",
    "LastModified",
    "mtime",
)


class Descriptor(Uncopied, int):
    """Number of an open file, which is closed when nothing holds this object any more.

    A thread that reads keeps a reference, so that the file stays open until it has read.
    """

    copy_remedy = "open the file again"

    def __del__(self) -> None:
        os.close(self)


class FileSource(Uncopied):
    """A local file, read by `pread`, which needs no shared position and so no lock. Thread-safe."""

    copy_remedy = "open the file again"

    def __init__(self, path: str) -> None:
        self.name = path
        self._file = Path(path).name
        self._descriptor: Descriptor | None = Descriptor(os.open(path, os.O_RDONLY))

    def read_at(self, offset: int, length: int) -> bytes:
        """Reads exactly `length` bytes; SlideReadError if the source ends before."""
        # this reference keeps the file open if another thread calls `close`
        descriptor = self._descriptor
        if descriptor is None:
            raise closed_error(self.name)
        data = os.pread(descriptor, length, offset)
        _check_whole(len(data), length, self._file, offset)
        return data

    def read_into(self, offset: int, arrays: Sequence[NDArray[np.uint8]]) -> None:
        """Fills C-contiguous arrays, one after the other, from `offset` on, without a copy."""
        descriptor = self._descriptor
        if descriptor is None:
            raise closed_error(self.name)
        length = sum(array.nbytes for array in arrays)
        buffers = [array.data for array in arrays]
        num_read = os.preadv(descriptor, buffers, offset)
        _check_whole(num_read, length, self._file, offset)

    def close(self) -> None:
        """Closes the file when no thread reads from it; a second call does nothing."""
        self._descriptor = None


class FsspecSource(Uncopied):
    """A file of `size` bytes, read by range requests through fsspec. Thread-safe.

    Requests and fetched bytes are counted.
    """

    copy_remedy = "open the URL again"

    def __init__(self, url: str) -> None:
        self._fs, self._path, self.name = filesystem(url)
        try:
            details = self._fs.info(self._path)
            self.size = int(details["size"])
        except Exception as error:  # noqa: BLE001 - each store has its own errors
            check_connection(error, self.name)
            raise SlideOpenError(
                f"slide must be reachable, got {without_secrets(repr(error))} for {self.name!r}"
            ) from None
        # what the server states about the version of the file; '' if it states nothing
        versions = [details[name] for name in _VERSIONS if details.get(name)]
        self.version = str(versions[0]) if versions else ""
        self._lock = threading.Lock()
        self.fetched_bytes = 0
        self.requests = 0
        # web servers may ignore the range of a request
        if self.size > 1 and url.lower().startswith(WEB):
            self._check_ranges()
        self._copy_lock = threading.Lock()
        self._make_copy: Callable[[], Path | None] | None = None
        self._copy: FileSource | None = None

    def read_at(self, offset: int, length: int) -> bytes:
        """See `FileSource.read_at`."""
        with self._copy_lock:
            num_streamed = self.fetched_bytes + length
            if self._make_copy and num_streamed > _STREAMED_SHARE * self.size:
                path = self._make_copy()
                self._make_copy = None
                if path is not None:
                    self._copy = FileSource(str(path))
            copy = self._copy
        if copy is not None:
            return copy.read_at(offset, length)
        return self._fetch(offset, length)

    def keep_copy(self, make_copy: Callable[[], Path | None]) -> None:
        """Reads from a local copy once more than 3 % of the file would be streamed.

        So a file that is read completely, and partly twice, is fetched only once.

        Args:
            make_copy: makes the copy with `copy_to`, and returns its path. It returns None if there
                is no room; then the file is streamed as before. It is called once.
        """
        self._make_copy = make_copy

    def copy_to(self, path: Path) -> None:
        """Fetches the whole file. Memory: 8 MiB."""
        with path.open("wb") as file:
            for start in range(0, self.size, _COPY_BYTES):
                file.write(self._fetch(start, min(_COPY_BYTES, self.size - start)))

    def _check_ranges(self) -> None:
        """Asks a web server for one byte; SlideOpenError if it would send the whole file.

        From such a server, each range request would bring the whole file into memory.
        """
        try:
            with self._fs.open(self._path, size=self.size, cache_type="none") as file:
                file.seek(1)
                data = file.read(1)
        except (OSError, ValueError):
            data = b""
        if len(data) != 1:
            raise SlideOpenError(
                f"server must answer range requests, got none for {self.name!r}; download the "
                "slide, or serve it by a server that answers them"
            )
        self.fetched_bytes = 1
        self.requests = 1

    def _fetch(self, offset: int, length: int) -> bytes:
        """Reads a range from the server."""
        try:
            data: bytes = self._fs.cat_file(
                self._path, start=offset, end=offset + length
            )
        except Exception as error:
            raise SlideReadError(
                f"range of {self.name!r} must be readable, got {without_secrets(repr(error))}"
            ) from error
        with self._lock:
            self.fetched_bytes += len(data)
            self.requests += 1
        _check_whole(len(data), length, self.name, offset)
        return data

    def read_into(self, offset: int, arrays: Sequence[NDArray[np.uint8]]) -> None:
        """See `FileSource.read_into`; here the bytes are copied."""
        length = sum(array.nbytes for array in arrays)
        data = memoryview(self.read_at(offset, length))
        start = 0
        for array in arrays:
            array.data.cast("B")[:] = data[start : start + array.nbytes]
            start += array.nbytes

    def close(self) -> None:
        """Closes the local copy; no connection stays open between requests."""
        self._make_copy = None
        if self._copy is not None:
            self._copy.close()


ByteSource = FileSource | FsspecSource  # random access to the bytes of a slide


def metadata_file(source: FsspecSource) -> BinaryIO:
    """Opens a source as a seekable file, for metadata. Memory: 4 MiB, 64 blocks of 64 KiB."""
    from fsspec.spec import AbstractBufferedFile

    class RangeFile(AbstractBufferedFile):  # type: ignore[misc]
        def _fetch_range(self, start: int, end: int) -> bytes:
            return source.read_at(start, min(end, source.size) - start)

    file = RangeFile(
        None,
        source.name,
        size=source.size,
        cache_type="blockcache",
        block_size=64 * KIB,
        cache_options={"maxblocks": 64},
    )
    return cast(BinaryIO, file)


def filesystem(url: str) -> "tuple[AbstractFileSystem, str, str]":
    """Returns fsspec's file system of a URL, the secret path in it, and the URL's public form."""
    public = hide_secret(url)
    whole = whole_url(public)
    check_needs(needs_of_path(public))
    with importing("URLs", "fsspec"):
        import fsspec
    try:
        file_system, path = fsspec.core.url_to_fs(whole, **client_options(whole))
    except ImportError as error:
        protocol = public.partition(URL_MARK)[0]
        raise errors.MissingDependencyError(
            f"{protocol}:// needs a package: {error}"
        ) from None
    except ValueError as error:
        raise SlideOpenError(
            f"URL must have a known protocol, got {public!r}: "
            f"{without_secrets(str(error))}"
        ) from None
    except Exception as error:  # noqa: BLE001 - each store has its own errors
        raise SlideOpenError(
            f"URL must lead to a readable place, got {without_secrets(repr(error))} for "
            f"{public!r}"
        ) from None
    return file_system, str(path), public


def _check_whole(num_read: int, length: int, name: str, offset: int) -> None:
    if num_read != length:
        raise SlideReadError(
            f"segment must be complete, got {num_read} of {length} bytes at offset {offset} in "
            f"{name!r}; the file is truncated"
        )


def closed_error(slide_path: str) -> SlideReadError:
    """Returns the error for a read after `close`."""
    name = Path(slide_path).name
    return SlideReadError(
        f"slide must be open, got a closed one in {name!r}; open it again"
    )


class RemoteFolder:
    """Files by relative name under the URL of a folder, which need not exist.

    Object stores have no reliable locks, so only one process at a time may put files here.

    Raises MissingDependencyError: no package for the protocol; SlideOpenError: unknown protocol.
    """

    def __init__(self, url: str) -> None:
        self._fs, path, public = filesystem(url.rstrip("/"))
        self.url = public.rstrip("/")
        self._root = path.rstrip("/")
        # True for object stores, in which a new file is visible only when it is complete; elsewhere
        # a file is put under a temporary name and then renamed
        self._whole = url.partition(URL_MARK)[0] in STORE_SCHEMES

    def check(self) -> None:
        """Raises StoreError, with the message of the store: a file cannot be put and deleted."""
        path = f"{self._root}/{TMP_MARK}writable"
        try:
            self._make_parent(path)
            self._fs.pipe_file(path, b"\0")
            self._fs.rm_file(path)
        except (
            Exception
        ) as error:  # each store has its own errors, also for credentials
            raise StoreError(
                f"out must be writable, got {without_secrets(repr(error))} for {self.url!r}"
            ) from error

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of every file by its relative name. Memory: about 200 bytes a file."""
        self._fs.invalidate_cache()
        try:
            files = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {
            path.removeprefix(f"{self._root}/"): int(details["size"])
            for path, details in files.items()
        }

    def read(self, name: str) -> bytes:
        """Reads a small file."""
        data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return data

    def get(self, name: str, local: Path) -> None:
        """Downloads a file; `local` appears only when it is complete."""
        with atomic_path(local) as tmp:
            self._fs.get_file(f"{self._root}/{name}", str(tmp))

    def put(self, local: Path, name: str) -> None:
        """Uploads a file; readers see either the complete new file or the old one."""
        target = f"{self._root}/{name}"
        self._make_parent(target)
        if self._whole:
            self._fs.put_file(str(local), target)
            return
        folder, _, last = target.rpartition("/")
        unfinished = f"{folder}/{TMP_MARK}{last}"
        self._fs.put_file(str(local), unfinished)
        self._fs.mv(unfinished, target)

    def delete(self, name: str) -> None:
        """Removes an existing file."""
        self._fs.rm_file(f"{self._root}/{name}")

    def _make_parent(self, path: str) -> None:
        if not self._whole:  # object stores have no folders
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)


WEB = ("http://", "https://")


class LocalAddressError(OSError):
    """A connection that would go to this machine."""


def client_options(url: str) -> dict[str, Any]:
    """Returns options by which fsspec makes the web client of a URL; {} for other stores."""
    if not url.lower().startswith(WEB) or may_be_local(url):
        return {}
    return {"get_client": _guarded_client}


def check_connection(error: BaseException, url: str) -> None:
    """Explains an error that a refused connection caused.

    Raises:
        SlideOpenError: the URL leads to this machine.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalAddressError):
            raise SlideOpenError(
                "URL must not lead to this machine or to a link-local network, got "
                f"{cause} for {url!r}; pass allow_local_urls=True if you trust its table, or write "
                "'localhost' or the address in the URL"
            ) from None
        cause = cause.__cause__ or cause.__context__


async def _guarded_client(**options: Any) -> "aiohttp.ClientSession":
    """Returns fsspec's client with a look at each address and at each redirect."""
    import aiohttp
    from aiohttp.abc import AbstractResolver

    class GuardedResolver(AbstractResolver):
        def __init__(self) -> None:
            self._resolver = aiohttp.ThreadedResolver()

        async def resolve(
            self,
            host: str,
            port: int = 0,
            family: socket.AddressFamily = socket.AF_INET,
        ) -> "list[ResolveResult]":
            results = await self._resolver.resolve(host, port, family)
            for result in results:
                if is_local_address(result["host"]):
                    raise LocalAddressError(
                        f"the name {host!r} with the address {result['host']}"
                    )
            return results

        async def close(self) -> None:
            await self._resolver.close()

    redirects = aiohttp.TraceConfig()
    redirects.on_request_redirect.append(_check_redirect)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=GuardedResolver()),
        trace_configs=[redirects],
        **options,
    )


async def _check_redirect(
    _: "aiohttp.ClientSession",
    __: SimpleNamespace,
    request: "aiohttp.TraceRequestRedirectParams",
) -> None:
    """Refuses a redirect to an address; names are looked at when they are resolved."""
    headers = request.response.headers
    location = headers.get("Location") or headers.get("URI") or ""
    target = urljoin(str(request.url), location)
    if is_local_host(target):
        raise LocalAddressError(f"a redirect to {target!r}")
