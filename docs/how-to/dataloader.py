# %% [markdown]
# # Train a network on tiles
# Tiles are decoded from the slides while the network trains; no tile is written to disk. `ts.run`
# finds tissue and tiles once, `ts.TileDataset` reads them, in workers of PyTorch's `DataLoader`. The
# slides here are generated; put yours in their place.

# %%
import tempfile
from pathlib import Path

import torch

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

folder = Path(tempfile.mkdtemp())
(folder / "slides").mkdir()
for number in range(4):
    write_he_slide(
        folder / "slides" / f"s{number}.svs", (1400, 1000), seed=number, mpp=0.5
    )

# %%
labels = {"s0": 0, "s1": 1, "s2": 0, "s3": 1}
# --8<-- [start:script]
ts.run([folder / "slides"], out=folder / "results", until="tiles", tile_px=128)
dataset = ts.TileDataset(folder / "results", labels=labels, memory="64MiB")
loader = dataset.loader(batch_size=32, num_workers=1)
# --8<-- [end:script]

network = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 7, stride=4),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(8, 2),
)
optimizer = torch.optim.Adam(network.parameters())
for epoch in range(2):
    num_tiles = 0
    for batch in loader:  # each loop is an epoch, in another order
        scores = network(batch["image"] / 255)
        loss = torch.nn.functional.cross_entropy(scores, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoint = loader.state_dict()  # to continue after a stop
        num_tiles += len(batch["label"])
    print(f"epoch {epoch}: {num_tiles} tiles, loss {loss.item():.2f}")
assert num_tiles == dataset.num_tiles
