"""Files of one cache: key, chunks, journal and manifest.

    <root>/<encoder>-<digest>/
        features.bin    chunks one after another, each at a multiple of 4096 bytes
        chunks.jsonl    one line per finished chunk, each with its own checksum (while writing)
        manifest.json   written last; without it, the cache is unfinished and can be continued
        write.lock      locked by the process that writes

A chunk holds whole rows in one dtype, so a row has the offset `offset + i * stride`. Each row
has a CRC-32, which a reader checks when it reads the row for the first time.
"""

import hashlib
import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import parse_json
from thinsection.store.cache.dtypes import (
    ITEM_BYTES,
    Bytes,
    Loss,
    Storage,
    StoredDtype,
)

Shape = tuple[int, ...]

DATA = "features.bin"
JOURNAL = "chunks.jsonl"
MANIFEST = "manifest.json"
LOCK = "write.lock"
FORMAT = "thinsection feature cache"
VERSION = 1
ALIGN = 4096  # bytes; one memory page
_CRC_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """Identity of a cache's content: equal keys stand for results that are equal to the bit."""

    encoder: str  # name of the encoder, shown and used for the folder's name
    weights_hash: str
    # preprocessing of the images, and precision and device of the encoder, as text
    preprocessing: str
    data_hash: str  # hash of the images and their order
    # 'lossless', or a forced dtype; a lossy cache is never used in place of another
    storage: Storage = "lossless"

    @property
    def folder_name(self) -> str:
        """Folder name: the encoder's name to read, and a digest that identifies the key."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", self.encoder).strip("-.")[:40]
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"{name or 'encoder'}-{digest[:16]}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows that are stored from byte `offset` on."""

    first_row: int
    rows: int
    dtype: StoredDtype
    offset: int
    crc32: str  # 8 hex digits per row

    def place(self, row: int, row_values: int) -> tuple[int, int]:
        """(offset, number of bytes) of a row, by its number in the cache."""
        row_bytes = row_values * ITEM_BYTES[self.dtype]
        return self.offset + (row - self.first_row) * row_bytes, row_bytes

    def end(self, row_values: int) -> int:
        """Offset of the byte after the chunk."""
        return self.place(self.first_row + self.rows, row_values)[0]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a finished cache: features (N, ...) in chunks, in the order of rows."""

    key: CacheKey
    shape: Shape
    data_bytes: int
    loss: Loss | None  # None if all bits were kept
    created: str  # ISO date and time, UTC
    chunks: tuple[Chunk, ...]

    @property
    def dtype_rows(self) -> dict[str, int]:
        """Number of rows that are stored in each dtype."""
        counts = dict.fromkeys(ITEM_BYTES, 0)
        for chunk in self.chunks:
            counts[chunk.dtype] += chunk.rows
        return {dtype: count for dtype, count in counts.items() if count}

    def as_mapping(self) -> dict[str, object]:
        """Plain values, and a checksum of them."""
        body = {**asdict(self), "dtype_rows": self.dtype_rows}
        return {
            "format": FORMAT,
            "version": VERSION,
            "crc32": _body_checksum(body),
            **body,
        }


def row_checksum(stored: Bytes) -> int:
    """CRC-32 by libdeflate: about 30 GB/s, compared with 4 GB/s by zlib."""
    import imagecodecs

    return imagecodecs.deflate_crc32(stored)  # type: ignore[arg-type]


def checksum_digits(rows: Bytes) -> str:
    """`Chunk.crc32` for rows (R, bytes)."""
    return "".join(f"{row_checksum(row):0{_CRC_DIGITS}x}" for row in rows)


def journal_line(chunk: Chunk) -> str:
    """One line of the journal for a finished chunk, with a checksum of the line."""
    text = json.dumps(asdict(chunk), separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def read_journal(folder: Path) -> list[Chunk]:
    """Reads the journal's chunks up to a line that a crash has cut; [] without a journal."""
    path = folder / JOURNAL
    chunks: list[Chunk] = []
    if not path.exists():
        return chunks
    for line in path.read_bytes().splitlines():
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            break
        chunks.append(Chunk(**parse_json(text)))
    return chunks


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a finished cache.

    Raises:
        StoreError: the manifest is missing, damaged or of another version.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise StoreError(
            f"cache must be complete, got {str(folder)!r} without {MANIFEST}; run again to "
            "continue"
        )
    with rewording(
        "cache manifest must be complete",
        path,
        ValueError,
        OSError,
        error=StoreError,
        more=f"; {remedy(folder)}",
    ):
        document = parse_json(path.read_bytes())
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise StoreError(
                f"cache manifest must have the format {FORMAT}, got {str(path)!r}"
            )
        version = document.get("version")
        if version != VERSION:
            raise StoreError(
                f"cache version must be {VERSION}, got {version!r} in {str(path)!r}"
            )
        checksum = document.get("crc32")
        body = {
            name: value
            for name, value in document.items()
            if name not in ("format", "version", "crc32")
        }
        if _body_checksum(body) != checksum:
            raise ValueError("its checksum does not match")
    loss = body["loss"]
    return Manifest(
        key=CacheKey(**body["key"]),
        shape=tuple(body["shape"]),
        data_bytes=body["data_bytes"],
        loss=Loss(**loss) if loss else None,
        created=body["created"],
        chunks=tuple(Chunk(**chunk) for chunk in body["chunks"]),
    )


def remedy(folder: Path) -> str:
    """Advice on what to do with a damaged cache."""
    return f"remove it ('thinsection cache rm {folder.name}') and compute it again"


def _body_checksum(body: dict[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
