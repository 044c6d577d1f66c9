"""Stages: the steps of a run, each a value that says where its result lies and how it is made.

A stage also lists the stages that it needs, and the settings that change its result. A run is the
graph of the stages that its last result needs. Three kinds differ in what they read:

    SlideStage   the opened slide: tissue, quality control, segmentations
    TileStage    decoded tiles, all such stages of a slide in one pass: embeddings, token grids
    StoreStage   results of other stages on disk: pooling, pictures, graphs, exports

The tile grid is made like a SlideStage; with pixel filters it is made like a TileStage, because
then the pixels of a tile decide whether the tile is kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, cast

from thinsection.errors import StaleResultError, StoreError
from thinsection.files.atomic import TMP_MARK, link_or_copy
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.facts import cohort_facts, ledger_facts, slide_facts
from thinsection.stages.source import Source
from thinsection.store.identity import file_sum, file_times, fingerprint
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord, stage_key
from thinsection.types import Document, PlainValues

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
    # later stages of this run use it instead of reading the files
    value: T_co | None = None


class Stage(ABC, Generic[T_co]):
    """One step of the work on a slide; `load` reads its result back as a `T_co`.

    Subclasses are frozen dataclasses. Their fields are the settings of the step. Class attributes
    hold for all stages of a subclass.
    """

    # name of the step in messages: tissue, qc, tile, embed, ...
    title: ClassVar[str]
    # cohort columns that are copied into the result; a change there runs the stage again
    cohort_columns: ClassVar[tuple[str, ...]] = ()

    @property
    def annotation_setting(self) -> str:
        """Setting that names the stage's annotation file: 'tissue' or 'roi'; '' without a file."""
        return ""

    @property
    @abstractmethod
    def address(self) -> str:
        """Folder-like name, unique in a results folder: 'slides/tissue', '256px_0.5mpp/tiles'.

        Stages whose settings differ have different addresses.
        """

    @property
    def settings(self) -> PlainValues:
        """Settings that change the result, without the settings of the stages in `needs`."""
        return {}

    @property
    def needs(self) -> tuple["AnyStage", ...]:
        """Stages whose results this one reads; by default every field that is a stage."""
        return tuple(value for value in vars(self).values() if isinstance(value, Stage))

    def load(self, work: "SlideWork") -> T_co:
        """Reads the value of the result from its files; only for stages that others need."""
        raise TypeError(
            f"stage {self.address} must define `load`, because another stage needs its value"
        )

    def key(self, source: Source) -> str:
        """Hash of the inputs and settings that the result depends on.

        `SlideWork.result_key` adds the cohort columns.
        """
        return self.key_from([need.key(source) for need in self.needs], source)

    def key_from(self, input_keys: Sequence[str], source: Source) -> str:
        """The same hash, from the keys of the stages in `needs`."""
        input_keys = input_keys or [source.key]
        settings = dict(self.settings)
        # The argument names are hashed too: another name would make all stored results outdated.
        if self.annotation_setting:
            annotation_hash = source.annotation_hashes.get(self.annotation_setting)
            return stage_key(of=input_keys, settings=settings, drawn=annotation_hash)
        return stage_key(of=input_keys, settings=settings)

    def folder(self, slide_id: str) -> str:
        """Folder of one slide's files, for a stage with several files a slide.

        Relative to the results folder.
        """
        name = self.address.removeprefix(f"{SLIDES}/")
        return f"{SLIDES}/{slide_id}/{name}"

    def file(self, slide_id: str, suffix: str = ".h5") -> str:
        """File of one slide, for a stage with one file a slide, in a folder with all slides.

        Relative to the results folder.
        """
        return f"{self.address}/{slide_id}{suffix}"


class SlideStage(Stage[T_co]):
    """A stage that reads the opened slide."""

    @abstractmethod
    def run(self, work: "SlideWork", slide: Slide) -> Output[T_co]:
        """Makes the result."""


class TileStage(Stage[T_co]):
    """A stage that reads the stream of decoded tiles.

    It has no `run`: tiles are decoded once for all such stages of a slide, so the code that reads
    the stream writes their results.
    """


class StoreStage(Stage[T_co]):
    """A stage that reads results of other stages on disk."""

    @abstractmethod
    def run(self, work: "SlideWork") -> Output[T_co]:
        """Makes the result."""


@dataclass(frozen=True, kw_only=True)
class RecordedStage(Stage[None]):
    """Stands for a finished stage whose settings are unknown; only its ledger entry is.

    It lets a new stage need the result of an earlier run.
    """

    title: ClassVar[str] = "recorded"

    recorded_address: str
    recorded_key: str

    @property
    def address(self) -> str:
        return self.recorded_address

    def key_from(self, input_keys: Sequence[str], source: Source) -> str:
        """The key that the ledger has."""
        return self.recorded_key


# a stage, whatever its value is
AnyStage = Stage[object]


@dataclass(frozen=True)
class EmbeddingsBeforeEdit:
    """Embeddings of a slide's tiles from before its annotation was edited."""

    # hash of everything that an embedding depends on, except the tile itself
    settings_hash: str
    # hidden file, because the embeddings are no result any more
    path: Path


class SlideWork:
    """Ledger and stage values of one slide, while a process works on it under the slide's lock.

    One thread uses it at a time: the stream's prepare thread until the slide is prepared, then the
    sink's thread from the slide's first batch to its end. The threads that decode and encode in
    between use only the frozen `PreparedSlide`.

    Args:
        entry: row of the cohort.
        out: the results folder.
        source: identity of the slide's pixels.
        ledger: the stored ledger.
        stages: all stages of the run; each comes after the stages that it needs.
        overwrite: True if results of another slide file or other settings may be replaced.
        slide_encoders: loaded slide encoders by name, for the stages that pool.
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
        facts = ledger.slide | cohort_facts(entry, ledger)
        self.ledger = replace(ledger, slide=facts)
        # stages that are not done
        self.missing: list[AnyStage] = []
        # title of the stage at work, for the record of a failure
        self.stage_title = "open"
        self.embeddings_before_edit: list[EmbeddingsBeforeEdit] = []
        # `Stage.key` of each stage by its address
        self._keys: dict[str, str] = {}
        # value of each stage by its address
        self._values: dict[str, object] = {}
        # addresses of the stages that this object made
        self._made_addresses: list[str] = []

    def find_missing(self, *, resume: bool = True) -> None:
        """Sets `missing` to the stages that the ledger lacks; without `resume`, to all stages."""
        if resume:
            self.missing = [stage for stage in self.stages if not self.is_done(stage)]
        else:
            self.missing = list(self.stages)

    def result_key(self, stage: AnyStage) -> str:
        """Hash of everything that the stage's result for this slide depends on.

        It is the key in the ledger: `Stage.key`, and the values of the stage's cohort columns.
        """
        key = self._key(stage)
        if not stage.cohort_columns:
            return key
        cohort_values = {
            name: self.ledger.slide.get(name) for name in stage.cohort_columns
        }
        # The argument names are hashed too: another name would make all stored results outdated.
        return stage_key(of=key, said=cohort_values)

    def _key(self, stage: AnyStage) -> str:
        """`Stage.key`, computed once; most stages are needed by several others."""
        if stage.address not in self._keys:
            input_keys = [self._key(need) for need in stage.needs]
            self._keys[stage.address] = stage.key_from(input_keys, self.source)
        return self._keys[stage.address]

    def is_done(self, stage: AnyStage) -> bool:
        """True if the ledger has the stage's result."""
        return self.ledger.done(stage.address, self.result_key(stage))

    def path(self, name: str) -> Path:
        """Path of a file in the results folder."""
        return self.out / name

    def value(self, stage: Stage[T]) -> T:
        """Value of a stage: from this run if the run made it, else read from its files."""
        if stage.address not in self._values:
            self.fetch(stage)
            self._values[stage.address] = stage.load(self)
        return cast(T, self._values[stage.address])

    def fetch(self, stage: AnyStage) -> None:
        """Downloads the files of a finished stage if they exist only at the run's URL."""
        record = self.ledger.stages.get(stage.address)
        if record is not None:
            self.ledger = self.ledger.with_local_files(record)

    def perform(self, stage: StoreStage[T]) -> None:
        """Runs a stage that reads stored results, and records its result."""
        self._start(stage)
        self.make_and_record(stage, lambda: stage.run(self))

    def perform_on(self, slide: Slide, stage: SlideStage[T]) -> None:
        """Runs a stage that reads the opened slide, and records its result."""
        self._start(stage)
        self.make_and_record(stage, lambda: stage.run(self, slide))

    def make_and_record(self, stage: Stage[T], make: Callable[[], Output[T]]) -> None:
        """Removes an outdated result of the stage, makes a new one and records it."""
        self.stage_title = stage.title
        self.remove_outdated(stage)
        self.record(stage, make())

    def note_metadata(self, slide: Slide) -> None:
        """Copies the metadata of the opened slide into the ledger."""
        facts = slide_facts(slide, self.entry, self.ledger)
        self.ledger = replace(self.ledger, slide=facts)

    def note_file_hash(self, file_hash: str) -> None:
        """Adds the hash of the whole slide file to the ledger."""
        # "whole" is a field of `Identity`
        source = self.ledger.source | {"whole": file_hash}
        self.ledger = replace(self.ledger, source=source)

    def check_unchanged(self, times: str) -> None:
        """Checks that the slide file was not written while it was read.

        If it was, the results that this object made are removed; they may mix old and new bytes.

        Args:
            times: `file_times` of the slide from before it was read; '' skips this comparison.

        Raises:
            StoreError: the slide file has changed.
        """
        path = self.entry.slide_path
        hash_of_sampled_bytes = self.ledger.source["samples"]
        same_times = True
        if times:
            same_times = file_times(path) == times
        if same_times and fingerprint(path) == hash_of_sampled_bytes:
            return
        for address in self._made_addresses:
            record = self.ledger.stages.get(address)
            if record is None:
                continue
            for name in record.files:
                self.path(name).unlink(missing_ok=True)
        self.ledger = self.ledger.without(self._made_addresses)
        self.ledger.save()
        raise StoreError(
            f"slide must not change while it is read, got other bytes in {path!r}; run the same "
            "command again when the file is complete"
        )

    def check_stale(self) -> None:
        """Checks that no stored result was made from another slide file or other settings.

        Two kinds of results may be replaced without `--overwrite`, because few or no tiles must be
        encoded again: those that copy cohort columns, and those that depend on an edited
        annotation.

        Raises:
            StaleResultError: a stored result would be replaced without `--overwrite`.
        """
        if self.overwrite:
            return
        for stage in self.missing:
            if not self._is_outdated(stage):
                continue
            if stage.cohort_columns or self._was_edited(stage):
                continue
            raise StaleResultError(
                f"{stage.address} of {self.entry.slide_id!r} must come from the same slide "
                "file and settings, got a result of another slide file, resolution, weights "
                "or version; pass --overwrite to replace it and all results that were made "
                "from it, or pass another --out"
            )

    def remove_outdated(self, stage: AnyStage) -> None:
        """Removes an outdated result of the stage, and all results that were made from it.

        Call it before a new file is put in place. A killed process then leaves no old file that
        could be taken for a new one.
        """
        if not self._is_outdated(stage):
            return
        addresses = (
            stage.address,
            *self.ledger.addresses_made_from(stage.address),
        )
        was_edited = self._was_edited(stage)
        for address in addresses:
            record = self.ledger.stages[address]
            # the ledger names this hash "rows"; only results with embeddings have it
            settings_hash = record.facts.get("rows")
            for name in record.files:
                if was_edited and settings_hash:
                    self._keep_embeddings(settings_hash, self.path(name))
                self.path(name).unlink(missing_ok=True)
        self.ledger = self.ledger.without(addresses)
        self.ledger.save()

    def record(self, stage: Stage[T], output: Output[T]) -> None:
        """Records a result whose files are in place; removes other files of an earlier result."""
        earlier = self.ledger.stages.get(stage.address)
        if earlier is not None:
            for name in earlier.files:
                if name not in output.files:
                    self.path(name).unlink(missing_ok=True)
        stage_record = StageRecord(
            key=self.result_key(stage),
            files={name: self.path(name).stat().st_size for name in output.files},
            needs=tuple(need.address for need in stage.needs),
            facts=dict(output.facts),
            sums={name: file_sum(self.path(name)) for name in output.files},
        )
        self.ledger = self.ledger.with_stage(stage.address, stage_record)
        self.ledger.save()
        self._made_addresses.append(stage.address)
        self.missing = [
            other for other in self.missing if other.address != stage.address
        ]
        if output.value is not None:
            self._values[stage.address] = output.value

    def ready_stages(self) -> Iterator[StoreStage[object]]:
        """Yields the missing stages that read stored results, as soon as all of these are there."""
        for stage in list(self.missing):
            lacking = {other.address for other in self.missing}
            is_ready = lacking.isdisjoint(need.address for need in stage.needs)
            if isinstance(stage, StoreStage) and is_ready:
                yield stage

    def facts(self) -> Document:
        """Facts of the slide and of the run's stages, with all warnings joined into one text."""
        return ledger_facts(self.ledger, [stage.address for stage in self.stages])

    def drop_embeddings_before_edit(self) -> None:
        """Removes the embeddings that were kept from before an annotation was edited."""
        for embeddings in self.embeddings_before_edit:
            embeddings.path.unlink(missing_ok=True)

    def _start(self, stage: AnyStage) -> None:
        """Notes the stage at work, and downloads the files that it needs."""
        self.stage_title = stage.title
        for need in stage.needs:
            self.fetch(need)

    def _keep_embeddings(self, settings_hash: str, path: Path) -> None:
        """Keeps a file of embeddings under a hidden name, to reuse it for unchanged tiles."""
        # with this mark in its name, the file is removed later if this process is killed
        hidden_path = path.with_name(f".{path.name}{TMP_MARK}kept")
        link_or_copy(path, hidden_path)
        self.embeddings_before_edit.append(
            EmbeddingsBeforeEdit(settings_hash, hidden_path)
        )

    def _was_edited(self, stage: AnyStage) -> bool:
        """True if the result depends on an annotation that was edited, and the slide is the same.

        The annotation may be one of a stage that this stage needs, directly or not.
        """
        record = self.ledger.stages.get(stage.address)
        if stage.annotation_setting and record is not None:
            # the fact "pixels" is the key of the slide that the annotation was drawn on
            same_pixels = record.facts.get("pixels") == self.source.key
            return same_pixels and self._is_outdated(stage)
        return any(self._was_edited(need) for need in stage.needs)

    def _is_outdated(self, stage: AnyStage) -> bool:
        """True if the ledger has a result of the stage from other inputs or settings."""
        record = self.ledger.stages.get(stage.address)
        return record is not None and record.key != self.result_key(stage)
