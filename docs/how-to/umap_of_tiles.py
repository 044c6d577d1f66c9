"""Draws a UMAP of the tile embeddings of all slides, coloured by slide."""

from pathlib import Path

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

Path("slides").mkdir(exist_ok=True)
for number in range(2):
    write_he_slide(f"slides/s{number}.svs", (1200, 900), seed=number)
ts.run("slides", out="results", until="embeddings", tile_px=128)

# --8<-- [start:script]
from matplotlib import pyplot

results = ts.open_results("results")
ts.plot.embedding(results, method="umap", color="slide_id")
pyplot.savefig("umap.png")
# --8<-- [end:script]
