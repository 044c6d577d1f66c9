"""The public names resolve."""

import inspect
import re
from pathlib import Path

import pytest

import thinsection
from thinsection.encode import TileEncoder
from thinsection.pool import SlideEncoder
from thinsection.qc import QcResult, TissueMask
from thinsection.results.folder import Results
from thinsection.results.tile_dataset import TileDataset
from thinsection.slide import Slide
from thinsection.tiles import TileTable


@pytest.mark.parametrize("name", [n for n in thinsection.__all__ if n != "__version__"])
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(thinsection, name).__doc__


# public functions, and the classes of what they return
FUNCTIONS = [n for n in thinsection._PUBLIC if n != "plot"]
CLASSES = [
    Slide,
    TileTable,
    TissueMask,
    QcResult,
    Results,
    TileDataset,
    TileEncoder,
    SlideEncoder,
]
UNREADABLE = re.compile(r"numpy\.ndarray|<function|thinsection\.|typing\.")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_has_names_in_place_of_what_they_stand_for(name: str) -> None:
    text = str(inspect.signature(getattr(thinsection, name)))
    assert not UNREADABLE.search(text), text


@pytest.mark.parametrize("kind", CLASSES)
def test_the_methods_of_what_is_returned_have_names_too(kind: type) -> None:
    methods = inspect.getmembers(kind, inspect.isfunction)
    texts = [str(inspect.signature(one)) for name, one in methods if name[0] != "_"]
    assert texts and not UNREADABLE.search(" ".join(texts)), texts


@pytest.mark.parametrize("name", thinsection.plot.__all__)
def test_a_signature_of_a_plot_has_names(name: str) -> None:
    text = str(inspect.signature(getattr(thinsection.plot, name)))
    assert not UNREADABLE.search(text), text


def test_the_plots_are_all_that_their_module_shows() -> None:
    assert dir(thinsection.plot) == ["embedding", "heatmap", "tiles", "tissue"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tile_gird'"):
        getattr(thinsection, "tile_gird")  # noqa: B009 - mypy would refuse it


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(thinsection.__file__).parent / "py.typed").is_file()


def test_a_room_that_is_imported_does_not_hide_the_function_of_its_name() -> None:
    import thinsection.predict.predicting
    import thinsection.segment

    assert callable(thinsection.segment) and callable(thinsection.predict)
    assert thinsection.predict is thinsection.predict
