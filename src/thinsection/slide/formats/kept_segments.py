"""A temporary file of decoded segments, so that slow codecs decode each of them once.

To decode a segment of JPEG 2000 takes some forty times as long as to read its pixels back.
Quality control reads a level before the tiles of a run do. What lies between the two is too much
for the memory, and so it lies on the disk.
"""

import os
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np

from thinsection.files.sources import Descriptor, closed_error
from thinsection.types import GIB, RgbArray, Uncopied

# Most bytes of the file of one slide, and its share of what is free on the disk.
MAX_KEPT_BYTES = 4 * GIB
_SHARE_OF_FREE = 0.25


class KeptFile(Uncopied):
    """A file without a name, of which nothing is left after a kill. Thread-safe.

    Memory: none; the file has at most 4 GiB, and a quarter of what was free on its disk.
    """

    copy_remedy = "open the slide again"

    def __init__(self, folder: Path) -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            self._descriptor: Descriptor | None = Descriptor(os.dup(file.fileno()))
        free_bytes = shutil.disk_usage(folder).free
        self._max_bytes = min(MAX_KEPT_BYTES, int(_SHARE_OF_FREE * free_bytes))
        self._end = 0
        self._lock = threading.Lock()

    def write(self, pixels: RgbArray) -> int | None:
        """Writes an array and returns its place; None if the file or its disk is full."""
        descriptor = self._descriptor
        if descriptor is None or not pixels.flags.c_contiguous:
            return None
        with self._lock:
            place = self._end
            if place + pixels.nbytes > self._max_bytes:
                return None
            self._end += pixels.nbytes
        try:
            num_written = os.pwrite(descriptor, pixels.data, place)
        except OSError:  # a quota, or other programs have filled the disk
            num_written = 0
        if num_written < pixels.nbytes:
            self._max_bytes = 0
            return None
        return place

    def read(self, place: int, out: RgbArray) -> None:
        """Fills an array with what was written at a place."""
        descriptor = self._descriptor
        if descriptor is None:
            raise closed_error("the file of decoded segments")
        if out.flags.c_contiguous:
            num_read = os.preadv(descriptor, [out.data], place)
        else:
            data = os.pread(descriptor, out.nbytes, place)
            num_read = len(data)
            if num_read == out.nbytes:
                out[:] = np.frombuffer(data, np.uint8).reshape(out.shape)
        if num_read != out.nbytes:
            raise OSError(f"a temporary file has {num_read} of {out.nbytes} bytes")

    def close(self) -> None:
        """Removes the file when no thread uses it; a second call does nothing."""
        self._descriptor = None
