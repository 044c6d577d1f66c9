"""Slide encoders: tile embeddings in, one embedding per slide out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinsection.pool.api import aggregate as aggregate
    from thinsection.pool.api import patient_embedding as patient_embedding
    from thinsection.pool.encoder import Expects as Expects
    from thinsection.pool.encoder import LoadOptions as LoadOptions
    from thinsection.pool.encoder import SlideEmbedding as SlideEmbedding
    from thinsection.pool.encoder import SlideEncoder as SlideEncoder
    from thinsection.pool.encoder import check_fit as check_fit
    from thinsection.pool.encoder import load_slide_encoder as load_slide_encoder
    from thinsection.pool.gigapath import GigaPathSlideEncoder as GigaPathSlideEncoder
    from thinsection.pool.pooling import AbmilSlideEncoder as AbmilSlideEncoder
    from thinsection.pool.pooling import MaxSlideEncoder as MaxSlideEncoder
    from thinsection.pool.pooling import MeanSlideEncoder as MeanSlideEncoder
    from thinsection.pool.titan import TitanSlideEncoder as TitanSlideEncoder

_NAMES_OF = {
    "api": "aggregate patient_embedding",
    "encoder": "Expects LoadOptions SlideEmbedding SlideEncoder check_fit load_slide_encoder",
    "gigapath": "GigaPathSlideEncoder",
    "pooling": "AbmilSlideEncoder MaxSlideEncoder MeanSlideEncoder",
    "titan": "TitanSlideEncoder",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:  # torch is imported with what needs it, not with the names
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
