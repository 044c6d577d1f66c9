"""What one cache's files say, and in which dtypes they say it.

    <root>/<encoder>-<digest>/
        features.bin    chunks one after another, each at a multiple of 4096 bytes
        chunks.jsonl    one line per finished chunk, each with its own checksum (while writing)
        manifest.json   last; a folder without it is an unfinished cache that can be continued
        write.lock      held by the process that writes

A chunk holds whole rows in one dtype, so that a row lies at offset + i * stride. Each row carries a
CRC-32, which a reader checks when it reads that row for the first time.

NumPy has no bfloat16: such values are uint16, the upper half of the float32's bits. Exactness is
judged on bits, so that -0.0 stays -0.0; values that are not finite are refused before.
"""

import hashlib
import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, StoreError, rewording
from thinsection.files.json_text import parse_json

if TYPE_CHECKING:
    import torch

StoredDtype = Literal["fp32", "bf16", "fp16"]
Storage = Literal["lossless", "fp32", "bf16", "fp16"]
Shape = tuple[int, ...]
F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

DATA, JOURNAL, MANIFEST, LOCK = (
    "features.bin",
    "chunks.jsonl",
    "manifest.json",
    "write.lock",
)
FORMAT, VERSION = "thinsection feature cache", 1
ALIGN = 4096  # bytes; a page
ITEM_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "lossless": 4}
# torch runs an element-wise operation of up to this many elements on the calling thread: reader
# threads do not wake a thread pool of their own beside the training step's
BLOCK = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """What it is a cache of: the same key means that the same bits would be computed again."""

    encoder: str  # its name, for people and for the folder's name
    weights_hash: str
    preprocessing: (
        str  # of the images, with the precision and device of the encoder, as text
    )
    data_hash: str  # of the images and their order
    storage: Storage = (
        "lossless"  # or the dtype that was forced; a lossy cache never stands in
    )

    @property
    def folder_name(self) -> str:
        """Encoder's name for people, the key's digest for programs."""
        slug = (
            re.sub(r"[^A-Za-z0-9.]+", "-", self.encoder).strip("-.")[:40] or "encoder"
        )
        digest = hashlib.sha256(
            json.dumps(asdict(self), sort_keys=True).encode()
        ).hexdigest()
        return f"{slug}-{digest[:16]}"


@dataclass(frozen=True, slots=True)
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

    def has(self, row: int, stored: Bytes) -> bool:
        """Whether these are the bytes of one of its rows, by their checksum."""
        at = 8 * (row - self.first_row)
        return row_checksum(stored) == self.crc32[at : at + 8]


@dataclass(frozen=True, slots=True)
class Loss:
    """What a forced dtype did to the values; the relative error is over values that are not 0."""

    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    changed: int = 0  # of all `values`, those with other bits
    values: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished cache holds: (N, ...) in chunks, in the order of rows."""

    key: CacheKey
    shape: Shape
    data_bytes: int
    loss: Loss | None  # None where every bit was kept
    created: str  # ISO date and time, UTC
    chunks: tuple[Chunk, ...]

    @property
    def dtype_rows(self) -> dict[str, int]:
        """How many rows are stored in each dtype."""
        counts = {
            d: sum(c.rows for c in self.chunks if c.dtype == d) for d in ITEM_BYTES
        }
        return {d: n for d, n in counts.items() if n}

    def as_mapping(self) -> dict[str, Any]:
        """Plain values with a checksum over them."""
        body = asdict(self) | {"dtype_rows": self.dtype_rows}
        return {
            "format": FORMAT,
            "version": VERSION,
            "crc32": _body_checksum(body),
            **body,
        }


def row_checksum(stored: Bytes) -> str:
    """CRC-32 in hex, by libdeflate: some 30 GB/s, where zlib's own makes 4."""
    import imagecodecs

    return f"{imagecodecs.deflate_crc32(stored):08x}"  # type: ignore[arg-type]


def journal_line(chunk: Chunk) -> str:
    """A finished chunk as one line that proves itself whole."""
    text = json.dumps(asdict(chunk), separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def read_journal(folder: Path) -> list[Chunk]:
    """The chunks up to the first line that is not whole (a crash cut it); none without a file."""
    path, chunks = folder / JOURNAL, list[Chunk]()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        check, _, text = line.partition(b" ")
        if check != b"%08x" % zlib.crc32(text):
            break
        chunks.append(Chunk(**parse_json(text)))
    return chunks


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished cache; StoreError if missing, damaged or of another version."""
    path, rule = folder / MANIFEST, "cache manifest must be whole"
    if not path.exists():
        got = f"{str(folder)!r} without {MANIFEST}; run again to continue"
        raise StoreError(f"cache must be finished, got {got}")
    with rewording(
        rule, path, ValueError, OSError, error=StoreError, more=f"; {remedy(folder)}"
    ):
        document = parse_json(path.read_bytes())
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise StoreError(
                f"cache manifest must be one of a {FORMAT}, got {str(path)!r}"
            )
        if (version := document.get("version")) != VERSION:
            raise StoreError(
                f"cache version must be {VERSION}, got {version!r} in {str(path)!r}"
            )
        body = {
            k: v for k, v in document.items() if k not in ("format", "version", "crc32")
        }
        if _body_checksum(body) != document.get("crc32"):
            raise ValueError("its checksum does not match")
    body.pop("dtype_rows", None)  # derived
    body["shape"], body["loss"] = (
        tuple(body["shape"]),
        body["loss"] and Loss(**body["loss"]),
    )
    body["key"], body["chunks"] = (
        CacheKey(**body["key"]),
        tuple(Chunk(**c) for c in body["chunks"]),
    )
    return Manifest(**body)


def remedy(folder: Path) -> str:
    """What to do about a damaged cache."""
    return f"remove it ('thinsection cache rm {folder.name}') and compute it again"


def _body_checksum(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def check_rows_finite(values: F32, *, first_row: int) -> None:
    """Raises InvalidInputError, naming the row, where a value is NaN or infinite."""
    for i, row in enumerate(values, first_row):
        if not (finite := np.isfinite(row)).all():
            got = f"{row[~finite].flat[0]} in row {i}"
            remedy = "check that image and the encoder's precision"
            raise InvalidInputError(f"features must be finite, got {got}; {remedy}")


def narrowest(values: F32) -> StoredDtype:
    """bf16 if every value is exact in it, else fp16 if exact in that, else fp32."""
    bits = values.reshape(-1).view(np.uint32)
    blocks = [bits[i : i + BLOCK] for i in range(0, bits.size, BLOCK)]
    if not any(int(np.bitwise_or.reduce(block)) & 0xFFFF for block in blocks):
        return "bf16"
    return "fp16" if all(map(_exact_in_fp16, blocks)) else "fp32"


def _exact_in_fp16(bits: npt.NDArray[np.uint32]) -> bool:
    back = np.empty(bits.size, np.float32)
    widen_into(narrow(bits.view(np.float32), "fp16"), "fp16", back)
    return np.array_equal(back.view(np.uint32), bits)


def narrow(values: F32, dtype: StoredDtype) -> Bytes:
    """The values as bytes of that dtype, rounded to nearest even. Memory: half of them."""
    flat = values.reshape(-1)
    if dtype == "fp32":
        return flat.view(np.uint8)
    import torch

    narrowed = torch.from_numpy(flat).to(_half(dtype))
    return narrowed.view(torch.int16).numpy().view(np.uint8)


def widen_into(stored: Bytes, dtype: StoredDtype, out: F32) -> None:
    """Writes the stored values to `out` as float32; exact for every dtype. Memory: nothing."""
    flat = out.reshape(-1)
    if dtype == "fp32":
        np.copyto(flat.view(np.uint8), stored)
        return
    import torch

    source = torch.from_numpy(stored.view(np.int16)).view(_half(dtype))
    target = torch.from_numpy(flat)
    for i in range(0, flat.size, BLOCK):
        target[i : i + BLOCK].copy_(source[i : i + BLOCK])


def _half(dtype: StoredDtype) -> "torch.dtype":
    import torch

    return torch.bfloat16 if dtype == "bf16" else torch.float16


def measure_loss(
    values: F32, stored: Bytes, dtype: StoredDtype, first: int, loss: Loss
) -> Loss:
    """The error of values from row `first` on, and before; InvalidInputError: one is infinite."""
    flat, item = values.reshape(-1), ITEM_BYTES[dtype]
    for i in range(0, flat.size, BLOCK):
        want = flat[i : i + BLOCK]
        got = np.empty_like(want)
        widen_into(stored[i * item : (i + want.size) * item], dtype, got)
        if (infinite := ~np.isfinite(got)).any():
            row = first + (i + int(infinite.argmax())) // (flat.size // len(values))
            got_value = f"{want[infinite][0]:g} in row {row}, which becomes infinite"
            remedy = "use --cache-dtype lossless"
            raise InvalidInputError(
                f"features must fit {dtype}, got {got_value}; {remedy}"
            )
        error, size = (
            np.abs(got.astype(np.float64) - want),
            np.abs(want.astype(np.float64)),
        )
        relative = error[size > 0] / size[size > 0]
        largest = float(error.max(initial=loss.max_abs_error))
        largest_relative = float(relative.max(initial=loss.max_rel_error))
        changed = loss.changed + np.count_nonzero(
            got.view(np.uint32) != want.view(np.uint32)
        )
        loss = Loss(largest, largest_relative, int(changed), loss.values + want.size)
    return loss
