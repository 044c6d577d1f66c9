"""Embeds the tiles of a folder of slides with a network of one's own."""

from pathlib import Path

import torch
from PIL import Image
from torch import nn

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

# slides to try it on, and a network; put yours in their place
Path("slides").mkdir(exist_ok=True)
for number in range(2):
    write_he_slide(f"slides/s{number}.svs", (900, 700), seed=number)
network = nn.Sequential(nn.Conv2d(3, 16, 9, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def transform(tile: Image.Image) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(tile.tobytes()), dtype=torch.uint8)
    return pixels.reshape(tile.height, tile.width, 3).permute(2, 0, 1) / 255


# --8<-- [start:script]
encoder = ts.make_encoder(network, name="my_network", transform=transform)
ts.run("slides", out="results", encoder=encoder)
results = ts.open_results("results")
for slide_id in results.slides:
    print(slide_id, results.tile_embeddings(slide_id).embeddings.shape)
# --8<-- [end:script]

assert results.tile_embeddings("s0").embeddings.shape[1] == 16
