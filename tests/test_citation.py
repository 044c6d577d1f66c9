"""What says who made the package and which version it is: all of it says the same, and is true."""

import json
import re
import subprocess
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import thinsection

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEVELOPERS = "The Thinsection developers"
# what a person fills in: no file has it, and CITATION.cff says so
FOR_A_PERSON = (
    "orcid",
    "affiliation",
    "doi",
    "given-names",
    "family-names",
    "repository-code",
)
_SECTION = re.compile(r"^## (\d+\.\d+\.\d+)(?: \((\d{4}-\d\d-\d\d)\))?$", re.MULTILINE)


def cff() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    document = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert isinstance(document, dict)
    return document


def read(name: str) -> dict[str, Any]:
    document = json.loads((ROOT / name).read_text())
    assert isinstance(document, dict)
    return document


def sections() -> list[tuple[str, str]]:
    """Version and date of each section of the change log, newest first."""
    return _SECTION.findall((ROOT / "CHANGELOG.md").read_text())


def test_the_version_has_one_place() -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    assert build["version"]["path"] == "src/thinsection/__init__.py"
    text = (ROOT / build["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+?)"', text, re.MULTILINE) == [
        thinsection.__version__
    ]


def test_the_citation_file_has_what_the_format_requires_and_agrees_with_the_package() -> (
    None
):
    """Required keys: Citation File Format 1.2.0; `type` and `license` are its own words."""
    cited = cff()
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["authors"] == [{"name": DEVELOPERS}]
    assert cited["title"].lower() == PROJECT["name"]
    assert cited["version"] == thinsection.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["keywords"] == PROJECT["keywords"]
    assert cited["abstract"].rstrip(".") == PROJECT["description"]


def test_codemeta_and_zenodo_say_the_same_as_the_citation_file() -> None:
    cited = cff()
    codemeta = read("codemeta.json")
    zenodo = read(".zenodo.json")
    released = str(cited["date-released"])
    assert codemeta["name"] == zenodo["title"] == cited["title"]
    assert codemeta["version"] == zenodo["version"] == cited["version"]
    assert codemeta["dateModified"] == zenodo["publication_date"] == released
    assert codemeta["description"] == zenodo["description"] == PROJECT["description"]
    assert codemeta["keywords"] == zenodo["keywords"] == PROJECT["keywords"]
    assert zenodo["license"] == PROJECT["license"]
    assert codemeta["license"] == f"https://spdx.org/licenses/{PROJECT['license']}"
    assert [one["name"] for one in codemeta["author"]] == [DEVELOPERS]
    assert zenodo["creators"] == [{"name": DEVELOPERS}]
    assert zenodo["upload_type"] == "software"
    assert codemeta["@type"] == "SoftwareSourceCode"


def test_no_file_has_what_only_a_person_knows_and_the_note_names_it() -> None:
    note = "".join(
        line
        for line in (ROOT / "CITATION.cff").read_text().splitlines(keepends=True)
        if line.startswith("#")
    )
    for word in FOR_A_PERSON:
        assert word in note, word
    for name in ("CITATION.cff", "codemeta.json", ".zenodo.json"):
        text = (ROOT / name).read_text().replace(note, "").lower()
        for word in (*FOR_A_PERSON, "givenname", "familyname"):
            assert f"{word}:" not in text and f'"{word}"' not in text, (name, word)


def test_the_newest_section_of_the_change_log_is_this_version_in_some_ten_lines() -> (
    None
):
    assert PROJECT["name"] == "thinsection"
    listed = sections()
    version, released = listed[0]
    assert version == thinsection.__version__
    assert (
        released
        == str(cff()["date-released"])
        == date.fromisoformat(released).isoformat()
    )
    assert len({version for version, _ in listed}) == len(listed)
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = text.split(f"## {version}")[1].split("\n## ")[0]
    assert 5 <= len(re.findall(r"^- ", newest, re.MULTILINE)) <= 12
    whole = ROOT / "docs" / "changes" / f"{version}.md"
    assert f"docs/changes/{version}.md" in newest and whole.is_file()
    assert "docs/upgrading.md" in newest
    assert whole.read_text().startswith(f"# Changes of {version} ({released})\n")


def problem_of_tags(tags: list[str], version: str) -> str:
    """What is wrong with a commit's tags; '' if nothing is."""
    releases = [tag for tag in tags if re.fullmatch(r"v?\d+(\.\d+)+\S*", tag)]
    if releases in ([], [f"v{version}"]):
        return ""
    return f"tag must be v{version}, got {', '.join(releases)}"


def test_a_tag_of_this_commit_is_the_version() -> None:
    assert problem_of_tags(["v0.1.9"], "0.2.0") == "tag must be v0.2.0, got v0.1.9"
    assert problem_of_tags(["0.2.0"], "0.2.0")  # without v
    assert problem_of_tags(["v0.2.0", "seen"], "0.2.0") == ""
    assert problem_of_tags(["v0.2.0", "v0.2.0rc1"], "0.2.0")
    ended = subprocess.run(
        ["git", "tag", "--points-at", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        pytest.skip(f"not a clone: {ended.stderr.strip()}")
    assert problem_of_tags(ended.stdout.split(), thinsection.__version__) == ""


def test_classifiers_are_known_to_the_index_and_name_no_license_beside_the_expression() -> (
    None
):
    known = pytest.importorskip("trove_classifiers", reason="comes with hatchling")
    assert set(PROJECT["classifiers"]) <= known.classifiers
    assert not any(
        c.startswith("License ::") for c in PROJECT["classifiers"]
    )  # PEP 639
    assert "Typing :: Typed" in PROJECT["classifiers"]
