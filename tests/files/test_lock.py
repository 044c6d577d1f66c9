"""Locks: one owner, none for ever."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinsection.errors import StoreError
from thinsection.files.lock import STALE_AFTER_S, FileLock, heartbeat


def test_only_one_of_two_gets_it_and_release_frees_it(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "l"), FileLock(tmp_path / "l")
    assert first.acquire()
    assert not second.acquire()
    owner = second.owner()
    assert owner is not None
    assert owner.pid == os.getpid()
    second.release()  # not the owner: nothing happens
    assert first.held()
    first.release()
    assert second.acquire()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; from thinsection.files.lock import FileLock; "
        f"FileLock(Path({str(tmp_path / 'l')!r})).acquire(); os._exit(9)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=False)
    assert (tmp_path / "l").exists()
    assert FileLock(tmp_path / "l").acquire()
    assert [p.name for p in tmp_path.iterdir()] == ["l"]


def foreign(path: Path, age_s: float) -> None:
    text = json.dumps({"host": "another-node", "pid": 1, "started": 0.0, "token": "abc"})
    path.write_text(text)
    then = time.time() - age_s
    os.utime(path, (then, then))


def test_a_lock_of_another_host_is_stale_only_without_heartbeat(tmp_path: Path) -> None:
    foreign(tmp_path / "l", STALE_AFTER_S / 2)
    assert not FileLock(tmp_path / "l").acquire()
    foreign(tmp_path / "l", STALE_AFTER_S * 2)
    assert FileLock(tmp_path / "l").acquire()


def test_an_owner_that_was_taken_over_knows_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "l")
    assert lock.acquire()
    foreign(tmp_path / "l", 0)
    assert not lock.held()
    lock.release()
    assert (tmp_path / "l").exists()


def contend(path: str, barrier: object, wins: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    if FileLock(Path(path)).acquire():
        wins.put(os.getpid())  # type: ignore[attr-defined]
        barrier.wait()  # type: ignore[attr-defined]
    else:
        barrier.wait()  # type: ignore[attr-defined]


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_processes_exactly_one_wins(tmp_path: Path, stale: bool) -> None:
    context = multiprocessing.get_context("spawn")
    for round_ in range(3):
        path = tmp_path / f"l{round_}"
        if stale:
            foreign(path, STALE_AFTER_S * 2)
        barrier, wins = context.Barrier(4), context.SimpleQueue()
        processes = [
            context.Process(target=contend, args=(str(path), barrier, wins)) for _ in range(4)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        winners = []
        while not wins.empty():
            winners.append(wins.get())
        # a stale lock may be left for the next try, but never be won twice
        assert len(winners) == 1 or (stale and not winners)


def test_leaving_the_heartbeat_releases_what_is_left(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "l")
    with heartbeat({lock}):
        assert lock.acquire()
    assert not (tmp_path / "l").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="output folder must be writable"):
        FileLock(tmp_path / "file" / "sub" / "l").acquire()
