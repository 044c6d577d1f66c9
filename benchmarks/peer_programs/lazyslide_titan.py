"""LazySlide's `feature_aggregation` with TITAN: `python lazyslide_titan.py SLIDE H5 NPY`.

The tiles of the slide are those of the file: their embeddings and corners replace computed ones.
"""

import sys

import h5py
import lazyslide as zs
import numpy as np
from wsidata import open_wsi
from wsidata.io import add_features, add_tiles

with h5py.File(sys.argv[2]) as file:
    tiles = file["features"][:]
    corners = file["coords"][:]
    size = int(file["coords"].attrs["patch_size_level0"])
wsi = open_wsi(sys.argv[1], store=None)
zs.pp.find_tissues(wsi)
zs.pp.tile_tissues(wsi, size, mpp=0.5)
add_tiles(wsi, "tiles", corners, wsi.tile_spec("tiles"), 0)
add_features(wsi, "conch_v1.5_tiles", "tiles", tiles)
zs.tl.feature_aggregation(wsi, "conch_v1.5", encoder="titan", device="cpu")
operations = wsi.tables["conch_v1.5_tiles"].uns["agg_ops"]["agg_slide"]
np.save(sys.argv[3], np.asarray(operations["features"], np.float32).ravel())
