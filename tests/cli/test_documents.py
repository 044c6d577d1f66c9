"""`--json`: one document on standard output, of the form that the reference page states.

Pydantic derives a JSON schema from each document's class, and jsonschema compares what the command
prints with it: neither is our code.
"""

import json
import re
import tomllib
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from tests.predict.planted import planted
from tests.support.cells import feature, random_rings, write_geojson
from tests.support.shell import Ended, thinsection

from thinsection import __version__
from thinsection.cli.documents import DOCUMENTS
from thinsection.testing.synthetic import write_he_slide

ROOT = Path(__file__).parents[2]
FORMS = Path(__file__).with_name("documents.toml")
PAGE = ROOT / "docs" / "json.md"


def form_of(cls: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Path of each field of a document, such as `slides[].status`, and its type."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        kind = hints[field.name]
        path = f"{prefix}{field.name}"
        inner, end = _inner(kind)
        yield path, _words(kind)
        if inner is not None:
            yield from form_of(inner, f"{path}{end}.")


def version_of(kind: str) -> Any:
    """Version of a kind of document."""
    return get_type_hints(DOCUMENTS[kind])["version"].__args__[0]


def _inner(kind: Any) -> tuple[Any, str]:
    """Class of the objects in a value, and how they are reached."""
    for member in _members(kind):
        if is_dataclass(member):
            return member, ""
        if get_origin(member) is tuple and is_dataclass(get_args(member)[0]):
            return get_args(member)[0], "[]"
    return None, ""


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _words(kind: Any) -> str:
    """Type as JSON names it."""
    if len(_members(kind)) > 1:
        return " or ".join(_words(member) for member in _members(kind))
    if kind is type(None):
        return "null"
    if get_origin(kind) is Literal:
        return "number" if isinstance(get_args(kind)[0], int) else "string"
    if get_origin(kind) is tuple:
        item = _words(get_args(kind)[0])
        is_list = item.startswith("list ")
        return f"list of {item.replace('list', 'lists', 1) if is_list else item + 's'}"
    if get_origin(kind) is dict or is_dataclass(kind):
        return "object"
    return {str: "string", int: "number", float: "number", bool: "boolean"}[kind]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_keeps_its_form_while_its_version_is_the_same(kind: str) -> None:
    """Whoever changes a field raises the version, and then this file."""
    known = tomllib.loads(FORMS.read_text())[kind]
    assert known.pop("version") == version_of(kind)
    form = dict(form_of(DOCUMENTS[kind]))
    assert form.pop("version") == "number"
    assert form == known


def test_every_form_that_is_kept_has_its_document() -> None:
    assert list(tomllib.loads(FORMS.read_text())) == list(DOCUMENTS)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_the_page_has_every_field_with_its_type(kind: str) -> None:
    text = PAGE.read_text().split(f"\n## {kind}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \| \S.* \|$", text, re.MULTILINE)
    wanted = dict(form_of(DOCUMENTS[kind]))
    del wanted["kind"], wanted["version"]
    assert dict(rows) == wanted
    assert f"(version {version_of(kind)})" in text
    assert "--json" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides, one of them broken, and their results."""
    home = tmp_path_factory.mktemp("documents")
    (home / "slides").mkdir()
    write_he_slide(home / "slides" / "good.svs", (900, 700), downsamples=(1, 4))
    (home / "slides" / "bad.svs").write_text("no slide")
    planted(home / "features", cases=12, tiles=(20, 30))
    rings = enumerate(random_rings(40))
    write_geojson(home / "cells.geojson", [feature(ring, n) for n, ring in rings])
    return home


def arguments_of(kind: str, home: Path) -> list[object]:
    """A command that prints a document of this kind."""
    slides = home / "slides"
    out = home / "out"
    features = home / "features"
    table = features / "labels.csv"
    commands: dict[str, list[object]] = {
        "audit": ["audit", features, "--labels", table, "--target", "label"],
        "labels": ["labels", table, "--target", "label"],
        "run": ["run", slides, "--out", out],
        "plan": ["plan", slides, "--until", "tiles", "--slurm"],
        "ls": ["ls", out],
        "merge": ["merge", out, "--out", home / "all"],
        "verify": ["verify", out],
        "efficiency": ["efficiency", out],
        "info": ["info", slides / "good.svs"],
        "doctor": ["doctor"],
        "models": ["models"],
        "models-check": ["models", "check", "efficientnet_lite0", "--device", "cpu"],
        "cells-check": ["cells", "check", home / "cells.geojson"],
    }
    return commands[kind]


def checked(kind: str, ended: Ended) -> dict[str, Any]:
    """Document of a command, compared with the schema of its class."""
    pydantic = pytest.importorskip("pydantic", reason="pydantic makes the schemas")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema compares them")
    document: dict[str, Any] = json.loads(ended.stdout)
    schema = pydantic.TypeAdapter(DOCUMENTS[kind]).json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"version": "1"}, schema)
    assert document["kind"] == kind
    assert list(document) == [field.name for field in fields(DOCUMENTS[kind])]
    return document


def test_a_run_prints_its_document_and_its_messages_apart(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = thinsection("run", folder / "slides", "--out", out, "--json")
    document = checked("run", ended)
    assert ended.returncode == document["exit_code"] == 3
    assert document["counts"] == {
        "done": 1,
        "skipped": 0,
        "empty": 0,
        "excluded": 0,
        "failed": 1,
    }
    bad, good = document["slides"]
    assert (bad["slide_id"], bad["status"], bad["stage"]) == ("bad", "failed", "open")
    assert "no reader opens 'bad.svs'" in bad["error"]
    assert good["num_tiles"] > 0
    assert "good: done" in ended.stderr and "1 done, 1 failed" in ended.stderr
    assert (out / "records" / document["record"] / "run.json").is_file()


@pytest.mark.parametrize("kind", [kind for kind in DOCUMENTS if kind != "run"])
def test_a_command_prints_its_document_alone(kind: str, folder: Path) -> None:
    if not (folder / "out").exists():
        thinsection(*arguments_of("run", folder))
    ended = thinsection(*arguments_of(kind, folder), "--json")
    # the folder has a slide that failed, which a merge leaves out
    assert ended.returncode == (3 if kind == "merge" else 0), ended.stderr
    checked(kind, ended)


def test_ls_and_verify_name_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    thinsection("run", folder / "slides", "--out", out, "--until", "tiles")
    (out / "slides" / "good" / "tissue.png").unlink()
    listed = checked("ls", thinsection("ls", out, "--json"))
    assert listed["slide_ids"] == ["good"]
    assert [failure["slide_id"] for failure in listed["failures"]] == ["bad"]
    assert listed["invocations"][0]["command"] == "run --until tiles"
    ended = thinsection("verify", out, "--json")
    assert ended.returncode == 1
    verified = checked("verify", ended)
    assert verified["versions"] == [__version__]
    damaged = verified["damaged"]
    assert damaged == [{"file": "slides/good/tissue.png", "problem": "missing"}]


def test_a_wrong_setting_prints_no_document(folder: Path, tmp_path: Path) -> None:
    slides = folder / "slides"
    ended = thinsection("run", slides, "--out", tmp_path, "--json", "--encoder", "x")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "error: " in ended.stderr


def test_a_resumed_run_counts_what_it_skips_and_verbose_lists_it(
    folder: Path, tmp_path: Path
) -> None:
    good = folder / "slides" / "good.svs"
    run = ["run", good, "--out", tmp_path, "--until", "tiles"]
    first = thinsection(*run, "--quiet")
    assert (first.returncode, first.stdout) == (0, "")
    again = thinsection(*run)
    assert "1 slide skipped: an earlier run completed" in again.stdout
    assert "good: skipped" not in again.stdout
    listed = thinsection(*run, "--verbose")
    assert "good: skipped, an earlier run completed it with the same" in listed.stdout
    assert "1 slide skipped" not in listed.stdout
    logs = sorted((tmp_path / "records").glob("*/run.log"))
    assert "good: skipped" in logs[-1].read_text()
    both = thinsection(*run, "--quiet", "--verbose")
    assert both.returncode == 2
    assert "--quiet must not be combined with --verbose" in both.stderr


def test_quiet_prints_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    run = ["run", folder / "slides", "--out", tmp_path, "--until", "tiles", "--quiet"]
    ended = thinsection(*run)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 3
    assert lines[0].startswith("bad: failed (open)")
    assert lines[1:] == [f"see {tmp_path}/failed.csv"]


def test_labels_that_must_be_corrected_have_a_document_too(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide_id,label\na,x\nb,x\nc,y\n")
    ended = thinsection("labels", table, "--target", "label", "--json")
    assert ended.returncode == 2
    (problem,) = checked("labels", ended)["problems"]
    assert problem in ended.stderr
