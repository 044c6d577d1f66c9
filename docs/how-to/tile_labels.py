"""Trains on tiles with a label each, and draws the rare class as often as the other one."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

import thinsection as ts
from thinsection.store.tiles_h5 import TilesFile
from thinsection.testing.synthetic import write_he_slide

# slides to try it on, and a label for each tile: put yours in their place
Path("slides").mkdir(exist_ok=True)
for number in range(2):
    write_he_slide(f"slides/s{number}.svs", (1400, 1000), seed=number, mpp=0.5)
ts.run("slides", out="results", until="tiles", tile_px=128)


def label(slide_id: str, tiles: TilesFile) -> npt.NDArray[np.int64]:
    """1 for the leftmost tiles of a slide, 0 for others."""
    x = tiles.coords_l0[:, 0]
    return np.asarray(x == x.min(), dtype=np.int64)


dataset = ts.TileDataset("results", labels=label)
print(dataset.label_counts)
sampler = WeightedRandomSampler(dataset.weights().tolist(), num_samples=256)
loader = DataLoader(dataset.map_style(), batch_size=32, sampler=sampler, num_workers=1)
shares = [batch["label"].float().mean() for batch in loader]
print(f"share of the rare class: {torch.stack(shares).mean():.2f}")

assert 0.35 < torch.stack(shares).mean() < 0.65
