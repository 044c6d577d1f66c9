"""Slide encoders: tile embeddings in, one embedding per slide out."""

from thinsection.pool.api import aggregate, patient_embedding
from thinsection.pool.fit import check_fit
from thinsection.pool.gigapath import GigaPathSlideEncoder
from thinsection.pool.pooling import AbmilSlideEncoder, MaxSlideEncoder, MeanSlideEncoder
from thinsection.pool.protocol import Expects, SlideEmbedding, SlideEncoder
from thinsection.pool.registry import load_slide_encoder, slide_encoder_names
from thinsection.pool.titan import TitanSlideEncoder

__all__ = [
    "AbmilSlideEncoder",
    "Expects",
    "GigaPathSlideEncoder",
    "MaxSlideEncoder",
    "MeanSlideEncoder",
    "SlideEmbedding",
    "SlideEncoder",
    "TitanSlideEncoder",
    "aggregate",
    "check_fit",
    "load_slide_encoder",
    "patient_embedding",
    "slide_encoder_names",
]
