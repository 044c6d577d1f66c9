"""The monitor: what it sees, what it costs, what survives a kill; limits of Slurm and cgroups."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinsection.types import MIB
from thinsection.usage.monitor import (
    GpuSampler,
    TreeSampler,
    filesystem_of,
    read_limits,
    read_usage,
    resource_monitor,
)


def test_slurms_environment_says_what_was_requested(tmp_path: Path) -> None:
    env = {
        "SLURM_JOB_ID": "12",
        "SLURM_ARRAY_JOB_ID": "10",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_MEM_PER_NODE": "512",
        "SLURM_JOB_GPUS": "0,2",
        "SLURM_JOB_START_TIME": "1000",
        "SLURM_JOB_END_TIME": "4600",
    }
    limits = read_limits(env=env, root=tmp_path)
    assert (limits.source, limits.job) == ("slurm", "10_3")
    assert (limits.cpus, limits.memory_bytes, limits.gpus) == (1, 512 * MIB, 2)
    assert limits.walltime_s == 3600


def test_hidden_gpus_are_not_counted(tmp_path: Path) -> None:
    assert read_limits(env={"CUDA_VISIBLE_DEVICES": "-1"}, root=tmp_path).gpus == 0
    assert read_limits(env={"CUDA_VISIBLE_DEVICES": "1,GPU-x"}, root=tmp_path).gpus == 2


def test_the_tree_counts_a_childs_cpu_and_memory_also_after_it_ended() -> None:
    code = "import time; b = bytearray(60 << 20); t = time.process_time()\n"
    code += "while time.process_time() - t < 0.3: pass\nprint('x', flush=True); input()"
    sampler = TreeSampler()
    before = sampler.sample(0)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdin is not None
    child.stdout.readline()
    during = [sampler.sample(i) for i in range(6)][
        -1
    ]  # the tree is walked every fifth look
    assert during.processes == before.processes + 1
    assert during.rss_bytes - before.rss_bytes > 60 * MIB
    child.communicate(b"\n")
    after = [sampler.sample(i) for i in range(6)][-1]
    assert after.processes == before.processes
    assert after.cpu_s - before.cpu_s >= 0.3


def test_a_record_comes_back_with_limits_samples_and_stage_seconds(
    tmp_path: Path,
) -> None:
    with resource_monitor(
        tmp_path, facts={"reader": "tiff"}, stage_seconds=lambda: {"decode_busy": 1.5}
    ):
        sum(range(10**6))
    (usage,) = read_usage(tmp_path)
    assert usage.pid == os.getpid()
    assert len(usage.samples) >= 2
    assert usage.samples[-1].rss_bytes > 10 * MIB
    assert usage.stage_seconds == {"decode_busy": 1.5}
    assert usage.facts["reader"] == "tiff"
    assert usage.requested.cpus >= 1


def test_a_killed_process_leaves_its_timeline_and_a_torn_line_is_ignored(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, pathlib; from thinsection.usage.monitor import resource_monitor\n"
        "with resource_monitor(pathlib.Path(sys.argv[1]), interval_s=0.02) as path:\n"
        "    while path.read_text().count('\\n') < 5: pass\n"
        "    print('x', flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None and child.stdin is not None
    child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    (path,) = (tmp_path / "usage").glob("*.jsonl")
    with path.open("a") as file:
        file.write("[1.0, 2.")
    (usage,) = read_usage(tmp_path)
    assert len(usage.samples) >= 4
    assert usage.stage_seconds == {}


def test_a_look_costs_under_one_percent_of_a_second() -> None:
    sampler = TreeSampler(gpu=GpuSampler())
    sampler.sample(0)
    start = time.thread_time()
    for i in range(50):
        sampler.sample(i)
    assert (time.thread_time() - start) / 50 < 0.01


def test_without_a_driver_the_gpu_columns_are_empty() -> None:
    gpu = GpuSampler({"CUDA_VISIBLE_DEVICES": ""})
    assert gpu.sample({os.getpid()}) == (None, None)
    gpu.close()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/home/a/.cache", "nfs4"), ("/home2", "ext4"), ("/scratch/x", "xfs")],
)
def test_the_file_system_is_that_of_the_deepest_mount(path: str, kind: str) -> None:
    mounts = "d / ext4 rw 0 0\ns:/h /home nfs4 rw 0 0\nd /scratch xfs rw 0 0\n"
    assert filesystem_of(Path(path), mounts) == kind
