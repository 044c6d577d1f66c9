# %% [markdown]
# # Train a classifier
# From 40 slides and a table to a model with scores that hold, its page, and predictions of new slides. The slides are
# generated: the nuclei of the high-grade ones are twice as large. Put your folder and your table in their place.

# %%
import tempfile
from pathlib import Path

import pandas as pd

import thinsection as ts
from thinsection.evaluation.labels import LabelsConfig
from thinsection.predict.config import TrainConfig
from thinsection.predict.training import FitConfig
from thinsection.testing.synthetic import write_he_slide

folder = Path(tempfile.mkdtemp())
slides, rows = folder / "slides", []
slides.mkdir()
for number in range(40):
    high = number % 2
    size, mpp = ((1200, 900), 0.5) if high else ((2400, 1800), 0.25)
    write_he_slide(slides / f"s{number:02}.svs", size, seed=number, mpp=mpp)
    rows.append(
        {
            "slide_id": f"s{number:02}",
            "case_id": f"p{number // 4 * 2 + high:02}",
            "grade": "high" if high else "low",
        }
    )
pd.DataFrame(rows).to_csv(folder / "labels.csv", index=False)

# %% [markdown]
# ## Embeddings
# `thinsection run slides/ --out results --until embeddings`. Any encoder of `thinsection models` will do; this one is small.

# %%
summary = ts.run([slides], out=folder / "results", until="embeddings")
summary.counts

# %% [markdown]
# ## Train
# In the shell: `thinsection train results --labels labels.csv --target grade --out results/experiments/grade`. The table
# has two slides a patient: they are one bag and never lie on two sides of a split. What matched is said first.

# %%
config = TrainConfig(
    labels=LabelsConfig(labels=folder / "labels.csv", target=("grade",)),
    fit=FitConfig(epochs=12),
)
out = folder / "results" / "experiments" / "grade"
found = ts.train(folder / "results", out=out, config=config, on_message=print)
print(
    f"AUROC {found['value']:.3f}, 95 % interval {found['interval']} over {found['interval_by']}"
)
assert found["value"] > 0.9

# %% [markdown]
# Each case was scored by a model that has not seen it: five folds, and in each an inner part of the training cases
# that chose the epoch and the temperature. `index.html` in `out` has the curves and the cases that were worst predicted.

# %%
pd.read_csv(out / "predictions.csv").head()

# %% [markdown]
# ## Is another head better?
# The same folds, the same resamples of patients: the difference has an interval and a test of its own.

# %%
linear = TrainConfig(
    labels=config.labels, fit=config.fit, head=type(config.head)(head="linear")
)
told = ts.train(
    folder / "results", out=out.with_name("linear"), config=linear, against=[out]
)
print(told["against"][0]["value"], told["against"][0]["p_holm"])

# %% [markdown]
# ## New slides
# `thinsection predict model.safetensors new/ --out predicted` does the whole job from the slides, with the model's own
# settings, and warns of slides unlike those it was trained on.

# %%
new = folder / "new"
new.mkdir()
write_he_slide(new / "x.svs", (1200, 900), seed=1000, mpp=0.5)
predicted = ts.predict(out / "model.safetensors", [new], out=folder / "predicted")
pd.read_csv(predicted.table)
