"""A process that keeps its heap clears no page twice."""

import os
import subprocess
import sys

import pytest

from thinsection import machine
from thinsection.encode import memory

# 40 MiB is above the size from which malloc maps every block anew
FAULTS = """
import resource, sys
import numpy as np
from thinsection.machine import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(40 << 20, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def faults_of_a_second_block(mode: str) -> int:
    command = [sys.executable, "-c", FAULTS, mode]
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return int(done.stdout)


@pytest.mark.skipif(machine._glibc() is None, reason="no glibc")
def test_freed_blocks_are_used_again_without_page_faults() -> None:
    assert faults_of_a_second_block("keep") < 100
    assert faults_of_a_second_block("plain") >= 20  # with huge pages; 10,240 without


def test_without_glibc_it_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_glibc", lambda: None)
    assert machine.keep_freed_memory() is False


def test_its_former_place_says_the_new_one() -> None:
    with pytest.warns(
        DeprecationWarning, match="thinsection.machine.keep_freed_memory"
    ):
        assert memory.keep_freed_memory is machine.keep_freed_memory
