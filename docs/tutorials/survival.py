# %% [markdown]
# # Train on survival
# 40 slides, a time and an event: the larger the nuclei, the earlier the event. The slides are generated.

# %%
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import thinsection as ts
from thinsection.evaluation.labels import LabelsConfig
from thinsection.predict.config import TrainConfig
from thinsection.predict.training import FitConfig
from thinsection.testing.synthetic import write_he_slide

folder, rng = Path(tempfile.mkdtemp()), np.random.default_rng(0)
slides, rows = folder / "slides", []
slides.mkdir()
for number in range(40):
    mpp = float(
        rng.uniform(0.25, 0.5)
    )  # of the file; at the tiles' 0.5 nuclei are mpp / 0.5 as large
    size = (round(600 / mpp), round(450 / mpp))
    write_he_slide(slides / f"s{number:02}.svs", size, seed=number, mpp=mpp)
    days, follow_up = (
        3000 * np.exp(-8 * mpp + 0.1 * rng.normal()),
        rng.uniform(100, 500),
    )
    rows.append(
        {
            "slide_id": f"s{number:02}",
            "dead": int(days < follow_up),
            "days": min(days, follow_up),
        }
    )
pd.DataFrame(rows).to_csv(folder / "labels.csv", index=False)

# %%
summary = ts.run([slides], out=folder / "results", until="embeddings")
summary.counts

# %% [markdown]
# ## Train
# `thinsection train results --labels labels.csv --target dead --time days --out results/experiments/survival`. The
# target is the event, `--time` the time to it or to the end of the follow-up. Cox' partial likelihood is the default,
# `--task discrete` learns intervals of time.

# %%
labels = LabelsConfig(labels=folder / "labels.csv", target=("dead",), time="days")
config = TrainConfig(labels=labels, fit=FitConfig(epochs=40, lr=2e-3, batch_cases=8))
out = folder / "results" / "experiments" / "survival"
found = ts.train(folder / "results", out=out, config=config, on_message=print)
print(
    f"c-index {found['value']:.3f}, 95 % interval {found['interval']} over {found['interval_by']}"
)
assert found["value"] > 0.7

# %% [markdown]
# `index.html` has Kaplan-Meier curves of the cases above and below the median risk of their fold, with the hazard ratio.

# %%
pd.read_csv(out / "predictions.csv").sort_values("risk").head()
