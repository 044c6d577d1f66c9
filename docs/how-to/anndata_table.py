"""Writes the tile embeddings of all slides as AnnData, for scanpy and squidpy."""

from pathlib import Path

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

Path("slides").mkdir(exist_ok=True)
for number in range(2):
    write_he_slide(f"slides/s{number}.svs", (900, 700), seed=number)
ts.run("slides", out="results", until="embeddings", tile_px=128)

# --8<-- [start:script]
import anndata

ts.export_anndata("results", "tiles.h5ad")
table = anndata.read_h5ad("tiles.h5ad")
print(table, table.obsm["spatial"][:3])
# --8<-- [end:script]

assert set(table.obs["slide_id"]) == {"s0", "s1"} and table.n_vars == 1280
