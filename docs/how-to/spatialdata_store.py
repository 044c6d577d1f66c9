# %% [markdown]
# # Results in SpatialData
# `thinsection export spatialdata` writes a store for each slide. Here the slide is a generated one.

# %%
import tempfile
from pathlib import Path

import spatialdata

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

folder = Path(tempfile.mkdtemp())
write_he_slide(folder / "s.svs", (1400, 1000), seed=3, mpp=0.5)

# %%
# --8<-- [start:script]
ts.run([folder / "s.svs"], out=folder / "results", until="tiles", tile_px=128)
ts.export_spatialdata(folder / "results", folder / "stores")
data = spatialdata.read_zarr(folder / "stores" / "s.zarr")
# --8<-- [end:script]
extent = spatialdata.get_extent(data, coordinate_system="um")
tiles = data.shapes["tiles"]
tissue = data.shapes["outlines"].union_all()
inside = tiles[tiles.centroid.within(tissue)]
print(
    f"{len(inside)} of {len(tiles)} tiles have their centre in tissue; extent in µm: {extent}"
)
assert data.tables["embeddings"].n_obs == len(tiles)
