"""The folder of a reader who has run the README's commands."""

import shutil
from pathlib import Path

import pytest
from tests.docs.data import write_inputs, write_results
from tests.support.shared_folder import shared_folder


def write_small_data(folder: Path) -> None:
    """Writes slides, tables, results, a model, and the measured speed of this machine."""
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        write_results(folder)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has run the README's commands; pages get a copy."""
    return shared_folder(tmp_path_factory, "documentation", write_small_data)


@pytest.fixture
def at_page(small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for a page, which is the current folder."""
    home = tmp_path / "home"
    shutil.copytree(small_data, home, symlinks=True)
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    return home
