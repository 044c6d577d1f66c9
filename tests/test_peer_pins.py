"""Our requirements without an extra fit beside those that other tools publish (peer_pins.toml).

A resolver in small: for each package that a tool and we both name, one published version must meet
both. What a tool's own packages require of ours in turn stands in the file where it limits us.
"""

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FACTS = tomllib.loads(Path(__file__).with_name("peer_pins.toml").read_text())
BASE = PROJECT["dependencies"]
SLIDES = [*BASE, *PROJECT["optional-dependencies"]["slides"]]
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
# packages that read or write slides and tables of them: none may come with the package alone
READERS = ("h5py", "imagecodecs", "openslide", "pillow", "pydicom", "tifffile", "zarr")


def ways_to_install() -> Iterator[tuple[str, str, list[str]]]:
    """Name of a tool with one extra or none, its versions of Python, and all that it requires."""
    for tool in FACTS["tool"]:
        in_turn = [line for lines in tool.get("through", {}).values() for line in lines]
        always = [*tool["requires"], *in_turn]
        yield tool["name"], tool["python"], always
        for extra, lines in tool.get("extras", {}).items():
            yield f"{tool['name']}[{extra}]", tool["python"], [*always, *lines]


WAYS = {name: (python, lines) for name, python, lines in ways_to_install()}


def allowed_versions(lines: Iterable[str], python: str) -> dict[str, SpecifierSet]:
    """Versions of each package that all these lines allow with this Python."""
    environment = {**default_environment(), "python_version": python}
    allowed: dict[str, SpecifierSet] = {}
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not marker.evaluate(environment):
            continue
        name = canonicalize_name(requirement.name)
        allowed[name] = allowed.get(name, SpecifierSet()) & requirement.specifier
    return allowed


def conflicts(ours: list[str], our_python: str, way: str) -> list[str]:
    """Packages of which no published version meets both, or Python; empty if we fit beside."""
    their_python, theirs = WAYS[way]
    both = SpecifierSet(our_python) & SpecifierSet(their_python)
    pythons = list(both.filter(PYTHONS))
    if not pythons:
        return [f"python {both}"]
    of_each_python = []
    for python in pythons:
        ours_allowed = allowed_versions(ours, python)
        theirs_allowed = allowed_versions(theirs, python)
        found = []
        for name in sorted(ours_allowed.keys() & theirs_allowed.keys()):
            allowed = ours_allowed[name] & theirs_allowed[name]
            # without a limit from them every version of ours will do
            published = FACTS["published"].get(name)
            if published is not None and not any(allowed.filter(published)):
                found.append(f"{name} {allowed}")
        of_each_python.append(found)
    return min(of_each_python, key=len)


@pytest.mark.parametrize("way", WAYS)
def test_we_fit_beside_the_tool(way: str) -> None:
    assert conflicts(BASE, PROJECT["requires-python"], way) == []


def test_every_package_that_we_require_has_its_published_versions_in_the_file() -> None:
    for line in BASE:
        name = canonicalize_name(Requirement(line).name)
        assert list(Requirement(line).specifier.filter(FACTS["published"][name])), line


def test_no_package_that_reads_slides_comes_without_the_extra() -> None:
    names = " ".join(canonicalize_name(Requirement(line).name) for line in BASE)
    assert not [reader for reader in READERS if reader in names]


@pytest.mark.parametrize(
    ("raised", "python", "way", "conflict"),
    [
        ("numpy>=2.0", ">=3.10", "slide2vec", "numpy"),
        ("torch>=2.6", ">=3.10", "Mussel[torch-cpu]", "torch"),
        ("torch>=2.6", ">=3.10", "Mussel[tensorflow-gpu]", "torch"),
        ("torch>=2.0.1", ">=3.10", "prov-gigapath", "torch"),
        ("torch>=2.11", ">=3.10", "STAMP[cpu]", "torch"),
        ("tifffile>=2025.1", ">=3.10", "TRIDENT", "tifffile"),
        ("numpy>=2.0", ">=3.12", "TRIDENT", "python"),
    ],
)
def test_a_floor_that_is_raised_shuts_tools_out(
    raised: str, python: str, way: str, conflict: str
) -> None:
    found = conflicts([*BASE, raised], python, way)
    assert len(found) == 1 and found[0].startswith(conflict), found


def test_the_extra_for_slides_fits_beside_few_tools() -> None:
    """Why a rescue may not need it: as uv's and pip's resolvers say too (docs/rescue.md)."""
    python = PROJECT["requires-python"]
    refused = {way for way in WAYS if conflicts(SLIDES, python, way)}
    by_tool = {name.partition("[")[0] for name in refused}
    assert by_tool == {"slide2vec", "TRIDENT", "Mussel", "prov-gigapath"}
    # its extras with PyTorch only
    assert "Mussel" not in refused and "Mussel[torch-gpu]" in refused
