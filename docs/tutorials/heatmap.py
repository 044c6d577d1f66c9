# %% [markdown]
# # From a model to a heatmap in QuPath
# A model that was trained on one label a slide says of every tile what it adds to the answer. Here 40 slides are
# generated, every other one with a small patch of crowded nuclei, and the model never hears where it lies. The end is a
# picture, a sheet of the top tiles, and a file that QuPath opens.

# %%
import json
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

import thinsection as ts
from thinsection.evaluation.labels import LabelsConfig
from thinsection.predict.config import TrainConfig
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.training import FitConfig
from thinsection.testing.synthetic import PyramidKind, write_he_slide, write_levels

folder = Path(tempfile.mkdtemp())
slides = folder / "slides"
slides.mkdir()


def write_slide(path, number, lesion):
    """A generated slide; with crowded nuclei in the box (left, top, edge), level-0 px, if one is given."""
    write_he_slide(folder / "plain.svs", (1200, 900), seed=number, mpp=0.5)
    with ts.open_slide(folder / "plain.svs") as slide:
        rgb = slide.read_region((0, 0), 0, slide.size).astype(float)
    if lesion:
        left, top, edge = lesion
        rng = np.random.default_rng(number)
        y, x = np.mgrid[-6:7, -6:7]
        for cx, cy in rng.integers(
            (left + 6, top + 6), (left + edge - 6, top + edge - 6), (edge**2 // 130, 2)
        ):
            rgb[cy - 6 : cy + 7, cx - 6 : cx + 7][np.hypot(x, y) < 6] = (82, 48, 120)
    rgb = rgb.astype(np.uint8)
    write_levels(path, [rgb, rgb[::4, ::4]], PyramidKind(mpp=(0.5, 0.5)))


rows = []
for number in range(40):
    lesion = (250 + number * 6, 150 + number * 4, 380) if number % 2 else None
    write_slide(slides / f"s{number:02}.tif", number, lesion)
    rows.append({"slide_id": f"s{number:02}", "lesion": "yes" if lesion else "no"})
pd.DataFrame(rows).to_csv(folder / "labels.csv", index=False)

# %% [markdown]
# ## Embed and train
# `thinsection run slides/ --out results --until embeddings`, then
# `thinsection train results --labels labels.csv --target lesion --out results/experiments/lesion`.

# %%
ts.run([slides], out=folder / "results", until="embeddings")
config = TrainConfig(
    labels=LabelsConfig(labels=folder / "labels.csv", target=("lesion",)),
    head=HeadConfig(hidden_dim=64, attention_dim=32),
    fit=FitConfig(epochs=8, lr=1e-3),
)
out = folder / "results" / "experiments" / "lesion"
found = ts.train(folder / "results", out=out, config=config)
print(f"AUROC {found['value']:.3f}, {found['interval']}")
assert found["value"] > 0.7

# %% [markdown]
# ## A new slide
# `thinsection heatmap model.safetensors new.tif --out new` embeds the slide as the model says, predicts it, and draws.

# %%
box = (500, 250, 420)
write_slide(folder / "new.tif", 1001, box)
drawn = ts.heatmap(out / "model.safetensors", folder / "new.tif", out=folder / "new")
for path in drawn:
    print(path.relative_to(folder))

# %%
pd.read_csv(folder / "new" / "predictions_lesion.csv")

# %% [markdown]
# Red tiles speak for the predicted class. `score_yes` is what a tile adds to the log-odds of `yes`.


# %%
def show(ending):
    with Image.open(
        next(path for path in drawn if path.name.endswith(ending))
    ) as picture:
        return picture.copy()


show("score_yes.png")

# %% [markdown]
# The tiles of highest score, a row for each class:

# %%
show("top.png")

# %% [markdown]
# ## Into QuPath
# Drag `new.geojson` onto the slide in QuPath, or *File, Import objects from file*. Each tile is a tile object with the
# measurements `attention`, `score_no` and `score_yes`: *Measure, Show measurement maps* colours them, and
# `selectObjects { it.measurements["score_yes"] > 0.05 }` in the script editor selects the ones that decided.

# %%
geojson = json.loads(
    next(path for path in drawn if path.suffix == ".geojson").read_text()
)
geojson["features"][0]

# %% [markdown]
# The same numbers are columns of the tile table, for a notebook, for filters and for the viewer.

# %%
table = ts.open_results(folder / "new").tiles("new")
score = table.columns["heatmap_lesion:score_yes"]
top = table.coords_l0[np.argsort(-score)[:3]]
left, top_edge, edge = box
inside = ((top + 256 > (left, top_edge)) & (top < (left + edge, top_edge + edge))).all(
    axis=1
)
print(f"{inside.sum()} of the top 3 tiles touch the lesion")
assert inside.all()
