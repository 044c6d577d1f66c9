"""The Snakemake workflow under the real Snakemake: a job for each slide, then one merged folder."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thinsection.files.atomic import read_table
from thinsection.results.verify import verify
from thinsection.run.run import run
from thinsection.testing.synthetic import write_he_slide

SNAKEFILE = Path(__file__).parents[2] / "workflows" / "snakemake" / "Snakefile"
SNAKEMAKE = shutil.which("snakemake")

pytestmark = [
    pytest.mark.check,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        SNAKEMAKE is None,
        reason="snakemake is not on PATH; pip install snakemake in an environment of its own",
    ),
]


def snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the workflow in a folder with a cohort.csv."""
    command = [str(SNAKEMAKE), "--snakefile", str(SNAKEFILE), "--cores", "1"]
    config = ["--config", "options=--until tiles", "threads=1"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [*command, *arguments, *config],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def write_cohort(folder: Path, names: list[str]) -> None:
    with (folder / "cohort.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["slide_path", "patient_id"])
        writer.writerows([f"in/{name}.svs", f"patient of {name}"] for name in names)


def test_each_slide_is_a_job_and_the_merged_folder_equals_one_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "in").mkdir()
    for number, name in enumerate(("a", "b")):
        write_he_slide(tmp_path / "in" / f"{name}.svs", (900, 700), seed=number)
    write_cohort(tmp_path, ["a"])
    first = snakemake(tmp_path)
    assert first.returncode == 0, first.stderr
    # a slide more and a broken one: the first is not run again, and the others go on
    (tmp_path / "in" / "bad.svs").write_text("no slide")
    write_cohort(tmp_path, ["a", "b", "bad"])
    second = snakemake(tmp_path, "--keep-going")
    assert second.returncode != 0
    assert "bad: failed (open)" in (tmp_path / "logs" / "bad.log").read_text()
    assert "rule slide" in second.stderr
    assert "slide=a\n" not in second.stderr
    # without the broken one, only the merge is left
    write_cohort(tmp_path, ["a", "b"])
    third = snakemake(tmp_path)
    assert third.returncode == 0, third.stderr
    assert "rule merge" in third.stderr
    assert "rule slide" not in third.stderr
    run([tmp_path / "cohort.csv"], out=tmp_path / "whole", until="tiles")
    merged = read_table(tmp_path / "results" / "summary.csv")
    whole = read_table(tmp_path / "whole" / "summary.csv")
    assert [row["patient_id"] for row in merged] == ["patient of a", "patient of b"]
    for row, wanted in zip(merged, whole, strict=True):
        assert Path(row.pop("slide_path")) == Path(wanted.pop("slide_path"))
        assert row == wanted
    for path in (tmp_path / "whole").glob("256px_0.5mpp/tiles/*.h5"):
        file = path.relative_to(tmp_path / "whole")
        assert (tmp_path / "results" / file).read_bytes() == path.read_bytes()
    assert verify(tmp_path / "results")[1] == []
