"""Saves the picture of one tile."""

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

write_he_slide("slide.svs", (1200, 900), seed=1)

# --8<-- [start:script]
from PIL import Image

slide = ts.open_slide("slide.svs")
tiles = ts.tile_grid(slide, tissue=ts.tissue_mask(slide), tile_px=224, tile_mpp=0.5)
Image.fromarray(slide.tiles(tiles)[3]).save("tile.png")
# --8<-- [end:script]

assert Image.open("tile.png").size == (224, 224)
