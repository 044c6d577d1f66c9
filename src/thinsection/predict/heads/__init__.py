"""Heads: the tile embeddings of a slide or a case in; logits and each tile's evidence out."""

from typing import TYPE_CHECKING

from thinsection.registry import lazy_names

if TYPE_CHECKING:
    from thinsection.predict.heads.config import HEADS as HEADS
    from thinsection.predict.heads.config import HeadConfig as HeadConfig
    from thinsection.predict.heads.head import Criterion as Criterion
    from thinsection.predict.heads.head import Head as Head
    from thinsection.predict.heads.head import HeadOutput as HeadOutput
    from thinsection.predict.heads.head import Recipe as Recipe

# these names are imported on first use: the command line lists heads without torch
_NAMES_OF = {
    "config": "HEADS HeadConfig",
    "head": "Criterion Head HeadOutput Recipe",
}
__getattr__ = lazy_names(__name__, _NAMES_OF)
