"""Locks: one owner, none for ever."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from thinsection.errors import StoreError
from thinsection.files import lock as lock_module
from thinsection.files.lock import (
    STALE_AFTER_S,
    FileLock,
    heartbeat,
    hold,
)


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
    text = json.dumps(
        {"host": "another-node", "pid": 1, "started": 0.0, "token": "abc"}
    )
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
            context.Process(target=contend, args=(str(path), barrier, wins))
            for _ in range(4)
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
    with pytest.raises(
        StoreError, match=r"output must be writable, got .Not a directory"
    ):
        FileLock(tmp_path / "file" / "sub" / "l").acquire()


CONTAINER = """
import socket, sys, time
from pathlib import Path
from thinsection.files.lock import FileLock
socket.sethostname("box")
lock = FileLock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
time.sleep(float(sys.argv[2]))
"""


def in_container(
    path: Path, seconds: float, *, before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A process in namespaces of its own, on a host called 'box', that takes a lock."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = ["unshare", "--pid", "--fork", "--kill-child", "--uts", "--mount-proc"]
    command += [*before, sys.executable, "-c", CONTAINER, str(path), str(seconds)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_a_live_lock_of_another_container_of_the_same_name_is_not_taken(
    tmp_path: Path,
) -> None:
    unshare = ["unshare", "--pid", "--fork", "--uts", "--mount-proc", "true"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(unshare, check=False).returncode
    ):
        pytest.skip("namespaces cannot be made here")
    # the number of this owner is nobody's in the other container
    shell = ("sh", "-c", '"$@"; true', "sh")
    with in_container(tmp_path / "l", 60, before=shell) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "True\n"
        with in_container(tmp_path / "l", 0) as second:
            text, _ = second.communicate(timeout=30)
        first.kill()
    assert text == "False\n"


def test_a_lock_of_another_boot_or_namespace_is_judged_by_its_age(
    tmp_path: Path,
) -> None:
    lock = FileLock(tmp_path / "l")
    assert lock.acquire()
    document = json.loads((tmp_path / "l").read_text())
    for field in ("boot", "namespace"):
        assert document[field]
        other = {**document, field: "another", "pid": 2**22 - 1}
        (tmp_path / "l").write_text(json.dumps(other))
        assert not FileLock(tmp_path / "l").acquire()
        then = time.time() - 2 * STALE_AFTER_S
        os.utime(tmp_path / "l", (then, then))
        taken = FileLock(tmp_path / "l")
        assert taken.acquire()


def test_a_lock_from_the_future_is_named_and_taken_when_nobody_touches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign(tmp_path / "l", -3600)
    lock = FileLock(tmp_path / "l")
    assert not lock.acquire()
    said = lock.describe()
    assert "process 1 on 'another-node'" in said
    assert str(tmp_path / "l") in said
    assert "in the future of this clock" in said
    now = time.monotonic()
    later = now + STALE_AFTER_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    foreign(tmp_path / "l", -3601)  # touched meanwhile: its owner lives
    assert not lock.acquire()
    monkeypatch.setattr(time, "monotonic", lambda: later + STALE_AFTER_S + 1)
    assert lock.acquire()


def test_who_waits_for_a_lock_is_told_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_TELL_AFTER_S", 0.0)
    foreign(tmp_path / "l", 0)
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        (tmp_path / "l").unlink()

    with hold(tmp_path / "l", on_wait=tell):
        pass
    assert len(said) == 1
    assert "waiting: process 1 on 'another-node' holds" in said[0]
