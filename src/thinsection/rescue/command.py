"""Another tool's command, run in this process, so that a rescue reaches its models."""

import importlib.metadata
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinsection.errors import InvalidInputError

_PYTHON = ("python", "python3", "python.exe")
_MODULE_FLAG = "-m"


def run_command(words: Sequence[str]) -> int:
    """Exit code of a command that runs as the shell would run it, but in this process.

    Args:
        words: `script.py ...`, `-m module ...`, either of them after `python`, or the name of a
            console script of an installed package, with its arguments.

    Raises InvalidInputError: the command is not one of Python. What the command raises passes.
    """
    arguments = list(words)
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if arguments and Path(arguments[0]).name in _PYTHON:
        arguments = arguments[1:]
    if not arguments or (arguments[0] == _MODULE_FLAG and len(arguments) == 1):
        raise InvalidInputError(
            "command must name a script, -m MODULE or a console script, got "
            f"{' '.join(words)!r}"
        )
    if arguments[0] == _MODULE_FLAG:
        module = arguments[1]
        with _as_program(arguments[1:], search_first=str(Path.cwd())):
            return _exit_code(
                lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
            )
    path = Path(arguments[0])
    if path.suffix == ".py" and path.is_file():
        return _run_script(path, arguments)
    function = _console_script(arguments[0])
    if function is not None:
        with _as_program(arguments):
            return _exit_code(lambda: sys.exit(function()))
    program = shutil.which(arguments[0])
    if program is not None and _is_python_script(Path(program)):
        return _run_script(Path(program), arguments)
    raise InvalidInputError(
        f"command must be a Python script, -m MODULE or a console script, got {arguments[0]!r}; "
        "another program's process is out of reach"
    )


def _run_script(path: Path, arguments: list[str]) -> int:
    """Exit code of a script, whose own folder is searched first for imports."""
    folder = str(path.resolve().parent)
    with _as_program(arguments, search_first=folder):
        return _exit_code(lambda: runpy.run_path(str(path), run_name="__main__"))


def _console_script(name: str) -> Callable[[], Any] | None:
    """Function of a console script of this environment's packages; None where there is none."""
    scripts = importlib.metadata.entry_points(group="console_scripts", name=name)
    for script in scripts:
        function: Callable[[], Any] = script.load()
        return function
    return None


def _is_python_script(path: Path) -> bool:
    """Whether the first line of a file names a Python interpreter."""
    with path.open("rb") as file:
        first_line = file.readline(256)
    return first_line.startswith(b"#!") and b"python" in first_line


@contextmanager
def _as_program(
    arguments: list[str], *, search_first: str | None = None
) -> Iterator[None]:
    """Let `sys.argv` and `sys.path` be those of a program, until the block ends."""
    own_arguments = sys.argv
    own_path = list(sys.path)
    sys.argv = arguments
    if search_first is not None:
        sys.path.insert(0, search_first)
    try:
        yield
    finally:
        sys.argv = own_arguments
        sys.path[:] = own_path


def _exit_code(run: Callable[[], object]) -> int:
    """Exit code of a program that ends by itself or by `sys.exit`."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201
        return 1
    return 0
