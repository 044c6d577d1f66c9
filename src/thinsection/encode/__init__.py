"""Tile encoders: a registry of declarations, one file per family, and what runs them."""

from thinsection.encode.embed import embed_tiles
from thinsection.encode.encoder import NetworkTileEncoder, TileEncoder
from thinsection.encode.load import load_encoder
from thinsection.encode.memory import batch_bytes, largest_batch_size, weights_bytes
from thinsection.encode.registry import DEFAULT_ENCODER, declared_encoders, encoder_spec
from thinsection.encode.spec import Architecture, EncoderSpec

__all__ = [
    "DEFAULT_ENCODER",
    "Architecture",
    "EncoderSpec",
    "NetworkTileEncoder",
    "TileEncoder",
    "batch_bytes",
    "declared_encoders",
    "embed_tiles",
    "encoder_spec",
    "largest_batch_size",
    "load_encoder",
    "weights_bytes",
]
