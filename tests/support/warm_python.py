"""A program that is called like `python` and has PyTorch and the like imported already.

`warm_python` starts a process that imports them once, and writes the program: a bare interpreter
that hands its arguments, folder, environment and open files to that process, which forks. The fork
runs the code, module or script, and the program ends with its exit code. Two to three CPU-seconds
less for each process. It is not for what asks for a fresh interpreter: times and memory of imports,
process ids, signals.
"""

import atexit
import fcntl
import gc
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

# none starts a thread, which a fork would lose
_IMPORTED = (
    "matplotlib.pyplot",
    "pandas",
    "sklearn.linear_model",
    "torch",
    "thinsection.predict.experiment",
    "thinsection.run.run",
    "thinsection.testing",
)
# beginnings of variables that are read when a package is imported, or by the interpreter
_READ_ONCE = ("HF_", "LD_", "MKL_", "MPL", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS_")
_COUNT_BYTES = 8  # before a message: its length
_MOST_FILES = 64  # open in a program
# Options of Python itself need the real one, and so do other values of variables that were read
# when the server started. All else goes to the server: the folder, how many arguments there are,
# these, the numbers of the open files, and the environment.
_PROGRAM = """#!{python} -IS
import _signal, _socket, array, os, sys
words = sys.argv[1:]
names = [name for name in os.environ if name.startswith({read_once!r})]
settings = {{name: os.environ[name] for name in names if name != "PYTHONPATH"}}
is_option = not words or (words[0].startswith("-") and words[0] not in ("-c", "-m"))
if is_option or settings != {settings!r}:
    os.execv({python!r}, [{python!r}, *words])
opened = [int(name) for name in os.listdir("/proc/self/fd")]
opened = [number for number in opened if os.path.exists(f"/proc/self/fd/{{number}}")]
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({address!r})
parts = [os.getcwd(), str(len(words)), *words, " ".join(map(str, opened))]
parts += [name + "=" + value for name, value in os.environ.items()]
data = os.fsencode("\\0".join(parts))
files = array.array("i", opened)
server.sendmsg(
    [len(data).to_bytes({count_bytes}, "big")],
    [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)],
)
server.sendall(data)
code = int(server.recv(16) or b"1")
if code < 0:
    if -code != _signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@dataclass(frozen=True, slots=True)
class _Request:
    """What a program was called with."""

    folder: str
    arguments: list[str]
    environment: dict[str, str]
    files: dict[int, int]  # number in the program -> number here


@contextmanager
def warm_python() -> Iterator[str]:
    """Path of the program, which works until the block ends."""
    with TemporaryDirectory() as folder:
        address = str(Path(folder, "socket"))
        program = Path(folder, "python")
        text = _PROGRAM.format(
            python=sys.executable,
            address=address,
            count_bytes=_COUNT_BYTES,
            read_once=_READ_ONCE,
            settings={
                name: value
                for name, value in os.environ.items()
                if name.startswith(_READ_ONCE) and name != "PYTHONPATH"
            },
        )
        program.write_text(text, encoding="utf-8")
        program.chmod(0o700)
        paths = os.pathsep.join(path for path in sys.path if path)
        with subprocess.Popen(
            [sys.executable, "-m", __name__, address, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
        ) as server:
            assert server.stdin is not None and server.stdout is not None
            assert server.stdout.readline(), "the warm process ended; see its error"
            yield str(program)
            server.stdin.close()


def main() -> None:
    """Imports, then answers programs until the input ends; a fork runs what one was called with."""
    address, program = sys.argv[1:]
    for name in _IMPORTED:
        import_module(name)
    import_module("thinsection.weights.placement").optional_package("timm")
    # multiprocessing starts its processes with the real interpreter, which it notes at its import
    import_module("multiprocessing.spawn")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)  # noqa: T201 - `warm_python` waits for it
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
        gc.freeze()  # a collection in a fork would copy all pages of what is imported
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _supervise(connection, program)


def _supervise(connection: socket.socket, program: str) -> NoReturn:
    """Forks once more, waits for the fork, and sends its exit code.

    A program that has gone takes its fork with it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = _receive(connection)
    job = os.fork()
    if job == 0:
        connection.close()
        sys.executable = program
        _end(_exit_code_of(request))
    for number in request.files.values():
        os.close(number)
    ended = os.pidfd_open(job)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:
        os.kill(job, signal.SIGTERM)
    status = os.waitpid(job, 0)[1]
    with suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _exit_code_of(request: _Request) -> int:
    """Runs what a program was called with, and prints an error as the interpreter does."""
    try:
        _become(request)
        _run(request.arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201 - so does the interpreter
        return 1
    except BaseException:  # noqa: BLE001 - it is printed
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends as the interpreter does, but takes no module down: that would copy all their pages."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code)


def _receive(connection: socket.socket) -> _Request:
    """Reads what a program sent."""
    header, files, _, _ = socket.recv_fds(connection, _COUNT_BYTES, _MOST_FILES)
    with connection.makefile("rb") as stream:
        data = stream.read(int.from_bytes(header, "big"))
    folder, count, *parts = os.fsdecode(data).split("\0")
    arguments = parts[: int(count)]
    numbers, *settings = parts[int(count) :]
    return _Request(
        folder=folder,
        arguments=arguments,
        environment=dict(setting.split("=", 1) for setting in settings),
        files=dict(zip(map(int, numbers.split()), files)),
    )


def _become(request: _Request) -> None:
    """Takes the program's open files under their numbers, its folder and its environment."""
    free = max(*request.files, *request.files.values()) + 1
    moved = {
        number: fcntl.fcntl(here, fcntl.F_DUPFD, free)
        for number, here in request.files.items()
    }
    for here in request.files.values():
        os.close(here)
    for number, here in moved.items():
        os.dup2(here, number)
        os.close(here)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)


def _run(arguments: list[str]) -> None:
    """Runs what follows the name of an interpreter: `-c CODE`, `-m MODULE` or a script."""
    first = arguments[0]
    start = {"-c": "", "-m": f"{Path.cwd()}"}.get(
        first, f"{Path(first).resolve().parent}"
    )
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [path for path in sys.path[1:] if path not in given]
    sys.path[:] = [start, *filter(None, given), *own]
    if first == "-c":
        sys.argv = ["-c", *arguments[2:]]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
    elif first == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
