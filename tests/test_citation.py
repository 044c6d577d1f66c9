"""CITATION.cff and pyproject.toml say the same, and what they say is known to those who read it."""

import tomllib
from pathlib import Path

import pytest

import thinsection

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_file_has_what_the_format_requires_and_agrees_with_the_package() -> (
    None
):
    """Required keys: Citation File Format 1.2.0; `type` and `license` are its own words."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert all(
        {"name"} <= a.keys() or {"family-names"} <= a.keys() for a in cited["authors"]
    )
    assert cited["title"].lower() == PROJECT["name"]
    assert cited["version"] == PROJECT["version"] == thinsection.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["keywords"] == PROJECT["keywords"]
    assert cited["abstract"].rstrip(".") == PROJECT["description"]


def test_classifiers_are_known_to_the_index_and_name_no_license_beside_the_expression() -> (
    None
):
    known = pytest.importorskip("trove_classifiers", reason="comes with hatchling")
    assert set(PROJECT["classifiers"]) <= known.classifiers
    assert not any(
        c.startswith("License ::") for c in PROJECT["classifiers"]
    )  # PEP 639
    assert "Typing :: Typed" in PROJECT["classifiers"]
