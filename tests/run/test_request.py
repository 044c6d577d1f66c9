"""What an array task asks for: predicted, given, or a default that says why."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thinsection.errors import ConfigError
from thinsection.jobs.backend import make_chunks
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.request import fit_to_nodes, fitting_nodes
from thinsection.run import job as module
from thinsection.run.calibration import (
    Calibration,
    EncoderSize,
    is_stored,
    store_calibration,
    stored_calibration,
)
from thinsection.run.cost import GridSize, Planner, SlideSize
from thinsection.run.job import MAX_OPENED, run_request
from thinsection.run.plan import planned_gpu
from thinsection.slide.cohort import SlideEntry, load_cohort
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import GIB, MIB
from thinsection.usage.analysis import Request

MACHINE = Calibration(
    process_bytes=300 * MIB, start_s=5.0, decode_px_per_s=1e8, slide_s=0.5
)
ENCODER = EncoderSize(
    weights_bytes=50 * MIB, batch_bytes=400 * MIB, dim=1280, flops_per_tile=8e9
)


def settings(**changes: Any) -> RunConfig:
    return resolve(RunConfig(), changes)


def entries(number: int, folder: Path) -> list[SlideEntry]:
    found = []
    for index in range(number):
        path = folder / f"s{index}.tiff"
        path.write_bytes(b"x" * (index + 1))
        found.append(SlideEntry(slide_id=path.stem, slide_path=str(path)))
    return found


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[SlideEntry]:
    """Slides with a thousand tiles more each, on a machine of known rates."""
    opened: list[SlideEntry] = []

    def size(entry: SlideEntry, spec: RunConfig) -> SlideSize:
        opened.append(entry)
        num_tiles = 1000 * (1 + int(entry.slide_id[1:]))
        return SlideSize(
            slide_id=entry.slide_id,
            grids=(GridSize(num_tiles=num_tiles, read_px=65536, scratch_bytes=196608),),
            mask_px=10_000,
            thumbnail_px=10**6,
        )

    def plan(spec: RunConfig) -> Planner:
        gpu = planned_gpu(spec)
        return Planner(
            spec=spec, gpu=gpu, encoder=ENCODER, machine=MACHINE, tiles_per_s=25
        )

    monkeypatch.setattr(module, "slide_size", size)
    monkeypatch.setattr(module, "planner", plan)
    return opened


def test_every_task_can_take_the_largest_slides_and_says_by_which_margin(
    tmp_path: Path, known: list[SlideEntry]
) -> None:
    chunks = make_chunks(entries(8, tmp_path), settings(chunk_slides=3).executor)
    found = run_request(chunks, settings(chunk_slides=3))
    tiles = 8000 + 7000 + 6000  # three slides a task: the three largest
    seconds = 5 + (3 * 0.51 + tiles * 65536 / 1e8 + tiles / 25) / 4
    assert found.walltime_s == math.ceil(seconds * 1.5 / 60) * 60 == 360
    assert found.cpus == 4
    assert found.gpus == 0
    assert found.memory_bytes % (256 * MIB) == 0
    assert 1 * GIB < found.memory_bytes < 3 * GIB
    assert found.warning == ""
    cpus, memory, time = found.origins
    assert cpus == "4 CPUs: default"
    assert memory.endswith("+20%")
    assert f"predicted {seconds:.0f} s" in time
    assert "3 slides of the size of the largest (8 opened), +50%" in time


def test_a_flag_always_wins_and_the_others_stay_predicted(
    tmp_path: Path, known: list[SlideEntry]
) -> None:
    chunks = [tuple(entries(2, tmp_path))]
    plain = run_request(chunks, settings())
    found = run_request(chunks, settings(job_memory="7GiB", job_cpus=2))
    assert found.memory_bytes == 7 * GIB
    assert found.cpus == 2
    assert found.walltime_s >= plain.walltime_s
    assert found.origins[:2] == ("2 CPUs: --job-cpus", "7.0 GiB: --job-memory")


def test_of_lists_the_first_is_planned_and_asked_for(
    tmp_path: Path, known: list[SlideEntry]
) -> None:
    chunks = [tuple(entries(2, tmp_path))]
    listed = run_request(
        chunks, settings(gpu="a40,h100", job_memory="3GiB,9GiB", gres="gpu:2")
    )
    assert listed == run_request(
        chunks, settings(gpu="a40", job_memory="3GiB", gres="gpu:2")
    )
    assert listed.memory_bytes == 3 * GIB
    assert "on the a40" in listed.origins[0]


def test_where_all_flags_are_given_nothing_is_opened(
    tmp_path: Path, known: list[SlideEntry]
) -> None:
    config = settings(job_memory="1GiB", job_cpus=1, walltime="2-00", device="cuda")
    found = run_request([tuple(entries(2, tmp_path))], config)
    assert not known
    assert found.walltime_s == 2 * 86400
    assert found.gpus == 1


def test_a_gpu_gets_as_many_cpus_as_feed_it(
    tmp_path: Path, known: list[SlideEntry]
) -> None:
    chunks = [tuple(entries(3, tmp_path))]
    fast = run_request(chunks, settings(gpu="h100"))
    assert fast.gpus == 1
    host_s = 3 * 0.51 + 6000 * 65536 / 1e8
    assert host_s / (6000 * 8e9 / (989e12 * 0.35)) > 16
    assert fast.cpus == 16
    assert "on the h100" in fast.origins[0]
    slow = run_request(chunks, settings(device="cuda"))
    assert slow.cpus == math.ceil(host_s / (6000 * 8e9 / (65e12 * 0.35))) + 1
    assert 2 < slow.cpus < 16
    assert "on the t4" in slow.origins[2]


def test_of_many_slides_a_few_are_opened_and_the_largest_among_them(
    tmp_path: Path, known: list[SlideEntry]
) -> None:
    many = entries(MAX_OPENED * 3, tmp_path)
    run_request([tuple(many[:16])] + [(e,) for e in many[16:]], settings())
    assert len(known) == len({e.slide_id for e in known}) == MAX_OPENED
    assert {"s0", f"s{len(many) - 1}"} <= {e.slide_id for e in known}


def test_slides_by_url_or_broken_ones_fall_back_to_defaults_and_say_why(
    tmp_path: Path,
) -> None:
    url = SlideEntry(slide_id="a", slide_path="s3://bucket/a.svs")
    found = run_request([(url,)], settings(walltime="01:00:00"))
    assert found.memory_bytes == 8 * GIB
    assert found.walltime_s == 3600
    assert "the job requests the defaults: no slide is a local file" in found.warning
    assert found.lines[0].startswith("warning: no prediction")
    (tmp_path / "s0.tiff").write_bytes(b"no slide")
    broken = run_request([tuple(entries(1, tmp_path))], settings())
    assert broken.cpus == 4
    assert "no slide can be opened, got no reader opens 's0.tiff'" in broken.warning


def test_an_unknown_card_is_refused_not_defaulted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpu must be a known one, got 'a4000'"):
        run_request([tuple(entries(1, tmp_path))], settings(gpu="a4000"))


def test_plan_and_script_print_the_same_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from thinsection.cli.app import build_app

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store_calibration(MACHINE)
    slides = tmp_path / "slides"
    slides.mkdir()
    for index in range(2):
        write_he_slide(slides / f"s{index}.tiff", (1500, 1200), seed=index)
    flags = ["--batch-size", "8", "--chunk-slides", "2", "--gres", "gpu:v100:1"]
    printed = []
    for command in (
        ["plan", "--slurm"],
        ["slurm", "script", "--out", str(tmp_path / "out")],
    ):
        build_app(command)([*command, str(slides), *flags], standalone_mode=False)
        printed.append(capsys.readouterr())
    names = ("--cpus-per-task", "--mem", "--time", "--gres")
    planned, scripted = (
        [
            line
            for line in out.out.splitlines()
            if line.startswith("#SBATCH ")
            and line.removeprefix("#SBATCH ").startswith(names)
        ]
        for out in printed
    )
    assert len(planned) == 4
    assert planned == scripted
    assert "#SBATCH --gres=gpu:v100:1" in planned
    origins = [line for line in printed[1].err.splitlines() if ": " in line][:4]
    assert len(load_cohort([slides])) == 2
    for line in origins:
        assert f"# {line}" in printed[1].out  # in the script, where it stays
        assert f"# {line}" in printed[0].out


SINFO_TEXT = """\
cpu*|40|alloc|64|256000|2-00:00:00|(null)
cpu*|3|idle|64|256000|2-00:00:00|(null)
cpu*|1|down*|64|256000|2-00:00:00|(null)
short|5|idle|64|256000|30:00|(null)
gpu|6|mix|48+|512000+|infinite|gpu:a40:4(S:0-1),nvme:1
gpu|2|idle|48|512000|infinite|gpu:a40:4(S:0-1)
gpu|1|drain|48|512000|infinite|gpu:a40:4
gpu|2|idle|48|512000|infinite|gpu:t4:2
old|4|idle|8|64000|7-00:00:00|gpu:1
"""


def test_partitions_and_gpus_that_a_job_fits_are_told_with_what_is_free() -> None:
    of_cpus = Request(cpus=16, memory_bytes=100 * GIB, gpus=0, walltime_s=3600)
    assert fitting_nodes(SINFO_TEXT, of_cpus) == [
        "cpu*: 43 nodes are large enough, 3 are idle now, 0 are partly free",
        "gpu: 10 nodes are large enough, 4 are idle now, 6 are partly free",
    ]
    of_gpu = Request(cpus=8, memory_bytes=32 * GIB, gpus=1, walltime_s=3600)
    assert fitting_nodes(SINFO_TEXT, of_gpu, suits=lambda name: name != "t4") == [
        "gpu gpu:a40: 8 nodes are large enough, 2 are idle now, 6 are partly free",
        "old gpu: 4 nodes are large enough, 4 are idle now, 0 are partly free",
    ]
    assert fitting_nodes(SINFO_TEXT, replace(of_gpu, gpus=8)) == []


def test_a_plan_says_what_it_measures_and_only_where_it_does(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored_calibration() is None
    store_calibration(MACHINE)
    assert stored_calibration() is not None
    assert not is_stored("encoders", "other|fp32|256")
    store_calibration(replace(MACHINE, encoders={"one|fp32|256": 9.0}))
    assert is_stored("encoders", "one|fp32|256")


def test_a_few_slides_ask_for_less_time_than_the_whole_cohort(
    tmp_path: Path, known: list[SlideEntry]
) -> None:
    cohort = entries(200, tmp_path)
    config = settings().executor
    whole = run_request(make_chunks(cohort, config), settings())
    few = run_request(make_chunks(cohort[:3], config), settings())
    assert few.walltime_s < whole.walltime_s / 10
    assert few.memory_bytes <= whole.memory_bytes


def test_without_a_prediction_a_request_follows_from_what_earlier_jobs_used(
    tmp_path: Path,
) -> None:
    """The parts of the numbers are multiplied by hand."""
    urls = [
        SlideEntry(slide_id=f"s{i}", slide_path=f"s3://bucket/s{i}.svs")
        for i in range(5)
    ]
    measured = module.Measured(peak_bytes=3 * GIB, slide_s=61.0, num_slides=20)
    found = run_request([tuple(urls[:3]), tuple(urls[3:])], settings(), measured)
    assert found.warning == ""
    assert found.walltime_s == 60 * math.ceil(3 * 61 * 1.5 / 60) == 300
    assert found.memory_bytes == 15 * 256 * MIB  # 3.6 GiB, rounded up
    cpus, memory, time = found.origins
    assert cpus == "4 CPUs: default"
    assert "earlier jobs used 3.0 GiB, +20%" in memory
    assert "183 s for 3 slides that take as long as the slowest of 20 slides" in time


def test_a_task_measures_earlier_invocations_with_the_same_settings(
    tmp_path: Path,
) -> None:
    from thinsection.run.run import make_task, run
    from thinsection.run.task import ended_slides

    for index in range(2):
        write_he_slide(tmp_path / f"s{index}.svs", (900, 700), seed=index)
    out = tmp_path / "out"
    config = RunConfig()
    first = run([tmp_path / "s0.svs"], out=out, until="tiles")
    spec = resolve(config, {"until": "tiles", "executor": "slurm"})
    task = make_task(out, spec)
    assert task.kept == (first.record,)
    url = SlideEntry(slide_id="s1", slide_path="s3://bucket/s1.svs")
    found = task.request([(url,)], spec.executor)
    (result,) = ended_slides(first.record).values()
    assert result.seconds > 0
    assert found.warning == ""
    assert found.walltime_s == 300  # the least
    assert "the slowest of 1 slide before" in found.origins[2]
    other = make_task(out, resolve(config, {"until": "tiles", "tile_px": 128}))
    assert other.request([(url,)], spec.executor).warning.startswith("no prediction")


def fitted(
    request: Request, listed: str = SINFO_TEXT, **settings: object
) -> tuple[Request, list[str]]:
    """The request as nodes allow it, and the lines that say so."""
    job = replace(request, origins=("cpus", "memory", "time"))
    found = fit_to_nodes(job, listed, ExecutorConfig(**settings))  # type: ignore[arg-type]
    return found, list(found.origins)


def test_a_job_asks_for_what_some_node_has() -> None:
    small = (
        "debug*|1|idle|2|3900|1:00:00|(null)\nbig|9|idle|64|256000|infinite|(null)\n"
    )
    asked = Request(cpus=4, memory_bytes=8 * GIB, gpus=0, walltime_s=2 * 3600)
    request, lines = fitted(asked, small)
    assert (request.cpus, request.walltime_s) == (2, 3600)
    assert request.memory_bytes == 3900 * 1024**2
    assert lines[0] == (
        "the largest node of partition debug has 2 CPUs; without this limit cpus"
    )
    assert "the limit of partition debug is 01:00:00" in lines[2]
    # another partition, no answer of Slurm, and numbers of the user
    assert fitted(asked, small, partition="big")[0] == asked
    assert fitted(asked, "")[0] == asked
    assert fitted(asked, small, partition="unknown")[0] == asked
    request, lines = fitted(asked, small, job_cpus=4)
    assert request.cpus == 4
    assert lines[-1] == (
        "warning: cpus is too much: the largest node of partition debug has 2 CPUs"
    )


def test_of_several_kinds_of_nodes_the_one_that_fits_best_counts() -> None:
    kinds = "a*|1|idle|2|256000|infinite|(null)\na*|1|idle|32|16000|infinite|gpu:t4:1\n"
    asked = Request(cpus=8, memory_bytes=8 * GIB, gpus=0, walltime_s=60)
    assert fitted(asked, kinds)[0] == asked
    # a node that is down is no node
    down = kinds.replace("|idle|32", "|down*|32")
    assert fitted(asked, down)[0].cpus == 2
    assert fitted(replace(asked, gpus=1), kinds)[0] == replace(asked, gpus=1)
