"""A few of the mutants of `make fuzz`, its changes, and its commands on sound files."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.fuzz.data import check_clean, fuzz, prepare
from tests.fuzz.data_home import COMMANDS, TARGETS
from tests.fuzz.data_mutants import FORMS, damage

pytestmark = pytest.mark.check


@pytest.mark.timeout(600)
def test_a_few_mutants_end_as_the_contract_says(tmp_path: Path) -> None:
    wrong, counts = fuzz(range(16), 5, tmp_path, 1)
    assert not wrong, "\n".join(wrong)
    assert counts["all: exit code 0"] > 0
    assert counts["all: exit code 2"] + counts["all: exit code 3"] > 4


@pytest.mark.timeout(900)
def test_every_command_takes_the_sound_files_and_every_change_changes_one(
    tmp_path: Path,
) -> None:
    prepare(tmp_path)
    assert check_clean(tmp_path) == []
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
