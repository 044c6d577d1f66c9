"""Locks between processes and nodes on a shared file system; what killed processes left is swept.

A lock is a file made with O_EXCL that names host, process and a random token; its owner touches it
while it lives. It goes stale when its process is gone (same host) or it was not touched for
`STALE_AFTER_S` (another host), measured against the file system's own clock.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path, PurePath

import psutil

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import TMP_MARK, writing

LOCK_NAME = ".lock"  # in the folder of a slide or of a job
STALE_AFTER_S = 60.0
_HEARTBEAT_S = 10.0
_POLL_S = 0.5
_PREFIX = "thinsection"  # of scratch folders


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Who holds a lock."""

    host: str
    pid: int
    started: float
    token: str


class FileLock:
    """One lock file. Not re-entrant; any thread may release it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token: str | None = None

    def acquire(self) -> bool:
        """Takes the lock if it is free or stale; never waits. StoreError: an unwritable folder."""
        if self._create():
            return True
        if not self.path.exists():  # released in between
            return self._create()
        owner = self.owner()  # None: being written, or its owner died while writing it
        return self._is_stale(owner) and self._steal(owner) and self._create()

    def release(self) -> None:
        """Gives the lock back; nothing happens where it was not held or was taken over."""
        if self.held():
            self.path.unlink(missing_ok=True)
        self._token = None

    def held(self) -> bool:
        """Whether this object still holds it: not so after others found it stale."""
        owner = self.owner()
        return owner is not None and owner.token == self._token

    def owner(self) -> LockOwner | None:
        """Who holds it; None where there is no lock or it is not readable (yet)."""
        try:
            return LockOwner(**json.loads(self.path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _create(self) -> bool:
        process, token = psutil.Process(), secrets.token_hex(8)
        owner = LockOwner(socket.gethostname(), process.pid, process.create_time(), token)
        folder = self.path.parent
        rule = "output folder must be writable"
        with rewording(rule, folder, OSError, error=StoreError), writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                file = self.path.open("x")
            except FileExistsError:
                return False
            try:
                with file:
                    file.write(json.dumps(asdict(owner)))
            except BaseException:  # an empty lock would be another's until it is stale
                with contextlib.suppress(OSError):
                    self.path.unlink()
                raise
        self._token = token
        return True

    def _is_stale(self, owner: LockOwner | None) -> bool:
        if owner is not None and owner.host == socket.gethostname():
            return is_gone(owner)
        probe = self.path.with_name(f"{self.path.name}.now-{secrets.token_hex(4)}")
        try:
            with writing(probe):
                probe.touch()  # tells the time of the file system that holds both
            return probe.stat().st_mtime - self.path.stat().st_mtime >= STALE_AFTER_S
        except FileNotFoundError:  # removed in between: whoever did so may make the next one now
            return False
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)

    def _steal(self, stale: LockOwner | None) -> bool:
        """Removes this owner's stale lock; of several processes exactly one succeeds.

        Whoever makes the marker of its token may remove the lock, and looks again before: what is
        there by now may be the next owner's, who has not written its name yet.
        """
        token = stale.token if stale else ""
        marker = self.path.with_name(f"{self.path.name}.steal-{token}")
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # its maker died in these few lines
                if time.time() - marker.stat().st_mtime > STALE_AFTER_S:
                    marker.unlink()
            return False
        try:
            if self.owner() != stale or not self._is_stale(stale):
                return False
            self.path.unlink(missing_ok=True)
            return True
        finally:
            marker.unlink(missing_ok=True)


def is_gone(owner: LockOwner) -> bool:
    """Whether a process of this host has ended; of another host's that is not known: False."""
    if owner.host != socket.gethostname():
        return False
    try:
        return bool(abs(psutil.Process(owner.pid).create_time() - owner.started) > 1.0)
    except psutil.NoSuchProcess:
        return True


@contextmanager
def heartbeat(locks: Collection[FileLock]) -> Iterator[None]:
    """Touches the locks of a (changing) collection from a thread while the block runs."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(_HEARTBEAT_S):
            for lock in list(locks):
                with contextlib.suppress(OSError):  # a lost share may come back
                    os.utime(lock.path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        try:
            thread.join()
        finally:
            for lock in list(locks):
                with contextlib.suppress(OSError):  # it goes stale with this process
                    lock.release()


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Waits until nobody else holds the lock, and holds it while the block runs."""
    lock = FileLock(path)
    while not lock.acquire():
        threading.Event().wait(_POLL_S)
    with heartbeat({lock}):
        yield


def unfinished(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """Unfinished files by the stem of what they were to become; who removes one holds its lock."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                stem, mark, _ = entry.name.removeprefix(".").rpartition(TMP_MARK)
                if mark:
                    found.setdefault(stem, []).append(Path(entry.path))
    return found


def sweep_slide(slide_id: str, folder: Path, others: dict[str, list[Path]]) -> None:
    """Removes what killed processes left of a slide; the caller holds its lock.

    The lock guards all of `folder`; `others` is `unfinished` of those with a file of each slide.
    """
    inner = [Path(e.path) for e in os.scandir(folder) if e.is_dir(follow_symlinks=False)]
    files = [path for paths in unfinished([folder, *inner]).values() for path in paths]
    for stem in [s for s in others if s == slide_id or PurePath(s).stem == slide_id]:
        files += others.pop(stem)  # 'ID' of ID.h5, 'ID.zarr' of ID.zarr.zip
    old = time.time() - STALE_AFTER_S
    files += [p for p in folder.glob(f"{LOCK_NAME}.*") if p.lstat().st_mtime < old]
    for path in files:
        path.unlink(missing_ok=True)


def sweep_old(folder: Path) -> None:
    """Removes unfinished files that nobody writes any more, after ten times a stale lock's age."""
    for path in chain.from_iterable(unfinished([folder]).values()):
        with contextlib.suppress(OSError):
            if path.is_file() and time.time() - path.stat().st_mtime > 10 * STALE_AFTER_S:
                path.unlink()


@contextmanager
def scratch_folder(kind: str, num_bytes: int = 0) -> Iterator[Path]:
    """A temporary folder that will hold so many bytes; what killed processes left goes first."""
    scratch_bytes(kind)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-{kind}-{num_bytes}-") as name:
        FileLock(Path(name) / LOCK_NAME).acquire()
        yield Path(name)


def scratch_bytes(kind: str) -> int:
    """What the scratch folders of a kind hold that living processes of this machine have."""
    named, total = re.compile(rf"{_PREFIX}-{kind}-(\d+)-[a-z0-9_]+"), 0
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{kind}-*"):
        match = named.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        owner = FileLock(path / LOCK_NAME).owner()
        with contextlib.suppress(FileNotFoundError):  # its process removes it
            age_s = time.time() - path.stat().st_mtime
            if is_gone(owner) if owner else age_s > STALE_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
            else:
                total += int(match[1])
    return total
