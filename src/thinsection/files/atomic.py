"""Files appear whole or not at all: temporary name in the same folder, fsync, rename."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TMP_MARK = ".tmp-"  # every unfinished file carries it; readers and clean-up know it


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it takes the place of `path` when the block ends well.

    The parent folder is made. The temporary path lies in the same folder (rename stays atomic) and
    has the same suffix, but for `.h5`. On any exception it is removed and `path` stays as it was.
    After a SIGKILL a file named `*.tmp-*` may stay; nothing reads it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # other tools list every *.h5 of a folder, hidden ones too
    suffix = "" if path.suffix == ".h5" else path.suffix
    mark = f"{TMP_MARK}{os.getpid()}-{secrets.token_hex(4)}"
    tmp = path.with_name(f".{path.stem}{mark}{suffix}")
    try:
        yield tmp
        _fsync(tmp)
        tmp.replace(path)
        _fsync(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes the file atomically."""
    with atomic_path(path) as tmp:
        tmp.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Writes the UTF-8 file atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, data: Any) -> None:
    """Writes JSON atomically: indented, keys in the given order, no NaN."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
