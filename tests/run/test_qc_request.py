"""What quality control asks Slurm for: bounds that hold, flags that win, and their origins."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from thinsection.jobs.executor import ExecutorConfig
from thinsection.run.cost import TRAINING_S, QcSize
from thinsection.run.job import run_request
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import QcConfig, RunConfig
from thinsection.stages.spec import resolve
from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import GIB, MIB
from thinsection.usage.analysis import Request

SIZE = (3000, 2400)


def asked(chunks: list[list[SlideEntry]], **flags: str) -> Request:
    config = RunConfig(
        executor=ExecutorConfig(**flags), qc=QcConfig(qc="histoqc-default")
    )
    return run_request(chunks, resolve(config, {"until": "qc"}))


@pytest.fixture
def entry(tmp_path: Path) -> SlideEntry:
    write_he_slide(tmp_path / "a.svs", SIZE, mpp=0.5)
    return SlideEntry(slide_id="a", slide_path=str(tmp_path / "a.svs"))


def test_array_tasks_ask_for_what_the_largest_slide_may_take(
    entry: SlideEntry, tmp_path: Path
) -> None:
    bad = SlideEntry(slide_id="bad", slide_path=str(tmp_path / "bad.svs"))
    Path(bad.slide_path).write_bytes(b"no slide")
    found = asked([[entry, bad]])
    bound = QcSize(num_px_l0=math.prod(SIZE), slide_mpp=0.5).peak_bytes
    assert found.cpus == 1
    assert bound * 1.2 <= found.memory_bytes < bound * 1.2 + 256 * MIB
    assert found.walltime_s == 300  # the least
    many = asked([[entry] * 500])
    assert many.walltime_s > 1.5 * (TRAINING_S + 500)
    assert any("the largest of 1 opened slide, +20%" in line for line in found.origins)


def test_a_slide_given_as_finer_is_larger_and_so_is_a_finer_work_image(
    entry: SlideEntry,
) -> None:
    huge = replace(entry, slide_mpp=(50.0, 50.0))
    plain, more = (asked([[e]]) for e in (entry, huge))
    assert more.memory_bytes > 10 * plain.memory_bytes
    two, four = (
        QcSize(num_px_l0=10**9, slide_mpp=0.25, work_mpp=mpp) for mpp in (2.0, 4.0)
    )
    assert two.held_bytes == pytest.approx(4 * four.held_bytes, rel=1e-6)


def test_flags_win_and_without_a_slide_that_opens_defaults_are_asked_for(
    entry: SlideEntry, tmp_path: Path
) -> None:
    found = asked([[entry]], job_memory="3GiB", walltime="02:00:00")
    assert (found.memory_bytes, found.walltime_s) == (3 * GIB, 7200)
    gone = SlideEntry(slide_id="gone", slide_path=str(tmp_path / "gone.svs"))
    lost = asked([[gone]])
    assert lost.memory_bytes == 8 * GIB
    assert "no slide is a local file" in lost.warning


@pytest.mark.check
@pytest.mark.parametrize("preset", ["histoqc-default", "auto"])
def test_the_bound_of_memory_holds_where_models_have_to_be_trained(
    entry: SlideEntry, tmp_path: Path, preset: str
) -> None:
    measured = run_and_measure(
        "benchmarks.bench_qc",
        "qc_once",
        slide_path=entry.slide_path,
        cache_dir=str(tmp_path / "cache"),
        preset=preset,
    )
    size = QcSize(num_px_l0=math.prod(SIZE), slide_mpp=0.5, maps=preset == "auto")
    assert measured.peak_bytes <= size.peak_bytes
