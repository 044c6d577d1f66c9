"""Slide encoders: tile embeddings in, one embedding per slide out."""

from thinsection.aggregate.api import aggregate, patient_embedding
from thinsection.aggregate.fit import check_fit
from thinsection.aggregate.gigapath import GigaPathSlideEncoder
from thinsection.aggregate.pooling import AbmilSlideEncoder, MaxSlideEncoder, MeanSlideEncoder
from thinsection.aggregate.protocol import Expects, SlideEmbedding, SlideEncoder
from thinsection.aggregate.registry import load_slide_encoder, slide_encoder_names
from thinsection.aggregate.titan import TitanSlideEncoder

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
