"""Objects go to other processes and come back, for a script that is a user's `__main__`."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from thinsection.testing.synthetic import write_he_slide

PACKAGES = {"spawn": None, "joblib": "joblib", "dask": "distributed", "ray": "ray"}


@pytest.mark.check
@pytest.mark.parametrize("way", PACKAGES)
def test_a_users_script_computes_the_same_in_other_processes(
    way: str, tmp_path: Path
) -> None:
    package = PACKAGES[way]
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for seed, name in enumerate(("first slide", "second:slide")):
        path = tmp_path / f"{name}.svs"
        write_he_slide(path, (900, 700), seed=seed, downsamples=(1, 4))
    script = Path(__file__).parent / "support" / "users_script.py"
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path), way],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == "equal"
