"""A warm Python does what Python does; the interpreter itself is the judge."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.warm_python import warm_python

pytestmark = pytest.mark.check  # imports PyTorch in a process of its own

SEEN = """
import os, sys
print(sys.argv[1:], __name__, os.getcwd(), os.environ.get("WORD"), os.environ.get("HOME"))
print(sys.path[0], [p for p in sys.path if p.endswith("extra")], sys.stdin.read())
print("error", file=sys.stderr)
"""
CALLS = {
    "code": ["-c", SEEN, "-m", "two words", ""],
    "module": ["-m", "seen", "a", "b"],
    "script": ["sub/seen.py", "--flag"],
    "module of the library": ["-m", "json.tool"],
    "number": ["-c", "import sys; sys.exit(7)"],
    "words": ["-c", "import sys; sys.exit('words')"],
    "none": ["-c", "raise SystemExit"],
    "at the end": ["-c", "import atexit; atexit.register(print, 'end')"],
    "thread": [
        "-c",
        "import threading as t; t.Timer(0.1, print, ['late']).start(); print('soon')",
    ],
    "child": [
        "-c",
        "import subprocess as s, sys; s.run([sys.executable, '-c', 'print(1)'])",
    ],
    "SIGTERM": ["-c", "import os; os.kill(os.getpid(), 15)"],
    "SIGKILL": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "option": ["-O", "-c", "assert False; print(__debug__)"],
}


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    with warm_python() as program:
        yield program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for path in (tmp_path / "seen.py", tmp_path / "sub" / "seen.py"):
        path.write_text(SEEN)
    return tmp_path


def called(
    program: str, arguments: list[str], folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in os.environ if name != "HOME"}
    return subprocess.run(
        [program, *arguments],
        cwd=folder,
        env=inherited | {"WORD": "a=b", "PYTHONPATH": "/extra", **variables},
        input='{"of": 1}',
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", CALLS)
def test_it_ends_and_prints_as_python_does(
    python: str, folder: Path, name: str
) -> None:
    ours = called(python, CALLS[name], folder)
    other = called(sys.executable, CALLS[name], folder)
    assert (ours.returncode, ours.stdout) == (other.returncode, other.stdout)
    assert ours.stderr == other.stderr


def test_an_error_is_printed_and_the_next_call_is_a_new_process(
    python: str, folder: Path
) -> None:
    code = "import sys, torch; print(sys.modules.get('left')); sys.modules['left'] = 1; 1 / 0"
    for _ in range(2):
        ended = called(python, ["-c", code], folder)
        assert (ended.returncode, ended.stdout) == (1, "None\n")
        assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_variables_that_imports_read_have_the_value_of_the_call(
    python: str, folder: Path
) -> None:
    code = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"
    for value in ("/some", "/other"):
        ended = called(python, ["-c", code], folder, HF_HUB_CACHE=value)
        assert (ended.stdout, ended.stderr) == (f"{value}\n", "")


def test_files_that_are_handed_on_have_their_numbers(python: str) -> None:
    reader, writer = os.pipe()
    other_reader, other_writer = os.pipe()
    code = "import os, sys; [os.write(int(n), n.encode()) for n in sys.argv[1:]]"
    numbers = [str(other_writer), str(writer)]
    subprocess.run(
        [python, "-c", code, *numbers], pass_fds=(writer, other_writer), check=True
    )
    assert os.read(reader, 9) == str(writer).encode()
    assert os.read(other_reader, 9) == str(other_writer).encode()
    for number in (reader, writer, other_reader, other_writer):
        os.close(number)


def test_what_runs_ends_with_the_program_that_was_called(python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        number = int(program.stdout.readline())
        assert number != program.pid
        running = os.pidfd_open(number)
        program.terminate()
    select.select([running], [], [])  # for ever if it runs on
    os.close(running)
