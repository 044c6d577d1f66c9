"""What decides a segmentation score; part of a protocol."""

from dataclasses import dataclass
from typing import Literal

Geometry = Literal["compatible", "correct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSettings:
    """MaskTransformer head on frozen dense tokens, soft dice, per-image Jaccard.

    Attributes:
        image_px: edge of the image and of the label that is scored.
        crop_px: edge of the centre crop that the encoder sees.
        width, blocks, heads, mlp: of the head's transformer.
        lr, weight_decay: Adam's (weight decay is its L2 term, not decoupled).
        epochs: passes over the training images; the best validation loss is restored.
        batch_size: images a step; the last partial batch is kept.
        dice_smooth: added to intersection and union.
        folds: where the dataset brings no split.
        background_weight: an image with more than background weighs this times the fraction of
            background-only images, at least 1.
    """

    image_px: int
    crop_px: int
    width: int
    blocks: int
    heads: int
    mlp: int
    lr: float
    weight_decay: float
    epochs: int
    batch_size: int
    dice_smooth: float
    folds: int
    background_weight: float


NANOPATH_SEGMENT = SegmentSettings(
    image_px=256,
    crop_px=224,
    width=768,
    blocks=2,
    heads=8,
    mlp=3072,
    lr=1e-3,
    weight_decay=1e-4,
    epochs=30,
    batch_size=64,
    dice_smooth=1.0,
    folds=3,
    background_weight=16.0,
)
