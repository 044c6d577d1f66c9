"""Tile encoders: a table of declarations, a registry, and what runs them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinsection.encode.embed import embed_tiles as embed_tiles
    from thinsection.encode.encoder import NetworkTileEncoder as NetworkTileEncoder
    from thinsection.encode.encoder import TileEncoder as TileEncoder
    from thinsection.encode.encoder import preprocess as preprocess
    from thinsection.encode.load import load_encoder as load_encoder
    from thinsection.encode.memory import batch_bytes as batch_bytes
    from thinsection.encode.memory import largest_batch_size as largest_batch_size
    from thinsection.encode.memory import weights_bytes as weights_bytes
    from thinsection.encode.registry import DEFAULT_ENCODER as DEFAULT_ENCODER
    from thinsection.encode.registry import Architecture as Architecture
    from thinsection.encode.registry import EncoderSpec as EncoderSpec
    from thinsection.encode.registry import declared_encoders as declared_encoders
    from thinsection.encode.registry import encoder_spec as encoder_spec

_MODULE_OF = {
    **{"embed_tiles": "embed", "load_encoder": "load"},
    **dict.fromkeys(("NetworkTileEncoder", "TileEncoder", "preprocess"), "encoder"),
    **dict.fromkeys(("batch_bytes", "largest_batch_size", "weights_bytes"), "memory"),
    **dict.fromkeys(("Architecture", "EncoderSpec", "DEFAULT_ENCODER"), "registry"),
    **dict.fromkeys(("declared_encoders", "encoder_spec"), "registry"),
}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:  # torch is imported with what needs it, not with the names
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
