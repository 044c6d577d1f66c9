"""Names that moved into `thinsection.frames` are found at their old places too."""

from importlib import import_module

import pytest

import thinsection.frames
from thinsection.tiles import graph


@pytest.mark.parametrize(
    ("face", "name"),
    [
        ("neighbors", "nearest_neighbors"),
        ("neighbors", "explain"),
        ("structures", "read_structure"),
        ("structures", "FrameOptions"),
        ("rescue", "openfold3"),
    ],
)
def test_an_old_name_is_the_new_one_and_says_where_it_is(face: str, name: str) -> None:
    module = import_module(f"thinsection.{face}")
    message = (
        rf"thinsection\.{face}\.{name} is deprecated since 0\.2\.0 and is removed in 0\.3\.0; "
        rf"use thinsection\.frames\.{name}"
    )
    with pytest.warns(DeprecationWarning, match=message):
        value = getattr(module, name)
    assert value is getattr(thinsection.frames, name)


def test_the_graph_of_tiles_is_found_among_the_neighbours() -> None:
    with pytest.warns(DeprecationWarning, match=r"use thinsection\.tiles\.graph"):
        from thinsection.neighbors import tile_graph
    assert tile_graph is graph.tile_graph


@pytest.mark.parametrize("face", ["neighbors", "structures"])
def test_every_listed_name_is_there(face: str) -> None:
    module = import_module(f"thinsection.{face}")
    for name in module.__all__:
        with pytest.warns(DeprecationWarning):
            assert getattr(module, name).__name__ == name


def test_a_name_that_never_was_is_refused_as_by_any_module() -> None:
    module = import_module("thinsection.structures")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
