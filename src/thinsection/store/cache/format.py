"""The files of one cache and what they say, without any array in them.

    <root>/<encoder>-<digest>/
        features.bin    chunks one after another, each at a multiple of 4096 bytes
        chunks.jsonl    one line per finished chunk, each with its own checksum (while writing)
        manifest.json   last; a folder without it is an unfinished cache that can be continued
        write.lock      held by the process that writes

A chunk holds whole rows in one dtype, so that a row lies at offset + i * stride. Each row carries a
CRC-32, which a reader checks when it reads that row for the first time.
"""

import hashlib
import json
import math
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinsection.errors import StoreError
from thinsection.store.cache.dtypes import ITEM_BYTES, STORED, Bytes, Loss, Storage, StoredDtype

DATA, JOURNAL, MANIFEST, LOCK = "features.bin", "chunks.jsonl", "manifest.json", "write.lock"
FORMAT, VERSION = "thinsection feature cache", 1
ALIGN = 4096  # bytes; a page

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """What it is a cache of: the same key means that the same bits would be computed again.

    Attributes:
        encoder: its name, for people and for the folder's name.
        weights_hash: of the weights.
        preprocessing: of the images, with the precision and device of the encoder, as text.
        data_hash: of the images and their order.
        storage: 'lossless', or the dtype that was forced; a lossy cache never stands in.
    """

    encoder: str
    weights_hash: str
    preprocessing: str
    data_hash: str
    storage: Storage = "lossless"

    @property
    def folder_name(self) -> str:
        """Encoder's name for people, the key's digest for programs."""
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.encoder).strip("-.")[:40] or "encoder"
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{slug}-{digest[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows that lie together from byte `offset` on; `crc32` has 8 hex digits a row."""

    first_row: int
    rows: int
    dtype: StoredDtype
    offset: int
    crc32: str

    def place(self, row: int, row_values: int) -> tuple[int, int]:
        """(first byte, bytes) of one of its rows, by its number in the cache."""
        stride = row_values * ITEM_BYTES[self.dtype]
        return self.offset + (row - self.first_row) * stride, stride

    def end(self, row_values: int) -> int:
        """The byte after its last."""
        return self.place(self.first_row + self.rows, row_values)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a finished cache holds: (N, ...) in chunks, in the order of rows.

    `loss` is None where every bit was kept; `created` an ISO date and time, UTC.
    """

    key: CacheKey
    shape: Shape
    data_bytes: int
    loss: Loss | None
    created: str
    chunks: tuple[Chunk, ...]

    @property
    def dtype_rows(self) -> dict[str, int]:
        """How many rows are stored in each dtype."""
        counts = {d: sum(c.rows for c in self.chunks if c.dtype == d) for d in STORED}
        return {d: n for d, n in counts.items() if n}

    def as_mapping(self) -> dict[str, Any]:
        """Plain values with a checksum over them."""
        body = asdict(self) | {"dtype_rows": self.dtype_rows}
        return {"format": FORMAT, "version": VERSION, "crc32": _body_checksum(body), **body}


def row_values(shape: Shape) -> int:
    """Values of one row."""
    return math.prod(shape[1:])


def row_checksum(stored: Bytes) -> str:
    """CRC-32 in hex, by libdeflate: some 30 GB/s, where zlib's own makes 4."""
    import imagecodecs

    return f"{imagecodecs.deflate_crc32(stored):08x}"  # type: ignore[arg-type]


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


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished cache.

    Raises:
        StoreError: missing, damaged, of another version, or not a cache.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        got = f"{str(folder)!r} without {MANIFEST}; run again to continue"
        raise StoreError(f"cache must be finished, got {got}") from None
    except (ValueError, OSError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"cache manifest must be one of a {FORMAT}, got {str(path)!r}")
    if (version := document.get("version")) != VERSION:
        raise StoreError(f"cache version must be {VERSION}, got {version!r} in {str(path)!r}")
    body = {k: v for k, v in document.items() if k not in ("format", "version", "crc32")}
    if _body_checksum(body) != document.get("crc32"):
        raise _damaged(path, "its checksum does not match")
    return Manifest(
        key=CacheKey(**body["key"]),
        shape=tuple(body["shape"]),
        data_bytes=body["data_bytes"],
        loss=body["loss"] and Loss(**body["loss"]),
        created=body["created"],
        chunks=tuple(Chunk(**c) for c in body["chunks"]),
    )


def remedy(folder: Path) -> str:
    """What to do about a damaged cache."""
    return f"remove it ('thinsection cache rm {folder.name}') and compute it again"


def _body_checksum(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _damaged(path: Path, why: str) -> StoreError:
    got = f"{str(path)!r}: {why}; {remedy(path.parent)}"
    return StoreError(f"cache manifest must be whole, got {got}")
