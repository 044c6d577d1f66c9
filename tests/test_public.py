"""The public names resolve."""

from pathlib import Path

import pytest

import thinsection


@pytest.mark.parametrize("name", [n for n in thinsection.__all__ if n != "__version__"])
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(thinsection, name).__doc__


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
