"""Lays tiles on a mask of one's own, and draws them."""

import numpy as np

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

write_he_slide("slide.svs", (1600, 1200), seed=1)
mask = np.zeros((75, 100), dtype=bool)  # 8 µm/px: 16 pixels of the slide each
mask[10:40, 20:80] = True

# --8<-- [start:script]
from matplotlib import pyplot

slide = ts.open_slide("slide.svs")
tiles = ts.tile_grid(slide, tissue=(mask, 8.0), tile_px=128, tile_mpp=0.5)
ts.plot.tiles(slide, tiles)
pyplot.savefig("tiles.png")
# --8<-- [end:script]

left, top = tiles.coords_l0.min(axis=0)
assert len(tiles) > 10 and left >= 16 * 20 - 64 and top >= 16 * 10 - 64
