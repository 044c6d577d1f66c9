"""Draws a UMAP of tile embeddings for a paper, with the classes of the slides in the legend."""

from pathlib import Path

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

# slides to try it on: put your results folder in their place
Path("slides").mkdir(exist_ok=True)
rows = ["slide_id,slide_path,label"]
for number in range(4):
    mpp = 0.5 if number % 2 else 0.25
    write_he_slide(f"slides/s{number}.svs", (1200, 900), seed=number, mpp=mpp)
    rows.append(f"s{number},slides/s{number}.svs,{'high' if number % 2 else 'low'}")
Path("cohort.csv").write_text("\n".join(rows))
ts.run("cohort.csv", out="results", until="embeddings", tile_px=64, tile_mpp=1.0)

# --8<-- [start:script]
from matplotlib import pyplot

import thinsection as ts

results = ts.open_results("results")
pyplot.rc("font", size=7)
figure, axes = pyplot.subplots(figsize=(110 / 25.4, 70 / 25.4), layout="constrained")
ts.plot.embedding(results, method="umap", color="label", ax=axes)
axes.set(xticks=[], yticks=[])  # distances of a UMAP have no unit
axes.legend(title="grade", loc="center left", bbox_to_anchor=(1, 0.5), markerscale=3)
figure.savefig("umap.png", dpi=300)
figure.savefig("umap.svg")
# --8<-- [end:script]

from PIL import Image

with Image.open("umap.png") as picture:
    assert abs(picture.info["dpi"][0] - 300) < 1
legend = axes.get_legend()
assert legend is not None
names = {text.get_text() for text in legend.get_texts()}
assert names == {"high", "low"}
