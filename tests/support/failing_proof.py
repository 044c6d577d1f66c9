"""gpu_proof with steps that fail in every way; run by tests/test_gpu_proof.py."""

import os
import time
from typing import Any

from benchmarks import gpu_proof


def good(device: str, smoke: bool) -> dict[str, Any]:
    return {"pid": os.getpid()}


def wrong(device: str, smoke: bool) -> dict[str, Any]:
    raise AssertionError("0.5 is not 1")


def dies(device: str, smoke: bool) -> dict[str, Any]:
    os._exit(7)


def hangs(device: str, smoke: bool) -> dict[str, Any]:
    time.sleep(60)
    return {}


if __name__ == "__main__":
    gpu_proof.SMOKE_LIMITS_S = (600.0, 1)
    known = {"a": good, "b": good, "c": wrong, "d": dies, "e": hangs, "f": good}
    gpu_proof.main(lambda: known, "tests.support.failing_proof")
