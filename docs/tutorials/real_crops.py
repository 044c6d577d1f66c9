# %% [markdown]
# # Real tissue with labels
# Two crops of a high-grade serous ovarian carcinoma come with the Python package histolytics (BSD-3), and with them the
# outline and the class of each nucleus. This tutorial asks how well an encoder tells tumour from other tissue, with
# labels that people checked. `examples/real_data.py` of the repository fetches the crops and checks the hash:
#
# ```
# python examples/real_data.py crops
# ```
#
# Without a network, `--from DIR` takes the wheel of histolytics 0.3.0 from a folder. If the site was built without the
# crops, this page shows the code without its results.

# %%
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet
import shapely
from matplotlib import pyplot
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import thinsection as ts

cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
data = Path(os.environ.get("THINSECTION_REAL_DATA", cache / "thinsection" / "real"))

nest = ts.open_slide(data / "hgsc_nest.jpg", slide_mpp=(0.5, 0.5))
print(nest.size, "pixels at 0.5 µm/px")
Image.fromarray(nest.thumbnail((500, 500)))

# %% [markdown]
# ## The label of a tile
# A tile of 100 pixels is called tumour if more than half of the nuclei in it are neoplastic. Tiles with fewer than three nuclei
# have no label.


# %%
def labels_of(coords_l0, parquet):
    """1 for tumour, 0 for other tissue, -1 for no label, one per tile."""
    table = pyarrow.parquet.read_table(parquet).to_pydict()
    outlines = shapely.from_wkb(table["geometry"])
    centres = shapely.get_coordinates(shapely.centroid(outlines))
    is_tumour = np.array(table["class_name"]) == "neoplastic"
    labels = np.full(len(coords_l0), -1)
    for row, corner in enumerate(coords_l0):
        inside = ((centres >= corner) & (centres < corner + 100)).all(axis=1)
        if inside.sum() >= 3:
            labels[row] = is_tumour[inside].mean() > 0.5
    return labels


encoder = ts.load_encoder("efficientnet_lite0", device="cpu")
embeddings, labels, squares = [], [], []
for picture, nuclei in (
    ("hgsc_nest", "hgsc_nest"),
    ("hgsc_stromal_he", "hgsc_stromal_cells"),
):
    slide = ts.open_slide(data / f"{picture}.jpg", slide_mpp=(0.5, 0.5))
    grid = ts.tile_grid(slide, tile_px=100, tile_mpp=0.5)
    crop_embeddings, tiles = ts.embed_tiles(slide, grid, encoder)
    crop_labels = labels_of(tiles.coords_l0, data / f"{nuclei}.parquet")
    embeddings.append(crop_embeddings[crop_labels >= 0])
    labels.append(crop_labels[crop_labels >= 0])
    for x, y in tiles.coords_l0[crop_labels >= 0]:
        squares.append(f"{picture} {x // 300} {y // 300}")
embeddings, labels = np.concatenate(embeddings), np.concatenate(labels)
print(len(labels), "tiles with a label,", labels.sum(), "of them tumour")

# %% [markdown]
# ## How well are they told apart?
# Neighbouring tiles look alike. So the crops are divided into squares of 300 pixels, and each square is tested by a model that
# was not trained on it. Tiles that are drawn at random would give too good a score.

# %%
model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
scores = cross_val_predict(
    model, embeddings, labels, groups=squares, cv=GroupKFold(5), method="predict_proba"
)[:, 1]
auroc = roc_auc_score(labels, scores)
print(f"AUROC {auroc:.2f}")
print(ts.interval(labels, scores, "auroc", patients=squares))
assert 0.75 < auroc < 1

# %% [markdown]
# The interval takes the squares as units. It says nothing about other patients: both crops are of one tumour.

# %%
figure, axis = pyplot.subplots(figsize=(4, 2.6), layout="constrained")
for label, name in ((0, "other tissue"), (1, "tumour")):
    axis.hist(scores[labels == label], bins=20, range=(0, 1), alpha=0.6, label=name)
axis.set(xlabel="predicted probability of tumour", ylabel="tiles")
axis.legend()
pyplot.show()
