"""Trains without labels on two crops of each tile, as self-supervised methods do.

Start it as it is, or on several GPUs or CPUs: `torchrun --nproc-per-node 2 two_crops.py`.
"""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

if "RANK" in os.environ:
    distributed.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))
folder = Path("two_crops")

# slides to try it on: put yours in their place
if rank == 0:
    folder.mkdir(exist_ok=True)
    for number in range(2):
        write_he_slide(folder / f"s{number}.svs", (1400, 1000), seed=number, mpp=0.5)
    ts.run(folder, out=folder / "results", until="tiles", tile_px=128)
if distributed.is_initialized():
    distributed.barrier()


def crop(tile: npt.NDArray[np.uint8]) -> torch.Tensor:
    """A random part of a tile, perhaps mirrored."""
    x, y, is_mirrored = torch.randint(0, 32, (3,)).tolist()
    pixels = tile[y : y + 96, x : x + 96]
    if is_mirrored % 2:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


def two_crops(tile: npt.NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two crops of a tile."""
    return crop(tile), crop(tile)


# with several ranks, all of them get the same number of batches; drop_last=True leaves out the
# last batch of a worker if it is not full
dataset = ts.TileDataset(folder / "results", transform=two_crops, memory="64MiB")
loader = dataset.loader(batch_size=16, num_workers=1, drop_last=True)
network: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 7, stride=4),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
)
if distributed.is_initialized():
    network = torch.nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.Adam(network.parameters())
for epoch in range(loader.epoch, 2):
    for batch in loader:
        first, second = (
            torch.nn.functional.normalize(network(images)) for images in batch["image"]
        )
        # SimCLR's loss: the other crop of a tile is the class
        scores = first @ second.T / 0.1
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoint = {"loader": loader.state_dict(), "network": network.state_dict()}
    print(f"rank {rank}, epoch {epoch}: loss {loss.item():.2f}")

assert len(first) == 16
if distributed.is_initialized():
    distributed.destroy_process_group()
