"""The command line: quick help, derived flags, one-line errors, exit codes."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.shell import thinsection
from typer.testing import CliRunner

from thinsection.cli import machine
from thinsection.cli.app import COMMANDS, build_app
from thinsection.cli.documents import Finding

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    "COLUMNS": "200",
    "NO_COLOR": "1",
}


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_help_lists_every_command_and_is_quick() -> None:
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = subprocess.run(
            [sys.executable, "-m", "thinsection", "--help"],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        user_s = after.ru_utime - before.ru_utime
        spent.append(user_s + after.ru_stime - before.ru_stime)
    assert found.returncode == 0
    assert all(name in found.stdout for name in COMMANDS)
    # some 0.2 CPU-s; time of day would fail while the machine is busy
    assert min(spent) < 0.6


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_its_module_and_help(name: str) -> None:
    result = CliRunner().invoke(
        build_app([name]), [name, "--help"], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


def test_flags_show_their_one_default_and_their_choices() -> None:
    result = CliRunner().invoke(
        build_app(["run"]), ["run", "--help-all"], env={"COLUMNS": "250"}
    )
    assert "[default: 256]" in result.output
    assert "[drop|pad]" in result.output
    assert "Examples" in result.output


def test_an_error_is_one_line_that_names_the_value_and_exits_with_2(
    tmp_path: Path,
) -> None:
    found = thinsection("run", "none.svs", "--out", tmp_path)
    assert found.returncode == 2
    assert (
        "slide must be an existing file, folder or URL, got 'none.svs'" in found.stderr
    )
    assert "Traceback" not in found.stderr


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(
    tmp_path: Path, he_slide: Path
) -> None:
    import h5py

    (tmp_path / "run.toml").write_text("[tiles]\ntile_px = 128\noverlap = 32\n")
    arguments = [he_slide, "--out", tmp_path / "o", "--config", tmp_path / "run.toml"]
    found = thinsection("run", *arguments, "--until", "tiles", "--overlap", "0")
    assert found.returncode == 0, found.stderr
    with h5py.File(tmp_path / "o" / "128px_0.5mpp" / "tiles" / "he.h5") as file:
        assert file["coords"].attrs["patch_size"] == 128
        assert file["coords"].attrs["overlap"] == 0


def test_config_is_written_once_and_refused_twice(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert thinsection("config", "--write", path).returncode == 0
    assert "tile_px = 256" in path.read_text()
    again = thinsection("config", "--write", path)
    assert again.returncode == 2
    assert "write must name a new file" in again.stderr


def test_a_folder_with_bad_slides_exits_with_3_and_names_them(
    tmp_path: Path, slide_folder: Path
) -> None:
    found = thinsection("run", slide_folder, "--until", "tiles", "--out", tmp_path)
    assert found.returncode == 3
    for name in ("text", "empty", "truncated"):
        assert f"{name}: failed" in found.stdout
    assert "2 done, 3 failed" in found.stdout
    assert found.stderr == ""


def test_aggregate_pools_tiles_files_of_trident(tmp_path: Path) -> None:
    import h5py
    import numpy as np

    from thinsection.store.tiles_h5 import read_slide_embedding

    features = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)
    with h5py.File(tmp_path / "case.h5", "w") as file:
        file["features"] = features
        file["coords"] = np.arange(40).reshape(20, 2) * 512
        file["coords"].attrs["patch_size_level0"] = 512
    found = thinsection("aggregate", tmp_path, "--slide-encoder", "max")
    assert found.returncode == 0, found.stderr
    pooled = read_slide_embedding(only(tmp_path, "slide_features_max-*/case.h5"))
    np.testing.assert_array_equal(pooled.slide_embedding, features.max(axis=0))
    assert (
        "skipped" in thinsection("aggregate", tmp_path, "--slide-encoder", "max").stdout
    )


def test_doctor_names_a_missing_extra_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To rich, `[view]` is markup that shows nothing."""
    remedy = "pip install 'thinsection[view]'"
    monkeypatch.setattr(machine, "_devices", lambda: iter(()))
    found = Finding("format", "anndata", False, remedy)
    monkeypatch.setattr(machine, "_entries", lambda: iter([found]))
    monkeypatch.setattr(machine, "_places", lambda out: iter(()))
    machine.doctor(out=None)
    assert remedy in capsys.readouterr().out


def test_doctor_says_what_is_here() -> None:
    found = thinsection("doctor")
    assert found.returncode == 0
    for word in ("openslide", "tiff", "cpu", "free"):
        assert word in found.stdout
