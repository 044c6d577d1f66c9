"""An import of cells killed between slides or within one resumes to the same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cell_files import SIZE, write_cells

from thinsection.testing.synthetic import write_he_slide

pytestmark = pytest.mark.check  # some twenty runs

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
SLIDES = ("a", "b")
TABLES = ("few", "many")


@pytest.mark.timeout(900)
def test_killed_at_any_part_of_a_table_nothing_half_written_counts(
    tmp_path: Path,
) -> None:
    (tmp_path / "slides").mkdir()
    for seed, slide_id in enumerate(SLIDES):
        path = tmp_path / "slides" / f"{slide_id}.svs"
        write_he_slide(path, SIZE, seed=seed, downsamples=(1,))
        for number, name in enumerate(TABLES):
            file = tmp_path / name / f"{slide_id}.geojson"
            write_cells(file, number=200 + 200 * number, seed=2 * number + seed)
    command = [sys.executable, str(HERE / "kill_in_cells.py")]
    for name in ("slides", "out", *TABLES):
        command.append(str(tmp_path / name))
    child = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert child.returncode == 0, child.stderr
    reference, *kills = map(json.loads, child.stdout.splitlines())
    sources = {f"{name}/{slide_id}.geojson" for name in TABLES for slide_id in SLIDES}
    assert sources <= set(reference["opened"])
    # each table is read in several batches and written in several blocks
    for word in ("batch", "block"):
        for name in TABLES:
            assert f"{word} of cells/{name}/a.parquet 2" in reference["moments"]
    assert len(kills) == 10
    num_not_read_again = []
    for kill in kills:
        assert kill["wrong_tables"] == []
        assert kill["differs"] == []
        is_done = {
            f"{name}/{slide_id}.geojson"
            for name in TABLES
            for slide_id in SLIDES
            if f"slides/cells_{name}" in kill["done"][slide_id]
        }
        assert sources - is_done <= set(kill["opened"])
        assert not is_done & set(kill["opened"])
        num_not_read_again.append(len(is_done))
    # killed within the first table, within the last, and after all of them
    assert min(num_not_read_again) == 0
    assert {3, 4} <= set(num_not_read_again)
