"""Locks between processes and nodes on a shared file system; what killed processes left is swept.

A lock is a file made with O_EXCL that names host, process and a random token; its owner touches it
while it lives. It goes stale when its process is gone, where that can be seen (the same host since
its last start, and the same PID namespace: a container has its own), else when it was not touched
for `STALE_AFTER_S`: by the file system's own clock, or as seen by the process that waits.
"""

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path, PurePath

import psutil

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import TMP_MARK, output_errors
from thinsection.files.json_text import read_json

LOCK_NAME = ".lock"  # in the folder of a slide or of a job
STALE_AFTER_S = 60.0
_HEARTBEAT_S = 10.0
_POLL_S = 0.5
_TELL_AFTER_S = 5.0  # of waiting without a word
_PREFIX = "thinsection"  # of scratch folders


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Owner of a lock."""

    host: str
    pid: int
    started: float
    token: str
    boot: str = ""  # which start of the host it was; '' where that is not known
    namespace: str = ""  # in which process numbers count; '' where there is one

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host!r}"


class FileLock:
    """One lock file. Not re-entrant; any thread may release it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token: str | None = None
        # its time stamp when it was looked at, and when that began to be so (monotonic)
        self._seen: tuple[int, float] | None = None

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
        """Tells whether this object still holds it: not so after others found it stale."""
        owner = self.owner()
        return owner is not None and owner.token == self._token

    def owner(self) -> LockOwner | None:
        """Returns who holds it; None where there is no lock or it is not readable (yet)."""
        try:
            return LockOwner(**read_json(self.path))
        except (OSError, ValueError, TypeError):
            return None

    def _create(self) -> bool:
        process = psutil.Process()
        token = secrets.token_hex(8)
        owner = LockOwner(
            host=socket.gethostname(),
            pid=process.pid,
            started=process.create_time(),
            token=token,
            boot=_boot_id(),
            namespace=_pid_namespace(),
        )
        folder = self.path.parent
        rule = "output folder must be writable"
        with (
            rewording(rule, folder, OSError, error=StoreError),
            output_errors(self.path),
        ):
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
        if owner is not None and _is_visible(owner):
            return is_gone(owner)
        if self._unchanged_s() >= STALE_AFTER_S:
            return True
        probe = self.path.with_name(f"{self.path.name}.now-{secrets.token_hex(4)}")
        try:
            with output_errors(probe):
                probe.touch()  # tells the time of the file system that holds both
            return probe.stat().st_mtime - self.path.stat().st_mtime >= STALE_AFTER_S
        except FileNotFoundError:
            return False  # removed in between: whoever did so may make the next one now
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)

    def _unchanged_s(self) -> float:
        """For how long this object has seen the same time stamp, whatever its date is."""
        now = time.monotonic()
        try:
            stamp = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0.0
        if self._seen is None or self._seen[0] != stamp:
            self._seen = (stamp, now)
        return now - self._seen[1]

    def describe(self) -> str:
        """Describes who holds it, with the file and its age, for who waits for it."""
        owner = self.owner()
        holder = str(owner) if owner else "a process without a name"
        try:
            age_s = time.time() - self.path.stat().st_mtime
        except OSError:
            return f"{holder} holds {str(self.path)!r}"
        when = f"touched {age_s:.0f} s ago"
        if age_s < -1:
            when = f"dated {-age_s:.0f} s in the future of this clock"
        return f"{holder} holds {str(self.path)!r}, {when}"

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
            # its maker died in these few lines
            with contextlib.suppress(FileNotFoundError):
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
    """Tells whether a process that can be seen from here has ended; False of any other."""
    if not _is_visible(owner):
        return False
    try:
        return bool(abs(psutil.Process(owner.pid).create_time() - owner.started) > 1.0)
    except psutil.NoSuchProcess:
        return True


def _is_before_boot(owner: LockOwner, folder: Path) -> bool:
    """Tells whether a folder of this host has not changed since the host was started."""
    is_here = owner.host == socket.gethostname()
    return is_here and folder.stat().st_mtime < psutil.boot_time()


def _is_visible(owner: LockOwner) -> bool:
    """Tells whether a process of this owner would be found under its number from here.

    A container may have the host's name and process numbers of its own.
    """
    if owner.host != socket.gethostname():
        return False
    return owner.namespace == _pid_namespace() and owner.boot == _boot_id()


@functools.cache
def _boot_id() -> str:
    """A name of this start of the host; '' where the system tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    """A name of the namespace of process numbers; '' where the system has none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


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
def hold(
    path: Path, *, on_wait: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Waits until nobody else holds the lock, and holds it while the block runs.

    `on_wait` gets, once, who holds it where that takes longer than some seconds.
    """
    lock = FileLock(path)
    begun = time.monotonic()
    has_reported = False
    while not lock.acquire():
        threading.Event().wait(_POLL_S)
        if not has_reported and time.monotonic() - begun > _TELL_AFTER_S:
            has_reported = True
            on_wait(f"waiting: {lock.describe()}")
    with heartbeat({lock}):
        yield


def find_unfinished_files(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """Finds unfinished files, by the stem of the file that they were to become.

    Only a process that holds the lock of such a file may remove it.
    """
    unfinished_files: dict[str, list[Path]] = {}
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                stem, mark, _ = entry.name.removeprefix(".").rpartition(TMP_MARK)
                if mark:
                    unfinished_files.setdefault(stem, []).append(Path(entry.path))
    return unfinished_files


def sweep_slide(slide_id: str, folder: Path, others: dict[str, list[Path]]) -> None:
    """Removes what killed processes left of a slide; the caller holds its lock.

    Args:
        slide_id: the slide.
        folder: its folder; the lock guards everything in it.
        others: `find_unfinished_files` of the folders that have a file of each slide.
    """
    inner = [
        Path(entry.path)
        for entry in os.scandir(folder)
        if entry.is_dir(follow_symlinks=False)
    ]
    files = list(chain.from_iterable(find_unfinished_files([folder, *inner]).values()))
    for stem in list(others):
        # 'ID' of ID.h5, 'ID.zarr' of ID.zarr.zip
        if slide_id in (stem, PurePath(stem).stem):
            files += others.pop(stem)
    oldest_s = time.time() - STALE_AFTER_S
    for path in folder.glob(f"{LOCK_NAME}.*"):
        if path.lstat().st_mtime < oldest_s:
            files.append(path)
    for path in files:
        path.unlink(missing_ok=True)


def sweep_old(folder: Path) -> None:
    """Removes unfinished files that nobody writes any more, after ten times a stale lock's age."""
    for path in chain.from_iterable(find_unfinished_files([folder]).values()):
        with contextlib.suppress(OSError):
            if (
                path.is_file()
                and time.time() - path.stat().st_mtime > 10 * STALE_AFTER_S
            ):
                path.unlink()


@contextmanager
def scratch_folder(kind: str, num_bytes: int = 0) -> Iterator[Path]:
    """A temporary folder that will hold so many bytes; what killed processes left goes first."""
    scratch_bytes(kind)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-{kind}-{num_bytes}-") as name:
        FileLock(Path(name) / LOCK_NAME).acquire()
        yield Path(name)


def scratch_bytes(kind: str) -> int:
    """Adds up the bytes of a kind's scratch folders that living processes of this machine have."""
    pattern = re.compile(rf"{_PREFIX}-{kind}-(\d+)-[a-z0-9_]+")
    total = 0
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{kind}-*"):
        match = pattern.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        owner = FileLock(path / LOCK_NAME).owner()
        with contextlib.suppress(FileNotFoundError):  # its process removes it
            age_s = time.time() - path.stat().st_mtime
            is_old = age_s > STALE_AFTER_S
            if owner:
                is_old = is_gone(owner) or _is_before_boot(owner, path)
            if is_old:
                shutil.rmtree(path, ignore_errors=True)
            else:
                total += int(match[1])
    return total
