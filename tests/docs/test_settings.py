"""The TOML files that the pages show are read by the code that reads a user's."""

import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from thinsection.encode import EncoderSpec, registry
from thinsection.qc.pipeline import CHECKS, load_pipeline
from thinsection.report.verdict import load_rules
from thinsection.segment.spec import read_spec

from .pages import ROOT, Block, blocks_of, page_paths

_CHECKS = 'name = "stained"\n[[check]]\nkind = "stains"\nname = "stains"\n'


def _read_encoders(path: Path) -> list[EncoderSpec]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["encoder"]
    return [registry._spec(row) for row in rows]


def _read_variant(path: Path) -> Any:
    """Reads the settings of a stain, for a pipeline that has the check."""
    path.write_text(_CHECKS + path.read_text(encoding="utf-8"), encoding="utf-8")
    return load_pipeline(path)


# how a block begins that is a file of ours -> what reads it
READERS: dict[str, Callable[[Path], object]] = {
    "[[verdict]]": load_rules,
    "[variant": _read_variant,
    "[[check]]": load_pipeline,
    "[segmenter]": read_spec,
    "[[encoder]]": _read_encoders,
}


def _table_of(block: Block) -> str | None:
    """The first of `READERS` that a block has; a pipeline may have [segmenter], too."""
    return next((table for table in READERS if table in block.text), None)


SHOWN = [
    (block, _table_of(block))
    for page in page_paths()
    for block in blocks_of(page)
    if block.language == "toml" and _table_of(block)
]


def test_every_form_is_shown() -> None:
    assert {table for _, table in SHOWN} == set(READERS)


@pytest.fixture
def example_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the check of `examples/plugin` known, as if the package were installed."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "plugin"))
    name = "left_strip"
    point = metadata.EntryPoint(name, "example_plugin.check:LeftStrip", CHECKS.group)
    monkeypatch.setitem(CHECKS._points, name, point)


@pytest.mark.usefixtures("example_plugin")
@pytest.mark.parametrize(("block", "table"), SHOWN)
def test_a_file_of_the_pages_is_read(block: Block, table: str, tmp_path: Path) -> None:
    path = tmp_path / "shown.toml"
    path.write_text(block.text, encoding="utf-8")
    assert READERS[table](path)
