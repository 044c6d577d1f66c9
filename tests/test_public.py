"""The public names resolve, and the README's tour in Python runs as written."""

import os
import re
from pathlib import Path

import pytest

import thinsection

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("name", [n for n in thinsection.__all__ if n != "__version__"])
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(thinsection, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tile_gird'"):
        getattr(thinsection, "tile_gird")  # noqa: B009 - mypy would refuse it


def test_the_tour_of_the_readme_runs(tmp_path: Path, he_slide: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (tmp_path / "slides").mkdir()
    (tmp_path / "a.svs").write_bytes(he_slide.read_bytes())
    (tmp_path / "slides" / "b.svs").write_bytes(he_slide.read_bytes())
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        names: dict[str, object] = {}
        exec(compile(code, "README.md", "exec"), names)
    finally:
        os.chdir(before)
    assert list((tmp_path / "results" / "256px_0.5mpp").glob("slide_features_*/b.h5"))
    assert getattr(names["stored"], "features", None) is not None
    assert getattr(names["slide_embedding"], "shape", None) == (1280,)


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(thinsection.__file__).parent / "py.typed").is_file()


def test_a_room_that_is_imported_does_not_hide_the_function_of_its_name() -> None:
    import thinsection.predict.predicting
    import thinsection.segment

    assert callable(thinsection.segment) and callable(thinsection.predict)
    assert thinsection.predict is thinsection.predict
