"""Identities of tile encoders: what stages, folders and records know of them, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinsection.encode.encoder import TileEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderIdentity:
    """A tile encoder as its results name it; equal identities give equal embeddings."""

    name: str  # in the registry
    label: str  # in the names of folders: 'uni2_h_bf16'
    # name, weights_hash, precision, preprocessing and engine; the hub's revision
    provenance: Mapping[str, str]
    supports_tokens: bool = False  # whether it has a dense token grid
    # files of its weights; None where they are not all that decides what the weights are
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
