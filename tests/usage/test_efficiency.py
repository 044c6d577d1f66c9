"""Requested against used: the sentence, the warnings, the next request, the page."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from thinsection.errors import StoreError
from thinsection.results.records import (
    begin_record,
    efficiency,
    read_records,
    update_record,
    write_efficiency,
)
from thinsection.types import GIB
from thinsection.usage.analysis import analyse, bottleneck, format_walltime
from thinsection.usage.monitor import (
    ProcessUsage,
    Requested,
    Sample,
    read_usage,
    resource_monitor,
)
from thinsection.usage.page import efficiency_page, timeline_svg


@pytest.fixture(autouse=True)
def no_one_else_here(monkeypatch) -> None:
    """Whether this machine is busy while a test records is not what they ask."""
    monkeypatch.setattr("thinsection.usage.monitor.stalled_s", dict)


def sample(t_s: float, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        **{"t_s": t_s, "cpu_s": t_s, "rss_bytes": GIB, "processes": 1},
        **{"read_bytes": int(t_s) << 20, "write_bytes": 0, "net_bytes": 0},
    }
    return Sample(**values | changes)


def usage(
    *, requested: dict[str, Any] | None = None, seconds: int = 300, **changes: Any
) -> ProcessUsage:
    limits = {"cpus": 4.0, "memory_bytes": 20 * GIB} | (requested or {})
    gpu = changes.pop("gpu", {})
    return ProcessUsage(
        host="node7",
        pid=changes.pop("pid", 1),
        started=1000.0,
        requested=Requested(**limits),
        samples=tuple(sample(float(t), **gpu) for t in range(seconds + 1)),
        **changes,
    )


FED = {"encode_busy": 95.0, "encode_wait": 5.0, "decode_busy": 60.0}
STARVED = {
    "encode_busy": 30.0,
    "transfer_busy": 8.0,
    "encode_wait": 62.0,
    "decode_busy": 190.0,
}


def test_a_starved_gpu_is_told_in_one_sentence_with_the_flag() -> None:
    facts = {"device": "cuda:0", "decode_threads": 2, "reader": "tiff"}
    assert bottleneck(STARVED, facts, cpus=8) == (
        "the GPU waited 62% of the time for decoding: raise --decode-threads from 2 to 6"
    )


@pytest.mark.parametrize(
    ("stalled", "remedy"),
    [
        ("queued", "CPUs of its own"),
        ("throttled", "quota"),
        ("stolen", "another machine"),
    ],
)
def test_a_starved_run_is_told_so_and_nothing_about_its_settings(
    stalled: str, remedy: str
) -> None:
    """One that got a quarter of its CPUs; with all of them the same waits are its own."""
    job = usage(stage_seconds=FED, facts={"device": "cpu"}, stalled_s={stalled: 280.0})
    said = analyse([job]).bottleneck
    assert "got 25% of its" in said and remedy in said
    busy = usage(requested={"cpus": 1.0}, stage_seconds=FED, stalled_s={stalled: 280.0})
    for fed in (busy, replace(job, stalled_s={stalled: 2.0})):
        assert "busy 95%" in analyse([fed]).bottleneck


@pytest.mark.parametrize("stages", [FED, STARVED, {"write_wait": 50.0, **FED}])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_nothing_is_advised_that_the_docs_warn_against(
    stages: dict, device: str
) -> None:
    said = bottleneck(stages, {"device": device, "decode_threads": 2}, cpus=2)
    assert "cucim" not in said and "bf16" not in said


def test_when_every_cpu_decodes_already_more_cpus_are_asked_for() -> None:
    facts = {"device": "cuda:0", "decode_threads": 2, "reader": "tiff"}
    said = bottleneck(STARVED, facts, cpus=2)
    assert said.endswith(
        "decoding on all 2 CPUs of the job: ask for 6 CPUs (--job-cpus 6)"
    )


def test_slow_opening_and_tissue_are_not_blamed_on_decoding() -> None:
    stages = {**STARVED, "decode_busy": 20.0, "prepare_busy": 90.0}
    assert "raise --prefetch-slides" in bottleneck(stages, {}, cpus=8)


@pytest.mark.parametrize(
    ("facts", "flag"),
    [
        ({"device": "cpu", "precision": "fp32"}, "--device cuda"),
        ({"device": "cpu", "precision": "bf16"}, "--device cuda"),
        ({"device": "cuda"}, "more GPUs"),
    ],
)
def test_a_fed_encoder_is_named_as_the_pace_setter(
    facts: dict[str, str], flag: str
) -> None:
    said = bottleneck(FED, facts, cpus=8)
    assert "busy 95% of the time" in said
    assert flag in said


def test_the_story_of_the_issue_is_loud_about_its_gpu_and_asks_for_less() -> None:
    job = usage(
        requested={"gpus": 1, "walltime_s": 3600.0, "source": "slurm", "job": "9_1"},
        gpu={"gpu_util": 0.0, "gpu_bytes": 0},
        stage_seconds=FED,
        facts={"torch_cuda_build": False, "gpus_visible": 1},
    )
    found = analyse([job])
    assert found.next_request is not None
    assert any("got a GPU and never used it" in w for w in found.warnings)
    assert any("torch is a CPU build" in w for w in found.warnings)
    assert found.next_request.gpus == 0
    assert found.next_request.cpus == 1
    assert (
        found.next_request.memory_bytes == 1.25 * GIB
    )  # 1 GiB + 20 %, to the next 256 MiB
    assert found.next_request.walltime_s == 480  # 300 s + 50 %, to the next minute
    assert found.next_request.sbatch_lines() == (
        "#SBATCH --cpus-per-task=1",
        "#SBATCH --mem=1280M",
        "#SBATCH --time=00:08:00",
    )
    shares = {s.name: s.fraction for s in found.shares}
    assert shares["CPU"] == pytest.approx(0.25)
    assert shares["memory"] == pytest.approx(0.05)
    assert shares["time"] == pytest.approx(1 / 12)
    assert shares["GPU"] == 0


def test_a_used_gpu_is_no_alarm_and_is_asked_for_again() -> None:
    job = usage(requested={"gpus": 1}, gpu={"gpu_util": 0.4, "gpu_bytes": GIB})
    found = analyse([job])
    assert found.warnings == ()
    assert found.next_request is not None
    assert "#SBATCH --gres=gpu:1" in found.next_request.sbatch_lines()


def test_a_slow_cache_and_a_job_near_its_limits_are_told() -> None:
    job = usage(
        requested={"memory_bytes": int(1.05 * GIB), "walltime_s": 310.0, "job": "9_2"},
        facts={"cache": "/home/a", "cache_filesystem": "nfs4"},
    )
    text = "\n".join(analyse([job]).warnings)
    assert "slow file system (nfs4)" in text
    assert "job 9_2 used 95% of its memory" in text
    assert "job 9_2 used 97% of its time" in text


def test_several_jobs_add_up_and_the_worst_one_sets_the_next_request() -> None:
    small, large = usage(seconds=100), usage(seconds=700, pid=2)
    found = analyse([small, large])
    assert found.wall_s == 700
    assert found.next_request is not None
    assert found.next_request.walltime_s == 1080  # 700 s + 50 %, to the next minute


def test_nothing_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        analyse([])
    with pytest.raises(
        StoreError, match="out must contain records of a run that did work, got none"
    ):
        efficiency(tmp_path)
    record = update_record(begin_record(tmp_path, "run", {}), {"counts": {"done": 1}})
    with pytest.raises(
        StoreError, match=r"record of a run must contain usage/\*\.jsonl, got none"
    ):
        efficiency(tmp_path)
    assert not (record.folder / "efficiency.html").exists()


def test_who_only_waited_or_found_all_done_does_not_judge_the_work() -> None:
    worked = usage(stage_seconds=FED, facts={"device": "cpu"}, pid=2)
    driver = usage(
        seconds=900, pid=1, requested={"cpus": 64.0}
    )  # waited for its workers
    resumed = usage(seconds=3, pid=3, facts={"device": "cpu"}, idle=True)
    assert analyse([driver, worked, resumed]) == analyse([worked])


def test_where_nothing_was_worked_on_there_is_no_advice() -> None:
    resumed = usage(seconds=3, idle=True)
    found = analyse([resumed])
    assert found.next_request is None
    assert found.bottleneck == "the run had nothing to do, so there is no advice"
    assert "SBATCH" not in efficiency_page(found, [resumed])


def test_a_record_says_whether_anything_was_worked_on(tmp_path: Path) -> None:
    for folder, seconds in (("a", FED), ("b", {"prepare_wait": 1.0})):
        with resource_monitor(tmp_path / folder, stage_seconds=lambda s=seconds: s):
            pass
    assert [read_usage(tmp_path / name)[0].idle for name in "ab"] == [False, True]


@pytest.mark.parametrize("mib", [1, 300, 425, 426, 427, 500, 668, 5000])
def test_never_is_less_memory_advised_than_was_used(mib: int) -> None:
    request = analyse(
        [usage(gpu={"rss_bytes": mib << 20}, stage_seconds=FED)]
    ).next_request
    assert request is not None
    assert request.memory_bytes >= 1.2 * (mib << 20)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.2, "00:01:00"), (3723, "01:02:03"), (183845, "2-03:04:05")],
)
def test_times_are_written_as_slurm_reads_them(seconds: float, text: str) -> None:
    assert format_walltime(seconds) == text


def test_the_picture_is_well_formed_and_bounded_however_long_the_run() -> None:
    long = usage(seconds=20_000, gpu={"gpu_util": 0.5, "gpu_bytes": GIB})
    tree = ElementTree.fromstring(timeline_svg([long, usage()]))
    lines = [e for e in tree.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 8  # CPU, GPU, memory, disk of two processes
    assert max(len(e.attrib["points"].split()) for e in lines) <= 601


def test_the_page_holds_the_sentence_and_escapes_what_it_shows() -> None:
    job = usage(
        stage_seconds=STARVED,
        facts={
            "cache": "<script>x</script>",
            "cache_filesystem": "nfs",
            "decode_threads": 2,
        },
    )
    page = efficiency_page(analyse([job]), [job])
    assert "raise --decode-threads from 2 to 4" in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r'(src|href)="http', page)


def work(out: Path, counts: dict[str, int]) -> Path:
    """The record of an invocation that was watched and ended with these counts."""
    record = begin_record(out, "run", {"until": "embeddings"})
    with resource_monitor(record.folder, stage_seconds=lambda: FED):
        sum(range(10**5))
    update_record(record, {"counts": counts})
    return record.folder


def test_the_newest_invocation_that_did_work_is_told_of(tmp_path: Path) -> None:
    first, second, third = (
        work(tmp_path, {"done": 2, "skipped": 0}),
        work(tmp_path, {"done": 1, "skipped": 1}),
        work(tmp_path, {"done": 0, "skipped": 3}),
    )
    (third.parent / "torn").mkdir()
    (third.parent / "torn" / "run.json").write_text("{")
    unfinished = begin_record(tmp_path, "run", {})
    assert [r.folder for r in read_records(tmp_path)] == [
        first,
        second,
        third,
        unfinished.folder,
    ]
    _, page = efficiency(tmp_path)
    assert page == second / "efficiency.html"
    assert [p.parent for p in tmp_path.rglob("efficiency.html")] == [second]


def test_invocations_of_one_second_come_in_the_order_in_which_they_began(
    tmp_path: Path,
) -> None:
    for name, started in (
        ("20261121-231430-a-999", ".100"),
        ("20261121-231430-a-1000", ".200"),
    ):
        (tmp_path / "records" / name).mkdir(parents=True)
        document = {"started": f"2026-11-21T23:14:30{started}+00:00"}
        (tmp_path / "records" / name / "run.json").write_text(json.dumps(document))
    assert [r.folder.name[-4:] for r in read_records(tmp_path)] == ["-999", "1000"]


def test_a_recorded_run_gets_its_page_and_its_section_of_run_json(
    tmp_path: Path,
) -> None:
    folder = work(tmp_path, {"done": 1})
    write_efficiency(folder)
    document = json.loads((folder / "run.json").read_text())
    assert document["config"] == {"until": "embeddings"}
    assert document["counts"] == {"done": 1}
    assert document["efficiency"]["bottleneck"].startswith("the encoder was busy 95%")
    assert document["efficiency"]["next_request"]["sbatch"][0].startswith(
        "#SBATCH --cpus-per-task"
    )
    assert "<svg" in (folder / "efficiency.html").read_text()
