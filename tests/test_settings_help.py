"""`help(ts.run)` lists every setting; the classes of results and slides are imported from rooms."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from tests.settings_types import SETTINGS

import thinsection as ts
from thinsection.config import flat_fields
from thinsection.results import EmbeddedTiles, Results, TilesFile
from thinsection.results import folder as results_folder

FUNCTIONS = [
    (function, config) for _, config, functions in SETTINGS for function in functions
]


@pytest.mark.parametrize(
    ("function", "config"), FUNCTIONS, ids=lambda item: item.__name__
)
def test_help_lists_each_setting_once_with_its_default(
    function: Callable[..., object], config: Any
) -> None:
    words = inspect.getdoc(function) or ""
    assert max(map(len, words.splitlines())) <= 100
    listed = words.partition("\nSettings, which are keywords as well:\n")[2]
    fields = {name: field for name, (_, field, _) in flat_fields(config).items()}
    fields = fields or {f.name: f for f in dataclasses.fields(config)}
    own = inspect.signature(function).parameters
    assert fields
    for name, field in fields.items():
        line = f"\n    {name}={field.default!r}: "
        assert f"\n{listed}".count(line) == (name not in own), name


def test_help_keeps_what_the_docstring_says() -> None:
    words = inspect.getdoc(ts.run) or ""
    assert words.startswith("Takes slides from files to embeddings")
    assert (
        "Raises:" in words and "\n    tile_px=256: Edge of a tile in pixels." in words
    )


def test_a_room_has_the_classes_for_type_hints() -> None:
    assert Results is results_folder.Results
    assert issubclass(EmbeddedTiles, TilesFile)
    with pytest.raises(AttributeError, match="no attribute 'Result'"):
        from thinsection import results

        _ = results.Result
