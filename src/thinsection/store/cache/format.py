"""Files of one cache: key, chunks, journal and manifest.

    <root>/<encoder>-<digest>/
        features.bin    chunks one after another, each at a multiple of 4096 bytes
        chunks.jsonl    one line per finished chunk, each with its own checksum (while writing)
        manifest.json   last; a folder without it is an unfinished cache that can be continued
        write.lock      held by the process that writes

A chunk holds whole rows in one dtype, so that a row lies at offset + i * stride. Each row
carries a CRC-32, which a reader checks when it reads that row for the first time.
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
ALIGN = 4096  # bytes; a page
_CRC_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """Identity of a cache's content: the same key would compute the same bits again."""

    encoder: str  # its name, for people and for the folder's name
    weights_hash: str
    # of the images, with the precision and device of the encoder, as text
    preprocessing: str
    data_hash: str  # of the images and their order
    # or the dtype that was forced; a lossy cache never stands in for another
    storage: Storage = "lossless"

    @property
    def folder_name(self) -> str:
        """Encoder's name for people, the key's digest for programs."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", self.encoder).strip("-.")[:40]
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"{name or 'encoder'}-{digest[:16]}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that lie together from byte `offset` on."""

    first_row: int
    rows: int
    dtype: StoredDtype
    offset: int
    crc32: str  # 8 hex digits a row

    def place(self, row: int, row_values: int) -> tuple[int, int]:
        """(first byte, bytes) of one of its rows, by its number in the cache."""
        row_bytes = row_values * ITEM_BYTES[self.dtype]
        return self.offset + (row - self.first_row) * row_bytes, row_bytes

    def end(self, row_values: int) -> int:
        """The byte after its last."""
        return self.place(self.first_row + self.rows, row_values)[0]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a finished cache: (N, ...) in chunks, in the order of rows."""

    key: CacheKey
    shape: Shape
    data_bytes: int
    loss: Loss | None  # None where every bit was kept
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
        """Plain values with a checksum over them."""
        body = {**asdict(self), "dtype_rows": self.dtype_rows}
        return {
            "format": FORMAT,
            "version": VERSION,
            "crc32": _body_checksum(body),
            **body,
        }


def row_checksum(stored: Bytes) -> int:
    """CRC-32 by libdeflate: some 30 GB/s, where zlib's own makes 4."""
    import imagecodecs

    return imagecodecs.deflate_crc32(stored)  # type: ignore[arg-type]


def checksum_digits(rows: Bytes) -> str:
    """`Chunk.crc32` of rows (R, bytes)."""
    return "".join(f"{row_checksum(row):0{_CRC_DIGITS}x}" for row in rows)


def journal_line(chunk: Chunk) -> str:
    """A finished chunk as one line that proves itself whole."""
    text = json.dumps(asdict(chunk), separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def read_journal(folder: Path) -> list[Chunk]:
    """Reads the chunks up to the first line that a crash cut; none without a file."""
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
        StoreError: it is missing, damaged or of another version.
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
    """Advice for a damaged cache."""
    return f"remove it ('thinsection cache rm {folder.name}') and compute it again"


def _body_checksum(body: dict[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
