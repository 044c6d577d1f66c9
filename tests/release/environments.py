"""Bare environments: one that uv installs, and one of links to packages that are here already."""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
# variables by which a Python finds packages outside of its environment
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MYPYPATH")


@dataclass(frozen=True)
class Environment:
    """An environment of Python that holds the package, with one extra or none."""

    folder: Path
    extra: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a shell in which it is active."""
        kept = {
            name: value for name, value in os.environ.items() if name not in _FOREIGN
        }
        bin_folder = str(self.folder / "bin")
        path = os.pathsep.join([bin_folder, kept.get("PATH", "")])
        return kept | {"PATH": path, "COLUMNS": "200", "NO_COLOR": "1"}

    def packages(self) -> int:
        """Number of installed distributions."""
        return len([*self.folder.glob("lib/python*/site-packages/*.dist-info")])


def pythons_here(versions: Iterable[str]) -> dict[str, Path]:
    """Interpreters that this machine has, by version; nothing is downloaded."""
    found = {}
    for version in versions:
        ended = uv(
            "python",
            "find",
            "--no-python-downloads",
            "--no-project",
            "--system",
            version,
        )
        if ended.returncode == 0:
            found[version] = Path(ended.stdout.strip())
    return found


def install(python: Path, artefact: Path, extra: str, folder: Path) -> Environment:
    """A bare environment into which uv installs an artefact and what it requires.

    Raises RuntimeError with what uv said: it failed.
    """
    environment = Environment(folder, extra)
    requirement = (
        f"thinsection{f'[{extra}]' if extra else ''} @ {artefact.resolve().as_uri()}"
    )
    commands = (
        ("venv", "--quiet", "--clear", "--python", str(python), str(folder)),
        (
            *("pip", "install", "--quiet", "--python", str(environment.python)),
            *("--constraints", str(CONSTRAINTS), "--reinstall-package", "thinsection"),
            requirement,
        ),
    )
    for command in commands:
        ended = uv(*command)
        if ended.returncode:
            raise RuntimeError(ended.stdout + ended.stderr)
    return environment


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs uv, whose own variables choose the index and the cache."""
    command = [sys.executable, "-m", "uv", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def link(wheel: Path, extra: str, folder: Path) -> Environment:
    """An environment of links to what the wheel requires, and no other package; without network.

    What is not installed here is left out.
    """
    environment = Environment(folder, extra)
    make = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(make, check=True, capture_output=True)
    subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(environment.python),
                "install",
            ),
            *(
                "--quiet",
                "--no-deps",
                "--no-index",
                "--disable-pip-version-check",
                str(wheel),
            ),
        ],
        check=True,
        capture_output=True,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    (ours,) = packages.glob("thinsection-*.dist-info")
    for required in closure(Distribution.at(ours), extra):
        link_files(required, packages)
    return environment


def closure(root: Distribution, extra: str) -> list[Distribution]:
    """Installed distributions that one requires with an extra, and what these require."""
    waiting = [(root, extra)]
    done: set[tuple[str, str]] = set()
    by_name: dict[str, Distribution] = {}
    while waiting:
        current, current_extra = waiting.pop()
        for line in current.requires or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is not None and not marker.evaluate({"extra": current_extra}):
                continue
            for wanted in {"", *requirement.extras}:
                if (requirement.name, wanted) in done:
                    continue
                done.add((requirement.name, wanted))
                if requirement.name == "thinsection":
                    waiting.append((root, wanted))
                    continue
                try:
                    required = distribution(requirement.name)
                except PackageNotFoundError:  # nothing that we run needs it
                    continue
                by_name[requirement.name] = required
                waiting.append((required, wanted))
    return [*by_name.values()]


def link_files(required: Distribution, packages: Path) -> None:
    """Links to the files and folders of a distribution."""
    for top in {file.parts[0] for file in required.files or []}:
        source = Path(str(required.locate_file(top)))
        target = packages / top
        if top != ".." and source.exists() and not target.exists():
            target.symlink_to(source)
