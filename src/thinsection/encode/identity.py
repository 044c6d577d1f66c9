"""Identities of tile encoders for stages, folders and records; torch is not imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinsection.encode.encoder import TileEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderIdentity:
    """Identity of a tile encoder in its results; equal identities give equal embeddings."""

    name: str  # name in the registry
    label: str  # label in the names of folders: 'uni2_h_bf16'
    # name, weights_hash, precision, preprocessing and engine; the hub's revision
    provenance: Mapping[str, str]
    supports_tokens: bool = False  # True if it has a dense token grid
    # files of its weights; None if the weights depend on more than these files
    files: tuple[str, ...] | None = None


def encoder_identity(encoder: "TileEncoder") -> EncoderIdentity:
    """Identity of a loaded encoder."""
    return EncoderIdentity(
        name=encoder.spec.name,
        label=encoder.label,
        provenance=encoder.provenance,
        supports_tokens=encoder.spec.supports_tokens,
        files=encoder.origin.files,
    )
