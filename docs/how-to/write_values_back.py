"""Clusters the tiles of all slides, and writes the clusters back beside the results."""

from pathlib import Path

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

Path("slides").mkdir(exist_ok=True)
for number in range(2):
    write_he_slide(f"slides/s{number}.svs", (900, 700), seed=number)
ts.run("slides", out="results", until="embeddings", tile_px=128)

# --8<-- [start:table]
import pandas as pd
from sklearn.cluster import KMeans

results = ts.open_results("results")
adata = results.to_anndata()
clusters = KMeans(3, random_state=0).fit_predict(adata.X)
adata.obs["cluster"] = pd.Categorical(clusters.astype(str))

results.write_columns(adata.obs[["cluster"]])
# --8<-- [end:table]

# --8<-- [start:column]
for slide_id in results.slides:
    tiles = results.tiles(slide_id)
    left = tiles.coords_l0[:, 0] < 400
    results.write_column(slide_id, "is_left", left)
    words = ["tumour" if is_left else "stroma" for is_left in left]
    colors = {"tumour": "#AA0000", "stroma": "#00AA00"}
    results.write_column(slide_id, "region_class", words, colors=colors)
# --8<-- [end:column]

# --8<-- [start:read]
from matplotlib import pyplot

tiles = results.tiles("s0")
print(tiles.values("cluster"))  # names, one for each tile
print(tiles.categories["cluster"])  # names and colours
ts.export_qupath("results", "for_qupath", classes="region_class")
ts.heatmap("cluster", "results")
ts.plot.heatmap(results, "s0", "region_class")
pyplot.savefig("s0.png")
dataset = ts.TileDataset(results, columns=["region_class"])
# --8<-- [end:read]

# --8<-- [start:slides]
table = results.table()
labels = table[["slide_id", "is_left_share", "region_class_share_tumour"]]
labels.to_csv("labels.csv", index=False)
# --8<-- [end:slides]

assert set(tiles.values("cluster")) <= {"0", "1", "2"}
assert tiles.values("region_class").tolist()[0] == "tumour"
assert len(labels) == 2 and labels["is_left_share"].between(0, 1).all()
item = next(iter(dataset))
names = dataset.categories["region_class"].names
assert names[int(item["region_class"])] in ("stroma", "tumour")
again = results.to_anndata()
assert (again.obs["cluster"] == adata.obs["cluster"]).all()
