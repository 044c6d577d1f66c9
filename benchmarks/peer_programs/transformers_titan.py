"""TITAN from the hub's cache on a file of tile embeddings: `transformers_titan.py H5 NPY`."""

import sys

import h5py
import numpy as np
import torch

from thinsection.weights.placement import optional_package

with h5py.File(sys.argv[1]) as file:
    tiles = torch.from_numpy(file["features"][:])[None]
    coords = torch.from_numpy(file["coords"][:])[None]
    size = int(file["coords"].attrs["patch_size_level0"])
AutoModel = optional_package("transformers").AutoModel
model = AutoModel.from_pretrained("MahmoodLab/TITAN", trust_remote_code=True).eval()
with torch.inference_mode():
    embedding = model.encode_slide_from_patch_features(tiles, coords, size)
np.save(sys.argv[2], embedding.float().numpy().ravel())
