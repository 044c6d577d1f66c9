"""Locks between processes and nodes on a shared file system, and removal of leftover files.

A lock is a file made with O_EXCL that names host, process and a random token. Its owner touches it
every `_HEARTBEAT_S`. Another process may take over a stale lock. A lock is stale in two cases:

    the owner is gone    This can be seen only from the same start of the same host, and from the
                         same PID namespace (a container has its own).
    no heartbeat         For any other owner: the file's time stamp is `STALE_AFTER_S` older than
                         that of a file made now in the same folder, or a waiting process has seen
                         the same time stamp for that long.
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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path, PurePath

import psutil

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import TMP_MARK, output_errors, read_json
from thinsection.machine import file_text
from thinsection.types import Uncopied

# name of the lock file in the folder of a slide or a job
LOCK_NAME = ".lock"
STALE_AFTER_S = 60.0
_HEARTBEAT_S = 10.0
_POLL_S = 0.5
# seconds of waiting before a message says who holds the lock
_TELL_AFTER_S = 5.0
# id of the host's current start; some systems have none
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# first part of the names of scratch folders
_PREFIX = "thinsection"


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Owner of a lock."""

    host: str
    pid: int
    started: float
    token: str
    # id of the host's current start; '' if the system has none
    boot: str = ""
    # PID namespace, in which process numbers are unique; '' if the system has none
    namespace: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host!r}"


class FileLock(Uncopied):
    """One lock file. Not re-entrant; any thread may release it."""

    copy_remedy = "pass its path"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token: str | None = None
        # time stamp of the file, and the time since when it has been the same (monotonic)
        self._last_stamp: tuple[int, float] | None = None

    def acquire(self) -> bool:
        """Takes the lock if it is free or stale; never waits.

        Raises:
            StoreError: the folder cannot be written.
        """
        if self._create():
            return True
        if not self.path.exists():
            # it was released in between
            return self._create()
        # None if the file is being written, or its owner died while writing it
        owner = self.owner()
        if not self._is_stale(owner):
            return False
        return self._steal(owner) and self._create()

    def release(self) -> None:
        """Gives the lock back; does nothing if it is not held, or was taken over."""
        if self.held():
            self.path.unlink(missing_ok=True)
        self._token = None

    def held(self) -> bool:
        """Returns True if this object still holds the lock; another may have taken it as stale."""
        owner = self.owner()
        return owner is not None and owner.token == self._token

    def owner(self) -> LockOwner | None:
        """Returns the owner; None if there is no lock file, or it is not readable (yet)."""
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
            boot=file_text(_BOOT_ID),
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
            except BaseException:
                # an empty file would lock out everybody until it is stale
                with contextlib.suppress(OSError):
                    self.path.unlink()
                raise
        self._token = token
        return True

    def _is_stale(self, owner: LockOwner | None) -> bool:
        if owner is not None and _is_visible(owner):
            return is_gone(owner)
        # seconds for which this object has seen the same time stamp, whatever its date is
        now = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            stamp = self.path.stat().st_mtime_ns
            if self._last_stamp is None or self._last_stamp[0] != stamp:
                self._last_stamp = (stamp, now)
            if now - self._last_stamp[1] >= STALE_AFTER_S:
                return True
        # the time stamp of a new file is the time of day by the file system's clock
        clock_file = self.path.with_name(f"{self.path.name}.now-{secrets.token_hex(4)}")
        try:
            with output_errors(clock_file):
                clock_file.touch()
            age_s = clock_file.stat().st_mtime - self.path.stat().st_mtime
            return age_s >= STALE_AFTER_S
        except FileNotFoundError:
            # the lock was removed in between; the process that did so may create the next one
            return False
        finally:
            with contextlib.suppress(OSError):
                clock_file.unlink(missing_ok=True)

    def describe(self) -> str:
        """Describes the owner, the file and its age, for the person who waits."""
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

        Only the process that creates the marker file for the owner's token may remove the lock. It
        checks the lock again first: another process may have replaced it since, perhaps with a file
        that is still empty.
        """
        token = stale.token if stale else ""
        marker = self.path.with_name(f"{self.path.name}.steal-{token}")
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            # an old marker is from a process that died in this function
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


def is_held(path: Path) -> bool:
    """Returns True if the owner of a lock file seems to work still; nothing is written."""
    owner = FileLock(path).owner()
    if owner is not None and _is_visible(owner):
        return not is_gone(owner)
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    return age_s < STALE_AFTER_S


def is_gone(owner: LockOwner) -> bool:
    """Returns True if the process can be seen from here and has ended."""
    if not _is_visible(owner):
        return False
    try:
        return bool(abs(psutil.Process(owner.pid).create_time() - owner.started) > 1.0)
    except psutil.NoSuchProcess:
        return True


def _is_visible(owner: LockOwner) -> bool:
    """Returns True if the owner's process number means the same process here.

    A container may have the host's name, but its own process numbers.
    """
    if owner.host != socket.gethostname():
        return False
    return owner.namespace == _pid_namespace() and owner.boot == file_text(_BOOT_ID)


def _pid_namespace() -> str:
    """Id of the PID namespace of this process; '' if the system has none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


@contextmanager
def heartbeat(locks: Collection[FileLock]) -> Iterator[None]:
    """Touches locks from a thread while the block runs, and releases them at its end.

    Args:
        locks: the locks; the collection may change in the meantime.
    """
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(_HEARTBEAT_S):
            for lock in list(locks):
                # a file system that was lost may come back
                with contextlib.suppress(OSError):
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
                # a lock that cannot be removed goes stale
                with contextlib.suppress(OSError):
                    lock.release()


@contextmanager
def hold(
    path: Path, *, on_wait: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Waits until nobody else holds the lock, and holds it while the block runs.

    Args:
        path: the lock file.
        on_wait: called once, with a line on the owner, if the wait takes some seconds.
    """
    lock = FileLock(path)
    started = time.monotonic()
    has_reported = False
    while not lock.acquire():
        threading.Event().wait(_POLL_S)
        if not has_reported and time.monotonic() - started > _TELL_AFTER_S:
            has_reported = True
            on_wait(f"waiting: {lock.describe()}")
    with heartbeat({lock}):
        yield


def find_unfinished_files(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """Finds unfinished files, by the stem of the file that they were to become.

    Only a process that holds the lock of such a file may remove it.
    """
    files_by_stem: dict[str, list[Path]] = {}
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                # '.ID.tmp-1234-ab12.zip' becomes 'ID'
                stem, mark, _ = entry.name.removeprefix(".").rpartition(TMP_MARK)
                if mark:
                    files_by_stem.setdefault(stem, []).append(Path(entry.path))
    return files_by_stem


def unfinished_files_of(slide_id: str, others: dict[str, list[Path]]) -> list[Path]:
    """Returns a slide's files, and removes them from `others`.

    Args:
        slide_id: the slide.
        others: result of `find_unfinished_files`: files of this and other slides, by stem.
    """
    files: list[Path] = []
    for stem in list(others):
        # the stem is 'ID' for ID.h5, and 'ID.zarr' for ID.zarr.zip
        if slide_id in (stem, PurePath(stem).stem):
            files += others.pop(stem)
    return files


def sweep_slide(slide_id: str, folder: Path, others: dict[str, list[Path]]) -> None:
    """Removes the files that killed processes left of a slide; the caller holds its lock.

    Args:
        slide_id: the slide.
        folder: its folder; the lock guards everything in it.
        others: result of `find_unfinished_files` for the folders with one file per slide; this
            slide's files are removed from the dict.
    """
    subfolders = [
        Path(entry.path)
        for entry in os.scandir(folder)
        if entry.is_dir(follow_symlinks=False)
    ]
    files = list(
        chain.from_iterable(find_unfinished_files([folder, *subfolders]).values())
    )
    files += unfinished_files_of(slide_id, others)
    stale_before_s = time.time() - STALE_AFTER_S
    for path in folder.glob(f"{LOCK_NAME}.*"):
        if path.lstat().st_mtime < stale_before_s:
            files.append(path)
    for path in files:
        path.unlink(missing_ok=True)


def sweep_old(folder: Path) -> None:
    """Removes unfinished files that have not been written for ten times `STALE_AFTER_S`."""
    for path in chain.from_iterable(find_unfinished_files([folder]).values()):
        with contextlib.suppress(OSError):
            if (
                path.is_file()
                and time.time() - path.stat().st_mtime > 10 * STALE_AFTER_S
            ):
                path.unlink()


@contextmanager
def scratch_folder(kind: str, num_bytes: int = 0) -> Iterator[Path]:
    """Makes a temporary folder, and removes those that killed processes left.

    Args:
        kind: use of the folder, a part of its name.
        num_bytes: bytes that it will hold, for `scratch_bytes` of other processes.
    """
    # removes the folders that killed processes left
    scratch_bytes(kind)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-{kind}-{num_bytes}-") as name:
        FileLock(Path(name) / LOCK_NAME).acquire()
        yield Path(name)


def scratch_bytes(kind: str) -> int:
    """Adds up the bytes of this machine's scratch folders of a kind.

    Folders that killed processes left are removed and not counted.
    """
    pattern = re.compile(rf"{_PREFIX}-{kind}-(\d+)-[a-z0-9_]+")
    total = 0
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{kind}-*"):
        match = pattern.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        owner = FileLock(path / LOCK_NAME).owner()
        # the owner may remove the folder at the same time
        with contextlib.suppress(FileNotFoundError):
            age_s = time.time() - path.stat().st_mtime
            if owner is None:
                is_leftover = age_s > STALE_AFTER_S
            else:
                # a folder of this host that is older than the last boot
                is_before_boot = (
                    owner.host == socket.gethostname()
                    and path.stat().st_mtime < psutil.boot_time()
                )
                is_leftover = is_gone(owner) or is_before_boot
            if is_leftover:
                shutil.rmtree(path, ignore_errors=True)
            else:
                total += int(match[1])
    return total
