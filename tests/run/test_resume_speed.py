"""Finding that everything is done costs milliseconds a slide."""

import shutil
import time
from pathlib import Path

import pytest

from thinsection.run.run import run
from thinsection.testing.synthetic import write_he_slide

pytestmark = pytest.mark.check  # a thousand slides

SLIDES = 100


def test_a_finished_slide_costs_less_than_5_ms_of_cpu_when_a_run_is_resumed(
    tmp_path: Path,
) -> None:
    slides, out = tmp_path / "slides", tmp_path / "out"
    slides.mkdir()
    write_he_slide(slides / "s0.svs", (1200, 1000), seed=1)
    run([slides], out=out, until="tiles")
    written = [path for path in out.rglob("*") if path.is_file() and "s0" in str(path)]
    for index in range(1, SLIDES):
        shutil.copy(slides / "s0.svs", slides / f"s{index}.svs")
        for path in written:
            copy = out / str(path.relative_to(out)).replace("s0", f"s{index}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
            if path.suffix == ".json":
                copy.write_text(path.read_text().replace("s0", f"s{index}"))
    spent = []
    for _ in range(3):
        before = time.process_time()
        summary = run([slides], out=out, until="tiles")
        spent.append(time.process_time() - before)
        assert summary.counts["skipped"] == SLIDES
    assert min(spent) < 0.5 + SLIDES * 0.005
