"""The cost models: monotone, additive, calibrated once, honest about what does not fit."""

import json
import re
import statistics
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import simplejpeg
import torch
from tests.support.known_machine import MACHINE, know_machine

from thinsection.cells.config import CellsConfig
from thinsection.encode import NetworkTileEncoder, load_encoder
from thinsection.encode.engine_choice import engine_version
from thinsection.encode.preprocessing import preprocess
from thinsection.encode.sizes import NetworkSize, declared_size
from thinsection.errors import ConfigError
from thinsection.extras import is_installed
from thinsection.jobs.executor import ExecutorConfig
from thinsection.qc.tissue import tissue_mask
from thinsection.run import calibration, cost, measuring, task
from thinsection.run.calibration import (
    Calibration,
    EncoderSize,
    calibrate,
    is_quick,
    is_stored,
    measurement,
    refute_rate,
    store_calibration,
)
from thinsection.run.cost import (
    ASSUMED_EFFICIENCY,
    GPUS,
    MARGIN,
    WEIGHTS_BYTES_PER_S,
    Gpu,
    GridSize,
    MemoryPlan,
    Planner,
    SlideSize,
    TimePlan,
    encoders_together,
    find_gpu,
)
from thinsection.run.measuring import (
    measure_cpu_peak,
    measure_decoding,
    measure_encoder,
    measure_maps,
    measure_start,
    measure_transformer,
    network_size,
)
from thinsection.run.plan import (
    RunPlan,
    fast_advice,
    local_workers,
    plan,
    planned_gpu,
    slide_size,
)
from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.formats.segments import SegmentCache
from thinsection.slide.formats.tiff_decoder import MAX_READ_BYTES
from thinsection.slide.resize import read_tiles, resample
from thinsection.stages.config import (
    EncodeConfig,
    QcConfig,
    RunConfig,
)
from thinsection.stages.spec import resolve
from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import TilesConfig, tile_grid
from thinsection.tiles.budget import MAX_SLOTS, StreamConfig
from thinsection.types import MIB

ENCODER = EncoderSize(
    weights_bytes=50 * MIB, batch_bytes=400 * MIB, dim=1280, flops_per_tile=8e9
)


def slide(num_tiles: int) -> SlideSize:
    return SlideSize(
        slide_id="a",
        grids=(GridSize(num_tiles=num_tiles, read_px=65536, scratch_bytes=196608),),
        mask_px=10_000,
        thumbnail_px=10**6,
    )


def planner(
    gpu: Gpu | None = None, encoder: EncoderSize = ENCODER, rate: float = 25
) -> Planner:
    stream = StreamConfig(memory="2GiB", decode_threads=2, prefetch_slides=2)
    config = RunConfig(stream=stream, encode=EncodeConfig(batch_size=32))
    spec = resolve(config)
    return Planner(
        spec=spec, gpu=gpu, encoder=encoder, machine=MACHINE, tiles_per_s=rate
    )


def memory(
    num_tiles: int, *, on_gpu: bool = False, encoder: EncoderSize = ENCODER
) -> MemoryPlan:
    by = planner(find_gpu("a40") if on_gpu else None, encoder)
    return by.memory([slide(num_tiles)], cpus=2)


def time(
    num_tiles: int, *, cpus: int, gpu: Gpu | None = None, rate: float = 25
) -> TimePlan:
    return planner(gpu, rate=rate).time([slide(num_tiles)], cpus=cpus)


def test_the_peak_is_the_sum_of_its_parts_and_the_margin() -> None:
    plan = memory(1000)
    assert plan.host_bytes == int(sum(plan.host.values()) * MARGIN)
    assert plan.host["batch buffers"] == MAX_SLOTS * 32 * 256 * 256 * 3
    assert plan.gpu_bytes == 0


def test_several_workers_need_the_peak_of_one_each_and_that_of_the_first_process() -> (
    None
):
    one = memory(1000)
    three = one.of_workers(3)
    whole = 3 * sum(one.host.values()) + cost.PLAIN_PROCESS_BYTES
    assert sum(three.host.values()) == whole
    assert {name: three.host[name] for name in one.host} == one.host
    assert one.of_workers(1) == one


def test_a_plan_counts_the_workers_of_this_node_and_no_more_than_slides() -> None:
    config = ExecutorConfig(workers=3, threads=2)
    assert local_workers(config, 8) == (3, 2)
    assert local_workers(config, 2) == (2, 2)
    assert local_workers(ExecutorConfig(), 8) == (1, 0)
    # jobs of a cluster have a node each
    assert local_workers(ExecutorConfig(executor="slurm", workers=3), 8) == (1, 0)


def test_a_slide_with_few_tiles_needs_few_buffers_and_a_large_one_no_more_than_the_budget() -> (
    None
):
    assert memory(40).host["batch buffers"] == 40 * 256 * 256 * 3
    assert memory(10**6).host["batch buffers"] == memory(1000).host["batch buffers"]


def test_on_a_gpu_weights_and_batch_leave_the_host() -> None:
    plan = memory(1000, on_gpu=True)
    assert "batch" not in plan.host
    assert plan.gpu_bytes > ENCODER.weights_bytes + ENCODER.batch_bytes
    cuda = plan.host["CUDA"]  # which a process on a CPU never loads
    assert cuda > 0 and sum(plan.host.values()) - cuda < sum(memory(1000).host.values())


def test_fp8_needs_the_loaded_weights_until_they_are_rounded() -> None:
    rounded = replace(ENCODER, loading_bytes=100 * MIB)
    plan = memory(1000, on_gpu=True, encoder=rounded)
    # a batch is larger than what the loaded weights need more
    assert plan.gpu["weights"] == 50 * MIB
    assert plan.host["weights while loading"] == 100 * MIB
    small = replace(rounded, batch_bytes=10 * MIB)
    on_card = memory(1000, on_gpu=True, encoder=small).gpu
    assert on_card["weights"] + on_card["batch"] == 100 * MIB
    assert memory(1000, encoder=rounded).host["weights"] == 2 * 100 * MIB
    both = encoders_together([rounded, ENCODER])
    assert (both.weights_bytes, both.loading_bytes) == (100 * MIB, 150 * MIB)


def test_a_plan_in_fp8_has_half_of_the_weights_and_loads_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_he_slide(tmp_path / "a.tiff", (1500, 1200))
    store_calibration(MACHINE)

    def parts(precision: Any) -> MemoryPlan:
        encode = EncodeConfig(
            encoders=("kaiko_vitb16",), device="cuda", precision=precision
        )
        config = RunConfig(encode=encode)
        return plan([tmp_path / "a.tiff"], config=config, gpu="h100").memory

    exact = parts("fp32")
    rounded = parts("fp8")
    stored = exact.gpu["weights"]
    assert rounded.gpu["weights"] == stored // 2
    assert rounded.host["weights while loading"] == stored
    assert rounded.gpu["batch"] == exact.gpu["batch"]
    assert parts("bf16").gpu["weights"] > 2 * rounded.gpu["weights"]


def test_a_measured_peak_takes_the_place_of_process_weights_and_batch_on_a_cpu() -> (
    None
):
    measured = replace(ENCODER, cpu_peak_bytes=700 * MIB)
    counted, plan = memory(1000), memory(1000, encoder=measured)
    assert plan.host["process and encoder"] == 700 * MIB
    assert not {"process", "weights", "batch"} & set(plan.host)
    shared = set(plan.host) - {"process and encoder"}
    assert all(plan.host[name] == counted.host[name] for name in shared)
    assert memory(1000, encoder=measured, on_gpu=True) == memory(1000, on_gpu=True)


def test_the_peak_of_encoding_is_measured_in_a_process_of_its_own_and_grows_with_the_batch() -> (
    None
):
    peaks = [
        measure_cpu_peak(
            "efficientnet_lite0", precision="fp32", batch_size=n, tile_px=256
        )
        for n in (1, 12)
    ]
    assert peaks[0] > 200 * MIB
    assert (
        30 * MIB < peaks[1] - peaks[0] < 150 * MIB
    )  # 12 MiB a tile by the dry pass, 4 at once


def test_a_slow_measurement_is_not_made() -> None:
    assert is_quick(replace(ENCODER, flops_per_tile=1e9), batch_size=32)
    assert not is_quick(replace(ENCODER, flops_per_tile=1e11), batch_size=32)


def test_on_a_cpu_time_adds_up_and_is_shared_by_the_cpus() -> None:
    one = time(1000, cpus=1)
    # the process, the libraries of the encoder, and its weights
    assert one.start_s == pytest.approx(5 + 1.5 + 50 * MIB / WEIGHTS_BYTES_PER_S)
    assert one.encode_s == 40
    assert one.decode_s == pytest.approx(0.65536)
    assert one.prepare_s == pytest.approx(0.51)
    rest_s = 40 + 0.65536 + 0.51
    assert one.wall_s == pytest.approx(one.cpu_s) == pytest.approx(one.start_s + rest_s)
    two = time(1000, cpus=2)
    assert two.wall_s - one.start_s == pytest.approx(rest_s / 2)
    tiles = replace(planner(), encoder=None).time([slide(1000)], cpus=1)
    assert tiles.start_s == 5.0


def test_on_a_gpu_the_slower_of_decoding_and_encoding_sets_the_pace() -> None:
    card = find_gpu("a40")
    plan = time(10**6, cpus=1, gpu=card, rate=1)
    assert plan.encode_s == pytest.approx(8e15 / (149.7e12 * ASSUMED_EFFICIENCY))
    # decoding on one CPU is slower
    assert plan.wall_s == pytest.approx(plan.start_s + 655.36 + 0.51)
    many = time(10**6, cpus=64, gpu=card, rate=1)
    assert many.wall_s == pytest.approx(many.start_s + many.encode_s)


def test_every_gpu_of_the_issue_is_known_and_another_name_is_helped() -> None:
    assert {"a40", "a100-40", "a100-80", "h100", "v100"} <= set(GPUS)
    with pytest.raises(ConfigError, match=r"got 'a100-8'; did you mean 'a100-80'\?"):
        find_gpu("a100-8")


def test_a_machine_is_measured_once_and_an_encoder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[str] = []

    def machine() -> Calibration:
        calls.append("machine")
        return MACHINE

    def rate() -> float:
        calls.append("encoder")
        return 12.5

    path = tmp_path / "thinsection" / "plan.json"
    assert calibrate(machine) == MACHINE
    assert calibrate(machine) == MACHINE
    assert not is_stored("encoders", "lite0")
    assert measurement("encoders", "lite0", rate) == 12.5
    assert measurement("encoders", "lite0", rate) == 12.5
    assert is_stored("encoders", "lite0") and not is_stored("operations", "lite0")
    assert measurement("peaks", "lite0|32", lambda: 5) == 5
    assert measurement("peaks", "lite0|32", lambda: 6) == 5
    assert measurement("encoders", "lite0", rate) == 12.5
    assert calls == ["machine", "encoder"]
    path.write_text("{ torn")
    calibrate(machine)
    assert calls == ["machine", "encoder", "machine"]


def test_a_busy_machine_is_measured_again_once_it_is_quieter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = list[float]()
    load = 3.0

    def machine() -> Calibration:
        calls.append(load)
        return replace(MACHINE, load=load)

    monkeypatch.setattr(calibration, "load_per_cpu", lambda: load)
    calibrate(machine)
    measurement("encoders", "lite0", lambda: 2.0)
    load = 2.0  # as busy as then
    calibrate(machine)
    assert is_stored("encoders", "lite0") and calls == [3.0]
    load = 0.2
    calibrate(machine)
    # the rates of encoders beside the same work are forgotten too
    assert not is_stored("encoders", "lite0") and calls == [3.0, 0.2]
    load = 0.0
    calibrate(machine)
    assert calls == [3.0, 0.2]


def test_a_rate_that_a_whole_run_exceeds_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def refuted(name: str, tiles_per_s: float) -> bool:
        return refute_rate(
            name,
            precision="fp32",
            tile_px=256,
            engine="openvino 1",
            tiles_per_s=tiles_per_s,
        )

    assert not refuted("efficientnet_lite0", 1e9)  # nothing is stored
    key = "efficientnet_lite0|fp32|256|openvino 1"
    rates = {key: 50.0, "other|fp32|256|openvino 1": 1.0}
    operations = {"fp32|openvino 1": 1e12, "bf16|openvino 1": 1e12}
    store_calibration(replace(MACHINE, encoders=rates, operations=operations))
    assert not refuted("efficientnet_lite0", 49.0) and is_stored("encoders", key)
    assert refuted("efficientnet_lite0", 51.0) and not is_stored("encoders", key)
    assert is_stored("encoders", "other|fp32|256|openvino 1")
    size = declared_size("uni2_h", tile_px=256)
    assert size is not None
    assert not refuted("uni2_h", 0.99e12 / size.flops_per_tile)
    assert is_stored("operations", "fp32|openvino 1")
    assert refuted("uni2_h", 1.01e12 / size.flops_per_tile)
    assert not is_stored("operations", "fp32|openvino 1")
    assert is_stored("operations", "bf16|openvino 1")


def test_a_run_refutes_a_rate_that_is_far_too_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_he_slide(tmp_path / "a.tiff", (1000, 800))
    engine = engine_version("torch")
    keys = [
        f"efficientnet_lite0|{precision}|256|{engine}" for precision in ("fp32", "bf16")
    ]
    store_calibration(replace(MACHINE, encoders=dict.fromkeys(keys, 1e-3)))
    summary = run(
        [tmp_path / "a.tiff"],
        out=tmp_path / "out",
        pretrained=False,
        precision="fp32",
        device="cpu",
        overview=False,
    )
    assert summary.counts["done"] == 1
    assert [is_stored("encoders", key) for key in keys] == [False, True]


def test_a_run_ends_well_whatever_the_stored_rates_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "thinsection" / "plan.json"
    path.parent.mkdir()
    path.write_text(json.dumps({calibration.machine_key(): {"no": "field"}}))
    assert calibration.stored_calibration() is None
    calls = list[float]()

    def unwritable(*arguments: object, tiles_per_s: float, **settings: object) -> bool:
        calls.append(tiles_per_s)
        raise PermissionError(path)

    monkeypatch.setattr(task, "refute_rate", unwritable)
    write_he_slide(tmp_path / "a.tiff", (1000, 800))
    summary = run(
        [tmp_path / "a.tiff"],
        out=tmp_path / "out",
        pretrained=False,
        device="cpu",
        overview=False,
    )
    assert summary.counts["done"] == 1 and len(calls) == 1 and calls[0] > 0


@pytest.mark.check  # ten processes
def test_the_start_of_a_run_is_measured_in_whole_runs() -> None:
    start = measure_start()
    assert 0.1 < start.start_s < 20
    assert 0.02 < start.slide_s < 10
    # PyTorch alone takes longer than this
    assert 0.2 < start.libraries_s < 30


def test_decoding_is_measured_in_a_plausible_range() -> None:
    assert 2e7 < measure_decoding() < 3e9
    assert 1e-8 < measure_maps() < 1e-4


def test_a_plan_counts_tiles_names_bad_slides_and_warns_of_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_machine(monkeypatch, tmp_path / "cache")
    write_he_slide(tmp_path / "good.tiff", (1500, 1200))
    (tmp_path / "bad.tiff").write_bytes(b"no slide")
    config = RunConfig(
        executor=ExecutorConfig(job_memory="200MiB"),
        encode=EncodeConfig(batch_size=16, engine="torch"),
    )
    planned = plan([tmp_path / "good.tiff", tmp_path / "bad.tiff"], config=config)
    assert [s.slide_id for s in planned.slides] == ["good"]
    assert 0 < planned.slides[0].num_tiles <= 20
    assert "no reader opens 'bad.tiff'" in planned.unreadable["bad"]
    (warning,) = (w for w in planned.warnings if w.startswith("--job-memory must be"))
    assert "for this run, got 200MiB; raise it" in warning
    large = RunConfig(
        encode=EncodeConfig(batch_size=2048), executor=ExecutorConfig(gpu="t4")
    )
    gpu = plan([tmp_path / "good.tiff"], config=large)
    assert any(
        "a t4 has 16.0 GiB" in w and "use --batch-size" in w for w in gpu.warnings
    )


def advised(*, rate: float, fast: bool, half_size: float, gpu: str = "") -> str:
    """Advice for 1,000 tiles of 6.5 CPU-s; encoding takes 1000 / rate CPU-s."""
    machine = replace(MACHINE, half_size_px_per_s=half_size, decode_px_per_s=1e7)
    by = replace(planner(find_gpu(gpu) if gpu else None, rate=rate), machine=machine)
    size = replace(
        slide(1000),
        grids=(
            GridSize(num_tiles=1000, read_px=65536, scratch_bytes=196608, fast=fast),
        ),
    )
    return " ".join(fast_advice(by, [size], cpus=1))


def test_fast_is_advised_only_where_it_saves_a_tenth_of_the_time() -> None:
    told = advised(rate=1000, fast=True, half_size=3e7)
    assert "decoding takes 7 CPU-s; with --resample fast it takes 2" in told
    # 6.6 s of start, 0.6 to prepare, 1 to encode
    assert "the run 10 s in place of 15 s" in told
    assert advised(rate=1000, fast=False, half_size=3e7) == ""  # levels suffice
    assert advised(rate=1000, fast=True, half_size=0.0) == ""  # not measured
    assert advised(rate=1000, fast=True, half_size=1.1e7) == ""  # hardly faster
    assert advised(rate=20, fast=True, half_size=3e7) == ""  # encoding takes 50 s
    # on a card decoding decides, unless encoding takes longer beside it
    assert advised(rate=1, fast=True, half_size=3e7, gpu="h200") != ""


def test_the_error_of_fast_in_the_advice_is_that_of_the_benchmark() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "bench_reading.json"
    difference = json.loads(path.read_text())["results"]["real"]["fast"]["difference"]
    assert round(difference["mean"], 1) == cost.FAST_GREY_LEVELS
    assert round(difference["psnr_db"]) == cost.FAST_DB


@pytest.mark.parametrize(
    ("tile_mpp", "edge"), [("0.5", 512), ("1", 1024), ("native", 0)]
)
def test_the_scratch_of_a_thread_is_what_reading_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile_mpp: str, edge: int
) -> None:
    path = tmp_path / "a.svs"
    write_he_slide(path, (4000, 3000), mpp=0.25, downsamples=(1,))
    spec = resolve(RunConfig(tiles=TilesConfig(tile_mpp=tile_mpp)))
    entry = SlideEntry(slide_id="a", slide_path=str(path))
    (grid,) = slide_size(entry, spec).grids
    with open_slide(path) as slide:
        plan = spec.tiles.grids[0].plan(slide)
        # a segment was decoded when the slide was opened
        monkeypatch.setattr(slide, "_cache", SegmentCache(0))
        # off the borders of segments, so that tiles need parts of them
        coords_l0 = np.arange(6)[:, None] * np.array([300, 200]) + 37
        out = np.empty((6, 256, 256, 3), np.uint8)
        resample(np.zeros((1, 8, 8, 3), np.uint8), np.empty((1, 4, 4, 3), np.uint8))
        tracemalloc.start()
        try:
            read_tiles(slide, plan, coords_l0, out)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes <= grid.scratch_bytes <= peak_bytes + MAX_READ_BYTES
    tiles_in_a_call = {512: 3, 1024: 1, 0: 0}[edge]
    pixels = tiles_in_a_call * edge**2 + 256**2  # and a segment
    assert grid.scratch_bytes == 3 * pixels + MAX_READ_BYTES


def test_each_decoding_thread_has_its_scratch() -> None:
    grid = GridSize(num_tiles=1000, read_px=65536, scratch_bytes=7 * MIB)
    size = replace(slide(1000), grids=(grid,))

    def scratch(threads: int, num_tiles: int = 1000) -> int:
        spec = replace(planner().spec, stream=StreamConfig(decode_threads=threads))
        few = replace(size, grids=(replace(grid, num_tiles=num_tiles),))
        parts = replace(planner(), spec=spec).memory([few], cpus=1).host
        return parts["decoding buffers"]

    assert scratch(1) == 7 * MIB
    assert scratch(6) == 6 * 7 * MIB
    # 20 tiles are three tasks of at least 8, the last one smaller
    assert scratch(6, num_tiles=20) == 3 * 7 * MIB


def test_a_slide_says_where_fast_would_decode_less(tmp_path: Path) -> None:
    path = tmp_path / "a.svs"
    write_he_slide(path, (1500, 1200), mpp=0.25, downsamples=(1,))

    def is_fast(mpp: str, resample: Literal["exact", "fast"] = "exact") -> bool:
        spec = resolve(RunConfig(tiles=TilesConfig(tile_mpp=mpp, resample=resample)))
        entry = SlideEntry(slide_id="a", slide_path=str(path))
        return slide_size(entry, spec).grids[0].fast

    assert is_fast("0.5")
    assert not is_fast("native")  # nothing is reduced
    assert not is_fast("0.5", "fast")  # it is


def test_half_size_is_decoded_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_DECODE_S", 0.02)
    sizes = set[tuple[int, ...]]()
    decode = simplejpeg.decode_jpeg

    def noted(data: bytes, **least: int) -> np.ndarray:
        pixels = decode(data, **least)
        sizes.add(pixels.shape)
        return pixels

    def rate(least_px: int, size: tuple[int, ...]) -> float:
        sizes.clear()
        measured = measure_decoding(least_px=least_px)
        assert sizes == {size}
        return measured

    monkeypatch.setattr(simplejpeg, "decode_jpeg", noted)
    ratios = [
        rate(128, (128, 128, 3)) / rate(0, (256, 256, 3)) for _ in range(15)
    ]  # in turns, since other work on the machine slows both
    # the bits are read in both; transforms, colours and pixels are a quarter
    assert statistics.median(ratios) > 1.05


def test_a_run_on_cuda_is_planned_for_the_named_card_or_the_slowest() -> None:
    def card(**settings: Any) -> str | None:
        device = settings.pop("device", "auto")
        config = RunConfig(
            encode=EncodeConfig(device=device), executor=ExecutorConfig(**settings)
        )
        found = planned_gpu(resolve(config))
        return found and found.name

    assert card() is None
    assert card(device="cuda:1") == "t4"
    assert card(gres="gpu:1") == "t4"
    assert card(gres="gpu:v100:2") == "v100"
    assert card(gres="gpu:v100:2", gpu="h100") == "h100"
    assert card(gres="nvme:1") is None


def test_quality_control_is_part_of_the_plan(tmp_path: Path) -> None:
    write_he_slide(tmp_path / "a.svs", (3000, 2000), mpp=4.0)
    entry = SlideEntry(slide_id="a", slide_path=str(tmp_path / "a.svs"))
    sizes = {}
    for qc in ("off", "auto", "histoqc-default"):
        config = RunConfig(qc=QcConfig(qc=qc), tiles=TilesConfig(tile_mpp="8"))
        sizes[qc] = slide_size(entry, resolve(config))
    held = {qc: planner().memory([size], cpus=1).host for qc, size in sizes.items()}
    assert "quality control" not in held["off"]
    # its picture has half of the slide's resolution
    assert held["auto"]["quality control"] == 16 * 1500 * 1000
    work_px = 3000 * 2000 * (4.0 / 2.0) ** 2  # pen at 5x
    assert held["histoqc-default"]["quality control"] <= 34 * work_px
    # a slide that waits after quality control has less beside its picture
    beside = held["off"]["prepared slides"] - held["auto"]["prepared slides"]
    assert beside == 6 * 1500 * 1000
    ends = replace(planner(), encoder=None)
    process = ends.memory([sizes["auto"]], cpus=1).host
    assert process["process"] == min(cost.PLAIN_PROCESS_BYTES, MACHINE.process_bytes)
    # a segmenter imports torch
    segmented = replace(sizes["auto"], qc=replace(sizes["auto"].qc, segments=True))
    process = ends.memory([segmented], cpus=1).host
    assert process["process"] == MACHINE.process_bytes > cost.PLAIN_PROCESS_BYTES
    took = [planner().time([size], cpus=1).cpu_s for size in sizes.values()]
    assert took[0] < min(took[1:])
    slow = replace(
        planner(), machine=replace(MACHINE, maps_s_per_px=MACHINE.maps_s_per_px * 3)
    )
    more = [slow.time([size], cpus=1).cpu_s for size in sizes.values()]
    nets = 2 * MACHINE.maps_s_per_px * 3000 * 2000
    assert [b - a for a, b in zip(took, more)] == pytest.approx([0, nets, 0])


def test_the_time_of_quality_control_follows_what_focus_reads() -> None:
    """All of a small slide, a quarter of a large one, four pixels for one of a finer slide."""

    def run_s(num_px: float, mpp: float) -> float:
        size = cost.QcSize(
            num_px_l0=round(num_px), slide_mpp=mpp, work_mpp=8.0, maps=True
        )
        # without what grows with the picture of the other checks
        return size.run_s(0.0) - 2e-7 * num_px * (mpp / 4.0) ** 2

    start = run_s(0, 0.5)
    small, large = run_s(20e6, 0.5) - start, run_s(320e6, 0.5) - start
    assert 0 < small < large < 5 * small
    finer = run_s(4 * 320e6, 0.25) - start
    assert 1.2 * large < finer < 4 * large
    assert run_s(320e6, 2.0) == pytest.approx(start)
    bound = cost.QcSize(
        num_px_l0=320_000_000, slide_mpp=0.5, work_mpp=8.0, maps=True
    ).most_s
    assert run_s(320e6, 0.5) < bound / 2


def test_a_notebook_shows_a_plan_as_bars_of_its_parts() -> None:
    shown = RunPlan(
        slides=(slide(300), slide(1)),
        unreadable={"<b>": "it is empty"},
        memory=MemoryPlan(host={"process": 100 * MIB, "stream": 50 * MIB}),
        time=TimePlan(
            start_s=1.0, prepare_s=2.0, decode_s=30.0, encode_s=60.0, wall_s=93.0
        ),
        gpu=None,
        measured_on="2026-11-29",
        load=2.5,
        warnings=("too little",),
    )
    assert repr(shown).startswith("RunPlan(2 slides, 301 tiles, 93 s, ")
    page = shown._repr_html_()
    widths = [int(width) for width in re.findall(r"width:(\d+)px", page)]
    assert widths == [3, 6, 90, 180, 180, 90]
    assert "&lt;b&gt; does not open" in page and "too little" in page
    assert "measured on 2026-11-29" in page
    assert "The machine was busy then (2.5 processes per CPU)" in page
    assert "busy" not in replace(shown, load=0.5).rates_note


def test_bf16_is_proposed_with_its_gain_and_its_error_on_tiles_of_the_slide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "is_quick", lambda *_, **__: False)
    write_he_slide(tmp_path / "a.tiff", (1500, 1200))
    name = "efficientnet_lite0"
    errors = list[str]()

    def noted(name: str, **arguments: Any) -> float | None:
        errors.append(name)
        return bf16_error(name, **arguments)

    bf16_error = measuring.bf16_error
    monkeypatch.setattr(measuring, "bf16_error", noted)

    def proposed(
        gain: float, *, has_bf16: bool = True, known: dict[str, str], **settings: Any
    ) -> tuple[str, ...]:
        engine = engine_version("torch")
        rates = {f"{name}|fp32|256|{engine}": 50.0}
        rates[f"{name}|bf16|256|{engine}"] = 50.0 * gain
        machine = replace(MACHINE, encoders=rates, has_bf16=has_bf16)
        store_calibration(replace(machine, bf16_errors=known))
        encode = EncodeConfig(engine="torch", batch_size=4, **settings)
        return plan([tmp_path / "a.tiff"], config=RunConfig(encode=encode)).advice

    assert proposed(2.0, has_bf16=False, known={}) == ()
    assert proposed(1.2, known={}) == ()
    assert proposed(2.0, known={}, precision="fp32") == ()
    assert proposed(2.0, known={}, device="cuda") == ()
    assert errors == []
    (proposal,) = proposed(2.0, known={})
    assert errors == [name]
    expected = r"efficientnet_lite0: --precision bf16 encodes 2\.0 times as many .*"
    found = re.match(
        expected
        + r"; the cosine distance of .* is (\S+) at most, on (\d+) tiles of 'a'$",
        proposal,
    )
    assert found
    # the same tiles, read at once, and PyTorch's own autocast
    with open_slide(tmp_path / "a.tiff") as slide:
        tiles = slide.tiles(tile_grid(slide, tissue=tissue_mask(slide)))[:]
    assert int(found[2]) == len(tiles) <= 16
    encoder = load_encoder(name, device="cpu", engine="torch")
    assert isinstance(encoder, NetworkTileEncoder)
    pixels = preprocess(tiles, encoder.spec)
    with torch.no_grad():
        full = encoder.backbone(pixels)[0].double().numpy()
        with torch.autocast("cpu", torch.bfloat16):
            half = encoder.backbone(pixels)[0].double().numpy()
    lengths = np.linalg.norm(full, axis=1) * np.linalg.norm(half, axis=1)
    angle = 1 - ((full * half).sum(1) / lengths).min()
    assert float(found[1]) == pytest.approx(angle, rel=0.3)
    assert angle > 1e-5
    # the next plan has the stored sentence, and reads no tiles
    machine = calibration.stored_calibration()
    assert machine is not None
    assert proposed(2.0, known=machine.bf16_errors) == (proposal,)
    assert errors == [name]
    assert proposed(2.0, known={}, pretrained=False) == ()
    monkeypatch.setattr(measuring, "find_local_weights", lambda _: None)
    (unknown,) = proposed(2.0, known={})
    machine = calibration.stored_calibration()
    assert machine is not None and machine.bf16_errors == {}
    assert unknown.endswith(
        "; the error is not measured, as the weights are not on this machine"
    )


@pytest.mark.parametrize("encoder", ["efficientnet_lite0", "uni2_h", "conch_v15"])
def test_a_plan_of_a_known_encoder_on_a_measured_machine_imports_no_torch(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed("openvino"):
        pytest.skip("openvino is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_he_slide(tmp_path / "a.tiff", (1500, 1200))
    engine = engine_version("openvino")
    key = f"efficientnet_lite0|fp32|256|{engine}"
    machine = replace(MACHINE, measured_on="2026-11-28", encoders={key: 50.0})
    machine = replace(machine, operations={f"fp32|{engine}": 2e11})
    store_calibration(replace(machine, peaks={f"{key}|32": 400 * MIB}))
    measured = run_and_measure(
        "tests.run.without_torch",
        "planned",
        slide=str(tmp_path / "a.tiff"),
        encoder=encoder,
    )
    heavy, seconds, rates_note = measured.result
    assert heavy == []
    assert "measured on 2026-11-28" in rates_note
    flops = declared_size(encoder, tile_px=256)
    assert flops is not None
    tiles_per_s = 2e11 / flops.flops_per_tile if flops.is_transformer else 50.0
    num_tiles = seconds * tiles_per_s
    assert num_tiles == pytest.approx(round(num_tiles)) and num_tiles > 5
    assert measured.peak_bytes < 150 * MIB
    assert measured.cpu_seconds < 1.5


def test_one_rate_of_operations_holds_for_another_vision_transformer() -> None:
    """`plip`, with its 12 layers of 768 and 50 tokens, is unlike what is measured."""
    operations = measure_transformer(precision="fp32", engine="torch")
    own = measure_encoder("plip", precision="fp32", tile_px=224, engine="torch")
    planned = operations / network_size("plip", tile_px=224).flops_per_tile
    assert 0.7 < planned / own < 1.4


def test_a_timm_network_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed("timm"):
        pytest.skip("timm is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "is_quick", lambda *_, **__: False)
    counted = list[str]()

    def noted(name: str, *, tile_px: int) -> NetworkSize:
        counted.append(name)
        return network_size(name, tile_px=tile_px)

    monkeypatch.setattr(measuring, "network_size", noted)
    write_he_slide(tmp_path / "a.tiff", (1500, 1200))
    store_calibration(
        replace(
            MACHINE,
            encoders={f"timm:resnet18|fp32|256|{engine_version('torch')}": 20.0},
        )
    )
    encode = EncodeConfig(encoders=("timm:resnet18",), engine="torch")
    plans = [
        plan([tmp_path / "a.tiff"], config=RunConfig(encode=encode)) for _ in range(2)
    ]
    assert plans[0].memory == plans[1].memory and plans[0].time == plans[1].time
    assert counted == ["timm:resnet18"]
    assert plans[0].time.encode_s == plans[0].slides[0].num_tiles / 20


def test_files_of_cells_take_their_time_and_one_import_of_memory() -> None:
    with_cells = replace(slide(100), cells_s=3.0)
    by = planner()
    plain = by.time([slide(100)] * 1000, cpus=2)
    more = by.time([with_cells] * 1000, cpus=2)
    assert more.prepare_s - plain.prepare_s == pytest.approx(3000)
    one = by.memory([with_cells], cpus=2).host
    assert one["cells"] == by.memory([with_cells] * 1000, cpus=2).host["cells"] > 0
    assert "cells" not in by.memory([slide(100)], cpus=2).host


def test_the_time_of_cells_follows_the_bytes_and_the_kind_of_each_file(
    tmp_path: Path,
) -> None:
    for folder, end, num_bytes in (
        ("a", "geojson", 24_000),
        ("b", "geojson.gz", 24_000),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"s.{end}").write_bytes(bytes(num_bytes))
    sources = (str(tmp_path / "a"), str(tmp_path / "b"))
    entry = SlideEntry(slide_path=str(tmp_path / "s.svs"), slide_id="s")
    seconds = [
        CellsConfig(cells=cells).import_s(entry)
        for cells in ((), sources[:1], sources[1:], sources)
    ]
    assert seconds[0] == 0 < seconds[1] < seconds[2]
    assert seconds[3] == pytest.approx(seconds[1] + seconds[2])
