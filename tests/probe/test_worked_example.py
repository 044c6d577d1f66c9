"""The worked example of docs/probes.md, run as it stands there."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "probes.md"


def test_the_worked_example_of_the_docs_runs_and_gives_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DOCS.read_text()
    (block,) = re.findall(r"```python\n(# a worked example.*?)```", text, flags=re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(DOCS), "exec"), {})
    found = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    (task,) = (t for t in found["tasks"] if t["task"] == "aspirates, knn")
    (pair,) = task["pairs"]
    scores = [f"{model['score']:.3f}" for model in task["models"]]
    said = f"kNN macro F1 {scores[0]} against {scores[1]}, difference {pair['difference']:.3f} "
    said += (
        f"[{pair['low']:.3f}, {pair['high']:.3f}], p {pair['p_holm']:.1g} after Holm"
    )
    assert said in text
    assert pair["different"]
    assert [model["rank"] for model in task["models"]] == [1, 2]
    assert (tmp_path / "compared" / "comparison.html").is_file()
