"""Slide encoders: tile embeddings in, one embedding per slide out."""

from typing import TYPE_CHECKING

from thinsection.registry import lazy_names, listed_names

if TYPE_CHECKING:
    from thinsection.pool.abmil import AbmilSlideEncoder as AbmilSlideEncoder
    from thinsection.pool.api import aggregate as aggregate
    from thinsection.pool.api import patient_embedding as patient_embedding
    from thinsection.pool.encoder import Expects as Expects
    from thinsection.pool.encoder import LoadOptions as LoadOptions
    from thinsection.pool.encoder import SlideEmbedding as SlideEmbedding
    from thinsection.pool.encoder import SlideEncoder as SlideEncoder
    from thinsection.pool.encoder import TileLayout as TileLayout
    from thinsection.pool.encoder import check_fit as check_fit
    from thinsection.pool.encoder import load_slide_encoder as load_slide_encoder
    from thinsection.pool.gigapath import GigaPathSlideEncoder as GigaPathSlideEncoder
    from thinsection.pool.means import MaxSlideEncoder as MaxSlideEncoder
    from thinsection.pool.means import MeanSlideEncoder as MeanSlideEncoder
    from thinsection.pool.titan import TitanSlideEncoder as TitanSlideEncoder

# torch is imported with what needs it, not with the names
_NAMES_OF = {
    "abmil": "AbmilSlideEncoder",
    "api": "aggregate patient_embedding",
    "encoder": (
        "Expects LoadOptions SlideEmbedding SlideEncoder TileLayout check_fit "
        "load_slide_encoder"
    ),
    "gigapath": "GigaPathSlideEncoder",
    "means": "MaxSlideEncoder MeanSlideEncoder",
    "titan": "TitanSlideEncoder",
}
__all__ = [*listed_names(_NAMES_OF)]  # noqa: PLE0604
__getattr__ = lazy_names(__name__, _NAMES_OF)
