"""Invariance: how far stain, blur, JPEG and rotation move an embedding, and what that costs."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from skimage.color import hed2rgb, rgb2hed

from thinsection.encode.answers import encoded
from thinsection.errors import InvalidInputError
from thinsection.evaluation.embeddings import Embeddings
from thinsection.evaluation.rows import Ratios
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data import images
from thinsection.probe.data.load import image_rows
from thinsection.probe.data.sets import TileSet
from thinsection.probe.probes.tiles import knn_probe
from thinsection.probe.result import ProbeResult, scored
from thinsection.types import RgbArray

STAIN = (1.3, 0.75, 1.0)  # of haematoxylin, eosin and the rest
BLUR_PX = 1.0  # sigma
JPEG_QUALITY = 40  # of 1..95


def stained(tile: RgbArray) -> RgbArray:
    """Tile with 30 % more haematoxylin and 25 % less eosin."""
    rgb = hed2rgb(rgb2hed(tile) * np.array(STAIN))
    return np.asarray(np.clip(rgb * 255 + 0.5, 0, 255), dtype=np.uint8)


def compressed(tile: RgbArray) -> RgbArray:
    """Through a JPEG of JPEG_QUALITY."""
    Image.fromarray(tile).save(buffer := io.BytesIO(), "JPEG", quality=JPEG_QUALITY)
    return np.asarray(Image.open(buffer))


CHANGES: dict[str, Callable[[RgbArray], RgbArray]] = {
    "stain": stained,
    "blur": lambda tile: np.asarray(gaussian_filter(tile, (BLUR_PX, BLUR_PX, 0))),
    "jpeg": compressed,
    "rotation": lambda tile: np.rot90(tile).copy(),
}


def invariance_probe(path: Path, config: ProbeConfig) -> ProbeResult:
    """Mean cosine of validation images' embeddings before and after each change.

    `score_drop` is what kNN, its training rows unchanged, loses on the changed images.

    Memory: 8 (N + Nq) D + what embeds the images. Raises InvalidInputError: the data hold
    embeddings, no images.
    """
    data, encoder = image_rows(path, config)
    if not data.images:
        raise InvalidInputError(f"data must be images, got embeddings in {str(path)!r}")
    size = config.compute.batch_size
    tiles = images.embed_rows(data, encoder, batch_size=size)

    def knn(of_tiles: TileSet) -> ProbeResult:
        return knn_probe(
            of_tiles,
            protocol=config.protocol,
            device=config.compute.device,
            budget_bytes=config.budget_bytes,
        )

    before = knn(tiles)
    refs = [data.images[i] for i in data.fold[1]]
    refs = [ref for ref in refs if ref.place not in tiles.left_out]
    unit = _unit(tiles.val.embeddings)
    cosines = {}
    drops = {}
    for name, change in CHANGES.items():

        def encode(
            batch: RgbArray, change: Callable[..., RgbArray] = change
        ) -> torch.Tensor:
            changed_tiles = np.stack([change(tile) for tile in batch])
            return encoded(encoder, changed_tiles)[0]

        moved, _ = images.embed_images(refs, encode, batch_size=size)
        cosines[name] = (unit * _unit(moved)).sum(axis=1)
        changed = replace(tiles, val=replace(tiles.val, embeddings=moved))
        drops[name] = before.score - knn(changed).score
    mean = np.mean([*cosines.values()], axis=0)
    rows = Ratios(
        metric="cosine",
        ids=tiles.val.ids,
        top=mean,
        bottom=np.ones(len(mean)),
        groups=tiles.val.groups,
    )
    return scored(
        "invariance",
        tiles,
        rows,
        "cosine",
        score=float(mean.mean()),
        protocol=config.protocol,
        details={
            "cosine": {name: float(each.mean()) for name, each in cosines.items()},
            "score_drop": drops,
            "knn_score": before.score,
        },
        facts=before.facts,
    )


def _unit(x: Embeddings) -> Embeddings:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))
