"""The real slide, from pixels to probe pages, by the commands that a person types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.probe.make import rectangle

pytestmark = pytest.mark.check  # a real slide, in processes of its own

DEFAULT = Path(__file__).parents[3] / "shared" / "slides"
SLIDES = Path(os.environ.get("THINSECTION_TEST_SLIDES", DEFAULT))
REAL = SLIDES / "CMU-1-Small-Region.svs"
WIDTH, HEIGHT = 2220, 2967  # level-0 px


def invoke(*arguments: object) -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "thinsection", *map(str, arguments)]
    child = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.skipif(
    not REAL.exists(), reason=f"{REAL.name} is not under THINSECTION_TEST_SLIDES"
)
def test_two_regions_of_the_real_slide_are_told_apart(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "probe"
    invoke("run", REAL, "--out", run, "--tile-px", 160, "--device", "cpu")
    regions = [
        rectangle((0, 0, WIDTH, HEIGHT // 2), "upper half"),
        rectangle((0, HEIGHT // 2, WIDTH, HEIGHT), "lower half"),
    ]
    labels = tmp_path / "regions.geojson"
    labels.write_text(json.dumps({"type": "FeatureCollection", "features": regions}))
    invoke(
        "probe",
        "tileset",
        run,
        "--labels",
        labels,
        "--allow-leakage",
        "--out",
        out,
        "--device",
        "cpu",
    )
    for probe in ("knn", "fewshot", "linear"):
        result = json.loads((out / f"{probe}.json").read_text())
        assert result["score"] > 0.55, probe  # chance is 0.5
        assert result["data"]["encoder"]
        assert (out / f"{probe}_confusion.png").is_file()
