"""A folder that takes long to make, made once for all processes of a test session."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]
) -> Path:
    """Folder of that name, filled by `make`; tests copy it, and change nothing in it.

    Processes of pytest-xdist have one folder above their own. The first that comes makes it, and
    the others wait. An error leaves the work to the next one.
    """
    top = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top = top.parent
    folder = top / name
    done = top / f"{name}.done"
    with (top / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
