"""A process that is asked to end: when it listens, and what code around it makes of that.

Each program runs in a process of its own: a signal would end the tests too.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# as pybind11's modules do with whatever is raised while they are made
SIGNALLED = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
except BaseException:
    raise ImportError("initialization failed")
loaded = True
"""
# as compiled code does that calls Python and looks at no exception
FOREIGN = """
import os, signal, time
def call():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    except BaseException:
        raise SystemError("returned a result with an exception set")
"""
IMPORTING = "from signalled import loaded\n"
STOPPED = """
import os, signal, sys, time
from thinsection.errors import Stopped, stopping
signal.signal(signal.SIGTERM, signal.SIG_DFL)
try:
    with stopping():
        try:
            {body}
            time.sleep(20)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # who asks once more is not in the way
            print("cleaned")
except Stopped as stop:
    print(stop, getattr(sys.modules.get("signalled"), "loaded", None))
    sys.exit(stop.exit_code)
"""
ASK = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    ("program", "loaded"),
    [
        pytest.param(
            STOPPED.format(body="import signalled"), True, id="a module is imported"
        ),
        pytest.param(
            STOPPED.format(body="import importing"), True, id="one that imports it"
        ),
        pytest.param(STOPPED.format(body=ASK), None, id="nothing is imported"),
        pytest.param(
            STOPPED.format(body="import foreign; foreign.call()"),
            None,
            id="another error of it",
        ),
        pytest.param("import program", None, id="the program itself is imported"),
    ],
)
def test_a_signal_stops_a_program_but_waits_for_an_import(
    tmp_path: Path, program: str, loaded: bool | None
) -> None:
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    (tmp_path / "foreign.py").write_text(FOREIGN)
    (tmp_path / "importing.py").write_text(IMPORTING)
    (tmp_path / "program.py").write_text(STOPPED.format(body=ASK))
    began, command = time.monotonic(), [sys.executable, "-c", program]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert ended.stdout == f"cleaned\nstopped by SIGTERM {loaded}\n"
    assert time.monotonic() - began < 15


LEFT = """
import signal, time
from thinsection.errors import stopping
signal.signal(signal.SIGTERM, signal.SIG_DFL)
before = signal.getsignal(signal.SIGALRM)
try:
    with stopping():
        import signalled_well
        raise ValueError("ordinary")
except ValueError as error:
    print(error)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
time.sleep(0.3)  # a timer that goes on would end the process now
"""


def test_an_error_after_a_signal_during_an_import_is_not_followed_by_an_alarm(
    tmp_path: Path,
) -> None:
    asked = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "signalled_well.py").write_text(asked)
    command = [sys.executable, "-c", LEFT]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "ordinary\n"), ended.stderr
