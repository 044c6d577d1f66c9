"""Thinsection: whole-slide pathology images to embeddings and predictions, in bounded memory.

Names are resolved on first use, so that `import thinsection` pulls in neither torch nor a reader.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it; the one list of the Python surface
_PUBLIC = {
    "open_slide": "thinsection.slide",
    "tissue_mask": "thinsection.qc",
    "tile_grid": "thinsection.tiles",
    "iter_tiles": "thinsection.stream",
    "embed_tiles": "thinsection.encode",
    "load_encoder": "thinsection.encode",
    "aggregate": "thinsection.aggregate",
    "run": "thinsection.run",
    "RunConfig": "thinsection.run",
    "alibi2d_attention": "thinsection.attention",
    "nearest_neighbors": "thinsection.neighbors",
    "tile_graph": "thinsection.neighbors",
    "token_frame_atoms": "thinsection.neighbors",
    "FeatureCache": "thinsection.store",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'thinsection' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
