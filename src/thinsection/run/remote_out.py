"""Writes results to a URL; a local folder holds a slide's files until they are uploaded.

The folder at the URL has the layout of a local results folder. A slide's `slide.json` is deleted
before its files are replaced and is uploaded last. If the process is killed, a slide is then either
finished or done again. The local folder keeps the ledgers of all slides (some kB each) and the
files of slides in progress. A new stage downloads the earlier results that it needs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath

from thinsection.errors import ConfigError, StoreError
from thinsection.files.atomic import TMP_MARK
from thinsection.files.lock import LOCK_NAME, scratch_folder
from thinsection.files.sources import RemoteFolder
from thinsection.results.records import RECORD_NAME, RECORDS
from thinsection.run.process import OnEvent, RunEvent
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.stage import BEFORE_EDIT
from thinsection.store.ledger import (
    ELSEWHERE_NAME,
    FAILURE_NAME,
    LEDGER_NAME,
    SLIDES,
    Elsewhere,
    load_ledger,
)
from thinsection.store.outcome import SlideResult, record_failure
from thinsection.store.slide_ids import SLIDE_IDS_NAME

# files of a slide from which the tables of a run are made
_FILES_FOR_TABLES = (LEDGER_NAME, FAILURE_NAME)
# files that are not uploaded
_NOT_UPLOADED = (LOCK_NAME, ELSEWHERE_NAME)


@contextmanager
def uploads_to(out: str, spec: RunConfig, executor: object) -> Iterator["Uploads"]:
    """Makes a local folder with the ledgers at a URL, and the object that uploads finished slides.

    Only one run at a time may write to a URL, since object stores have no locks.

    Memory:
        Some kB per slide of the target. Disk (TMPDIR): the files of the slides in progress.

    Raises:
        ConfigError: an executor other than inline, quality control, or embeddings of patients.
        StoreError: the target is not writable.
    """
    if spec.encoding.patients != "none":
        raise ConfigError(
            "aggregate.patients must be 'none' with results at a URL, got "
            f"{spec.encoding.patients!r}; run `thinsection aggregate` on a local copy"
        )
    if executor is not None or not spec.executor.in_process:
        raise ConfigError(
            f"out must be a local folder for executor {spec.executor.executor!r}, got {out!r}; "
            "object stores have no locks: write to a shared folder and copy it afterwards"
        )
    if spec.qc.qc != "off":
        raise ConfigError(
            f"out must be a local folder with qc, got {out!r}; the contact sheet needs all "
            "pictures"
        )
    target = RemoteFolder(out)
    target.check()
    with scratch_folder("out") as folder:
        yield Uploads(target, folder.resolve())


@contextmanager
def listing_of(url: str) -> Iterator[Path]:
    """A local folder with the ledgers, failures and records of the results at a URL.

    Disk (TMPDIR): some kB per slide.

    Raises:
        StoreError: the URL has no results.
    """
    target = RemoteFolder(url)
    names = []
    for name in target.sizes():
        path = PurePath(name)
        is_record = path.parts[0] == RECORDS and path.name == RECORD_NAME
        is_slide = path.parts[0] == SLIDES and path.name in _FILES_FOR_TABLES
        if ".." not in path.parts and (is_record or is_slide):
            names.append(name)
    if not any(name.startswith(f"{SLIDES}/") for name in names):
        raise StoreError(
            f"results must be a folder of `thinsection run` that contains {SLIDES}/, got {url!r}"
        )
    with scratch_folder("listing") as folder:
        for name in names:
            target.get(name, folder / name)
        yield folder


class Uploads:
    """Moves the files of finished slides from a local folder to the target.

    Attributes:
        target: folder at the URL.
        folder: local folder.
    """

    def __init__(self, target: RemoteFolder, folder: Path) -> None:
        """Downloads the target's ledgers, so that the run can resume."""
        self.target = target
        self.folder = folder
        # slides of the run, by id
        self._entries: dict[str, SlideEntry] = {}
        # slides whose files could not be uploaded
        self._failed: dict[str, SlideResult] = {}
        # name -> bytes of each file at the target
        self._sizes = target.sizes()
        # files that the target's ledgers list, by slide
        self._recorded: dict[str, set[str]] = {}
        for name in self._sizes:
            is_kept = (
                name.startswith(f"{SLIDES}/")
                and PurePath(name).name in _FILES_FOR_TABLES
            )
            if is_kept or name == SLIDE_IDS_NAME:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(target.read(name))
        for path in (folder / SLIDES).glob(f"*/{LEDGER_NAME}"):
            slide_id = path.parent.name
            names = self._ledger_files(slide_id)
            sizes = {name: self._sizes[name] for name in names if name in self._sizes}
            Elsewhere(url=target.url, files=sizes).save(path.parent)
            self._recorded[slide_id] = names

    def expect(self, entries: Sequence[SlideEntry]) -> None:
        """Sets the slides of the run."""
        self._entries = {entry.slide_id: entry for entry in entries}

    def watch(self, on_event: OnEvent) -> OnEvent:
        """Wraps a listener so that it also uploads the files of each slide that ends.

        It runs in the thread that wrote the files. The next slide waits, so that the local folder
        contains only slides in progress.
        """

        def receive(event: RunEvent) -> None:
            if event.kind == "ended" and event.result is not None:
                event = replace(event, result=self._upload(event.result))
            on_event(event)

        return receive

    def final_result(self, result: SlideResult) -> SlideResult:
        """Result of a slide, changed to failed if its files could not be uploaded."""
        return self._failed.get(result.slide_id, result)

    def put_tables(self, *, last_record: str | None) -> None:
        """Uploads the tables and records; run.json of `last_record` comes last.

        Raises:
            StoreError: the target is not writable.
        """
        names = []
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            is_local = path.name in _NOT_UPLOADED
            is_local |= TMP_MARK in path.name or BEFORE_EDIT in path.name
            if path.is_file() and not is_local and not name.startswith(f"{SLIDES}/"):
                names.append(name)
        names += [f"{SLIDES}/{slide_id}/{FAILURE_NAME}" for slide_id in self._failed]
        last = None
        if last_record is not None:
            last = f"{RECORDS}/{last_record}/{RECORD_NAME}"
        try:
            for name in sorted(names, key=lambda name: name == last):
                self.target.put(self.folder / name, name)
        except Exception as error:
            raise StoreError(
                f"out must be writable, got {error!r} for {self.target.url!r}; the slides that "
                "were uploaded are kept: run the same command again"
            ) from error

    def _upload(self, result: SlideResult) -> SlideResult:
        """Uploads a slide and returns its result, or a failed one if the upload fails."""
        if result.status == "skipped":
            return result
        entry = self._entries[result.slide_id]
        try:
            self._move_files(entry.slide_id)
        except Exception as error:  # noqa: BLE001 - the per-slide boundary of uploading
            result = record_failure(self.folder, entry, "upload", error)
            self._failed[entry.slide_id] = result
        # the tables do not need these files
        for name in self._ledger_files(entry.slide_id):
            (self.folder / name).unlink(missing_ok=True)
        return result

    def _move_files(self, slide_id: str) -> None:
        """Replaces a slide's files at the target; deletes its ledger first, uploads it last."""
        ledger_name = f"{SLIDES}/{slide_id}/{LEDGER_NAME}"
        failure_name = f"{SLIDES}/{slide_id}/{FAILURE_NAME}"
        ledger = load_ledger(self.folder, slide_id)
        wanted = self._ledger_files(slide_id)
        obsolete = self._recorded.get(slide_id, set()) - wanted
        for name in (ledger_name, failure_name, *obsolete):
            if self._sizes.pop(name, None) is not None:
                self.target.delete(name)
        # files that were downloaded only to be read are unchanged
        made_here = sorted(wanted - set(ledger.elsewhere.brought))
        names = [*made_here, failure_name]
        if ledger.stages:
            names.append(ledger_name)
        for name in names:
            path = self.folder / name
            if path.is_file():
                self.target.put(path, name)
                self._sizes[name] = path.stat().st_size
        self._recorded[slide_id] = wanted

    def _ledger_files(self, slide_id: str) -> set[str]:
        """Files that the local ledger of a slide lists."""
        names: set[str] = set()
        for record in load_ledger(self.folder, slide_id).stages.values():
            names.update(record.files)
        return names
