"""CPUs and memory that a process may use: affinity and cgroups, simulated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinsection.machine import cgroup_limits, cpu_count, stalled_s, visible_gpus
from thinsection.tiles import StreamConfig
from thinsection.types import GIB, MIB


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_parents_limit_of_cgroup_v2_holds_for_its_child(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job_7/step\n",
            "sys/fs/cgroup/slurm/memory.max": "max\n",
            "sys/fs/cgroup/slurm/job_7/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/slurm/job_7/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/slurm/job_7/step/cpu.max": "max 100000\n",
        },
    )
    assert cgroup_limits(tmp_path) == (1.5, 3 * GIB)


def test_cgroup_v1_limits_are_read_and_no_limit_is_none(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        },
    )
    assert cgroup_limits(tmp_path) == (0.5, 2 * GIB)


def test_a_machine_without_cgroups_has_no_cgroup_limits(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == (None, None)


def with_quota(root: Path, cpus: float | None, *, version: int) -> None:
    quota = "max" if cpus is None else str(round(cpus * 100_000))
    if version == 2:
        files = {
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/job/cpu.max": f"{quota} 100000",
        }
    else:
        quota = "-1" if cpus is None else quota
        files = {
            "proc/self/cgroup": "4:cpu,cpuacct:/job",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
        }
    write_tree(root, files)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("cpus", [1, 2, 4, 48, 64, 128, 256])
@pytest.mark.parametrize("quota", [None, 0.5, 1, 3.2, 4, 64, 1000])
def test_cpus_are_the_fewer_of_affinity_and_quota_rounded_up(
    version: int, cpus: int, quota: float | None, tmp_path: Path, monkeypatch
) -> None:
    with_quota(tmp_path, quota, version=version)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False
    )
    expected = {
        None: cpus,
        0.5: 1,
        1: 1,
        3.2: min(4, cpus),
        4: min(4, cpus),
        64: min(64, cpus),
    }
    assert cpu_count(tmp_path) == expected.get(quota, cpus)


@pytest.mark.parametrize("cpus", [1, 2, 3, 48, 60, 64, 128, 256])
def test_the_stream_starts_on_any_number_of_cpus_and_uses_no_more(
    cpus: int, monkeypatch
) -> None:
    monkeypatch.setattr("thinsection.tiles.budget.cpu_count", lambda: cpus)
    for batch_size in (1, 32, 256):
        budget = StreamConfig().budget(batch_size, tile_px=256, tile_bytes=32 * MIB)
        assert 1 <= budget.workers <= cpus


def test_torch_starts_no_more_threads_than_the_quota_allows() -> None:
    """On 64 CPUs with a quota of 4; a smaller choice, and a number that was asked for, stay."""
    code = """
import torch
from thinsection.run import task
task.cpu_count = lambda: 4
for own, asked in ((64, 0), (3, 0), (64, 6)):
    torch.set_num_threads(own)
    task.set_threads(asked, torch_too=True)
    print(torch.get_num_threads())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "3", "6"]


def test_without_torch_openmp_gets_the_quota_and_keeps_a_smaller_choice() -> None:
    """On 64 CPUs with a quota of 4: a list has a number for each level of nesting."""
    code = """
import os, sys
from thinsection.run import task
task.cpu_count = lambda: 4
os.cpu_count = lambda: 64
for own, asked in (("1", 0), ("16", 0), ("", 0), ("3,2", 0), ("1", 2)):
    os.environ["OMP_NUM_THREADS"] = own
    task.set_threads(asked, torch_too=False)
    print(os.environ["OMP_NUM_THREADS"])
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "4", "4", "3,2", "2"]


def test_what_held_work_up_is_read_from_cgroups_pressure_and_steal(
    tmp_path: Path,
) -> None:
    write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/stat": f"cpu  1 2 3 4 5 6 7 {500 * (os.cpu_count() or 1)} 0 0\ncpu0 1\n",
            "proc/pressure/cpu": "some avg10=0.00 total=9000000\nfull avg10=0.00 total=0\n",
            "sys/fs/cgroup/job/cpu.stat": "usage_usec 5\nthrottled_usec 2500000\n",
        },
    )
    assert stalled_s(tmp_path) == {"throttled": 2.5, "queued": 9.0, "stolen": 5.0}
    write_tree(
        tmp_path, {"sys/fs/cgroup/job/cpu.pressure": "some avg10=0.00 total=1000000\n"}
    )
    assert (
        stalled_s(tmp_path)["queued"] == 1.0
    )  # of this cgroup, not of the whole machine
    v1 = {
        "proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.stat": "nr_throttled 3\nthrottled_time 3000000000\n",
    }
    write_tree(tmp_path, v1)
    assert stalled_s(tmp_path)["throttled"] == 3.0
    assert set(stalled_s(tmp_path / "nothing").values()) == {0.0}


def test_gpus_are_those_of_the_environment_or_of_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == ("2", "10")
    for chosen, gpus in (
        ("3, GPU-1a", ("3", "GPU-1a")),
        ("", ()),
        ("1,-1,2", ("1",)),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert visible_gpus(tmp_path) == gpus
