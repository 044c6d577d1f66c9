"""The extra `slides`: packages that read slides, which `pip install thinsection` leaves out.

A rescue runs in another tool's environment, beside that tool's own versions. So the package alone
asks for little, and everything that reads slides asks for the extra with its newer versions.
"""

import re
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution

from thinsection.errors import MissingDependencyError

SLIDES_PYTHON = (3, 11)
# missing packages that a message names; it counts the others
_SHOWN = 3
_REQUIREMENT_LINE = re.compile(
    r"^Requires-Dist: ([\w.-]+) *>= *([\d.]+) *; *extra *== *['\"]slides['\"]$",
    re.MULTILINE,
)
_VERSION_LINE = re.compile(r"^Version: *(\S+)", re.MULTILINE)
_RELEASE = re.compile(r"\d+(\.\d+)*")


def check_slides() -> None:
    """Checks that Python and every package of the extra are there, in versions that will do.

    Raises:
        MissingDependencyError: one of them is missing or too old.
    """
    problem = slides_problem()
    if problem:
        raise MissingDependencyError(
            f"packages that read slides must be installed, got {problem}; "
            "pip install 'thinsection[slides]', best in an environment of its own with "
            f"Python {_dotted(SLIDES_PYTHON)} or newer"
        )


@cache
def slides_problem() -> str:
    """What keeps this environment from reading slides, in words; empty if it can.

    Empty too where the package runs from its sources and is not installed, as nothing says then
    what it needs.
    """
    problems = []
    python = sys.version_info[:3]
    if python < SLIDES_PYTHON:
        problems.append(f"Python {_dotted(python)} (needs >={_dotted(SLIDES_PYTHON)})")
    missing = []
    for name, least in _REQUIREMENT_LINE.findall(_metadata("thinsection")):
        version = _VERSION_LINE.search(_metadata(name))
        if version is None:
            missing.append(name)
        elif _release(version[1]) < _release(least):
            problems.append(f"{name} {version[1]} (needs >={least})")
    if missing:
        shown = ", ".join(missing[:_SHOWN])
        more = len(missing) - _SHOWN
        problems.append(f"no {shown}" + (f" and {more} more" if more > 0 else ""))
    return ", ".join(problems)


def _metadata(name: str) -> str:
    """Text of a distribution's METADATA; empty where it is not installed.

    Read by lines here: `importlib.metadata` parses it as an e-mail, in five times as long.
    """
    try:
        return distribution(name).read_text("METADATA") or ""
    except PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    """Numbers of a version, without zeros at the end: 2.6.0+cpu is (2, 6)."""
    match = _RELEASE.match(version)
    numbers = [int(part) for part in match[0].split(".")] if match is not None else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def moved_names(face: str, homes: dict[str, str]) -> Callable[[str], object]:
    """`__getattr__` of a module whose names have moved; each says its new place when it is used.

    Args:
        face: name of the module.
        homes: module that holds each name now.
    """

    def getattr_of_face(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        warnings.warn(
            f"{face}.{name} is deprecated; use {homes[name]}.{name}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(import_module(homes[name]), name)

    return getattr_of_face
