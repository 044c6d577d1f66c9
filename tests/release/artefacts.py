"""Builds the wheel and the sdist of the working tree, and checks what they hold and say."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from trove_classifiers import classifiers as known_classifiers

import thinsection

ROOT = Path(__file__).parents[2]
STATIC = Path("src", "thinsection", "view", "static")
VIEWER_FILES = ("openseadragon.min.js", "openseadragon.LICENSE.txt")
# an address at which nobody answers, so that a build that fetches a file fails at once
NO_NETWORK = {"npm_config_registry": "http://127.0.0.1:9", "PIP_NO_INDEX": "1"}
_PYTHON = re.compile(r"Programming Language :: Python :: (3\.\d+)")


@dataclass(frozen=True)
class Artefacts:
    """The two files that a release uploads."""

    wheel: Path
    sdist: Path


def copy_tree(folder: Path) -> None:
    """Copies what a commit of the working tree would hold, as a clone would have it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def copy_viewer_files(folder: Path) -> None:
    """Copies OpenSeadragon from the working tree into a copy of it, for a build without network."""
    for name in VIEWER_FILES:
        shutil.copy2(ROOT / STATIC / name, folder / STATIC / name)


def build(tree: Path, out: Path, *, network: bool) -> Artefacts:
    """Builds both from a tree that has no environment of its own; the hook may fetch a file.

    Raises RuntimeError with what the build said: it failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    hatchling(
        "build", "--target", "sdist", "--directory", str(out), cwd=tree, network=network
    )
    hatchling(
        "build", "--target", "wheel", "--directory", str(out), cwd=tree, network=network
    )
    (wheel,) = out.glob("thinsection-*.whl")
    (sdist,) = out.glob("thinsection-*.tar.gz")
    return Artefacts(wheel, sdist)


def wheel_of_sdist(sdist: Path, out: Path) -> Path:
    """Builds a wheel from an unpacked sdist, without network."""
    unpacked = out / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    hatchling(
        "build", "--target", "wheel", "--directory", str(out), cwd=tree, network=False
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def hatchling(*arguments: str, cwd: Path, network: bool) -> None:
    """Runs the build backend on a tree."""
    environment = dict(os.environ)
    if not network:
        environment |= NO_NETWORK
    ended = subprocess.run(
        [sys.executable, "-m", "hatchling", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(ended.stdout + ended.stderr)


def problems(artefacts: Artefacts, *, tags: list[str]) -> list[str]:
    """What keeps the two files from being uploaded, in words; empty if nothing does.

    Args:
        artefacts: the files.
        tags: names of the tags of this commit.
    """
    metadata = metadata_of(artefacts.wheel)
    return [
        *_problems_of_tool(
            "twine", "check", "--strict", str(artefacts.wheel), str(artefacts.sdist)
        ),
        *_problems_of_tool("check_wheel_contents", str(artefacts.wheel)),
        *_problems_of_files(artefacts),
        *problems_of_version(str(metadata["Version"]), tags),
        *problems_of_classifiers(
            metadata.get_all("Classifier", []), str(metadata["Requires-Python"])
        ),
    ]


def metadata_of(wheel: Path) -> Message:
    """METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def checksums_of(wheel: Path) -> dict[str, int]:
    """CRC-32 of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {member.filename: member.CRC for member in archive.infolist()}


def problems_of_version(version: str, tags: list[str]) -> list[str]:
    """Whether the version is that of the code, and of the commit's tag where it has one."""
    found = []
    if version != thinsection.__version__:
        found.append(f"version must be {thinsection.__version__}, got {version}")
    releases = [tag for tag in tags if re.match(r"v\d", tag)]
    if releases and releases != [f"v{version}"]:
        found.append(f"tag must be v{version}, got {', '.join(releases)}")
    return found


def problems_of_classifiers(classifiers: list[str], requires_python: str) -> list[str]:
    """Whether every classifier exists, and the named Pythons begin with the oldest allowed one."""
    found = [
        f"{name!r} must be a classifier"
        for name in classifiers
        if name not in known_classifiers
    ]
    versions = [match[1] for match in map(_PYTHON.fullmatch, classifiers) if match]
    oldest = requires_python.removeprefix(">=")
    minors = [int(version.partition(".")[2]) for version in versions]
    if (
        not minors
        or versions[0] != oldest
        or minors != [*range(minors[0], minors[-1] + 1)]
    ):
        found.append(
            f"classifiers must name Python from {oldest} on, got {', '.join(versions)}"
        )
    return found


def _problems_of_tool(module: str, *arguments: str) -> list[str]:
    """Output of a tool that ends with an error."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True
    )
    return [f"{module}: {ended.stdout}{ended.stderr}"] if ended.returncode else []


def _problems_of_files(artefacts: Artefacts) -> list[str]:
    """Files that the viewer or a build needs and that are not there."""
    with zipfile.ZipFile(artefacts.wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(artefacts.sdist) as sdist:
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = [STATIC / name for name in VIEWER_FILES]
    found = []
    for path in wanted:
        if path.relative_to("src").as_posix() not in in_wheel:
            found.append(f"wheel must hold {path.name}")
        if path.as_posix() not in in_sdist:
            found.append(f"sdist must hold {path.name}")
    if ".ci/openseadragon.py" not in in_sdist:
        found.append("sdist must hold the hook of its build")
    return found
