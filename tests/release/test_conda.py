"""The conda recipe asks for what pyproject.toml asks for, in the same versions."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import thinsection

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# names of conda-forge that are not those of PyPI
NAMES = {
    "matplotlib": "matplotlib-base",
    "openslide-bin": "openslide",
    "ray": "ray-core",
    "torch": "pytorch",
}
# the wheel's version has the number of its build: 4.0.0.8 holds the library 4.0.0
LIBRARY = "openslide-bin"


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the recipe")
    text = (ROOT / "conda" / "recipe.yaml").read_text()
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def pins(lines: list[str]) -> dict[str, str]:
    """Least version of each package, by its name at conda-forge; of two the higher one."""
    found: dict[str, str] = {}
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"python_version": "3.11"}):
            continue
        if requirement.name == "thinsection":
            continue
        name = canonicalize_name(requirement.name)
        least = str(requirement.specifier).removeprefix(">=")
        if name == LIBRARY:
            least = ".".join(least.split(".")[:3])
        name = NAMES.get(name, name)
        found[name] = max(found.get(name, "0"), least, key=numbers)
    return found


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def recipe_pins(lines: list[str]) -> dict[str, str]:
    found = {}
    for line in lines:
        match = re.fullmatch(r"([\w-]+) >=([\d.]+|\$\{\{ python_min \}\})", line)
        assert match, line
        found[canonicalize_name(match[1])] = match[2]
    return found


def test_it_runs_with_what_the_extra_slides_asks_for(recipe: dict[str, Any]) -> None:
    asked = recipe_pins(recipe["requirements"]["run"])
    assert asked.pop("python") == "${{ python_min }}"
    assert asked == pins([*PROJECT["dependencies"], *EXTRAS["slides"]])


def test_its_constraints_are_the_other_extras(recipe: dict[str, Any]) -> None:
    lines = [
        line for extra in ("hub", "cluster", "view", "all") for line in EXTRAS[extra]
    ]
    assert recipe_pins(recipe["requirements"]["run_constraints"]) == pins(lines)


def test_its_version_licence_and_command_are_ours(recipe: dict[str, Any]) -> None:
    assert recipe["context"]["version"] == thinsection.__version__
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    scripts = [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts


def test_a_pin_that_differs_is_noticed() -> None:
    raised = ["h5py>=3.13" if x.startswith("h5py") else x for x in EXTRAS["slides"]]
    assert pins(raised) != pins(EXTRAS["slides"])
    assert pins(["numpy>=1.24", "numpy>=2.0"]) == {"numpy": "2.0"}
    assert pins(["openslide-bin>=4.0.0.8"]) == {"openslide": "4.0.0"}
