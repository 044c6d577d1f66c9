"""The wheel and the sdist of the working tree, built once without network."""

from pathlib import Path

import pytest

from .artefacts import Artefacts, build, copy_tree, copy_viewer_files


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree as a clone has it: without OpenSeadragon."""
    folder = tmp_path_factory.mktemp("tree")
    copy_tree(folder)
    return folder


@pytest.fixture(scope="session")
def artefacts(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    copy = tmp_path_factory.mktemp("with_viewer") / "tree"
    copy_tree(copy)
    copy_viewer_files(copy)
    return build(copy, tmp_path_factory.mktemp("dist"), network=False)
