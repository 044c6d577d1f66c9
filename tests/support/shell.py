"""`thinsection ARGUMENTS` inside the test's own process.

A process of its own would import Python's packages anew, two seconds for a command that reads a
slide. Tests whose point is the process (signals, imports, entry points) start one.
"""

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock

from thinsection.cli.main import main

_ENVIRONMENT = {"COLUMNS": "200", "NO_COLOR": "1"}


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and output of a command, named as in `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def thinsection(*arguments: object, **environment: str) -> Ended:
    """Runs the command; `environment` is added for as long as it runs."""
    stdout = io.StringIO()
    stderr = io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["thinsection", *map(str, arguments)]),
        mock.patch.dict("os.environ", _ENVIRONMENT | environment),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    returncode = code if isinstance(code, int) else 0 if code is None else 1
    return Ended(returncode, stdout.getvalue(), stderr.getvalue())
