"""The settings that type checkers see are those of the configurations."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import thinsection as ts
from thinsection.config import flat_fields
from thinsection.errors import ConfigError
from thinsection.predict.config import TrainConfig
from thinsection.settings_types import RunSettings, TrainSettings
from thinsection.stages.config import RunConfig

from . import settings_types


def test_the_file_is_the_one_that_the_configurations_give() -> None:
    if find_spec("ruff") is None:
        pytest.skip("ruff formats the file and is not installed")
    current = settings_types.TARGET.read_text(encoding="utf-8")
    assert current == settings_types.text(), "run `python -m tests.settings_types`"


def test_every_setting_has_a_type_but_those_that_are_parameters() -> None:
    run = flat_fields(RunConfig).keys() - RunSettings.__annotations__.keys()
    assert run == {"executor"}
    assert flat_fields(TrainConfig).keys() == TrainSettings.__annotations__.keys()


def test_train_and_plan_take_single_settings_as_run_does(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'untill'.*'until'"):
        ts.plan([tmp_path], untill="tiles")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"unknown setting 'heads'.*'head'"):
        ts.train(tmp_path, out=tmp_path / "out", heads="abmil")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="head must be a known name, got 'abmill'"):
        ts.train(str(tmp_path), out=str(tmp_path / "out"), head="abmill")


def test_the_types_cost_nothing_at_import() -> None:
    code = (
        "import sys, thinsection as ts; ts.run; print('thinsection.settings_types' in"
    )
    code += " sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
