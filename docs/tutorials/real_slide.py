# %% [markdown]
# # A real slide
# The other tutorials draw their slides. This one uses CMU-1-Small-Region, a piece of an H&E section from OpenSlide's
# test data (CC0). The script `examples/real_data.py` of the repository fetches it and checks its hash:
#
# ```
# python examples/real_data.py slide
# ```
#
# Without a network, `--from DIR` takes the file from a folder. If the site was built without the slide, this page shows
# the code without its results.

# %%
import os
import tempfile
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from PIL import Image
from sklearn.cluster import KMeans

import thinsection as ts

cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
data = Path(os.environ.get("THINSECTION_REAL_DATA", cache / "thinsection" / "real"))
folder = Path(tempfile.mkdtemp())

path = data / "CMU-1-Small-Region.svs"
slide = ts.open_slide(path)
print(slide.size, "pixels;", slide.slide_mpp, "µm/px")
Image.fromarray(slide.thumbnail((500, 500)))

# %% [markdown]
# ## Tissue
# The mask has 8 µm/px. White is tissue.

# %%
tissue = ts.tissue_mask(slide)
print(f"{tissue.mask.mean():.0%} of the slide is tissue")
Image.fromarray(tissue.mask)

# %% [markdown]
# ## A run with quality control and measures
# In the shell: `thinsection run CMU-1-Small-Region.svs --out results --qc auto --measures --tile-px 128`. `--measures`
# adds columns such as the sharpness of each tile.

# %%
ts.run(
    [path],
    out=folder / "results",
    qc="auto",
    measures=True,
    tile_px=128,
    until="embeddings",
)
results = ts.open_results(folder / "results")
slide_id = results.slides[0]
tiles = results.tiles(slide_id)
print(len(tiles.coords_l0), "tiles;", sorted(tiles.columns)[:8])

# %% [markdown]
# ## Sharpness over the slide

# %%
ts.plot.heatmap(results, slide_id, "px_focus")
pyplot.show()

# %% [markdown]
# ## Which tiles look alike
# The embeddings are divided into four groups by k-means. Nobody has told the encoder what tissue is, and it was trained on
# photographs. So the groups are a first look, not a result.

# %%
embeddings = results.tile_embeddings(slide_id).embeddings
groups = KMeans(4, n_init=10, random_state=0).fit_predict(embeddings)
names = [f"group {group + 1}" for group in groups]
ts.plot.heatmap(results, slide_id, names)
pyplot.show()
assert len(set(groups)) == 4 and len(groups) == len(tiles.coords_l0)

# %% [markdown]
# Three tiles of each group:

# %%
figure, axes = pyplot.subplots(4, 3, figsize=(4, 5.4), layout="constrained")
for group, row in enumerate(axes):
    chosen = np.flatnonzero(groups == group)[:3]
    for place, axis in enumerate(row):
        axis.axis("off")
        if place < len(chosen):
            x, y = tiles.coords_l0[chosen[place]]
            axis.imshow(slide.read_region((int(x), int(y)), 0, (128, 128)))
    row[0].set_title(f"group {group + 1}", fontsize=8)
pyplot.show()

# %% [markdown]
# ## Where to go on
# Groups that you want to keep are written into the results with `results.write_column`: see *Your own values per tile*.
