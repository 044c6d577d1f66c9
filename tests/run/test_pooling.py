"""Aggregation by every executor: the same bytes, bad files alone, deaths recorded, resume."""

import json
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.run.make import write_features
from tests.support.faults import KilledPoolingTask
from tests.support.slurm_node import why_not
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.cli.slurm import TASKS
from thinsection.config import as_mapping, from_mapping, replace_flat
from thinsection.errors import ConfigError, StoreError, UnknownEncoderError
from thinsection.jobs.execute import execute
from thinsection.jobs.slurm_array import array_folders, load_array
from thinsection.run.pooling import (
    FeaturesFile,
    PoolingTask,
    aggregate_folder,
    find_features,
    loaded_encoder,
)
from thinsection.stages.config import AggregateRunConfig, PoolingConfig
from thinsection.store.outcome import SlideResult
from thinsection.store.tiles_h5 import read_slide_embedding

REASON = why_not()
needs_slurm = pytest.mark.skipif(REASON is not None, reason=f"no Slurm here: {REASON}")
DASK = {"executor": "dask", "workers": 2, "threads": 1, "chunk_slides": 2}
SLURM = {"executor": "slurm", "chunk_slides": 2, "job_cpus": 1, "job_memory": "1GiB"}


@pytest.fixture
def features(tmp_path: Path) -> Path:
    """Feature files of five slides as TRIDENT writes them, of different length; 'd' is broken."""
    folder = tmp_path / "features"
    folder.mkdir()
    for index, name in enumerate("abce"):
        write_features(folder / f"{name}.h5", num_tiles=11 + 7 * index, seed=index)
    (folder / "d.h5").write_bytes(b"no HDF5")
    return folder


def settings(**changes: object) -> AggregateRunConfig:
    return replace_flat(AggregateRunConfig(), {"slide_encoder": "max", **changes})


def files(out: Path) -> dict[str, bytes]:
    (folder,) = out.glob("slide_features_*")
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def states(results: list[SlideResult]) -> Mapping[str, str]:
    return {result.slide_id: result.status for result in results}


@pytest.mark.check
def test_dask_workers_write_the_same_bytes_as_inline_and_a_bad_file_stays_alone(
    features: Path, tmp_path: Path
) -> None:
    pytest.importorskip("distributed", reason="dask is not installed")
    inline = aggregate_folder(features, out=tmp_path / "inline", config=settings())
    told: list[SlideResult] = []
    dask = aggregate_folder(
        features, out=tmp_path / "dask", config=settings(**DASK), on_result=told.append
    )
    assert states(dask) == {**dict.fromkeys("abce", "done"), "d": "failed"}
    assert dask == inline  # paths, counts, errors, in the same order
    assert sorted(result.slide_id for result in told) == list("abcde")
    assert files(tmp_path / "dask") == files(tmp_path / "inline")
    assert sorted(files(tmp_path / "dask")) == ["a.h5", "b.h5", "c.h5", "e.h5"]


def test_several_workers_without_an_executor_are_a_pool_that_writes_the_same_bytes(
    features: Path, tmp_path: Path
) -> None:
    inline = aggregate_folder(features, out=tmp_path / "inline", config=settings())
    pool = aggregate_folder(
        features, out=tmp_path / "pool", config=settings(workers=2, threads=1)
    )
    assert states(pool) == states(inline)
    assert files(tmp_path / "pool") == files(tmp_path / "inline")


@pytest.mark.check
def test_what_is_done_is_skipped_by_another_executor_and_a_repaired_file_is_done(
    features: Path, tmp_path: Path
) -> None:
    pytest.importorskip("distributed", reason="dask is not installed")
    aggregate_folder(features, config=settings())
    before = files(features)
    write_features(features / "d.h5", num_tiles=5, seed=9)
    results = aggregate_folder(features, config=settings(**DASK))
    assert states(results) == {**dict.fromkeys("abce", "skipped"), "d": "done"}
    assert {name: files(features)[name] for name in before} == before


@pytest.mark.check
def test_a_slide_whose_worker_dies_is_recorded_and_the_others_are_done(
    features: Path, tmp_path: Path
) -> None:
    pytest.importorskip("distributed", reason="dask is not installed")
    sources = find_features(features, out=tmp_path / "out")
    task = KilledPoolingTask(pooling=PoolingConfig(), killed_always=frozenset("b"))
    results: list[SlideResult] = []
    execute(
        sources,
        task,
        replace_flat(settings(), DASK).executor,
        folder=tmp_path / "out",
        on_report=lambda report: results.extend(report.results),
        on_message=lambda text: None,
    )
    found = {result.slide_id: result for result in results}
    assert len(results) == 5
    assert [found[name].status in ("done", "skipped") for name in "ace"] == [True] * 3
    assert (found["b"].status, found["b"].stage) == ("failed", "worker")
    assert "twice, the second time with this entry alone" in found["b"].error
    assert sorted(files(tmp_path / "out")) == ["a.h5", "c.h5", "e.h5"]


@pytest.mark.check
@needs_slurm
def test_array_tasks_write_the_same_bytes_as_inline(
    features: Path, tmp_path: Path, on_slurm: dict[str, str]
) -> None:
    inline = aggregate_folder(features, out=tmp_path / "inline", config=settings())
    messages: list[str] = []
    slurm = aggregate_folder(
        features,
        out=tmp_path / "slurm",
        config=settings(**SLURM),
        on_message=messages.append,
    )
    assert states(slurm) == states(inline)
    assert files(tmp_path / "slurm") == files(tmp_path / "inline")
    assert "1 CPUs: --job-cpus" in messages
    (folder,) = array_folders(tmp_path / "slurm")
    array = load_array(folder, TASKS)
    assert list(map(len, array.chunks)) == [2, 2, 1]
    assert (
        messages[-1]
        == f"slurm job {array.job_id}: 3 array tasks, logs in {folder}/logs"
    )
    assert '"slide_id": "a"' in "".join(
        p.read_text() for p in (folder / "logs").iterdir()
    )


@pytest.mark.check
def test_the_command_takes_an_executor_and_exits_with_3_where_a_file_is_bad(
    features: Path, tmp_path: Path
) -> None:
    pytest.importorskip("distributed", reason="dask is not installed")
    flags = ["--out", str(tmp_path / "out"), "--executor", "dask", "--workers", "1"]
    command = ["aggregate", str(features), "--slide-encoder", "max", *flags]
    done = CliRunner().invoke(build_app(["aggregate"]), command)
    assert done.exit_code == 3, done.output
    assert "d: failed (aggregate): " in done.output
    assert "4 of 5 slides have an embedding of max" in done.output
    pooled = read_slide_embedding(
        tmp_path / "out" / "slide_features_max-features" / "a.h5"
    )
    with h5py.File(features / "a.h5") as file:
        np.testing.assert_array_equal(
            pooled.slide_embedding, file["features"][...].max(axis=0)
        )


def test_the_slide_encoder_is_loaded_once_for_all_files_of_a_process(
    features: Path,
) -> None:
    loaded_encoder.cache_clear()
    aggregate_folder(features, config=settings())
    assert loaded_encoder.cache_info().misses == 1
    assert loaded_encoder.cache_info().hits == 4


def test_a_task_comes_back_from_its_document(features: Path) -> None:
    task = PoolingTask(
        pooling=PoolingConfig(slide_encoder="max", tile_px_l0=512), threads=2
    )
    sources = find_features(features)
    kept = [json.dumps(as_mapping(value)) for value in (task, *sources)]
    assert from_mapping(PoolingTask, json.loads(kept[0])) == task
    assert [
        from_mapping(FeaturesFile, json.loads(text)) for text in kept[1:]
    ] == sources


def test_wrong_settings_are_refused_before_any_worker_starts(
    features: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UnknownEncoderError,
        match=r"slide encoder must be a known name, got 'maxx'; did .*'max'",
    ):
        aggregate_folder(features, config=settings(slide_encoder="maxx", **SLURM))
    with pytest.raises(ConfigError, match=r"pooling\.aggregate_memory must be a size"):
        settings(aggregate_memory="much")
    with pytest.raises(StoreError, match="folder must exist"):
        aggregate_folder(tmp_path / "none")
