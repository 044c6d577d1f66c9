"""A run whose results go to a URL: a local folder holds a slide's files until they are there.

The target looks as a local results folder does. A slide's `slide.json` is taken away before its
files are replaced and put last, so a kill at any moment leaves a finished slide or one that is done
again. Here stay the ledgers of all slides (some kB each) and the files of the slides in work; what
a new stage reads of earlier runs is fetched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath

from thinsection.errors import ConfigError, StoreError
from thinsection.files.atomic import TMP_MARK
from thinsection.files.lock import LOCK_NAME, scratch_folder
from thinsection.files.sources import RemoteFolder
from thinsection.pipeline.events import OnEvent, RunEvent
from thinsection.pipeline.records import RECORD_NAME, RECORDS
from thinsection.pipeline.results import SlideResult, record_failure
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.spec import RunSpec
from thinsection.store.claims import CLAIMS_NAME
from thinsection.store.ledger import (
    ELSEWHERE_NAME,
    FAILURE_NAME,
    LEDGER_NAME,
    SLIDES,
    Elsewhere,
    load_ledger,
)

# files of a slide that the tables of a run are made from
_KEPT = (LEDGER_NAME, FAILURE_NAME)
# files that stay here
_LOCAL = (LOCK_NAME, ELSEWHERE_NAME)


@contextmanager
def uploads_to(out: str, spec: RunSpec, executor: object) -> Iterator["Uploads"]:
    """A local folder that looks like what is at a URL, and what moves finished slides there.

    One run at a time may write to a URL, since object stores have no locks.

    Memory:
        Some kB per slide of the target. Disk (TMPDIR): the files of the slides in work.

    Raises:
        ConfigError: another executor than inline, or quality control.
        StoreError: the target cannot be written.
    """
    if executor is not None or not spec.executor.in_process:
        raise ConfigError(
            f"out must be a folder for --executor {spec.executor.executor}, got {out!r}; "
            "object stores have no locks: run on a shared folder and copy it"
        )
    if spec.qc.qc != "off":
        raise ConfigError(
            f"out must be a folder with --qc, got {out!r}; "
            "its contact sheet needs all pictures"
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
        StoreError: there are no results.
    """
    target = RemoteFolder(url)
    names = [name for name in target.sizes() if _is_listed(PurePath(name))]
    if not any(name.startswith(f"{SLIDES}/") for name in names):
        raise StoreError(
            f"results must be a folder of `thinsection run` with {SLIDES}/ in it, got {url!r}"
        )
    with scratch_folder("listing") as folder:
        for name in names:
            target.get(name, folder / name)
        yield folder


def _is_listed(name: PurePath) -> bool:
    """True where a file of a results folder is one of those that `listing_of` fetches."""
    if ".." in name.parts:
        return False
    if name.parts[0] == SLIDES:
        return name.name in _KEPT
    return name.parts[0] == RECORDS and name.name == RECORD_NAME


class Uploads:
    """Moves the files of finished slides from a local folder to the target.

    Attributes:
        target: folder at the URL.
        folder: the local one.
    """

    def __init__(self, target: RemoteFolder, folder: Path) -> None:
        """Fetches what the target says of its slides: the run resumes from it."""
        self.target = target
        self.folder = folder
        # slides of the run, by id
        self._entries: dict[str, SlideEntry] = {}
        # slides whose files did not arrive
        self._failed: dict[str, SlideResult] = {}
        # name -> bytes of each file of the target
        self._sizes = target.sizes()
        # files that the target's ledgers name, by slide
        self._recorded: dict[str, set[str]] = {}
        for name in self._sizes:
            is_kept = name.startswith(f"{SLIDES}/") and PurePath(name).name in _KEPT
            if is_kept or name == CLAIMS_NAME:
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
        """Takes the slides of the run."""
        self._entries = {entry.slide_id: entry for entry in entries}

    def watch(self, on_event: OnEvent) -> OnEvent:
        """The listener that also moves the files of each slide that ends.

        Called in the thread that wrote them: the next slide waits, so that no more than the slides
        in work are held here.
        """

        def receive(event: RunEvent) -> None:
            if event.kind == "ended" and event.result is not None:
                event = replace(event, result=self._upload(event.result))
            on_event(event)

        return receive

    def settle(self, result: SlideResult) -> SlideResult:
        """The result of a slide, failed where its files did not arrive."""
        return self._failed.get(result.slide_id, result)

    def put_rest(self, record: str) -> None:
        """Puts the tables and records, the run.json of the named one last.

        Raises:
            StoreError: the target refuses.
        """
        names = []
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            is_local = path.name in _LOCAL or TMP_MARK in path.name
            if path.is_file() and not is_local and not name.startswith(f"{SLIDES}/"):
                names.append(name)
        names += [f"{SLIDES}/{slide_id}/{FAILURE_NAME}" for slide_id in self._failed]
        last = f"{RECORDS}/{record}/{RECORD_NAME}"
        try:
            for name in sorted(names, key=lambda name: name == last):
                self.target.put(self.folder / name, name)
        except Exception as error:
            raise StoreError(
                f"out must be writable, got {error!r} for {self.target.url!r}; "
                "the slides that arrived stay: run the same command again"
            ) from error

    def _upload(self, result: SlideResult) -> SlideResult:
        """The result of a slide whose files were moved; a failed one where they do not arrive."""
        if result.status == "skipped":
            return result
        entry = self._entries[result.slide_id]
        try:
            self._move_files(entry.slide_id)
        except Exception as error:  # noqa: BLE001 - the per-slide boundary of uploading
            result = record_failure(self.folder, entry, "upload", error)
            self._failed[entry.slide_id] = result
        for name in self._ledger_files(entry.slide_id):  # the tables need none of these
            (self.folder / name).unlink(missing_ok=True)
        return result

    def _move_files(self, slide_id: str) -> None:
        """Replaces the files of a slide at the target, its ledger first taken away and put last."""
        ledger_name = f"{SLIDES}/{slide_id}/{LEDGER_NAME}"
        failure_name = f"{SLIDES}/{slide_id}/{FAILURE_NAME}"
        ledger = load_ledger(self.folder, slide_id)
        wanted = self._ledger_files(slide_id)
        obsolete = self._recorded.get(slide_id, set()) - wanted
        for name in (ledger_name, failure_name, *obsolete):
            if self._sizes.pop(name, None) is not None:
                self.target.delete(name)
        # a file that was fetched to be read is there as it was
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
        """The files that the local ledger of a slide names."""
        names: set[str] = set()
        for record in load_ledger(self.folder, slide_id).stages.values():
            names.update(record.files)
        return names
