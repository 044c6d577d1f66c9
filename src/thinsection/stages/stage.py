"""A stage is a value: where its result lies, what it needs, what decides it, and how it is made.

A run is the graph of the stages that were asked for. Three kinds differ in what they read:

    'slide'  the opened slide: tissue, quality control, the tile grid
    'tiles'  decoded tiles, all such stages of a slide in one pass: embeddings, token grids
    'store'  what other stages left on disk: pooling, pictures, graphs, exports
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from thinsection.errors import StaleResultError, StoreError, require
from thinsection.files.atomic import TMP_MARK, link_or_copy
from thinsection.files.sources import FsspecSource
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.store.identity import (
    WholeSum,
    file_sum,
    file_times,
    fingerprint,
    fingerprint_reads,
)
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord, stage_key

if TYPE_CHECKING:
    from thinsection.pool import SlideEncoder

OF_COHORTS = ("patient_id", "label", "split")

Reads = Literal["slide", "tiles", "store"]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a stage left."""

    files: tuple[str, ...]  # relative to the results folder
    facts: Mapping[str, Any] = field(
        default_factory=dict
    )  # for ledger and summary: plain values
    value: Any = (
        None  # what later stages of this run take, in place of reading the files
    )


class Stage(ABC):
    """One step on a slide's way. Subclasses are frozen dataclasses of the settings that they need.

    Class attributes say what all of a kind have in common; the rest follows from the settings.
    """

    title: ClassVar[
        str
    ]  # what a person calls it in failures: tissue, qc, tile, embed, ...
    told: ClassVar[
        tuple[str, ...]
    ] = ()  # words of the cohort that its result repeats: 'label'

    @property
    def reads(self) -> Reads:
        """What it is made from, see the module; of most kinds a class attribute."""
        return "store"

    @property
    def drawn(self) -> str:
        """Which setting names what people drew, of which it is made; '' of none."""
        return ""

    @property
    @abstractmethod
    def address(self) -> str:
        """Folder-like name, unique in a results folder: 'slides/tissue', '256px_0.5mpp/tiles'.

        Stages whose settings differ have different addresses.
        """

    @property
    def settings(self) -> Mapping[str, Any]:
        """Plain values that decide the result, beside those of `needs`."""
        return {}

    @property
    def needs(self) -> tuple["Stage", ...]:
        """Stages that it is made from: those among its fields, if a kind says no others."""
        return tuple(value for value in vars(self).values() if isinstance(value, Stage))

    def run(self, work: "SlideWork") -> Output:
        """Makes the result. Stages that read tiles are fed by the stream instead."""
        raise TypeError(f"{self.address} is fed by the stream")

    def load(self, work: "SlideWork") -> Any:
        """What `Output.value` was, read from the files; for stages that others need."""
        raise TypeError(f"nothing reads {self.address} back")

    def key(self, source: str) -> str:
        """Hash of all that the result depends on but the cohort's words; `source_key`'s source."""
        of = [need.key(source) for need in self.needs] or [source]
        drawn = (
            {"drawn": getattr(source, "drawn", {}).get(self.drawn)}
            if self.drawn
            else {}
        )
        return stage_key(of=of, settings=dict(self.settings), **drawn)

    def folder(self, slide_id: str) -> str:
        """Where its files of a slide lie that has its own folder, relative to the results'."""
        return f"{SLIDES}/{slide_id}/{self.address.removeprefix(f'{SLIDES}/')}"

    def file(self, slide_id: str, suffix: str = ".h5") -> str:
        """Its one file of a slide, relative to the results folder."""
        return f"{self.address}/{slide_id}{suffix}"


@dataclass(kw_only=True)
class SlideWork:
    """One slide while a process works on it, under the slide's lock."""

    entry: SlideEntry
    out: Path  # the results folder
    source: str  # identity of the slide's pixels
    ledger: SlideLedger  # as it stands, with what this run's cohort says of the slide
    stages: tuple[Stage, ...]  # of the run, each after what it needs
    missing: list[Stage] = field(default_factory=list)  # those that are not done
    overwrite: bool = (
        False  # whether results made from another file or setting may be replaced
    )
    # whether the stored ledger says less of the slide's file or of its row in the cohort
    ledger_is_old: bool = False
    slide: Slide | None = None  # while it is open
    warnings: list[str] = field(default_factory=list)  # of this run
    times: str = ""  # `file_times` before anything was read; '' where they do not count
    finished: list[str] = field(default_factory=list)  # addresses done by this work
    at: str = "open"  # title of the stage at work, for failures
    values: dict[str, Any] = field(default_factory=dict)  # what stages gave, by address
    attributes: dict[str, Any] = field(
        default_factory=dict
    )  # of the files of its tiles
    remote: FsspecSource | None = (
        None  # of a slide by URL, which counts what is fetched
    )
    kept: list[tuple[str, Path]] = field(
        default_factory=list
    )  # rows of before an edit: what, file
    taken: dict[str, Any] = field(
        default_factory=dict
    )  # rows that need no encoder, by address
    # loaded slide encoders by name, for the stages that pool
    slide_encoders: Mapping[str, "SlideEncoder"] = field(default_factory=dict)
    hashing: WholeSum | None = None  # while nobody has read every byte of its file

    def __post_init__(self) -> None:
        # a later run may name the slide alone: what an earlier one's cohort said is kept
        said = {name: getattr(self.entry, name) for name in OF_COHORTS}
        known = {name: value for name, value in said.items() if value is not None}
        known |= {"more": {**self.ledger.slide.get("more", {}), **self.entry.more}}
        self.ledger = replace(self.ledger, slide=self.ledger.slide | known)

    def fetched(self) -> dict[str, int]:
        """Bytes and requests of a slide by URL so far; none of a file.

        Its fingerprint counts twice: it is taken before the slide is read and after.
        """
        if self.remote is None:
            return {}
        sampled, requests = fingerprint_reads(self.remote.size)
        return {
            "fetched_bytes": self.remote.fetched_bytes + 2 * sampled,
            "file_bytes": self.remote.size,
            "requests": self.remote.requests + 2 * requests,
        }

    def key(self, stage: Stage) -> str:
        """Hash of all that the stage's result of this slide depends on."""
        key, said = (
            stage.key(self.source),
            {n: self.ledger.slide.get(n) for n in stage.told},
        )
        return stage_key(of=key, said=said) if said else key

    def done(self, stage: Stage) -> bool:
        """Whether the ledger has the stage's result."""
        return self.ledger.done(stage.address, self.key(stage))

    def path(self, name: str) -> Path:
        """A file of the results folder."""
        return self.out / name

    def value(self, stage: Stage) -> Any:
        """What a stage gave: in this run, or read back."""
        if stage.address not in self.values:
            self.bring(stage)
            self.values[stage.address] = stage.load(self)
        return self.values[stage.address]

    def bring(self, stage: Stage) -> None:
        """Fetches the files of a stage that is done where they lie at the URL of the run only."""
        if (record := self.ledger.stages.get(stage.address)) is not None:
            self.ledger = self.ledger.bring(record)

    def perform(self, stage: Stage) -> None:
        """Runs a stage that reads the slide or the store, and records it."""
        self.at = stage.title
        for need in stage.needs:
            self.bring(need)
        self.record(stage, lambda: stage.run(self))

    def record(self, stage: Stage, make: Callable[[], Output]) -> None:
        """Puts what is made now in the place of another result of the stage."""
        self.at = stage.title
        self.begin(stage)
        self.finish(stage, make())

    def settle_source(self) -> None:
        """Adds the hash of every byte to what the ledger knows of the file, once."""
        if self.hashing is not None:
            whole, self.hashing = self.hashing.result(), None
            self.ledger = replace(
                self.ledger, source=self.ledger.source | {"whole": whole}
            )

    def check_unchanged(self) -> None:
        """Raises StoreError: the slide's file was written while it was read.

        What this work has made of it is removed: nobody knows which bytes it shows.
        """
        if self.slide is None:
            return
        path = self.entry.slide_path
        is_same = not self.times or file_times(path) == self.times
        if is_same and fingerprint(path) == self.ledger.source["samples"]:
            return
        for address in self.finished:
            record = self.ledger.stages.get(address)
            for name in record.files if record else ():
                self.path(name).unlink(missing_ok=True)
        self.ledger = self.ledger.without(self.finished)
        self.ledger.save()
        rule = "slide must stay as it is while it is read"
        remedy = "run the same command again when it is complete"
        raise StoreError(f"{rule}, got other bytes in {path!r}; {remedy}")

    def check_stale(self) -> None:
        """StaleResultError where another file or other settings made what is there.

        What repeats the cohort's words is made again where these changed: that costs no tile; so
        is what somebody drew, which costs the tiles that changed.
        """
        for stage in self.missing:
            free = (
                self.overwrite
                or stage.told
                or not self._is_other(stage)
                or self._edited(stage)
            )
            name = f"{stage.address} of {self.entry.slide_id!r}"
            rule = f"{name} must be of the same file and settings"
            got = "one of another slide file, mpp, weights or version; pass --overwrite to replace "
            got += "it and all that was made from it, or another --out"
            require(free, rule, got, error=StaleResultError)

    def begin(self, stage: Stage) -> None:
        """Removes another result of the stage, and what was made from it.

        Before any file is replaced: a kill leaves no file that is taken for another's result.
        """
        if not self._is_other(stage):
            return
        gone = (stage.address, *self.ledger.derived(stage.address))
        records, edited = (
            [self.ledger.stages[address] for address in gone],
            self._edited(stage),
        )
        for record, path in ((r, self.path(name)) for r in records for name in r.files):
            if edited and (rows := record.facts.get("rows")):
                kept = path.with_name(f".{path.name}{TMP_MARK}kept")
                link_or_copy(path, kept)
                self.kept.append((rows, kept))
            path.unlink(missing_ok=True)
        self.ledger = self.ledger.without(gone)
        self.ledger.save()

    def finish(self, stage: Stage, output: Output) -> None:
        """Records a stage whose files are in place."""
        old = self.ledger.stages.get(stage.address)
        for name in set(old.files if old else ()) - set(output.files):
            self.path(name).unlink(missing_ok=True)
        key, needs = self.key(stage), tuple(need.address for need in stage.needs)
        files = {name: self.path(name).stat().st_size for name in output.files}
        sums = {name: file_sum(self.path(name)) for name in output.files}
        record = StageRecord(
            key=key, files=files, needs=needs, facts={**output.facts}, sums=sums
        )
        self.ledger = self.ledger.with_stage(stage.address, record)
        self.ledger.save()
        self.finished.append(stage.address)
        self.missing = [
            other for other in self.missing if other.address != stage.address
        ]
        if output.value is not None:
            self.values[stage.address] = output.value

    def opened(self, slide: Slide) -> None:
        """Takes the opened slide and what it says of itself."""
        self.slide, self.remote = slide, getattr(slide, "source", None)
        mpp_x, mpp_y = slide.slide_mpp or (None, None)
        levels = [
            {"size": list(lv.size), "downsample": lv.downsample} for lv in slide.levels
        ]
        facts: dict[str, Any] = {
            **{"slide_id": self.entry.slide_id, "slide_path": self.entry.slide_path},
            **{"reader": slide.reader, "width": slide.size[0], "height": slide.size[1]},
            **{"levels": levels, "mpp_x": mpp_x, "mpp_y": mpp_y},
            **{"objective_power": slide.objective_power, "vendor": slide.vendor},
            **{"rendering": slide.rendering, "warnings": "; ".join(slide.notes)},
        }
        facts |= {name: self.ledger.slide.get(name) for name in (*OF_COHORTS, "more")}
        self.ledger = replace(self.ledger, slide=facts)

    def facts(self) -> dict[str, Any]:
        """What the ledger tells of the slide and of the run's stages; warnings joined."""
        return ledger_facts(self.ledger, [stage.address for stage in self.stages])

    def _edited(self, stage: Stage) -> bool:
        """Whether what the stage is made of was drawn on the same pixels, and drawn anew."""
        if (
            stage.drawn
            and (record := self.ledger.stages.get(stage.address)) is not None
        ):
            return record.facts.get("pixels") == self.source and self._is_other(stage)
        return any(map(self._edited, stage.needs))

    def drop_kept(self) -> None:
        """Removes embeddings of tiles as they were before an edit."""
        for _, path in self.kept:
            path.unlink(missing_ok=True)

    def _is_other(self, stage: Stage) -> bool:
        """Whether the ledger has a result of the stage that another file or setting made."""
        record = self.ledger.stages.get(stage.address)
        return record is not None and record.key != self.key(stage)


def ledger_facts(ledger: SlideLedger, addresses: Iterable[str]) -> dict[str, Any]:
    """The slide's facts and those of the stages, later ones winning; warnings joined."""
    found = [
        ledger.stages[address].facts
        for address in addresses
        if address in ledger.stages
    ]
    told = [ledger.damage, *(facts.get("warnings") for facts in (ledger.slide, *found))]
    warnings = dict.fromkeys(text for text in told if text)
    merged = {
        name: value for facts in (ledger.slide, *found) for name, value in facts.items()
    }
    return merged | {"warnings": "; ".join(warnings)}


class Source(str):
    """Identity of a slide's pixels; `drawn` has hashes of what people drew on it, by role."""

    drawn: Mapping[str, str]


def source_key(
    content: str, entry: SlideEntry, drawn: Mapping[str, str] | None = None
) -> Source:
    """Identity of a slide's pixels: its file, and the resolution that was said of it."""
    look = {} if entry.look is None else {"look": asdict(entry.look)}
    source = Source(stage_key(slide=content, mpp=entry.slide_mpp, **look))
    source.drawn = drawn or {}
    return source


@dataclass(frozen=True, kw_only=True)
class RecordedStage(Stage):
    """A stage that is done, known by what the ledger says of it alone."""

    title: ClassVar[str] = "recorded"

    recorded_address: str
    recorded_key: str

    @property
    def address(self) -> str:
        return self.recorded_address

    def key(self, source: str) -> str:
        """The recorded one."""
        return self.recorded_key
