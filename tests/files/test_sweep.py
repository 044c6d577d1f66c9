"""What killed processes left is swept, what living ones have is not."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from thinsection.files.lock import (
    LOCK_NAME,
    find_unfinished_files,
    scratch_bytes,
    scratch_folder,
    sweep_old,
    sweep_slide,
)


@pytest.fixture(autouse=True)
def own_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def touch(path: Path, *, age_s: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_a_slides_unfinished_files_go_and_those_of_others_stay(tmp_path: Path) -> None:
    grid, own = tmp_path / "grid" / "features_x", tmp_path / "slides" / "a"
    gone = [
        grid / ".a.tmp-12-ab",
        grid / ".a.zarr.tmp-12-ab.zip",
        own / ".slide.tmp-1-2.json",
    ]
    gone += [own / "qc_auto" / ".pen.tmp-1-2.png"]
    kept = [
        grid / "a.h5",
        grid / ".b.tmp-12-ab",
        grid / ".ab.tmp-12-ab",
        own / "slide.json",
    ]
    kept += [own / f"{LOCK_NAME}.now-1"]  # of a process that looks at the lock now
    old = touch(own / f"{LOCK_NAME}.steal-1", age_s=100)
    for path in (*gone, *kept):
        touch(path)
    sweep_slide("a", own, find_unfinished_files([grid]))
    assert not any(path.exists() for path in (*gone, old))
    assert all(path.exists() for path in kept)


def test_files_that_no_lock_guards_go_when_nobody_writes_them_any_more(
    tmp_path: Path,
) -> None:
    old = touch(tmp_path / "out" / ".summary.tmp-1-2.csv", age_s=3600)
    new = touch(tmp_path / "out" / ".failed.tmp-1-2.csv")
    sweep_old(tmp_path / "out")
    assert not old.exists()
    assert new.exists()


def test_scratch_of_a_killed_process_goes_and_folders_of_similar_names_stay(
    own_tmpdir: Path,
) -> None:
    code = (
        "import os, tempfile; from thinsection.files.lock import scratch_folder; "
        f"tempfile.tempdir = {str(own_tmpdir)!r}; "
        "held = scratch_folder('staged', 700); held.__enter__(); os._exit(9)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=False)
    similar = [
        own_tmpdir / f"thinsection-staged-{name}" for name in ("x-y", "old", "7-")
    ]
    for path in similar:
        path.mkdir()
    assert len(list(own_tmpdir.iterdir())) == 4
    with scratch_folder("staged", 50) as mine:
        assert scratch_bytes("staged") == 50
        assert mine.exists()
    assert sorted(own_tmpdir.iterdir()) == sorted(similar)
