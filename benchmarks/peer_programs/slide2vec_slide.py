"""A slide encoder of slide2vec on a file of tile embeddings: `... titan|gigapath-slide H5 NPY`.

slide2vec's own command embeds tiles first, with weights that are gated.
"""

import sys

import h5py
import numpy as np
import torch
from slide2vec.encoders.registry import encoder_registry

with h5py.File(sys.argv[2]) as file:
    tiles = torch.from_numpy(file["features"][:])
    coords = torch.from_numpy(file["coords"][:])
    size = int(file["coords"].attrs["patch_size_level0"])
encoder = encoder_registry.require(sys.argv[1])().to("cpu")
with torch.inference_mode():
    embedding = encoder.encode_slide(tiles, coords, tile_size_lv0=size)
np.save(sys.argv[3], embedding.float().numpy().ravel())
