"""Slides by URL: TIFFs streamed by range requests, others staged to a local folder while in use.

The metadata of a TIFF is read through a block cache, its segments one by one as tiles need them, so
that of a pyramid only the levels which a run reads are fetched.
"""

import io
import os
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from thinsection.errors import (
    DiskSpaceError,
    MissingDependencyError,
    SlideOpenError,
    SlideReadError,
)
from thinsection.slide.base import BaseSlide
from thinsection.slide.sources import truncated_error
from thinsection.types import GIB, KIB, Closing, Mpp
from thinsection.units import format_bytes, parse_bytes

URL_MARK = "://"
CACHE_VARIABLE = "THINSECTION_STAGING_BYTES"  # how much staged slides may take, e.g. 50GiB
_DEFAULT_STAGING = 20 * GIB
_BLOCK = 64 * KIB
_MAX_BLOCKS = 64
_CHUNK = 8 << 20


def is_url(slide_path: str) -> bool:
    """Whether a slide is named by a URL (s3://, gs://, az://, https://, ...)."""
    return URL_MARK in slide_path


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
            index, inside = divmod(self._position, _BLOCK)
            piece = self._block(index)[inside : inside + wanted - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
            self._position += len(piece)
        return done

    def _block(self, index: int) -> bytes:
        if index not in self._blocks:
            start = index * _BLOCK
            length = min(_BLOCK, self._source.size - start)
            self._blocks[index] = self._source.read_at(start, length)
            if len(self._blocks) > _MAX_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(index)
        return self._blocks[index]


class StagedSlide(Closing):
    """A slide whose local copy goes when it is closed; all else is the slide's."""

    def __init__(
        self, slide: BaseSlide, folder: tempfile.TemporaryDirectory[str], source: FsspecSource
    ) -> None:
        self._slide, self._folder = slide, folder
        self.slide_path, self.source = source.name, source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slide, name)

    def close(self) -> None:
        """Closes the slide and deletes the copy."""
        self._slide.close()
        self._folder.cleanup()


def open_remote(url: str, *, reader: str, slide_mpp: Mpp | None) -> Any:
    """A slide by URL: streamed where it is a TIFF that our own reader opens, else staged.

    Raises:
        SlideOpenError: not reachable, or no reader opens it.
        DiskSpaceError: the staging folder has no room for it.
        MissingDependencyError: fsspec or the URL's own package is not installed.
    """
    source = FsspecSource(url)
    if reader in ("auto", "tiff"):
        from thinsection.slide.tiff_reader import TiffSlide

        try:
            handle = io.BufferedReader(RangeFile(source), _BLOCK)
            slide = TiffSlide(url, slide_mpp=slide_mpp, source=source, handle=handle)
            slide.choice = "tiff: streamed by range requests"
            slide.source = source  # type: ignore[attr-defined]
            return slide
        except SlideOpenError:
            if reader == "tiff":
                raise
    return stage(source, reader=reader, slide_mpp=slide_mpp)


def stage(source: FsspecSource, *, reader: str, slide_mpp: Mpp | None) -> StagedSlide:
    """Copies a slide to a local folder and opens it there.

    A run stages as far ahead as it opens slides (`--prefetch-slides`); each copy is deleted when
    its slide is done, so the folder holds a few slides at any time.

    Memory: one piece of 8 MiB.
    """
    from thinsection.slide.open import open_slide

    check_room(source.size, name=source.name)
    folder = tempfile.TemporaryDirectory(prefix=f"thinsection-staged-{source.size}-")
    try:
        local = Path(folder.name) / Path(source.name.split("?", 1)[0]).name
        with local.open("wb") as file:
            for start in range(0, source.size, _CHUNK):
                file.write(source.read_at(start, min(_CHUNK, source.size - start)))
        slide = open_slide(local, reader=reader, slide_mpp=slide_mpp)
    except BaseException:
        folder.cleanup()
        raise
    return StagedSlide(slide, folder, source)


def check_room(num_bytes: int, *, name: str) -> None:
    """Refuses a copy that would exceed the bound of all staged slides of this machine.

    Raises:
        DiskSpaceError: says what is there and which variable raises the bound.
    """
    limit = parse_bytes(os.environ.get(CACHE_VARIABLE, str(_DEFAULT_STAGING)), name=CACHE_VARIABLE)
    parent = Path(tempfile.gettempdir())
    held = sum(int(path.name.split("-")[2]) for path in parent.glob("thinsection-staged-*-*"))
    if held + num_bytes > limit:
        raise DiskSpaceError(
            f"staged slides must fit into {format_bytes(limit)}, got {format_bytes(held)} and "
            f"{format_bytes(num_bytes)} of {name!r}; set {CACHE_VARIABLE} or --prefetch-slides 1"
        )


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
