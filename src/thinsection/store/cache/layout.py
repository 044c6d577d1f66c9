"""The files of one cache and what they say, without any array in them.

    <root>/<encoder>-<digest>/
        features.bin    chunks one after another, each at a multiple of 4096 bytes
        chunks.jsonl    one line per finished chunk, each with its own checksum (while writing)
        manifest.json   last; a folder without it is an unfinished cache that can be continued
        write.lock      held by the process that writes

A chunk holds whole rows in one dtype, so that a row lies at offset + i * stride. Each row carries a
CRC-32, which a reader checks when it reads that row for the first time.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import StoreError
from thinsection.store.cache.dtypes import ITEM_BYTES, STORED, Bytes, Loss, StoredDtype
from thinsection.store.cache.key import CacheKey

DATA, JOURNAL, MANIFEST, LOCK = "features.bin", "chunks.jsonl", "manifest.json", "write.lock"
FORMAT, VERSION = "thinsection feature cache", 1
ALIGN = 4096  # bytes; a page

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows that lie together.

    Attributes:
        first_row, rows: which.
        dtype: of all its values.
        offset: of its first byte in features.bin.
        crc32: of each row's bytes, 8 hex digits a row.
    """

    first_row: int
    rows: int
    dtype: StoredDtype
    offset: int
    crc32: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a finished cache holds.

    Attributes:
        key: what it is a cache of.
        shape: (N, ...) of the whole.
        chunks: in the order of rows.
        data_bytes: size of features.bin.
        loss: of a forced dtype; None where every bit was kept.
        created: ISO date and time, UTC.
    """

    key: CacheKey
    shape: Shape
    chunks: tuple[Chunk, ...]
    data_bytes: int
    loss: Loss | None
    created: str

    @property
    def dtype_rows(self) -> dict[str, int]:
        """How many rows are stored in each dtype."""
        counts = {d: sum(c.rows for c in self.chunks if c.dtype == d) for d in STORED}
        return {d: n for d, n in counts.items() if n}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIndex:
    """Where each row lies.

    Attributes:
        offset: int64 (N,) in features.bin.
        dtype: uint8 (N,), index into STORED.
        crc32: uint32 (N,).
        row_values: values a row.
    """

    offset: npt.NDArray[np.int64]
    dtype: npt.NDArray[np.uint8]
    crc32: npt.NDArray[np.uint32]
    row_values: int


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that one read fetches: `count` rows at `offset`, to place `position` of a batch."""

    position: int
    count: int
    offset: int
    dtype: StoredDtype


def row_values(shape: Shape) -> int:
    """Values of one row."""
    return int(np.prod(shape[1:], dtype=np.int64))


def row_index(manifest: Manifest) -> RowIndex:
    """The place of every row. Memory: 13 N bytes."""
    per_row = row_values(manifest.shape)
    offset, dtype, crc32 = [], [], []
    for chunk in manifest.chunks:
        stride = per_row * ITEM_BYTES[chunk.dtype]
        offset.append(chunk.offset + stride * np.arange(chunk.rows, dtype=np.int64))
        dtype.append(np.full(chunk.rows, STORED.index(chunk.dtype), dtype=np.uint8))
        crc32.append(np.frombuffer(bytes.fromhex(chunk.crc32), dtype=">u4").astype(np.uint32))
    return RowIndex(
        offset=np.concatenate(offset) if offset else np.empty(0, np.int64),
        dtype=np.concatenate(dtype) if dtype else np.empty(0, np.uint8),
        crc32=np.concatenate(crc32) if crc32 else np.empty(0, np.uint32),
        row_values=per_row,
    )


def plan_reads(rows: npt.NDArray[np.int64], index: RowIndex, *, most_bytes: int) -> list[Run]:
    """The reads of a batch: neighbours on disk that are neighbours in the batch become one.

    Args:
        rows: (B,) in the order of the batch.
        index: where rows lie.
        most_bytes: a run is cut there; it holds at least one row.
    """
    offsets, codes = index.offset[rows].tolist(), index.dtype[rows].tolist()
    runs: list[Run] = []
    start = 0
    for i in range(1, len(offsets) + 1):
        stride = index.row_values * ITEM_BYTES[STORED[codes[start]]]
        joins = (
            i < len(offsets)
            and codes[i] == codes[start]
            and offsets[i] == offsets[start] + (i - start) * stride
            and (i - start + 1) * stride <= most_bytes
        )
        if not joins:
            runs.append(Run(start, i - start, offsets[start], STORED[codes[start]]))
            start = i
    return runs


def row_checksum(stored: Bytes) -> int:
    """CRC-32, by libdeflate: some 30 GB/s, where zlib's own makes 4."""
    import imagecodecs

    return int(imagecodecs.deflate_crc32(stored))  # type: ignore[arg-type]


def journal_line(chunk: Chunk) -> str:
    """A finished chunk as one line that proves itself whole."""
    text = json.dumps(asdict(chunk), separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def read_journal(folder: Path) -> list[Chunk]:
    """The chunks up to the first line that is not whole (a crash cut it)."""
    try:
        lines = (folder / JOURNAL).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    chunks: list[Chunk] = []
    for line in lines:
        check, _, text = line.partition(b" ")
        if check != b"%08x" % zlib.crc32(text):
            break
        chunks.append(Chunk(**json.loads(text)))
    return chunks


def manifest_mapping(manifest: Manifest) -> dict[str, Any]:
    """Plain values with a checksum over them."""
    body = {
        "key": manifest.key.as_mapping(),
        "shape": list(manifest.shape),
        "data_bytes": manifest.data_bytes,
        "dtype_rows": manifest.dtype_rows,
        "loss": None if manifest.loss is None else asdict(manifest.loss),
        "created": manifest.created,
        "chunks": [asdict(c) for c in manifest.chunks],
    }
    return {"format": FORMAT, "version": VERSION, "crc32": _body_checksum(body), **body}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished cache.

    Raises:
        StoreError: missing, damaged, of another version, or not a cache.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(
            f"cache must be finished, got {str(folder)!r} without {MANIFEST}; run again to continue"
        ) from None
    except (ValueError, OSError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"cache manifest must be one of a {FORMAT}, got {str(path)!r}")
    if document.get("version") != VERSION:
        raise StoreError(
            f"cache version must be {VERSION}, got {document.get('version')!r} in {str(path)!r}"
        )
    body = {k: v for k, v in document.items() if k not in ("format", "version", "crc32")}
    if _body_checksum(body) != document.get("crc32"):
        raise _damaged(path, "its checksum does not match")
    return Manifest(
        key=CacheKey(**body["key"]),
        shape=tuple(body["shape"]),
        chunks=tuple(Chunk(**c) for c in body["chunks"]),
        data_bytes=body["data_bytes"],
        loss=None if body["loss"] is None else Loss(**body["loss"]),
        created=body["created"],
    )


def _body_checksum(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _damaged(path: Path, why: str) -> StoreError:
    name = path.parent.name
    return StoreError(
        f"cache manifest must be whole, got {str(path)!r}: {why}; "
        f"remove it ('thinsection cache rm {name}') and compute it again"
    )
