# %% [markdown]
# # A cohort, with quality control
# A folder of slides becomes a folder of results: one command, or one call. A damaged slide is among them on purpose.

# %%
import tempfile
from pathlib import Path

import pandas as pd
from PIL import Image

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

folder = Path(tempfile.mkdtemp())
slides = folder / "slides"
slides.mkdir()
for number in range(3):
    write_he_slide(slides / f"s{number}.svs", (5000, 4000), seed=number, mpp=0.5)
(slides / "broken.svs").write_text("this is no slide")

# %% [markdown]
# In the shell this is `thinsection run slides/ --out results --qc auto --embedding-dtype float16`. Settings have the
# same names in Python, and in the TOML file of `thinsection config`.

# %%
summary = ts.run([slides], out=folder / "results", qc="auto", embedding_dtype="float16")
summary.counts

# %% [markdown]
# ## What failed, and what to do
# The others were not stopped. `failed.csv` has the stage and the reason.

# %%
pd.read_csv(folder / "results" / "failed.csv")[["slide_id", "stage", "error"]]

# %% [markdown]
# ## What is there

# %%
table = pd.read_csv(folder / "results" / "summary.csv")
table[["slide_id", "status", "tissue_fraction", "num_tiles"]]

# %%
print(sorted(path.name for path in (folder / "results").iterdir()))
overview = next((folder / "results").glob("*/overviews/s0.jpg"))
Image.open(overview).reduce(2)

# %% [markdown]
# ## Again: nothing is computed twice

# %%
ts.run([slides], out=folder / "results", qc="auto", embedding_dtype="float16").counts

# %% [markdown]
# ## In Python
# Embeddings come as arrays, or row by row; tables with what is known of each tile.

# %%
results = ts.open_results(folder / "results")
stored = results.tile_embeddings("s0")
print(stored.embeddings.shape, stored.embeddings.dtype, stored.tile_px_l0)
