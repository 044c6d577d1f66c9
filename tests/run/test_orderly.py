"""Every end is an orderly end: whatever stops a run, the same command goes on to the same bytes.

`make faults` repeats these twenty times and fails the disk at every single write.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from thinsection.errors import Stopped
from thinsection.report import index
from thinsection.run.run import run
from thinsection.testing.synthetic import write_he_slide

pytestmark = pytest.mark.check  # signals, kills and failing disks

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
REPEATS = int(os.environ.get("THINSECTION_FAULT_REPEATS", "2"))
EVERY_WRITE = REPEATS >= 20
RAY = pytest.param(
    ("--executor", "ray", "--workers", "2"),
    marks=pytest.mark.skipif(
        not EVERY_WRITE, reason="a Ray takes 20 s to start: `make faults`"
    ),
)
SHIM = HERE.parent / "support" / "failing_disk.c"


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    for number in range(3):
        write_he_slide(
            folder / f"s{number}.svs",
            (900, 800),
            seed=number,
            downsamples=(1,),
            white=255,
        )
    return folder


def lines_of(
    script: str, *arguments: object, **environment: str
) -> list[dict[str, Any]]:
    """What a script of this folder printed: the undisturbed run, then the disturbed ones."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    child = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=ENVIRONMENT | environment,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler for the failing file layer")
    library = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SHIM), "-ldl"]
    subprocess.run(command, check=True)
    return str(library)


GOES_ON = """
import gc, os, sys
from pathlib import Path
import numpy as np
from thinsection.store.tiles_h5 import TilesWriter

def write(path):
    with TilesWriter(path, dim=8, attributes={"patch_size": 256}) as writer:
        writer.append(np.zeros((3, 2), np.int64), np.ones((3, 8), np.float32))
        for number in range(8):
            writer.add_column(f"c{number}", np.arange(3.0))

failed = False
os.environ |= {"FAIL_BELOW": sys.argv[1], "FAIL_AT": sys.argv[2], "FAIL_ERRNO": "5"}
try:
    write(Path(sys.argv[1], "failed.h5"))
except OSError:
    failed = True
del os.environ["FAIL_BELOW"]
gc.collect()
for number in range(20):
    write(Path(sys.argv[1], f"{number}.h5"))
print(failed)
"""


@pytest.mark.parametrize("fail_at", [1, 2, 3, 5, 10, 20, 30])
def test_a_process_whose_disk_failed_under_hdf5_writes_on_when_it_is_back(
    tmp_path: Path, shim: str, fail_at: int
) -> None:
    command = [sys.executable, "-c", GOES_ON, str(tmp_path), str(fail_at)]
    env = ENVIRONMENT | {"LD_PRELOAD": shim}
    child = subprocess.run(
        command, capture_output=True, text=True, env=env, check=False
    )
    assert (child.returncode, child.stdout) == (0, "True\n"), child.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_that_fails_at_any_write_ends_the_run_with_a_word_and_it_resumes_to_the_same_bytes(
    tmp_path: Path, slides: Path, shim: str, number: int
) -> None:
    points = 0 if EVERY_WRITE and number == errno.ENOSPC else 4
    arguments = (slides, tmp_path, number, points)
    reference, *failed = lines_of("fail_at_write.py", *arguments, LD_PRELOAD=shim)
    assert reference["writes"] > 300
    assert len(failed) == (points or reference["writes"])
    for found in failed:
        # the last writes of a run are a record's, which is not worth a run
        assert found["code"] in (2, 4) or found["at"] > reference["writes"] - 10, found
        assert os.strerror(number) in found["said"] or found["code"] == 0, found
        if found["code"] == 4:
            assert "run the same command again" in found["said"], found
        assert found["resumed"] == 0
        assert found["left"] == []
        assert found["digest"] == reference["digest"]


@dataclass(frozen=True)
class Disturbed:
    """What runs with some flags left that got a signal, and the one that got none."""

    flags: tuple[str, ...]
    reference: dict[str, Any]
    runs: list[dict[str, Any]]

    def ended_by(self, name: str) -> list[dict[str, Any]]:
        return [found for found in self.runs if found["signal"] == name]


@pytest.fixture(
    scope="module",
    params=[(), ("--workers", "2"), ("--executor", "dask", "--workers", "2"), RAY],
    ids=lambda flags: f"{flags}",
)
def disturbed(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    slides: Path,
) -> Disturbed:
    """Runs with each signal, of one warm process, beside one undisturbed run."""
    flags = request.param
    # a kill leaves the processes of Ray
    signals = "TERM" if "ray" in flags else "TERM,KILL"
    out = tmp_path_factory.mktemp("disturbed")
    reference, *runs = lines_of("signal_at.py", slides, out, signals, REPEATS, *flags)
    assert len(runs) == REPEATS * len(signals.split(","))
    return Disturbed(flags, reference, runs)


def test_a_run_that_is_asked_to_end_leaves_tables_and_no_litter_and_resumes_to_the_same_bytes(
    disturbed: Disturbed,
) -> None:
    for found in disturbed.ended_by("TERM"):
        assert found["code"] in (0, 143), found
        assert found["ended_after_s"] < 20
        assert found["tables"] or not found["records"], found  # nothing had begun
        if found["records"] and found["code"]:
            assert "stopped by SIGTERM" in found["said"][0]
            assert "of 3 slides done, tables are in" in found["said"][1]
        if not {"dask", "ray"} & {
            *disturbed.flags
        }:  # these kill their workers, see below
            assert found["left"] == [], found
        check_resumed(found, disturbed.reference)


def test_a_run_that_is_killed_is_swept_and_resumed_to_the_same_bytes(
    disturbed: Disturbed,
) -> None:
    if "ray" in disturbed.flags:
        pytest.skip("a kill leaves the processes of Ray")
    for found in disturbed.ended_by("KILL"):
        assert found["code"] in (0, -9), found
        check_resumed(found, disturbed.reference)


def check_resumed(found: dict[str, Any], reference: dict[str, Any]) -> None:
    assert found["resumed"] == 0
    assert found["left_then"] == []
    assert found["digest"] == reference["digest"]


def test_a_signal_while_thumbnails_are_drawn_is_obeyed_before_the_next_one(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands take minutes, and who ends the process may have no more than 30 s."""
    settings: dict[str, Any] = {"until": "tissue", "memory": "256MiB"}
    run([slides], out=tmp_path, **settings)
    shutil.rmtree(tmp_path / index.THUMBNAILS)
    drawn = list[Path]()

    def stopped(picture: Path, mask: Path | None = None) -> Any:
        drawn.append(picture)
        raise Stopped("SIGTERM", 143)

    monkeypatch.setattr(index, "_outlined_thumbnail", stopped)
    with pytest.raises(Stopped) as caught:
        run([slides / "s0.svs"], out=tmp_path, **settings)
    assert len(drawn) == 1
    assert "1 of 1 slide done, tables are in" in caught.value.__notes__[0]
    assert "s2" in (tmp_path / "summary.csv").read_text()
    assert (tmp_path / index.INDEX).is_file()
