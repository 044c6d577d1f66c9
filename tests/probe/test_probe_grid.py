"""Many probes as jobs: the same files from every executor, failures as rows, resume."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.probe.make import two_regions
from tests.support.slurm_node import why_not
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.cli.slurm import TASKS
from thinsection.config import replace_flat
from thinsection.errors import ConfigError
from thinsection.jobs.slurm_array import array_folders, load_array
from thinsection.probe.config import ProbeConfig
from thinsection.probe.grid import (
    JOB_NAME,
    TRACEBACK_NAME,
    GridSection,
    ProbeGridConfig,
    ProbeRow,
    grid_probes,
    probe_jobs,
    run_probes,
)
from thinsection.probe.registry import PROBES

REASON = why_not()
needs_slurm = pytest.mark.skipif(REASON is not None, reason=f"no Slurm here: {REASON}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Tile embeddings of two runs, and the regions that label both."""
    folders = []
    for seed in range(2):
        root = tmp_path_factory.mktemp("data")
        folder, labels = two_regions(root, seed=seed)
        folders.append(folder.rename(root / f"cohort{seed}"))
    return folders, labels


def settings(labels: Path, **changes: Any) -> ProbeGridConfig:
    given = {
        "labels": labels,
        "device": "cpu",
        "probe": ("knn", "fewshot"),
        "threads": 1,
    }
    given["allow_leakage"] = True  # the tiles are of one slide
    return replace_flat(ProbeGridConfig(), {**given, **changes})


def table(out: Path) -> list[dict[str, str]]:
    with (out / "probes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def reports(out: Path) -> dict[str, bytes]:
    """Every file of every job, by name."""
    found = {}
    for job in (path.parent for path in out.rglob(JOB_NAME)):
        found |= {f"{job.name}/{p.name}": p.read_bytes() for p in job.iterdir()}
    return found


def test_every_combination_is_a_job_and_equal_names_are_kept_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "x").mkdir()
    paths = [tmp_path / "a.csv", tmp_path / "x" / "a.csv"]
    chosen: dict[str, Any] = {"probe": ("linear", "knn"), "encoders": ("uni", "hf:a/b")}
    jobs = probe_jobs(paths, settings(tmp_path, **chosen, seeds=("3", "4")))
    assert len({job.name for job in jobs}) == len(jobs) == 2 * 2 * 2 * 2
    assert jobs[0].name.startswith("a-uni-seed3-linear-")
    assert jobs[2].config.compute.seed == 4
    assert jobs[4].config.data.encoder == "hf:a/b"
    assert "a-hf_a_b-seed3-linear" in jobs[4].name
    (plain,) = probe_jobs(
        paths[:1], replace_flat(ProbeGridConfig(), {"probe": ("knn",)})
    )
    assert (plain.name, plain.config) == ("a-knn", ProbeConfig())
    unknown = ProbeGridConfig(grid=GridSection(probe=("liner",)))
    with pytest.raises(
        ConfigError,
        match="probe must be a known name, got 'liner'; did you mean 'linear'",
    ):
        probe_jobs(paths, unknown)
    with pytest.raises(ConfigError, match="seeds must be whole numbers, got 'x'"):
        run_probes(paths, out=tmp_path, config=settings(tmp_path, seeds=("x",)))


def test_a_probe_with_other_settings_is_neither_listed_nor_taken(
    tmp_path: Path,
) -> None:
    assert grid_probes() == tuple(name for name in PROBES.names() if name != "segment")
    with pytest.raises(
        ConfigError, match=r"grid.probe must be a known name, got 'segment'"
    ):
        settings(tmp_path, probe=("segment",))
    with pytest.raises(
        ConfigError, match=r"must be one with a `ProbeConfig`, got \['segment'\]"
    ):
        probe_jobs([tmp_path], ProbeGridConfig(grid=GridSection(probe=("segment",))))


def test_scores_are_those_of_the_probe_alone_and_what_is_done_is_not_done_again(
    data: tuple[list[Path], Path], tmp_path: Path
) -> None:
    folders, labels = data
    rows = run_probes(folders, out=tmp_path / "grid", config=settings(labels))
    assert [(Path(r.data).name, r.probe, r.status) for r in rows] == [
        *(("cohort0", "knn", "done"), ("cohort0", "fewshot", "done")),
        *(("cohort1", "knn", "done"), ("cohort1", "fewshot", "done")),
    ]
    alone = [
        "probe",
        "knn",
        str(folders[1]),
        "--labels",
        str(labels),
        "--out",
        str(tmp_path / "a"),
    ]
    alone.append("--allow-leakage")
    assert (
        CliRunner().invoke(build_app(["probe"]), [*alone, "--device", "cpu"]).exit_code
        == 0
    )
    assert (
        rows[2].score == json.loads((tmp_path / "a" / "knn.json").read_text())["score"]
    )
    assert [float(row["score"]) for row in table(tmp_path / "grid")] == [
        r.score for r in rows
    ]
    before = reports(tmp_path / "grid")
    again = run_probes(folders, out=tmp_path / "grid", config=settings(labels))
    assert {r.status for r in again} == {"skipped"}
    assert [r.score for r in again] == [r.score for r in rows]
    assert reports(tmp_path / "grid") == before
    other = run_probes(
        folders[:1], out=tmp_path / "grid", config=settings(labels, seed=5)
    )
    assert {r.status for r in other} == {"done"}  # other settings


def test_a_bad_job_is_a_row_with_its_traceback_and_the_others_are_unharmed(
    data: tuple[list[Path], Path], tmp_path: Path
) -> None:
    folders, labels = data
    bad = tmp_path / "empty"
    bad.mkdir()
    grid = ["probe", "grid", str(bad), str(folders[0]), "--labels", str(labels)]
    grid.append("--allow-leakage")
    flags = ["--probe", "knn", "--device", "cpu", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(build_app(["probe"]), [*grid, *flags])
    assert done.exit_code == 3, done.output
    assert "empty-knn: failed, knn: " in done.output
    assert "cohort0-knn: done, knn: macro_f1 " in done.output
    assert (
        "DatasetError" in (tmp_path / "out" / "empty-knn" / TRACEBACK_NAME).read_text()
    )
    assert [row["status"] for row in table(tmp_path / "out")] == ["failed", "done"]
    shutil.copytree(
        folders[1], bad, dirs_exist_ok=True
    )  # repaired: only that one is done
    done = CliRunner().invoke(build_app(["probe"]), [*grid, *flags])
    assert done.exit_code == 0, done.output
    assert [row["status"] for row in table(tmp_path / "out")] == ["done", "skipped"]
    assert not (tmp_path / "out" / "empty-knn" / TRACEBACK_NAME).exists()


@pytest.mark.check
def test_dask_workers_write_the_same_bytes_as_inline(
    data: tuple[list[Path], Path], tmp_path: Path
) -> None:
    pytest.importorskip("distributed", reason="dask is not installed")
    folders, labels = data
    run_probes(folders, out=tmp_path / "inline", config=settings(labels))
    config = settings(labels, executor="dask", workers=2)
    rows = run_probes(folders, out=tmp_path / "dask", config=config)
    assert {r.status for r in rows} == {"done"}
    assert reports(tmp_path / "dask") == reports(tmp_path / "inline") != {}
    assert table(tmp_path / "dask") == table(tmp_path / "inline")


@pytest.mark.check
@needs_slurm
def test_slurm_jobs_write_the_same_bytes_as_inline_and_only_what_is_missing_is_submitted(
    data: tuple[list[Path], Path], tmp_path: Path, on_slurm: dict[str, str]
) -> None:
    folders, labels = data
    config = settings(labels, probe=("knn",))
    flags = {
        "executor": "slurm",
        "job_cpus": 1,
        "job_memory": "1GiB",
        "walltime": "00:10:00",
    }
    on_cluster = replace_flat(config, flags)
    run_probes(folders, out=tmp_path / "inline", config=config)
    messages: list[str] = []

    def submit(paths: list[Path]) -> list[ProbeRow]:
        return run_probes(
            paths, out=tmp_path / "slurm", config=on_cluster, on_message=messages.append
        )

    bad = tmp_path / "bad"
    bad.mkdir()
    rows = submit([folders[0], bad])
    assert [r.status for r in rows] == ["done", "failed"]
    assert "data must contain tile embeddings" in rows[1].error
    rows = submit(folders)
    assert [r.status for r in rows] == ["skipped", "done"]
    first, second = (load_array(f, TASKS) for f in array_folders(tmp_path / "slurm"))
    assert (len(first.chunks), len(second.chunks)) == (
        2,
        1,
    )  # the second time what is missing
    where = f"logs in {second.folder}/logs"
    assert messages[-1] == f"slurm job {second.job_id}: 1 array tasks, {where}"
    assert reports(tmp_path / "slurm") == reports(tmp_path / "inline") != {}
