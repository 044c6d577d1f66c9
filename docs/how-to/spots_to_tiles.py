"""Joins the spots of Visium to tiles by their area, and writes expression back as columns."""

from pathlib import Path

import anndata
import numpy as np
import pandas as pd

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

# two slides and their spots to try it on: put yours in their place
Path("slides").mkdir(exist_ok=True)
rng = np.random.default_rng(0)
parts = []
for number, size in enumerate([(1400, 1000), (1000, 1300)]):
    write_he_slide(f"slides/s{number}.svs", size, seed=number, mpp=0.5)
    places = np.mgrid[100 : size[0] - 100 : 200, 100 : size[1] - 100 : 200]
    centres = places.reshape(2, -1).T.astype(float)
    names = [f"spot{row}" for row in range(len(centres))]
    spots = anndata.AnnData(
        # the gene grows from left to right, by 1 for 100 pixels
        X=np.stack([centres[:, 0] / 100, rng.poisson(3, len(centres))], axis=1),
        obs=pd.DataFrame({"slide_id": f"s{number}"}, index=names),
        var=pd.DataFrame(index=["EPCAM", "CD3E"]),
        obsm={"spatial": centres},
    )
    is_left = centres[:, 0] < 500
    spots.obs["cluster"] = np.where(is_left, "tumour", "stroma")
    parts.append(spots)
ts.run("slides", out="results", until="tiles", tile_px=128, tile_mpp=0.5)

# --8<-- [start:spots]
# AnnData objects of two slides, with the centres of their spots in obsm["spatial"]: x and y in
# pixels of the slide. Space Ranger states their diameter in the same pixels, in
# uns["spatial"][LIBRARY]["scalefactors"]["spot_diameter_fullres"].
adata = anndata.concat(parts, index_unique="-")
spot_radius = 110 / 2
# --8<-- [end:spots]

# --8<-- [start:join]
import shapely
from scipy import sparse

results = ts.open_results("results")
for slide_id in results.slides:
    tiles = results.tiles(slide_id)
    corners = tiles.coords_l0
    boxes = shapely.box(*corners.T, *(corners + tiles.size_l0).T)
    spots = adata[adata.obs["slide_id"] == slide_id]
    circles = shapely.buffer(shapely.points(spots.obsm["spatial"]), spot_radius)

    # pairs of a spot and a tile that overlap, and the area that they share
    spot, tile = shapely.STRtree(boxes).query(circles, predicate="intersects")
    area = shapely.area(shapely.intersection(circles[spot], boxes[tile]))
    shape = (len(tiles), len(spots))
    weights = sparse.csr_array((area, (tile, spot)), shape=shape)
    total = weights.sum(axis=1)
    covered = total > 0

    # a number: the mean over the spots of a tile, weighted by area; NaN for a tile without a spot
    gene = np.asarray(spots[:, "EPCAM"].X, dtype=float).ravel()
    mean = np.full(len(tiles), np.nan)
    mean[covered] = (weights @ gene)[covered] / total[covered]
    results.write_column(slide_id, "EPCAM", mean)

    # a category: the cluster with the largest area in the tile; None for a tile without a spot
    clusters = pd.get_dummies(spots.obs["cluster"])
    largest = (weights @ clusters.to_numpy(dtype=float)).argmax(axis=1)
    cluster = np.where(covered, clusters.columns.to_numpy()[largest], None)
    results.write_column(slide_id, "spot_cluster", cluster)
# --8<-- [end:join]

# --8<-- [start:read]
table = results.to_pandas()
print(table.groupby("slide_id", observed=True)["EPCAM"].describe())
ts.write_heatmap("s0.png", results, "s0", "EPCAM")
dataset = ts.TileDataset(results, labels="EPCAM")  # tiles without a spot are left out
# --8<-- [end:read]

known = table.dropna(subset=["EPCAM"])
assert 0 < len(known) < len(table) and dataset.num_tiles == len(known)
# the mean of a tile is near the value at its centre, within a spot's distance
assert (abs(known["EPCAM"] - (known["x"] + 64) / 100) < 1.2).all()
assert (known["spot_cluster"] == "tumour")[known["x"] < 300].all()
assert (known["spot_cluster"] == "stroma")[known["x"] > 600].all()
assert not (table["EPCAM"].isna() ^ table["spot_cluster"].isna()).any()
