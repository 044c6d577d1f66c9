"""Datasets of the three layouts with nuclei that a head can learn, and an encoder of colour."""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from scipy.io import savemat

from thinsection.probe.protocol import SegmentSettings

# the protocol's head and training, small enough for seconds
SMALL: dict[str, Any] = {"width": 32, "blocks": 1, "heads": 4, "mlp": 64}


def settings(**changes: Any) -> SegmentSettings:
    """The nanopath protocol's, with a small head."""
    return dataclasses.replace(SegmentSettings(), **{**SMALL, **changes})


def picture(rng: np.random.Generator, size: tuple[int, int], classes: int) -> Any:
    """(RGB image, label image): squares whose colour tells their class, on a pale ground."""
    height, width = size
    label = np.zeros(size, dtype=np.uint8)
    for _ in range(5):
        c = int(rng.integers(1, classes))
        y, x = int(rng.integers(0, height - 40)), int(rng.integers(0, width - 40))
        label[y : y + 72, x : x + 72] = c
    palette = np.array(
        [
            (235, 225, 235),
            (40, 40, 160),
            (160, 40, 40),
            (40, 140, 40),
            (150, 140, 30),
            (20, 20, 20),
        ]
    )
    noise = rng.normal(0, 6, (*size, 3))
    return (palette[label] + noise).clip(0, 255).astype(np.uint8), label


def pannuke(root: Path, sizes: tuple[int, int] = (8, 5), *, seed: int = 0) -> Path:
    """Two folds of float64 images and one-hot-like masks with instance numbers."""
    rng = np.random.default_rng(seed)
    for fold, n in zip((1, 2), sizes, strict=True):
        pairs = [picture(rng, (256, 256), 6) for _ in range(n)]
        images = np.stack([image for image, _ in pairs]).astype(
            np.float64
        )  # as published
        masks = np.zeros((n, 256, 256, 6))
        for i, (_, label) in enumerate(pairs):
            if i == 1:
                label[:] = 0
                images[i] = 235.0
            for c in range(1, 6):
                masks[i, ..., c - 1] = (label == c) * (i + 3.0)  # instance numbers
            masks[i, ..., 5] = label == 0
        for part, array in (("images", images), ("masks", masks)):
            folder = root / f"Fold{fold}" / part / f"fold{fold}"
            folder.mkdir(parents=True)
            np.save(folder / f"{part}.npy", array)
    return root


def monusac(root: Path, slides: int = 4, *, seed: int = 0) -> Path:
    """Slides with one to three images each, of different sizes."""
    rng = np.random.default_rng(seed)
    for s in range(slides):
        folder = root / "MoNuSAC_images_and_annotations" / f"TCGA-{s:02d}"
        folder.mkdir(parents=True)
        for k in range(1 + s % 3):
            image, label = picture(rng, (180 + 20 * s, 310 - 15 * k), 5)
            Image.fromarray(image).save(folder / f"TCGA-{s:02d}_{k}.tif")
            np.save(folder / f"TCGA-{s:02d}_{k}.npy", label)
    return root


def consep(root: Path, n: int = 6, *, seed: int = 0) -> Path:
    """PNG images and MATLAB label files."""
    rng = np.random.default_rng(seed)
    for name in ("Images", "Labels"):
        (root / "Train" / name).mkdir(parents=True)
    types = np.array((0, 1, 2, 3, 5))  # 3 and 4 are one class, 5 to 7 another
    for i in range(n):
        image, label = picture(rng, (300, 340), 5)
        Image.fromarray(image).save(root / "Train" / "Images" / f"train_{i + 1}.png")
        path = root / "Train" / "Labels" / f"train_{i + 1}.mat"
        savemat(path, {"type_map": types[label].astype(np.float64), "inst_map": label})
    return root


MAKERS = {"pannuke": pannuke, "monusac": monusac, "consep": consep}


class RamFeatures:
    """Features that are in RAM as float32: the plain way, and the cache's yardstick.

    Memory: what it is given; one batch more while iterating.
    """

    def __init__(self, features: torch.Tensor) -> None:
        self._features = features

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, T, D)."""
        return tuple(self._features.shape)

    def batches(
        self,
        order: npt.ArrayLike,
        batch_size: int,
        *,
        device: str | torch.device = "cpu",
    ) -> Iterator[torch.Tensor]:
        """Gathered batches."""
        rows = torch.from_numpy(np.asarray(order))
        for start in range(0, len(rows), batch_size):
            yield self._features[rows[start : start + batch_size]].float().to(device)


class StubEncoder:
    """Tokens that see colour: a seeded projection of each 16 px cell's mean, tanh; float32."""

    def __init__(self, dim: int = 24, *, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.dim, self.seed, self.calls = dim, seed, 0
        self.projection = torch.randn(3, dim, generator=g)
        self.spec = SimpleNamespace(name="stub", preprocessing={"input_px": 224})
        self.precision, self.device = "fp32", torch.device("cpu")
        self.engine = "stub 1.0"

    @property
    def weights_hash(self) -> str:
        return hashlib.sha256(self.projection.numpy().tobytes()).hexdigest()

    def encode_tokens(self, tiles_u8: Any) -> torch.Tensor:
        self.calls += 1
        pixels = (
            torch.from_numpy(np.ascontiguousarray(tiles_u8)).permute(0, 3, 1, 2).float()
        )
        cells = torch.nn.functional.avg_pool2d(pixels, 16) / 128 - 1
        return (cells.flatten(2).transpose(1, 2) @ self.projection).tanh()
