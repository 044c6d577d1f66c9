"""The guide for coding agents: printed as it is, in the form of a skill, and true.

`tests/docs` checks its commands, options, names and files, and executes its examples.
"""

import re
import tomllib
from pathlib import Path

import pytest
from tests.support.shell import thinsection

from thinsection.cli import rescue
from thinsection.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = Path(rescue.__file__).with_name(rescue.GUIDE).read_text(encoding="utf-8")
# commands for people, or for other work than slides
LEFT_OUT = {"convert", "deid", "import", "config", "cache", "model", "demo", "skill"}
LEFT_OUT |= {"frames", "rescue"}


def test_the_command_prints_the_file() -> None:
    ended = thinsection("skill")
    assert (ended.returncode, ended.stdout) == (0, TEXT)


def test_its_head_is_that_of_a_skill() -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml reads the head")
    _, head, _ = TEXT.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["name"] == "thinsection"
    # limits of the format: 1,024 characters, and a body of at most 500 lines
    assert 100 < len(fields["description"]) <= 1024
    assert len(TEXT.splitlines()) <= 500


def test_it_names_every_command_for_slides() -> None:
    table = TEXT.split("## Which command\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`thinsection ([a-z]+)", table))
    assert named == COMMANDS.keys() - LEFT_OUT


def test_it_names_every_document_and_only_fields_that_exist() -> None:
    forms = tomllib.loads((ROOT / "tests" / "cli" / "documents.toml").read_text())
    table = TEXT.split("## Read the documents\n")[1].split("\n```")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", table, re.MULTILINE)
    assert sorted(kind for kind, _ in rows) == sorted(forms)
    for kind, text in rows:
        known = {name for path in forms[kind] for name in (path, path.split(".")[-1])}
        for span in re.findall(r"`([^`]+)`", text):
            assert span.removesuffix("[]") in known or span.startswith("--"), span
