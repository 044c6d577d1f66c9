"""A stage is a value: where its result lies, what it needs, what decides it, and how it is made.

A run is the graph of the stages that were asked for. Three kinds differ in what they read:

    SlideStage   the opened slide: tissue, quality control, segmentations
    TileStage    decoded tiles, all such stages of a slide in one pass: embeddings, token grids
    StoreStage   what other stages left on disk: pooling, pictures, graphs, exports

The tile grid is of the first kind, and of the second where pixel filters decide on its tiles.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from thinsection.errors import StaleResultError, StoreError
from thinsection.files.atomic import TMP_MARK, link_or_copy
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.facts import cohort_facts, ledger_facts, slide_facts
from thinsection.stages.source import Source
from thinsection.store.identity import file_sum, file_times, fingerprint
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord, stage_key
from thinsection.types import PlainValues

if TYPE_CHECKING:
    from thinsection.pool import SlideEncoder

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Output(Generic[T_co]):
    """Result of a stage."""

    files: tuple[str, ...]  # relative to the results folder
    # plain values for ledger and summary
    facts: PlainValues = field(default_factory=dict)
    # taken by later stages of this run, in place of reading the files
    value: T_co | None = None


class Stage(ABC, Generic[T_co]):
    """One step on a slide's way, whose result is read back as a `T_co`.

    Subclasses are frozen dataclasses of the settings that they need. Class attributes say what all
    of a kind have in common; the rest follows from the settings.
    """

    # what a person calls it in failures: tissue, qc, tile, embed, ...
    title: ClassVar[str]
    # cohort columns that are copied into the result; a change there runs the stage again
    cohort_columns: ClassVar[tuple[str, ...]] = ()

    @property
    def drawn(self) -> str:
        """Setting that names what people drew, of which it is made; '' of none."""
        return ""

    @property
    @abstractmethod
    def address(self) -> str:
        """Folder-like name, unique in a results folder: 'slides/tissue', '256px_0.5mpp/tiles'.

        Stages whose settings differ have different addresses.
        """

    @property
    def settings(self) -> PlainValues:
        """Plain values that decide the result, beside those of `needs`."""
        return {}

    @property
    def needs(self) -> tuple["Stage[Any]", ...]:
        """Stages that it is made from: those among its fields, if a kind says no others."""
        return tuple(value for value in vars(self).values() if isinstance(value, Stage))

    def load(self, work: "SlideWork") -> T_co:
        """The value of its `Output`, read from the files; for stages that others need."""
        raise TypeError(f"nothing reads {self.address} back")

    def key(self, source: Source) -> str:
        """Hash of all that the result depends on but the cohort's columns."""
        of = [need.key(source) for need in self.needs] or [source.key]
        if self.drawn:
            drawn = source.drawn.get(self.drawn)
            return stage_key(of=of, settings=dict(self.settings), drawn=drawn)
        return stage_key(of=of, settings=dict(self.settings))

    def folder(self, slide_id: str) -> str:
        """Folder of a slide's files, relative to the results', for a stage that has one."""
        return f"{SLIDES}/{slide_id}/{self.address.removeprefix(f'{SLIDES}/')}"

    def file(self, slide_id: str, suffix: str = ".h5") -> str:
        """Its one file of a slide, relative to the results folder."""
        return f"{self.address}/{slide_id}{suffix}"


class SlideStage(Stage[T_co]):
    """A stage that reads the opened slide."""

    @abstractmethod
    def run(self, work: "SlideWork", slide: Slide) -> Output[T_co]:
        """Makes the result."""


class TileStage(Stage[T_co]):
    """A stage that the stream of decoded tiles feeds."""


class StoreStage(Stage[T_co]):
    """A stage that reads what other stages left on disk."""

    @abstractmethod
    def run(self, work: "SlideWork") -> Output[T_co]:
        """Makes the result."""


@dataclass(frozen=True, kw_only=True)
class RecordedStage(Stage[None]):
    """A stage that is done, known by its entry in the ledger alone."""

    title: ClassVar[str] = "recorded"

    recorded_address: str
    recorded_key: str

    @property
    def address(self) -> str:
        return self.recorded_address

    def key(self, source: Source) -> str:
        """The recorded one."""
        return self.recorded_key


AnyStage = Stage[Any]


@dataclass(frozen=True)
class RowsBeforeEdit:
    """Embeddings of a slide's tiles as they were before a drawing was edited."""

    content: str  # hash of all that a row depends on but its tile
    path: Path  # the file, under a hidden name


class SlideWork:
    """Ledger and stage values of one slide, while a process works on it under the slide's lock.

    One thread owns it at a time: the stream's prepare thread until the slide is prepared, then the
    sink's thread, from the slide's first batch to its end. The threads between them, which decode
    and encode, see the frozen `PreparedSlide` only.

    Args:
        entry: row of the cohort.
        out: the results folder.
        source: identity of the slide's pixels.
        ledger: as it is stored.
        stages: all of the run, each after what it needs.
        overwrite: whether results made from another file or setting may be replaced.
        slide_encoders: loaded ones by name, for the stages that pool.
    """

    def __init__(
        self,
        *,
        entry: SlideEntry,
        out: Path,
        source: Source,
        ledger: SlideLedger,
        stages: tuple[AnyStage, ...],
        overwrite: bool = False,
        slide_encoders: Mapping[str, "SlideEncoder"] | None = None,
    ) -> None:
        self.entry = entry
        self.out = out
        self.source = source
        self.stages = stages
        self.overwrite = overwrite
        self.slide_encoders = slide_encoders or {}
        self.ledger = replace(ledger, slide=ledger.slide | cohort_facts(entry, ledger))
        self.missing: list[AnyStage] = []  # those that are not done
        self.stage_title = "open"  # of the stage at work, for failures
        self.rows_before_edit: list[RowsBeforeEdit] = []
        self._values: dict[str, object] = {}  # of stages, by address
        self._finished: list[str] = []  # addresses of the stages that this work made

    def find_missing(self, *, resume: bool = True) -> None:
        """Lists the stages that the ledger lacks; all of them where nothing is resumed."""
        self.missing = [
            stage for stage in self.stages if not (resume and self.is_done(stage))
        ]

    def key(self, stage: AnyStage) -> str:
        """Hash of all that the stage's result of this slide depends on."""
        key = stage.key(self.source)
        if not stage.cohort_columns:
            return key
        words = {name: self.ledger.slide.get(name) for name in stage.cohort_columns}
        return stage_key(of=key, said=words)

    def is_done(self, stage: AnyStage) -> bool:
        """True where the ledger has the stage's result."""
        return self.ledger.done(stage.address, self.key(stage))

    def path(self, name: str) -> Path:
        """A file of the results folder."""
        return self.out / name

    def value(self, stage: Stage[T]) -> T:
        """The value that a stage gave in this run, or that is read back."""
        if stage.address not in self._values:
            self.fetch(stage)
            self._values[stage.address] = stage.load(self)
        return cast(T, self._values[stage.address])

    def fetch(self, stage: AnyStage) -> None:
        """Brings the files of a finished stage here, where they lie at the URL of the run only."""
        record = self.ledger.stages.get(stage.address)
        if record is not None:
            self.ledger = self.ledger.bring(record)

    def perform(self, stage: StoreStage[Any]) -> None:
        """Runs a stage that reads the store, and records it."""
        self._start(stage)
        self.record(stage, lambda: stage.run(self))

    def perform_on(self, slide: Slide, stage: SlideStage[Any]) -> None:
        """Runs a stage that reads the opened slide, and records it."""
        self._start(stage)
        self.record(stage, lambda: stage.run(self, slide))

    def record(self, stage: Stage[T], make: Callable[[], Output[T]]) -> None:
        """Puts what is made now in the place of another result of the stage."""
        self.stage_title = stage.title
        self.remove_outdated(stage)
        self.finish(stage, make())

    def take_slide(self, slide: Slide) -> None:
        """Notes in the ledger what the opened slide says of itself."""
        facts = slide_facts(slide, self.entry, self.ledger)
        self.ledger = replace(self.ledger, slide=facts)

    def take_whole_sum(self, whole: str) -> None:
        """Adds the hash of every byte to what the ledger knows of the file."""
        self.ledger = replace(self.ledger, source=self.ledger.source | {"whole": whole})

    def check_unchanged(self, times: str) -> None:
        """Raises StoreError: the slide's file was written while it was read.

        What this work has made of it is removed: nobody knows which bytes it shows. `times` are the
        `file_times` before anything was read; '' where they do not count.
        """
        path = self.entry.slide_path
        same_times = not times or file_times(path) == times
        if same_times and fingerprint(path) == self.ledger.source["samples"]:
            return
        for address in self._finished:
            record = self.ledger.stages.get(address)
            for name in record.files if record else ():
                self.path(name).unlink(missing_ok=True)
        self.ledger = self.ledger.without(self._finished)
        self.ledger.save()
        raise StoreError(
            f"slide must stay as it is while it is read, got other bytes in {path!r}; "
            "run the same command again when it is complete"
        )

    def check_stale(self) -> None:
        """Raises StaleResultError: another file or other settings made what is there.

        What repeats the cohort's words is made again where these changed: that costs no tile; so
        is what somebody drew, which costs the tiles that changed.
        """
        for stage in self.missing:
            replaceable = self.overwrite or stage.cohort_columns
            if replaceable or not self._is_other(stage) or self._was_edited(stage):
                continue
            raise StaleResultError(
                f"{stage.address} of {self.entry.slide_id!r} must be of the same file and "
                "settings, got one of another slide file, mpp, weights or version; pass "
                "--overwrite to replace it and all that was made from it, or another --out"
            )

    def remove_outdated(self, stage: AnyStage) -> None:
        """Removes another result of the stage, and what was made from it.

        Before any file is replaced: a kill leaves no file that is taken for another's result.
        """
        if not self._is_other(stage):
            return
        addresses = (stage.address, *self.ledger.derived(stage.address))
        edited = self._was_edited(stage)
        for address in addresses:
            record = self.ledger.stages[address]
            for name in record.files:
                if edited and record.facts.get("rows"):
                    self._keep_rows(record.facts["rows"], self.path(name))
                self.path(name).unlink(missing_ok=True)
        self.ledger = self.ledger.without(addresses)
        self.ledger.save()

    def finish(self, stage: Stage[T], output: Output[T]) -> None:
        """Records a stage whose files are in place."""
        before = self.ledger.stages.get(stage.address)
        for name in before.files if before else ():
            if name not in output.files:
                self.path(name).unlink(missing_ok=True)
        record = StageRecord(
            key=self.key(stage),
            files={name: self.path(name).stat().st_size for name in output.files},
            needs=tuple(need.address for need in stage.needs),
            facts=dict(output.facts),
            sums={name: file_sum(self.path(name)) for name in output.files},
        )
        self.ledger = self.ledger.with_stage(stage.address, record)
        self.ledger.save()
        self._finished.append(stage.address)
        self.missing = [
            other for other in self.missing if other.address != stage.address
        ]
        if output.value is not None:
            self._values[stage.address] = output.value

    def facts(self) -> dict[str, Any]:
        """Facts of the slide and of the run's stages; warnings joined."""
        return ledger_facts(self.ledger, [stage.address for stage in self.stages])

    def drop_rows_before_edit(self) -> None:
        """Removes embeddings of tiles as they were before an edit."""
        for rows in self.rows_before_edit:
            rows.path.unlink(missing_ok=True)

    def _start(self, stage: AnyStage) -> None:
        self.stage_title = stage.title
        for need in stage.needs:
            self.fetch(need)

    def _keep_rows(self, content: str, path: Path) -> None:
        """Keeps embeddings aside from which tiles that did not change are taken."""
        kept = path.with_name(f".{path.name}{TMP_MARK}kept")
        link_or_copy(path, kept)
        self.rows_before_edit.append(RowsBeforeEdit(content, kept))

    def _was_edited(self, stage: AnyStage) -> bool:
        """True where what the stage is made of was drawn on the same pixels, and drawn anew."""
        record = self.ledger.stages.get(stage.address)
        if stage.drawn and record is not None:
            same_pixels = record.facts.get("pixels") == self.source.key
            return same_pixels and self._is_other(stage)
        return any(self._was_edited(need) for need in stage.needs)

    def _is_other(self, stage: AnyStage) -> bool:
        """True where the ledger has a result of the stage that another file or setting made."""
        record = self.ledger.stages.get(stage.address)
        return record is not None and record.key != self.key(stage)
