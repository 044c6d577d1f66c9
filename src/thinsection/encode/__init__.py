"""Tile encoders: declarations, their registry, and the code that runs them."""

from typing import TYPE_CHECKING

from thinsection.registry import lazy_names, listed_names

if TYPE_CHECKING:
    from thinsection.encode.base import NUMPY as NUMPY
    from thinsection.encode.base import TileEncoder as TileEncoder
    from thinsection.encode.embed import embed_tiles as embed_tiles
    from thinsection.encode.encoder import NetworkTileEncoder as NetworkTileEncoder
    from thinsection.encode.engine_choice import Workload as Workload
    from thinsection.encode.load import load_encoder as load_encoder
    from thinsection.encode.memory import batch_bytes as batch_bytes
    from thinsection.encode.memory import largest_batch_size as largest_batch_size
    from thinsection.encode.memory import weights_bytes as weights_bytes
    from thinsection.encode.own import OwnTileEncoder as OwnTileEncoder
    from thinsection.encode.own import make_encoder as make_encoder
    from thinsection.encode.preprocessing import TilePixels as TilePixels
    from thinsection.encode.preprocessing import preprocess as preprocess
    from thinsection.encode.registry import DEFAULT_ENCODER as DEFAULT_ENCODER
    from thinsection.encode.registry import Architecture as Architecture
    from thinsection.encode.registry import EncoderSpec as EncoderSpec
    from thinsection.encode.registry import declared_encoders as declared_encoders
    from thinsection.encode.registry import encoder_spec as encoder_spec
    from thinsection.weights.placement import (
        importable_torchvision as importable_torchvision,
    )

# these names are imported on first use, as most need torch
_NAMES_OF = {
    "base": "NUMPY TileEncoder",
    "embed": "embed_tiles",
    "encoder": "NetworkTileEncoder",
    "engine_choice": "Workload",
    "load": "load_encoder",
    "memory": "batch_bytes largest_batch_size weights_bytes",
    "own": "OwnTileEncoder importable_torchvision make_encoder",
    "preprocessing": "TilePixels preprocess",
    "registry": "DEFAULT_ENCODER Architecture EncoderSpec declared_encoders encoder_spec",
}
__all__ = [*listed_names(_NAMES_OF)]  # noqa: PLE0604
__getattr__ = lazy_names(__name__, _NAMES_OF)
