"""One Slurm of one node for all tests of this folder that ask for it."""

import os
import sys
from collections.abc import Iterator

import pytest
from tests.support.slurm_node import slurm_node


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    with slurm_node() as environment:
        yield {**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@pytest.fixture
def on_slurm(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in ("SLURM_CONF", "PYTHONPATH"):
        monkeypatch.setenv(name, slurm[name])
    return slurm
