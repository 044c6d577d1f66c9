"""Joins the embedding of each tile with that of the coarse tile around it."""

from pathlib import Path

import numpy as np

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

Path("slides").mkdir(exist_ok=True)
for number in range(2):
    write_he_slide(f"slides/s{number}.svs", (1600, 1200), seed=number)

# --8<-- [start:script]
ts.run("slides", out="results", until="embeddings", tile_px=128, tile_mpp=[0.5, 2.0])
results = ts.open_results("results")
for slide_id in results.slides:
    fine = results.tile_embeddings(slide_id, "128px_0.5mpp")
    coarse = results.tile_embeddings(slide_id, "128px_2mpp")
    rows = ts.parent_rows(fine, coarse)  # -1 without a parent
    joined = np.hstack([fine.embeddings, coarse.embeddings[rows]])[rows >= 0]
    print(slide_id, joined.shape)
# --8<-- [end:script]

offsets = (fine.coords_l0 - coarse.coords_l0[rows])[rows >= 0]
assert joined.shape[1] == 2 * 1280 and len(joined) > 10
assert offsets.min() >= 0 and offsets.max() <= 512 - 128
