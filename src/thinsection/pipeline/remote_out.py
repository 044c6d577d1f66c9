"""A run whose results go to a URL: a local folder holds a slide's files until they are there.

The target looks as a local output folder does. A slide's `slide.json` is taken away before its
files are replaced and put last, so a kill at any moment leaves a finished slide or one that is done
again. Here stay the ledgers of all slides (some kB each) and the files of the slides in work.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from thinsection.errors import ConfigError, StoreError
from thinsection.files.atomic import TMP_MARK, write_json
from thinsection.files.lock import LOCK_NAME
from thinsection.files.remote_folder import RemoteFolder
from thinsection.pipeline.api import RunSummary, run_in_folder
from thinsection.pipeline.results import ERROR_NAME, TRACEBACK_NAME, SlideResult, record_failure
from thinsection.pipeline.slides import OnEvent, RunEvent
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.store.ledger import ELSEWHERE_NAME, LEDGER_NAME

UPLOAD_STAGE = "upload"
_PREFIX = "thinsection-out-"
_KEPT = (LEDGER_NAME, ERROR_NAME)  # what the tables of a run are made from
_LOCAL = (LOCK_NAME, ELSEWHERE_NAME)
_LAST = "run.json"


def run_to_url(
    entries: Sequence[SlideEntry],
    *,
    out: str,
    config: RunConfig,
    stage: str,
    on_event: OnEvent,
    on_message: Callable[[str], None],
) -> RunSummary:
    """See `run`; one run at a time may write to a URL, since object stores have no locks.

    Memory: as `run`, and some kB per slide of the target. Disk (TMPDIR): the files of the slides
    in work.

    Raises:
        ConfigError: another executor than inline, or quality control.
        StoreError: the target cannot be written.
    """
    if config.executor.executor != "inline":
        raise ConfigError(
            f"out must be a folder for --executor {config.executor.executor}, got {out!r}; object "
            "stores have no locks: run on a shared folder and copy it"
        )
    if config.qc.qc != "off":
        raise ConfigError(
            f"out must be a folder with --qc, got {out!r}; its contact sheet needs all pictures"
        )
    target = RemoteFolder(out)
    target.check()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        uploads = _Uploads(target, Path(name))
        uploads.fetch_ledgers()

        by_id = {entry.slide_id: entry for entry in entries}

        def ended(event: RunEvent) -> None:
            if event.kind == "ended" and event.result is not None:
                result = uploads.take(by_id[event.slide_id], event.result)
                event = replace(event, result=result)
            on_event(event)

        summary = run_in_folder(
            entries,
            out=Path(name),
            config=config,
            stage=stage,
            on_event=ended,
            on_message=on_message,
            settle=uploads.settle,
        )
        uploads.put_rest()
    return replace(summary, out=out)


class _Uploads:
    """What goes from the local folder to the target."""

    def __init__(self, target: RemoteFolder, folder: Path) -> None:
        self._target, self._folder = target, folder
        self._there: dict[str, dict[str, int]] = {}  # slide id -> name -> bytes
        self._failed: dict[str, SlideResult] = {}

    def fetch_ledgers(self) -> None:
        """Brings home what the target says of its slides, so that the run resumes from it."""
        sizes = self._target.sizes()
        for name, size in sizes.items():
            slide_id, _, rest = name.partition("/")
            if rest:
                self._there.setdefault(slide_id, {})[rest] = size
        for slide_id, files in self._there.items():
            kept = [name for name in _KEPT if name in files]
            for name in kept:
                local = self._folder / slide_id / name
                local.parent.mkdir(exist_ok=True)
                local.write_bytes(self._target.read(f"{slide_id}/{name}"))
            if kept:
                write_json(self._folder / slide_id / ELSEWHERE_NAME, files)

    def take(self, entry: SlideEntry, result: SlideResult) -> SlideResult:
        """Moves the files of a slide that ended; a failed result where they do not arrive.

        Called in the thread that wrote them: the next slide waits, so that no more than the slides
        in work are held here.
        """
        if result.status == "skipped":
            return result
        try:
            self._move(entry.slide_id)
            return result
        except Exception as error:  # noqa: BLE001 - the per-slide boundary of uploading
            self._drop(entry.slide_id)
            failed = record_failure(self._folder, entry, UPLOAD_STAGE, error)
            self._failed[entry.slide_id] = failed
            return failed

    def settle(self, entry: SlideEntry, result: SlideResult) -> SlideResult:
        """The result of a slide, failed where its files did not arrive."""
        return self._failed.get(entry.slide_id, result)

    def put_rest(self) -> None:
        """Puts the tables, records and, last, run.json.

        Raises:
            StoreError: the target refuses.
        """
        slides = {path.parent.name for path in self._folder.glob(f"*/{LEDGER_NAME}")}
        slides |= {path.parent.name for path in self._folder.glob(f"*/{ERROR_NAME}")}
        names = [n for n in _files(self._folder) if n.partition("/")[0] not in slides]
        names += [
            f"{slide_id}/{name}"
            for slide_id in self._failed
            for name in (ERROR_NAME, TRACEBACK_NAME)
        ]
        try:
            for name in sorted(names, key=lambda name: name == _LAST):
                self._target.put(self._folder / name, name)
        except Exception as error:
            raise StoreError(
                f"out must be writable, got {error!r} for {self._target.url!r}; the slides that "
                "arrived stay: run the same command again"
            ) from error

    def _move(self, slide_id: str) -> None:
        folder, there = self._folder / slide_id, self._there.get(slide_id, {})
        names = [name for name in _files(folder) if name != LEDGER_NAME]
        if LEDGER_NAME in there:
            self._target.delete(f"{slide_id}/{LEDGER_NAME}")
        for name in (ERROR_NAME, TRACEBACK_NAME):
            if name in there and name not in names:
                self._target.delete(f"{slide_id}/{name}")
        there = {n: s for n, s in there.items() if n not in (*_KEPT, TRACEBACK_NAME)}
        if (folder / LEDGER_NAME).exists():
            names.append(LEDGER_NAME)
        for name in names:
            self._target.put(folder / name, f"{slide_id}/{name}")
            there[name] = (folder / name).stat().st_size
        self._there[slide_id] = there
        self._drop(slide_id)

    def _drop(self, slide_id: str) -> None:
        """Deletes the local files but for what the tables need."""
        for path in (self._folder / slide_id).iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in _KEPT:
                path.unlink()


def _files(folder: Path) -> list[str]:
    """Relative names of the finished files."""
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in _LOCAL and TMP_MARK not in path.name
    ]
