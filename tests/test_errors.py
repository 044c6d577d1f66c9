"""A process that is asked to end: when it listens, and what code around it makes of that."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinsection.errors import Stopped, stopping

# as pybind11's modules do with whatever is raised while they are made
MODULE = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
except BaseException:
    raise ImportError("initialization failed")
loaded = True
"""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """The usual one, before and after: who was stopped ignores the next ones."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of a module that is signalled while it is imported, and of one that imports it."""
    names = ["thinsection_test_signalled", "thinsection_test_importing"]
    (tmp_path / f"{names[0]}.py").write_text(MODULE)
    (tmp_path / f"{names[1]}.py").write_text(f"from {names[0]} import loaded\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return names


@pytest.mark.parametrize("which", [0, 1])
def test_a_signal_while_a_module_is_imported_waits_until_it_is(
    modules: list[str], which: int
) -> None:
    began = time.monotonic()
    with pytest.raises(Stopped, match="stopped by SIGTERM") as caught, stopping():
        __import__(modules[which])
        time.sleep(10)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 5
    assert sys.modules[modules[0]].loaded
    assert sys.modules[modules[1]].loaded if which else modules[1] not in sys.modules


def test_a_program_that_is_itself_imported_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "thinsection_test_program"
    (tmp_path / f"{name}.py").write_text(
        "import os, signal, time\n"
        "from thinsection.errors import stopping\n"
        "with stopping():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(10)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    with pytest.raises(Stopped):
        __import__(name)
    assert time.monotonic() - began < 5


def test_a_signal_elsewhere_stops_at_once_and_once() -> None:
    seen = []
    with pytest.raises(Stopped), stopping():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a scheduler that asks again: not in the way
            seen.append("files removed")
    assert seen == ["files removed"]
