"""The tutorials on real data run, and their data are those whose hash the script has."""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import pytest
from examples import real_data

from .pages import ROOT

SLIDES = Path(
    os.environ.get("THINSECTION_TEST_SLIDES", ROOT.parent / "shared" / "slides")
)
SLIDE = SLIDES / real_data.SOURCES["slide"].file


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as a user does."""
    script = str(ROOT / "examples" / "real_data.py")
    words = [sys.executable, script, *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not SLIDE.is_file(), reason=f"no {SLIDE.name} in {SLIDES}")
def test_the_slide_is_taken_from_a_folder_without_a_network(tmp_path: Path) -> None:
    taken = command("slide", "--to", str(tmp_path), "--from", str(SLIDES))
    assert taken.returncode == 0, taken.stderr
    assert (tmp_path / SLIDE.name).read_bytes() == SLIDE.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [SLIDE.name]
    # what is there is not asked for again
    again = command("slide", "--to", str(tmp_path), "--from", "no such folder")
    assert again.returncode == 0


def test_a_file_with_other_bytes_is_refused_and_not_kept(tmp_path: Path) -> None:
    (tmp_path / SLIDE.name).write_bytes(b"another slide")
    out = tmp_path / "out"
    refused = command("slide", "--to", str(out), "--from", str(tmp_path))
    assert refused.returncode == 1
    assert "must have the SHA-256 ed92d5a9" in refused.stderr
    assert list(out.iterdir()) == []


def test_an_absent_file_and_an_unknown_name_are_named(tmp_path: Path) -> None:
    absent = command("slide", "--to", str(tmp_path / "out"), "--from", str(tmp_path))
    assert f"--from must have {SLIDE.name}" in absent.stderr
    assert "got 'slides'" in command("slides").stderr


def test_the_parts_of_an_archive_are_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crops = real_data.SOURCES["crops"]
    with zipfile.ZipFile(tmp_path / crops.file, "w") as archive:
        for part in (*crops.parts, "histolytics/data/not_needed.jpg"):
            archive.writestr(part, f"bytes of {part}")
    digest = sha256((tmp_path / crops.file).read_bytes()).hexdigest()
    monkeypatch.setitem(real_data.SOURCES, "crops", replace(crops, sha256=digest))
    out = tmp_path / "out"
    real_data.fetch("crops", out, tmp_path)
    names = sorted(path.name for path in out.iterdir())
    assert names == sorted(crops.results()) and "LICENSE" in names
    text = (out / "hgsc_nest.jpg").read_text()
    assert text == "bytes of histolytics/data/hgsc_nest.jpg"


@pytest.mark.check
@pytest.mark.parametrize(
    ("tutorial", "name"), [("real_slide", "slide"), ("real_crops", "crops")]
)
def test_a_tutorial_runs_on_its_data(tutorial: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    data = tmp_path / "data"
    if name == "slide" and SLIDE.is_file():
        real_data.fetch(name, data, SLIDES)
    elif real_data.is_there(name, real_data.default_folder()):
        shutil.copytree(real_data.default_folder(), data)
    else:
        pytest.skip(f"no data: python examples/real_data.py {name}")
    environment = os.environ | {"THINSECTION_REAL_DATA": str(data), "MPLBACKEND": "agg"}
    script = str(ROOT / "docs" / "tutorials" / f"{tutorial}.py")
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_the_site_shows_a_tutorial_without_results_where_its_data_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    hooks = import_module("docs.hooks")

    class Plugin:
        def __init__(self) -> None:
            self.config: dict[str, list[str]] = {"execute_ignore": []}

    class Config:
        def __init__(self) -> None:
            self.plugins = {"mkdocs-jupyter": Plugin()}

    monkeypatch.setenv("THINSECTION_REAL_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("THINSECTION_TEST_SLIDES", str(tmp_path))
    config = Config()
    hooks.on_config(config)
    ignored = config.plugins["mkdocs-jupyter"].config["execute_ignore"]
    assert ignored == list(hooks.NEEDS)
    for tutorial in hooks.NEEDS:
        assert (ROOT / "docs" / tutorial).is_file()
    if SLIDE.is_file():
        monkeypatch.setenv("THINSECTION_TEST_SLIDES", str(SLIDES))
        config = Config()
        hooks.on_config(config)
        ignored = config.plugins["mkdocs-jupyter"].config["execute_ignore"]
        assert ignored == ["tutorials/real_crops.py"]
