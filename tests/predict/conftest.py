"""Models trained once a session on the parts of a real slide."""

from pathlib import Path

import pytest
from tests.conftest import REAL_SLIDES
from tests.predict.lesions import Trained, trained_on_parts


@pytest.fixture(scope="session")
def source() -> Path:
    path = REAL_SLIDES / "tcga-cr-7395-01a-01-ts1.svs"
    if not path.is_file():
        pytest.skip(f"no real slide at {path}; set THINSECTION_TEST_SLIDES")
    return path


@pytest.fixture(scope="session")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Eight slides, the results of a run on them, and a model; tests copy, and change nothing."""
    return trained_on_parts(source, tmp_path_factory.mktemp("parts"))
