"""What killed processes left: unfinished files of slides, scratch folders of this machine."""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

from thinsection.files.atomic import TMP_MARK
from thinsection.files.lock import LOCK_NAME, STALE_AFTER_S, FileLock, is_gone

_PREFIX = "thinsection"


def unfinished(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """Unfinished files of some folders, by the stem of the file that they were to become.

    They may be of processes that live: whoever removes one holds the lock that guards it.
    """
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

    Args:
        slide_id: names the slide's files.
        folder: its own, all of which the lock guards.
        others: `unfinished` of folders that hold a file of each slide.
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
    """Removes unfinished files of a folder that no lock guards: those that nobody writes any more.

    That is after ten times the silence by which a lock goes stale.
    """
    for paths in unfinished([folder]).values():
        for path in paths:
            with contextlib.suppress(OSError):
                if path.is_file() and time.time() - path.stat().st_mtime > 10 * STALE_AFTER_S:
                    path.unlink()


@contextmanager
def scratch_folder(kind: str, num_bytes: int = 0) -> Iterator[Path]:
    """A temporary folder of this process, in TMPDIR; what killed ones left of the kind goes first.

    `num_bytes` is what it will hold, for `scratch_bytes`.
    """
    scratch_bytes(kind)
    with TemporaryDirectory(prefix=f"{_PREFIX}-{kind}-{num_bytes}-") as name:
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
