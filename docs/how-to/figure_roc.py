"""Draws the ROC curve of an experiment for a paper, with the score that `train` computed."""

from pathlib import Path

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

# slides to try it on: put your experiment in their place
Path("slides").mkdir(exist_ok=True)
labels = ["slide_id,grade"]
for number in range(16):
    # the nuclei of one class look twice as large; three slides look like the other class
    mpp = 0.5 if (number % 2) ^ (number in (3, 6, 9)) else 0.25
    write_he_slide(f"slides/s{number}.svs", (700, 500), seed=number, mpp=mpp)
    labels.append(f"s{number},{'high' if number % 2 else 'low'}")
Path("labels.csv").write_text("\n".join(labels))
ts.run("slides", out="results", until="embeddings", tile_px=64, tile_mpp=1.0)
ts.train("results", out="results/experiments/grade", labels="labels.csv", target=("grade",), epochs=4)

# --8<-- [start:script]
import csv
import json
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from sklearn.metrics import roc_curve

folder = Path("results/experiments/grade")
experiment = json.loads((folder / "experiment.json").read_text())
with (folder / "predictions.csv").open(newline="") as file:
    rows = sorted(csv.DictReader(file), key=lambda row: row["level"], reverse=True)
cases = list({row["case_id"]: row for row in rows}.values())  # "case" replaces "slide"
positive = experiment["positive"]
truth = np.array([row["truth"] == positive for row in cases])
probability = np.array([float(row[f"p_{positive}"]) for row in cases])
false_positives, true_positives, _ = roc_curve(truth, probability)
score = experiment["scores"]["auroc"]

pyplot.rc("font", size=7)
figure, axes = pyplot.subplots(figsize=(60 / 25.4, 60 / 25.4), layout="constrained")
axes.plot(false_positives, true_positives, color="#0072b2")
axes.plot([0, 1], [0, 1], color="0.7", linestyle=":")
axes.set(xlabel="1 - specificity", ylabel="sensitivity", aspect="equal")
words = f"AUROC {score['value']:.2f}\n95 % CI {score['low']:.2f} to {score['high']:.2f}"
axes.text(0.97, 0.05, f"{words}\n{len(cases)} cases", ha="right")
figure.savefig("roc.png", dpi=300)
figure.savefig("roc.svg")
# --8<-- [end:script]

from PIL import Image

with Image.open("roc.png") as picture:
    assert abs(picture.info["dpi"][0] - 300) < 1
assert len(cases) == 16 and 0.5 < score["value"] <= 1
assert np.interp(0.5, false_positives, true_positives) >= 0.5
