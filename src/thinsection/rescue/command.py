"""Another tool's command, run in this process, so that a rescue reaches its models.

The command finds what it finds when the shell starts it: its arguments, `__file__`, the search
path, signals, and Python's own way to end. So an exception of its own ends in a traceback and code
1, Ctrl-C in KeyboardInterrupt, and neither in a message of ours.
"""

import importlib.metadata
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from thinsection.errors import InvalidInputError, RescueError, signals_given_back

_MODULE_FLAG = "-m"
_EXIT_RAISED = 1
_EXIT_CTRL_C = 130  # 128 and the signal's number, as a shell says it


def run_command(words: Sequence[str]) -> int:
    """Exit code of a command that runs as the shell would run it, but in this process.

    Args:
        words: `script.py ...`, `-m module ...`, either of them after `python`, or the name of a
            console script of an installed package, with its arguments.

    Raises:
        InvalidInputError: the command is not one of Python, or one of another environment.
        RescueError: a rescue that is strict refused a model.
    """
    arguments = list(words)
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if arguments and _is_python(arguments[0]):
        _check_interpreter(arguments[0], arguments[1:])
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
    program = shutil.which(arguments[0])
    interpreter = "" if program is None else _interpreter_of(Path(program))
    if program is not None and interpreter:
        _check_interpreter(interpreter, arguments)
        return _run_script(Path(program), [program, *arguments[1:]])
    group = "console_scripts"
    scripts = importlib.metadata.entry_points(group=group, name=arguments[0])
    if scripts:
        function: Callable[[], Any] = next(iter(scripts)).load()
        with _as_program(arguments):
            return _exit_code(lambda: sys.exit(function()))
    raise InvalidInputError(
        f"command must be a Python script, -m MODULE or a console script, got {arguments[0]!r}; "
        "only models of a Python command can be rescued"
    )


def _is_python(word: str) -> bool:
    """Tells whether a word names a Python interpreter, such as python3.12 or /venv/bin/python."""
    name = Path(word).name.removesuffix(".exe")
    return name.startswith("python") and not name.removeprefix("python").strip(
        ".0123456789"
    )


def _check_interpreter(word: str, arguments: Sequence[str]) -> None:
    """Refuses an interpreter with a path that is not this one's: it has other packages.

    Raises:
        InvalidInputError: it belongs to another environment.
    """
    if "/" not in word and "\\" not in word:  # `python` means the one that runs
        return
    # not resolved: the interpreters of virtual environments are links to one file
    folder = Path(word).absolute().parent
    if folder == Path(sys.executable).absolute().parent:
        return
    command = " ".join(arguments)
    raise InvalidInputError(
        f"command must run in the environment of thinsection, got {word!r}, while this is "
        f"{sys.executable!r}; install thinsection there, then: {word} -m thinsection rescue NAME "
        f"-- {command}"
    )


def _run_script(path: Path, arguments: list[str]) -> int:
    """Exit code of a script, whose own folder is searched first for imports."""
    folder = str(path.resolve().parent)
    with _as_program(arguments, search_first=folder):
        return _exit_code(lambda: runpy.run_path(str(path), run_name="__main__"))


def _interpreter_of(path: Path) -> str:
    """Returns the Python interpreter that the first line of a file names; '' if it names none."""
    with path.open("rb") as file:
        first_line = file.readline(512)
    if not first_line.startswith(b"#!"):
        return ""
    words = first_line[2:].decode(errors="replace").split()
    return next((word for word in words if _is_python(word)), "")


@contextmanager
def _as_program(
    arguments: list[str], *, search_first: str | None = None
) -> Iterator[None]:
    """Let `sys.argv`, `sys.path` and signals be those of a program, until the block ends."""
    own_arguments = sys.argv
    own_path = list(sys.path)
    sys.argv = arguments
    if search_first is not None:
        sys.path.insert(0, search_first)
    try:
        with signals_given_back():
            yield
    finally:
        sys.argv = own_arguments
        sys.path[:] = own_path


def _exit_code(run: Callable[[], object]) -> int:
    """Exit code of a program that ends by itself, by `sys.exit`, or by an exception."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201
        return _EXIT_RAISED
    except RescueError:
        raise
    except BaseException as error:  # noqa: BLE001
        # as Python ends a program: its hook may be the program's own
        traceback = _own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return _EXIT_CTRL_C if isinstance(error, KeyboardInterrupt) else _EXIT_RAISED
    return 0


def _own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the program's first frame on."""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            return traceback
        traceback = traceback.tb_next
    return None
