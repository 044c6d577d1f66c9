"""A user's own `import timm` works after `importable_torchvision`, whatever build torch has."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

OWN_IMPORT = """
import thinsection as ts
{first}
import timm
network = timm.create_model("resnet10t", pretrained=False, num_classes=3)
print(network.num_classes)
"""
FIRST = """
from thinsection.encode import importable_torchvision
handle = importable_torchvision()
assert importable_torchvision() is handle
print("declared" if handle is not None else "loaded")
"""


def output_of(first: str) -> subprocess.CompletedProcess[str]:
    script = OWN_IMPORT.format(first=first)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_an_own_import_of_timm_works_and_nothing_is_declared_without_need() -> None:
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    helped = output_of(FIRST)
    assert helped.returncode == 0, helped.stderr
    state, classes = helped.stdout.split()
    assert classes == "3"
    plain = output_of("")
    assert (plain.returncode == 0) == (state == "loaded")
    if state == "declared":
        assert "torchvision::nms" in plain.stderr
