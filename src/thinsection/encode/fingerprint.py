"""Fingerprints: the embedding of one drawn tile, which proves the features of an encoder.

Another normalisation, another pooling or another version of timm gives embeddings that look
plausible and are wrong. So whoever has the weights embeds the tile of this module by the authors'
own code, once, and keeps the vector in a small TOML file. Each machine compares its own embedding
with that vector at the first load. `agreement.py` compares.
"""

import base64
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from thinsection.config import from_mapping, read_toml, toml_value, user_cache_dir
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.types import RgbArray
from thinsection.weights.origin import slug

Vector = npt.NDArray[np.float32]  # (D,)
# whose code made the embedding
Maker = Literal["authors", "port", "thinsection"]

TILE_EDGE = 512  # pixels; larger than the input of every declared encoder
# of the bytes of `drawn_tile()`; a test compares them, since drawing takes a third of a second
TILE_SHA256 = "f60bec3a0ce4b4a899c1bb3b0af9c5c7643076609e4375d214c9fbc38ebf9cc4"
_PACKAGED = Path(__file__).parent / "fingerprints"
_NUM_NUCLEI = 90
_LINE_LENGTH = 96  # characters of a line of the stored embedding


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Embedding of the drawn tile, with what it was made of. The fields are the keys of its file.

    Attributes:
        encoder: name of the encoder.
        made_by: authors: the authors' own code; port: another implementation; thinsection: ours.
        code: that code, and its version.
        who: person and date.
        weights: hash of the weights, as `encoder.weights_hash`.
        repo: repository of the weights; '' for other weights.
        revision: commit of that repository; '' if it is not known.
        versions: packages that computed the embedding, such as "timm 1.0.31, torch 2.13.0".
        preprocessing: declared preprocessing at that time, as JSON.
        pooling: declared pooling at that time.
        tile: sha256 of the bytes of the tile.
        embedding: float32 numbers, little endian, in base64.
    """

    encoder: str
    made_by: Maker
    code: str
    who: str
    weights: str
    repo: str
    revision: str
    versions: str
    preprocessing: str
    pooling: str
    tile: str
    embedding: str

    @property
    def vector(self) -> Vector:
        """Embedding as float32 (D,)."""
        content = base64.b64decode("".join(self.embedding.split()), validate=True)
        return np.frombuffer(content, dtype="<f4")

    @property
    def maker(self) -> str:
        """Words for the code that made the embedding, in a sentence."""
        if self.made_by == "authors":
            return "the authors' code"
        if self.made_by == "port":
            return f"a port, {self.code}"
        return f"an earlier embedding of {self.code}"

    def to_toml(self) -> str:
        """Text of its file."""
        lines = []
        for each in fields(self):
            if each.name != "embedding":
                lines.append(f"{each.name} = {toml_value(getattr(self, each.name))}")
        lines += ['embedding = """', *textwrap.wrap(self.embedding, _LINE_LENGTH)]
        return "\n".join(lines) + '\n"""\n'


def encoded_vector(vector: npt.ArrayLike) -> str:
    """Numbers of an embedding as text, for `Fingerprint.embedding`.

    Raises InvalidInputError: it is not one vector of finite numbers.
    """
    numbers = np.atleast_1d(np.asarray(vector, dtype=np.float32).squeeze())
    if numbers.ndim != 1 or not numbers.size or not np.isfinite(numbers).all():
        raise InvalidInputError(
            "embedding must be one vector (D,) of finite numbers, got shape "
            f"{np.shape(vector)}"
        )
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode()


def fingerprint_paths(encoder: str) -> tuple[Path, Path]:
    """Places of an encoder's fingerprint: in this package, and in the user's cache."""
    name = f"{slug(encoder)}.toml"
    return _PACKAGED / name, user_cache_dir() / "fingerprints" / name


def find_fingerprint(encoder: str) -> Fingerprint | None:
    """Fingerprint of an encoder: that of this package, or else the user's own; None without one.

    Raises InvalidInputError: the file is damaged, or of another tile.
    """
    for path in fingerprint_paths(encoder):
        if path.is_file():
            return read_fingerprint(path)
    return None


def read_fingerprint(path: Path) -> Fingerprint:
    """Fingerprint in a file; InvalidInputError: it is damaged, or of another tile."""
    try:
        fingerprint = from_mapping(Fingerprint, read_toml(path))
        size = fingerprint.vector.size
    except (ConfigError, ValueError) as error:
        raise InvalidInputError(
            f"fingerprint must be a file of `thinsection models fingerprint`, got {error} in "
            f"{str(path)!r}; make it again"
        ) from error
    if fingerprint.tile != TILE_SHA256 or not size:
        raise InvalidInputError(
            "fingerprint must be of the tile of this version of thinsection, got another one in "
            f"{str(path)!r}; make it again"
        )
    return fingerprint


def drawn_tile() -> RgbArray:
    """The fixed tile, uint8 [512, 512, 3]: a stroma of waves, nuclei, a vessel's lumen and a fibre.

    It has no symmetry, so that swapped axes or colours show. It has sharp and soft edges, so that
    another resize shows. It is drawn in integers: the bytes are the same on every machine.
    """
    y, x = np.mgrid[:TILE_EDGE, :TILE_EDGE].astype(np.int64)
    along = _wave(x + 2 * y, 96)
    tile = np.stack(
        [
            225 - along // 2,
            170 - _wave(3 * x - y, 150),
            200 - along // 3 - y // 16,
        ],
        axis=-1,
    )
    for number in range(_NUM_NUCLEI):
        centre_x = (number * 197 + 31) % TILE_EDGE
        centre_y = (number * 389 + (number * number * 7) % 101) % TILE_EDGE
        radius = 6 + (number * 5) % 11
        # nothing is covered beyond a box of twice the radius
        top, left = max(0, centre_y - 2 * radius), max(0, centre_x - 2 * radius)
        box = np.s_[top : centre_y + 2 * radius, left : centre_x + 2 * radius]
        distance = (x[box] - centre_x) ** 2 + 2 * (y[box] - centre_y) ** 2
        # 256 in the middle, falling to 0 at the soft edge
        cover = (2 * radius**2 - distance) * 256 // radius**2
        cover = np.clip(cover, 0, 256)[..., None]
        colour = np.array(
            [80 + number % 40, 40 + (number * 3) % 40, 130 + (number * 2) % 30]
        )
        tile[box] = (tile[box] * (256 - cover) + colour * cover) // 256
    tile[(x - 380) ** 2 + (y - 120) ** 2 < 45**2] = (243, 241, 244)
    tile[np.abs(x + y // 2 - 300) < 2] = (150, 60, 110)
    return tile.clip(0, 255).astype(np.uint8)


def _wave(values: npt.NDArray[np.int64], period: int) -> npt.NDArray[np.int64]:
    """Parabolas from 0 to 64, one in each period."""
    phase = values % period
    return 256 * phase * (period - phase) // period**2
