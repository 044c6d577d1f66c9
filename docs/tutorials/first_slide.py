# %% [markdown]
# # First slide
# From a slide file to tissue, tiles and embeddings, step by step. The slide is a generated one, so that this
# page runs anywhere; put the path of yours in its place.

# %%
import tempfile
from pathlib import Path

from PIL import Image

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

folder = Path(tempfile.mkdtemp())
path = folder / "slide.svs"
write_he_slide(path, (6000, 4000), seed=3, mpp=0.252)

# %% [markdown]
# ## Open it
# `choice` says which reader was taken and why. Nothing but the header has been read.

# %%
slide = ts.open_slide(path)
print(slide.size, slide.slide_mpp, [level.downsample for level in slide.levels])
print(slide.choice)
Image.fromarray(slide.thumbnail((600, 600)))

# %% [markdown]
# ## Tissue
# A mask at 8 µm/px, white where tissue is.

# %%
tissue = ts.tissue_mask(slide)
Image.fromarray(tissue.mask)

# %% [markdown]
# ## Tiles
# 256 px at 0.5 µm/px. The plan says which level is read, and how much it is reduced.

# %%
tiles = ts.tile_grid(slide, tissue=tissue)
print(len(tiles), "tiles;", tiles.plan)
print(tiles.coords_l0[:3])

# %% [markdown]
# ## Embeddings
# Tiles are decoded, and resampled where they must be, in buffers of a fixed size; they are never held all at once.

# %%
encoder = ts.load_encoder("efficientnet_lite0")
embeddings, tiles = ts.embed_tiles(slide, tiles, encoder)
print(embeddings.shape, embeddings.dtype)

# %% [markdown]
# ## One vector for the slide
# The mean here; `titan` and `gigapath` are slide encoders that take the embeddings of their own tile encoders.

# %%
slide_embedding = ts.aggregate(embeddings, tiles=tiles)
print(slide_embedding.shape)
slide.close()

# %% [markdown]
# The same for a folder, with files that other tools read and a run that can be resumed: `ts.run`.

# %%
summary = ts.run([folder], out=folder / "results")
print(summary)
results = ts.open_results(folder / "results")
print(results.slides, results.tile_embeddings(results.slides[0]).embeddings.shape)
