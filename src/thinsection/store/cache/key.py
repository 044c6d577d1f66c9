"""What a cache is a cache of: the same key means that the same bits would be computed again."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinsection.errors import DatasetError
from thinsection.store.cache.dtypes import Storage
from thinsection.types import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """Everything that decides the cached values, and how they are stored.

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
    def digest(self) -> str:
        """sha256 of the key, as hex."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        """Encoder's name for people, digest for programs."""
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.encoder).strip("-.")[:40] or "encoder"
        return f"{slug}-{self.digest[:16]}"

    def as_mapping(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def hash_files(paths: Iterable[Path], *, salt: str = "") -> str:
    """sha256 over the contents of files in the given order, their names left out.

    Memory: 1 MiB.

    Raises:
        DatasetError: a file cannot be read.
    """
    whole = hashlib.sha256(salt.encode())
    for path in paths:
        one = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while block := file.read(MIB):
                    one.update(block)
        except OSError as error:
            raise DatasetError(f"data file must be readable, got {str(path)!r}: {error}") from error
        whole.update(one.digest())
    return whole.hexdigest()
