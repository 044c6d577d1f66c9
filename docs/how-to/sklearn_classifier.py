"""Cross-validates a classifier of scikit-learn on slide embeddings."""

from pathlib import Path

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

Path("slides").mkdir(exist_ok=True)
for number in range(8):
    write_he_slide(f"slides/s{number}.svs", (500, 400), seed=number % 4)
ts.run("slides", out="results", tile_px=128, overview=False)
labels = {f"s{number}": ("low", "high")[number % 2] for number in range(8)}

# --8<-- [start:script]
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

slide_ids, embeddings = ts.open_results("results").slide_embeddings()
classes = [labels[slide_id] for slide_id in slide_ids]
print(cross_val_score(LogisticRegression(max_iter=1000), embeddings, classes, cv=4))
# --8<-- [end:script]

assert embeddings.shape == (8, 1280)
