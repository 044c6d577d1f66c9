"""Draws a heatmap for a paper: a bitmap of 300 dpi, and a vector file."""

from pathlib import Path

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

# a slide to try it on: put your results folder in its place
Path("slides").mkdir(exist_ok=True)
write_he_slide("slides/s1.svs", (3000, 2200), seed=1, mpp=0.5)
ts.run("slides", out="results", until="tiles", tile_px=128, measures=True)

# --8<-- [start:script]
from matplotlib import pyplot

import thinsection as ts

results = ts.open_results("results")
column = "px_focus"  # or "heatmap_grade:score_high", a column of `thinsection heatmap`
pyplot.rc("font", size=7)
figure, axes = pyplot.subplots(figsize=(85 / 25.4, 60 / 25.4))  # one column: 85 mm
ts.plot.heatmap(results, results.slides[0], column, ax=axes)
figure.savefig("heatmap.png", dpi=300, bbox_inches="tight")
ts.write_heatmap("heatmap.svg", results, results.slides[0], column)
# --8<-- [end:script]

from PIL import Image

with Image.open("heatmap.png") as picture:
    assert abs(picture.info["dpi"][0] - 300) < 1
    assert picture.width > 600
figure.draw_without_rendering()
legend = axes.get_legend()
bar = figure.axes[1].get_tightbbox()
assert legend is not None and bar is not None
assert not legend.get_window_extent().overlaps(bar)  # nothing covers the scale
assert Path("heatmap.svg").read_text().count("<rect") > 20
