"""Imports in a process what a run imported in its first fork, so that no later fork does it again.

A fork that has to import PyTorch and OpenVINO takes 2.6 CPU-seconds, one that has them .8.
"""

import importlib
import sys
from pathlib import Path

# packages whose imports take long; none starts a thread, which a fork would lose
_PACKAGES = ("thinsection", "torch", "timm", "openvino", "h5py")


def note_imports(file: Path) -> None:
    """Writes the names of all imported modules, one a line."""
    file.write_text("\n".join(sys.modules))


def import_noted(file: Path) -> None:
    """Imports those that take long."""
    for name in file.read_text().splitlines():
        if name.partition(".")[0] in _PACKAGES:
            importlib.import_module(name)
