"""The tutorials on training run as they stand, on generated cohorts of 60 slides."""

import runpy
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


@pytest.mark.timeout(900)  # some 90 seconds of CPU, on a machine that others use
@pytest.mark.parametrize("name", ["classification", "survival", "heatmap"])
def test_a_tutorial_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    names = runpy.run_path(str(TUTORIALS / f"{name}.py"))
    assert names["found"]["value"] > 0.7
    assert (names["out"] / "index.html").stat().st_size > 10_000
