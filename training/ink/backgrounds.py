"""Backgrounds of the training: scenes without ink, at 16 µm/px, with what looks like ink.

They are drawn by `training.scenes` with all that it draws except pen: tissue of three kinds,
biology that looks like artefacts, folds, bubbles, coverslips, dust and the edge of the slide.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.types import MaskArray, RgbArray
from training.lookalikes import LOOKALIKES
from training.real_tissue import Layout, layouts, pictures
from training.scenes import TrainingScene

# Scenes are drawn at this µm/px, and halved.
_DRAWN_MPP = 8.0
SIZE_PX = (480, 480)
_CHANCES = {"fold": 0.35, "bubble": 0.3, "coverslip": 0.25, "dust": 0.3, "edge": 0.2}

# Picture, uint8 (H, W, 3); its look-alikes, bool (H, W); True if it is grey.
Background = tuple[RgbArray, MaskArray, bool]


def draw_background(
    seed: int, scenes: list[Layout], real: tuple[RgbArray, ...]
) -> Background:
    """One background."""
    scene = TrainingScene(seed, SIZE_PX, _DRAWN_MPP, None)
    scene.layouts = scenes
    scene.pictures = real
    chosen = [name for name, chance in _CHANCES.items() if scene.rng.random() < chance]
    slide = scene.slide(chosen)
    like: MaskArray = np.zeros(slide.rgb.shape[:2], bool)
    for name in LOOKALIKES:
        if f"like_{name}" in slide.masks:
            like |= slide.masks[f"like_{name}"]
    rgb = np.asarray(Image.fromarray(slide.rgb).reduce(2))
    like = np.asarray(Image.fromarray(like.astype(np.uint8) * 255).reduce(2)) > 127
    return rgb, like, slide.stain == "grey"


def backgrounds(first: int, count: int, cache_dir: Path) -> list[Background]:
    """Backgrounds of `count` seeds from `first`; each is drawn once and kept in `cache_dir`."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    found = []
    scenes: list[Layout] | None = None
    for seed in range(first, first + count):
        path = cache_dir / f"ink-{seed}.npz"
        if not path.is_file():
            scenes = layouts(cache_dir) if scenes is None else scenes
            rgb, like, grey = draw_background(seed, scenes, pictures())
            np.savez_compressed(path, rgb=rgb, like=like, grey=grey)
        with np.load(path, allow_pickle=False) as arrays:
            found.append((arrays["rgb"], arrays["like"], bool(arrays["grey"])))
    return found
