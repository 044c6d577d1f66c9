"""A few of the mutants of `make fuzz`, its changes, and its commands on sound files."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fuzz.data import check_clean, fuzz, prepare
from tests.fuzz.data_home import COMMANDS, TARGETS
from tests.fuzz.data_mutants import FORMS, damage

from thinsection.testing import run_and_measure

pytestmark = pytest.mark.check


# In processes of their own: they fork, which a worker of pytest-xdist does not survive.
def few_mutants(home: str) -> dict[str, Any]:
    """What is wrong with a few mutants, and how many ended in which way."""
    wrong, counts = fuzz(range(16), 5, Path(home), 1)
    return {"wrong": wrong, "counts": dict(counts)}


@pytest.mark.timeout(600)
def test_a_few_mutants_end_as_the_contract_says(tmp_path: Path) -> None:
    ran = run_and_measure(
        "tests.fuzz.test_data", "few_mutants", timeout_s=580, home=str(tmp_path)
    )
    assert ran.result["wrong"] == []
    counts: Counter[str] = Counter(ran.result["counts"])
    assert counts["all: exit code 0"] > 0
    assert counts["all: exit code 2"] + counts["all: exit code 3"] > 4


def sound_home(home: str) -> list[str]:
    """What is wrong with the commands on sound files, which stay in the folder."""
    prepare(Path(home))
    return check_clean(Path(home))


@pytest.mark.timeout(900)
def test_every_command_takes_the_sound_files_and_every_change_changes_one(
    tmp_path: Path,
) -> None:
    ran = run_and_measure(
        "tests.fuzz.test_data", "sound_home", timeout_s=880, home=str(tmp_path)
    )
    assert ran.result == []
    read = {name for target in TARGETS for name in target.commands}
    assert read == {*COMMANDS}
    data = tmp_path / "data"
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
