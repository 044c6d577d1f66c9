"""Entry point of the `thinsection` command: what needs no settings, then the application.

The version and a path that does not exist are answered first. The settings of a run import NumPy,
and its flags import pydantic, which together take longer than the answer.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from thinsection import __version__, errors
from thinsection.errors import CohortError, stopping, with_options
from thinsection.files.atomic import output_errors
from thinsection.files.urls import is_url
from thinsection.machine import search_cycles_rarely

# the same code as for a wrong flag
EXIT_USAGE = 2
# code if the output is not writable; finished results stay
EXIT_OUTPUT = 4
# name of the logger of `pipeline.choice`, which is slow to import
CHOICES = "thinsection.results.choice"
# commands whose first arguments are slides
_TAKE_SLIDES = ("run", "segment", "qc", "plan")


def command() -> None:
    """Runs the command as a process of its own, with fewer searches for cycles of objects."""
    search_cycles_rarely()
    main()


def main() -> None:
    """Runs the command of the process's arguments, and prints our errors as one line."""
    # tifffile logs errors that it also raises; without a handler Python would print the log
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    arguments = sys.argv[1:]
    try:
        with stopping(), output_errors("standard output"), _choices_printed(arguments):
            if arguments == ["--version"]:
                print(__version__)
                return
            _check_slides_exist(arguments)
            from thinsection.cli.app import build_app

            build_app(arguments)(prog_name="thinsection")
    except errors.ThinsectionError as error:
        _print_error("error: ", error)
        sys.exit(EXIT_OUTPUT if isinstance(error, errors.OutputError) else EXIT_USAGE)
    except errors.Stopped as stop:
        _print_error("", stop)
        sys.exit(stop.exit_code)


def _check_slides_exist(arguments: Sequence[str]) -> None:
    """Raises CohortError: a path between the command and its first option does not exist.

    Paths behind an option are checked when the cohort is read.
    """
    asks_help = any(argument.startswith("--help") for argument in arguments)
    if not arguments or arguments[0] not in _TAKE_SLIDES or asks_help:
        return
    for argument in arguments[1:]:
        if argument.startswith("-"):
            break
        if not is_url(argument) and not Path(argument).exists():
            raise CohortError.no_such_slide(argument)


@contextlib.contextmanager
def _choices_printed(arguments: Sequence[str]) -> Iterator[None]:
    """Prints the lines about choices; `--json` leaves standard output to the document."""
    printer = _ChoicePrinter(sys.stderr if "--json" in arguments else sys.stdout)
    logger = logging.getLogger(CHOICES)
    logger.addHandler(printer)
    try:
        yield
    finally:
        logger.removeHandler(printer)


class _ChoicePrinter(logging.Handler):
    """Prints each line once, with options in place of Python's settings."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = with_options(record.getMessage())
        if line not in self._printed:
            self._printed.add(line)
            print(line, file=self._stream, flush=True)


def _print_error(start: str, error: BaseException) -> None:
    """Prints the error and its notes, one per line."""
    from rich.console import Console

    from thinsection.files.urls import without_secrets

    message = str(error)
    if isinstance(error, errors.ThinsectionError):
        message = with_options(message)
    message = without_secrets(message)
    lines = [f"{start}{message}", *getattr(error, "__notes__", [])]
    with contextlib.suppress(OSError):  # the reader of the output may have closed it
        console = Console(stderr=True)
        text = "\n".join(lines)
        console.print(text, style="bold red", markup=False, soft_wrap=True)
