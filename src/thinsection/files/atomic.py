"""Files appear whole or not at all: temporary name in the same folder, fsync, rename.

JSON is read here too: any text, whoever wrote it, gives a value or a ValueError.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.errors import OutputError, ThinsectionError
from thinsection.files.urls import public_text

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from thinsection.types import Json

# encoding of written text; a file's name that is not valid text is written with escapes
_ENCODING = "utf-8"
_ON_ERROR = "backslashreplace"
_MAX_NAME_BYTES = 255  # longest name of a file on the usual file systems
TMP_MARK = (
    ".tmp-"  # part of the name of every unfinished file, for readers and clean-up
)
# A spreadsheet may run text that begins like this as a formula. An apostrophe before it marks it
# as text. Text that already begins with apostrophes gets one more, so that it can be read back.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
# errors of a file system on which no file can be written, so that every slide would fail
_LOST_NAMES = (
    "ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE", "ENOTCONN", "ENODEV", "ENXIO", "ETIMEDOUT",
    "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO", "ECONNABORTED", "ECONNRESET", "ESHUTDOWN",
)  # fmt: skip
_LOST_NUMBERS = frozenset(
    getattr(errno, name) for name in _LOST_NAMES if hasattr(errno, name)
)
# errors of an output folder that was deleted or has lost its permissions; for other files they do
# not end the run
_GONE_NUMBERS = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM))
# HDF5 gives the number of an error only in its text
_HDF5_ERRNO = re.compile(r"errno = (\d+)")

Row = Mapping[str, object] | Sequence[object]


@contextmanager
def output_errors(path: Path | str) -> Iterator[None]:
    """Turns errors of the block into an OutputError if nothing can be written any more.

    Such errors come from a full disk or quota, missing inodes, a read-only, stale or lost file
    system, or an output folder that was deleted or has lost its permissions. Other errors are not
    changed.
    """
    try:
        yield
    except ThinsectionError:
        raise
    except (OSError, RuntimeError) as error:
        number = int(getattr(error, "errno", None) or 0)
        words = _HDF5_ERRNO.search(str(error))
        if not number and words:
            number = int(words[1])
        name = getattr(error, "filename", None) or path
        is_gone = number in _GONE_NUMBERS and _is_output(error, Path(path))
        if number not in _LOST_NUMBERS and not is_gone:
            raise
        remedy = "free some space, or restore the file system"
        if is_gone:
            remedy = "restore the folder and its permissions"
        raise OutputError(
            f"output must be writable, got {os.strerror(number)!r} for {str(name)!r}; {remedy}, "
            "then run the same command again"
        ) from error


def _is_output(error: OSError | RuntimeError, path: Path) -> bool:
    """True if an error is about this output, a file in it, or its unfinished file."""
    name = getattr(error, "filename", None)
    if name is None:  # HDF5 has the name in its words only
        return str(path.parent) in str(error)
    file = Path(os.fsdecode(name))
    is_unfinished = file.parent == path.parent and TMP_MARK in file.name
    return is_unfinished or file in (path, path.parent) or path in file.parents


class KeepingFile(io.FileIO):
    """A file that keeps the first error of a write, and pretends that later writes succeed.

    HDF5 2.0 must not see the error: it would keep files that it could not close, and crash later.
    """

    error: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data)
        unwritten = view.cast("B")
        while len(unwritten) and self.error is None:
            try:
                num_written = super().write(unwritten)
            except OSError as error:
                self.error = error
            else:
                unwritten = unwritten[num_written:]
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        if self.error is not None:
            return 0
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = error
            return 0

    def check(self) -> None:
        """Raises the error."""
        if self.error is not None:
            raise self.error

    def __exit__(self, *error: object) -> None:
        self.close()
        self.check()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to, which replaces `path` if the block ends without an error.

    The parent folder is made. The temporary path is in the same folder, so that the rename is
    atomic, and has the same suffix, except `.h5`. After an exception it is removed, and `path` is
    not changed. After a SIGKILL a file named `*.tmp-*` may remain; nothing reads it, and
    `files.lock` deletes it later.

    Raises OutputError: see `output_errors`.
    """
    path = Path(path)
    # other tools list every *.h5 of a folder, hidden ones too
    suffix = "" if path.suffix == ".h5" else path.suffix
    mark = f"{TMP_MARK}{os.getpid()}-{secrets.token_hex(4)}"
    # shorten the stem if there is no room for the ending
    ending = f"{mark}{suffix}"
    room = _MAX_NAME_BYTES - len(f".{ending}".encode(errors="surrogateescape"))
    stem = path.stem
    stem_bytes = stem.encode(errors="surrogateescape")
    if len(stem_bytes) > room:
        stem = stem_bytes[:room].decode(errors="ignore")
    tmp = path.with_name(f".{stem}{ending}")
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield tmp
            _fsync(tmp)
            tmp.replace(path)
            _fsync(path.parent)
        finally:
            # it has its new name, or is on a file system that is lost and is swept later
            with contextlib.suppress(OSError):
                tmp.unlink()


def link_or_copy(source: Path, target: Path, *, copy: bool = False) -> None:
    """Makes `target` a hard link of the file, or a copy: if asked, or where no link can be."""
    if not copy:
        # another file system, or one without hard links
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes the file atomically."""
    with atomic_path(path) as tmp:
        tmp.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Writes the UTF-8 file atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, data: Json) -> None:
    """Writes JSON atomically: indented, keys in the given order, no NaN, no secrets of URLs."""
    text = json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False)
    text = public_text(text)
    # "\\udc80" is also how JSON writes a lone surrogate, so that it is read back as it was
    write_bytes(path, f"{text}\n".encode(_ENCODING, _ON_ERROR))


def write_table(
    path: Path, rows: Iterable[Row], columns: Sequence[str] | None = None
) -> None:
    """Writes a UTF-8 table with a header, atomically; `.tsv` has tabs between cells, others commas.

    Numbers are written as they are. Text that a spreadsheet would run as a formula gets a leading
    apostrophe, which `read_table` takes off. None and cells that a mapping lacks are empty.

    Args:
        path: the file.
        rows: mappings, or sequences in the order of the columns.
        columns: names of the columns; None: all keys of the mappings in order of appearance.

    Memory: one row where columns are given, else all rows.

    Source: OWASP, CSV injection.
    """
    if columns is None:
        rows = list(rows)
        keys: dict[str, None] = {}
        for row in rows:
            if isinstance(row, Mapping):
                keys |= dict.fromkeys(row)
        columns = list(keys)
    line = io.StringIO(newline="")
    # a lone \r is quoted, before Python 3.13, only by a writer that ends its lines with one
    writer = csv.writer(line, delimiter=_delimiter(path), lineterminator="\r\n")
    with (
        atomic_path(path) as tmp,
        tmp.open("w", newline="", encoding=_ENCODING, errors=_ON_ERROR) as file,
    ):
        for row in chain([columns], rows):
            values = map(row.get, columns) if isinstance(row, Mapping) else row
            cells = []
            for value in values:
                public = public_text(value) if isinstance(value, str) else value
                cells.append(safe_cell(public))
            writer.writerow(cells)
            file.write(line.getvalue()[:-2] + "\n")
            line.seek(0)
            line.truncate()


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix == ".tsv" else ","


def read_table(path: Path) -> list[dict[str, str]]:
    """Reads the rows of a table that `write_table` wrote, as text, without a byte order mark."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, delimiter=_delimiter(path))
        header = [unescaped_cell(cell) for cell in next(lines, [])]
        return [dict(zip(header, map(unescaped_cell, line))) for line in lines]


def safe_cell(value: object) -> object:
    """Returns the value of a cell; text that a spreadsheet would run gets an apostrophe."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def unescaped_cell(cell: str) -> str:
    """Returns a cell without the apostrophe that `safe_cell` puts before a formula."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# largest depth of nested lists and tables; GeoJSON has 8, our documents have 6
MAX_DEPTH = 64


def parse_json(text: str | bytes) -> Json:
    """Returns the value of a JSON text. Raises ValueError: it is not JSON, or nested too deep.

    At a depth of some thousand brackets, Python's parser raises RecursionError, which is not a
    ValueError. At a smaller depth, code that walks through the value would raise it.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, list | dict):
        return value
    # bytes may be UTF-16, whose brackets are not counted here
    if isinstance(text, str) and text.count("{") + text.count("[") <= MAX_DEPTH:
        return value
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Json] = []
        for outer in level:
            items = outer.values() if isinstance(outer, dict) else outer
            inner += [item for item in items if isinstance(item, list | dict)]
        if not inner:
            return value
        level = inner
    raise _too_deep()


def read_json(path: Path) -> Json:
    """Returns the value of a JSON file. Raises ValueError: not JSON; OSError: not readable."""
    return parse_json(path.read_text(encoding="utf-8"))


def _too_deep() -> ValueError:
    return ValueError(f"brackets must be nested at most {MAX_DEPTH} deep")
