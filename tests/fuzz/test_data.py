"""A few of the mutants of `make fuzz`, its changes, and its commands on sound files."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fuzz.data import Clean, check_clean, fuzz, prepare
from tests.fuzz.data_home import COMMANDS, TARGETS
from tests.fuzz.data_mutants import FORMS, damage

from thinsection.testing import run_and_measure

pytestmark = pytest.mark.check


# In a process of its own: it forks, which a worker of pytest-xdist does not survive.
def sound_and_damaged(home: str) -> dict[str, Any]:
    """What is wrong with commands on sound files, which stay in the folder, and on mutants."""
    prepare(Path(home))
    clean = Clean(Path(home))
    sound = check_clean(clean)
    wrong, counts = fuzz(range(16), 5, clean, 1)
    return {"sound": sound, "wrong": wrong, "counts": dict(counts)}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def endings(home: Path) -> dict[str, Any]:
    """How the commands ended in this home."""
    ran = run_and_measure(
        "tests.fuzz.test_data", "sound_and_damaged", timeout_s=880, home=str(home)
    )
    result: dict[str, Any] = ran.result
    return result


@pytest.mark.timeout(900)
def test_a_few_mutants_end_as_the_contract_says(endings: dict[str, Any]) -> None:
    assert endings["wrong"] == []
    counts: Counter[str] = Counter(endings["counts"])
    assert counts["all: exit code 0"] > 0
    assert counts["all: exit code 2"] + counts["all: exit code 3"] > 4


@pytest.mark.timeout(900)
def test_every_command_takes_the_sound_files_and_every_change_changes_one(
    home: Path, endings: dict[str, Any], tmp_path: Path
) -> None:
    assert endings["sound"] == []
    read = {name for target in TARGETS for name in target.commands}
    assert read == {*COMMANDS}
    data = home / "data"
    for target in TARGETS:
        assert [path for path in data.glob(target.pattern) if path.is_file()]
    for suffix, pattern in {
        ".json": "results/slides/*/slide.json",
        ".csv": "labels.csv",
        ".xlsx": "labels.xlsx",
        ".parquet": "labels.parquet",
        ".toml": "checks.toml",
        ".h5": "results/32px_2mpp/tiles/*.h5",
        ".safetensors": "model/model.safetensors",
        ".xml": "roi/*.xml",
    }.items():
        assert FORMS[suffix]
        path = sorted(data.glob(pattern))[0]
        changed = tmp_path / f"x{suffix}"
        num_changed = 0
        for number in range(12):
            for _ in range(2):  # the same seed makes the same mutant
                if changed.is_dir():
                    changed.rmdir()
                shutil.copy(path, changed)
                how = damage(changed, np.random.default_rng((3, number)))
                assert how
            num_changed += changed.is_dir() or changed.read_bytes() != path.read_bytes()
        assert num_changed >= 9, suffix
