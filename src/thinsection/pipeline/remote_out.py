"""A run whose results go to a URL: a local folder holds a slide's files until they are there.

The target looks as a local results folder does. A slide's `slide.json` is taken away before its
files are replaced and put last, so a kill at any moment leaves a finished slide or one that is done
again. Here stay the ledgers of all slides (some kB each) and the files of the slides in work; what
a new stage reads of earlier runs is fetched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from thinsection.errors import ConfigError, StoreError, require
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

_KEPT = (LEDGER_NAME, FAILURE_NAME)  # what the tables of a run are made from
_LOCAL = (LOCK_NAME, ELSEWHERE_NAME)


@contextmanager
def uploads_to(out: str, spec: RunSpec, executor: Any) -> Iterator["Uploads"]:
    """A local folder that looks like what is at a URL, and what moves finished slides there.

    One run at a time may write to a URL, since object stores have no locks.

    Memory: some kB per slide of the target. Disk (TMPDIR): the files of the slides in work.

    Raises ConfigError: another executor than inline, or quality control; StoreError: the target
    cannot be written.
    """
    inline = executor is None and spec.executor.in_process
    got = f"{out!r}; object stores have no locks: run on a shared folder and copy it"
    rule = f"out must be a folder for --executor {spec.executor.executor}"
    require(inline, rule, got, error=ConfigError)
    got = f"{out!r}; its contact sheet needs all pictures"
    require(
        spec.qc.qc == "off", "out must be a folder with --qc", got, error=ConfigError
    )
    target = RemoteFolder(out)
    target.check()
    with scratch_folder("out") as folder:
        yield Uploads(target=target, folder=folder.resolve())


@contextmanager
def listing_of(url: str) -> Iterator[Path]:
    """A local folder with what tells of the results at a URL: ledgers, failures, records.

    Disk (TMPDIR): some kB per slide.

    Raises StoreError: there are no results.
    """
    target = RemoteFolder(url)
    names = [name for name in target.sizes() if _tells(PurePath(name))]
    if not any(name.startswith(f"{SLIDES}/") for name in names):
        rule = f"results must be a folder of `thinsection run` with {SLIDES}/ in it"
        raise StoreError(f"{rule}, got {url!r}")
    with scratch_folder("listing") as folder:
        for name in names:
            target.get(name, folder / name)
        yield folder


def _tells(name: PurePath) -> bool:
    """Whether a file of a results folder is one of those that `listing_of` fetches."""
    if ".." in name.parts:
        return False
    if name.parts[0] == SLIDES:
        return name.name in _KEPT
    return name.parts[0] == RECORDS and name.name == RECORD_NAME


@dataclass(kw_only=True)
class Uploads:
    """What goes from the local folder to the target."""

    target: RemoteFolder
    folder: Path  # the local one
    entries: dict[str, SlideEntry] = field(
        default_factory=dict
    )  # of the run, by slide id
    there: dict[str, int] = field(init=False)  # name -> bytes of what the target holds
    recorded: dict[str, set[str]] = field(
        default_factory=dict
    )  # what its ledgers name, by slide
    failed: dict[str, SlideResult] = field(
        default_factory=dict
    )  # whose files did not arrive

    def __post_init__(
        self,
    ) -> None:  # what the target says of its slides: the run resumes from it
        self.there = self.target.sizes()
        for name in self.there:
            is_kept = name.startswith(f"{SLIDES}/") and PurePath(name).name in _KEPT
            if is_kept or name == CLAIMS_NAME:
                local = self.folder / name
                local.parent.mkdir(parents=True, exist_ok=True)
                local.write_bytes(self.target.read(name))
        for path in (self.folder / SLIDES).glob(f"*/{LEDGER_NAME}"):
            slide_id = path.parent.name
            self.recorded[slide_id] = names = self._recorded_here(slide_id)
            sizes = {name: self.there[name] for name in names if name in self.there}
            Elsewhere(url=self.target.url, files=sizes).save(path.parent)

    def expect(self, entries: Sequence[SlideEntry]) -> None:
        """Takes the slides of the run."""
        self.entries = {entry.slide_id: entry for entry in entries}

    def watch(self, on_event: OnEvent) -> OnEvent:
        """The listener that also moves the files of each slide that ends.

        Called in the thread that wrote them: the next slide waits, so that no more than the slides
        in work are held here.
        """

        def ended(event: RunEvent) -> None:
            if event.kind == "ended" and event.result is not None:
                event = replace(event, result=self._take(event.result))
            on_event(event)

        return ended

    def settle(self, result: SlideResult) -> SlideResult:
        """The result of a slide, failed where its files did not arrive."""
        return self.failed.get(result.slide_id, result)

    def put_rest(self, record: str) -> None:
        """Puts the tables and records, the run.json of the named one last.

        Raises StoreError: the target refuses.
        """
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        done = [p for p in files if p.name not in _LOCAL and TMP_MARK not in p.name]
        names = [str(path.relative_to(self.folder)) for path in done]
        names = [name for name in names if not name.startswith(f"{SLIDES}/")]
        names += [f"{SLIDES}/{slide_id}/{FAILURE_NAME}" for slide_id in self.failed]
        last = f"{RECORDS}/{record}/{RECORD_NAME}"
        try:
            for name in sorted(names, key=lambda name: name == last):
                self.target.put(self.folder / name, name)
        except Exception as error:
            remedy = "the slides that arrived stay: run the same command again"
            got = f"got {error!r} for {self.target.url!r}; {remedy}"
            raise StoreError(f"out must be writable, {got}") from error

    def _take(self, result: SlideResult) -> SlideResult:
        """The result of a slide whose files were moved; a failed one where they do not arrive."""
        if result.status == "skipped":
            return result
        entry = self.entries[result.slide_id]
        try:
            self._move(entry.slide_id)
        except Exception as error:  # noqa: BLE001 - the per-slide boundary of uploading
            result = record_failure(self.folder, entry, "upload", error)
            self.failed[entry.slide_id] = result
        for name in self._recorded_here(
            entry.slide_id
        ):  # the tables need none of these
            (self.folder / name).unlink(missing_ok=True)
        return result

    def _move(self, slide_id: str) -> None:
        ledger_name, failure_name = (f"{SLIDES}/{slide_id}/{name}" for name in _KEPT)
        ledger = load_ledger(self.folder, slide_id)
        wanted = self._recorded_here(slide_id)
        # what was fetched to be read is there as it was
        candidates = [*sorted(wanted - set(ledger.elsewhere.brought)), failure_name]
        here = [name for name in candidates if (self.folder / name).is_file()]
        for name in (
            ledger_name,
            failure_name,
            *self.recorded.get(slide_id, set()) - wanted,
        ):
            if self.there.pop(name, None) is not None:
                self.target.delete(name)
        for name in [*here, *([ledger_name] if ledger.stages else [])]:
            self.target.put(self.folder / name, name)
            self.there[name] = (self.folder / name).stat().st_size
        self.recorded[slide_id] = wanted

    def _recorded_here(self, slide_id: str) -> set[str]:
        """The files that the local ledger of a slide names."""
        stages = load_ledger(self.folder, slide_id).stages.values()
        return {name for record in stages for name in record.files}
