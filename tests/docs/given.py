"""Names that a Python block of a page takes as given: arrays, tables and encoders of the reader."""

from collections.abc import Callable
from typing import Any

import numpy as np


def _attention() -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (1, 12, 65, 64)  # B, H, 1 + N, D
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    cells = torch.stack([torch.arange(64) // 8, torch.arange(64) % 8], dim=1)
    return {"q": q, "k": k, "v": v, "cells": cells}


def _encoders() -> dict[str, Any]:
    from thinsection.pool import SlideEncoder

    tiles = np.random.default_rng(0).integers(0, 255, (2, 256, 256, 3), dtype=np.uint8)
    return {"tiles_u8": tiles, "np": np, "SlideEncoder": SlideEncoder}


def _extending() -> dict[str, Any]:
    return {"np": np}


def _neighbors() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    corners = np.stack(np.meshgrid(np.arange(8), np.arange(8)), axis=-1)
    return {
        "points": rng.normal(size=(200, 3)),
        "present": rng.random(200) > 0.1,
        "slide_id": np.arange(200) % 2,
        "coords_l0": 512 * corners.reshape(-1, 2).astype(np.int64),
    }


def _probes() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    labels = np.arange(100) % 2
    embeddings = rng.normal(size=(100, 16)).astype(np.float32) + labels[:, None]
    return {
        "train_embeddings": embeddings[:60],
        "train_labels": labels[:60],
        "val_embeddings": embeddings[60:],
        "val_labels": labels[60:],
    }


def _readers() -> dict[str, Any]:
    from thinsection.slide import Slide
    from thinsection.types import Mpp, RgbArray

    return {"Slide": Slide, "Mpp": Mpp, "RgbArray": RgbArray}


# page -> its names
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/attention.md": _attention,
    "docs/encoders.md": _encoders,
    "docs/extending.md": _extending,
    "docs/neighbors.md": _neighbors,
    "docs/probes.md": _probes,
    "docs/readers.md": _readers,
}
