"""Stages: the steps of a run, each a value that says where its result lies and how it is made.

A stage also lists the stages that it needs, and the settings that change its result. The stages of
a run are those that the result named by --until needs; they form a graph. The run asks a stage what
it `reads`, and never for its class:

    'slide'   the opened slide: tissue, quality control, segmentations, the tile grid
    'tiles'   decoded tiles, all such stages of a slide in one pass: embeddings, token grids
    'store'   results of other stages on disk: pooling, pictures, graphs, exports

It then calls `make`, or `open` for a stage that the stream of decoded tiles feeds.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    ClassVar,
    Generic,
    Literal,
    TypeVar,
    cast,
)

import numpy as np
import numpy.typing as npt

from thinsection.errors import StaleResultError, StoreError
from thinsection.files.atomic import link_or_copy
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.store.identity import (
    Source,
    WholeFileHash,
    file_sum,
    file_times,
    fingerprint,
    fingerprint_reads,
)
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord, stage_key
from thinsection.store.outcome import (
    KnownSlide,
    cohort_facts,
    ledger_facts,
    slide_facts,
)
from thinsection.store.tile_tables import RowMerger
from thinsection.tiles import TileTable
from thinsection.tiles.stream import EmbeddedBatch, SlideTiles
from thinsection.tiles.table import Columns
from thinsection.types import Document, PlainValues, TileArray

if TYPE_CHECKING:
    from thinsection.pool import SlideEncoder

# in the hidden name of embeddings from before an edit, which no ledger lists
BEFORE_EDIT = ".before_edit-"

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# what a stage reads; see the docstring of this file
Reads = Literal["slide", "tiles", "store"]


# (label of a tile encoder, output that a stage needs); one forward pass gives both kinds of output
EncoderOutput = tuple[str, Literal["embeddings", "tokens"]]


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
    hold for all stages of a subclass. A stage that reads 'slide' may need other stages that read
    'slide', such as a tile grid without pixel filters, but no stage that reads 'tiles'.
    """

    # name of the step in messages: tissue, qc, tile, embed, ...
    title: ClassVar[str]
    # cohort columns that are copied into the result; a change there runs the stage again
    cohort_columns: ClassVar[tuple[str, ...]] = ()

    @property
    def annotation_setting(self) -> str:
        """Setting that names the stage's annotation file, such as 'roi'; '' without a file."""
        return ""

    def annotation_hash(self, entry: SlideEntry, ledger: SlideLedger) -> str:
        """Hash of what the annotations of a slide change; '' if they change nothing.

        Raises InvalidInputError: the file is missing or not valid.
        """
        return ""

    def is_only_edited(self, work: "SlideWork") -> bool:
        """True if a stored, outdated result differs from the wanted one by its annotation alone."""
        record = work.ledger.stages[self.address]
        # the record of a stage with an annotation has the slide's key as the fact "pixels"
        return bool(record.facts.get("pixels") == work.source.key)

    def take_over(self, work: "SlideWork") -> object | None:
        """What `make` uses of an outdated result, read before that is removed; None for nothing.

        The stage's files then stay until `make` replaces them. `work.taken_over` has the value.
        """
        return None

    @property
    @abstractmethod
    def address(self) -> str:
        """Folder-like name, unique in a results folder: 'slides/tissue', '256px_0.5mpp/tiles'.

        Stages whose settings differ have different addresses. What is made from the tiles of a
        grid has an address in the folder of the grid.
        """

    @property
    def settings(self) -> PlainValues:
        """Settings that change the result, without the settings of the stages in `needs`."""
        return {}

    @property
    def needs(self) -> tuple["AnyStage", ...]:
        """Stages whose results this one reads; by default every field that is a stage."""
        return tuple(value for value in vars(self).values() if isinstance(value, Stage))

    @property
    @abstractmethod
    def reads(self) -> Reads:
        """What the result is made from."""

    @property
    def label(self) -> str:
        """Short name of the result, or ''.

        It is a part of the folder name of each tile grid made from the result: 'qc-auto'.
        """
        return ""

    def make(self, work: "SlideWork") -> Output[T_co]:
        """Makes the result from the opened slide, `work.opened`, or from stored results."""
        raise TypeError(f"stage {self.address} reads tiles, so `open` makes its writer")

    def open(self, tiles: "GridTiles") -> "TileWriter":
        """Makes the writer that the stream feeds with the tiles of one slide."""
        raise TypeError(
            f"stage {self.address} reads no tiles, so `make` makes its result"
        )

    @property
    def encoder_output(self) -> EncoderOutput | None:
        """Encoder output that this stage needs for each tile; None if it needs none."""
        return None

    def reuse(self, work: "SlideWork", table: TileTable) -> Output[T_co] | None:
        """Takes the same result of these tiles from another address; None if there is none."""
        return None

    def stored_embedding_files(self, work: "SlideWork", table: TileTable) -> list[Path]:
        """Files that may hold stored embeddings of some of these tiles.

        Tiles whose embeddings are found there are not read again.
        """
        return []

    def tile_columns(self, work: "SlideWork", table: TileTable) -> Columns:
        """Columns that this stage adds to the tile table of a grid that needs it."""
        return {}

    def judge(self, work: "SlideWork") -> None:
        """Checks the finished result before any tile is read.

        Raises QcExclusion: the slide must be left out.
        """

    @property
    def notes(self) -> list[str]:
        """Sentences about what the results will lack; a run says them before its work."""
        return []

    def check_run(self) -> None:
        """Refuses settings that would fail for every slide, before any is opened."""

    def write_tables(self, out: Path, slides: Sequence[KnownSlide]) -> dict[str, str]:
        """Writes the stage's own tables for all slides of a folder, when a run ends.

        Returns:
            By slide id: why the stage, which sees all slides together, finds the slide unusable.
        """
        return {}

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
        # "drawn" is the hash of the annotation. The argument names are hashed too: another name
        # would make all stored results outdated.
        annotation_hash = source.annotation_hashes.get(self.annotation_setting)
        if annotation_hash:
            return stage_key(of=input_keys, settings=settings, drawn=annotation_hash)
        return stage_key(of=input_keys, settings=settings)

    def folder(self, slide_id: str) -> str:
        """Folder of one slide's files, if the stage writes several; relative to the results folder.

        Address 'slides/tissue' gives 'slides/ID/tissue'.
        """
        name = self.address.removeprefix(f"{SLIDES}/")
        return f"{SLIDES}/{slide_id}/{name}"

    def file(self, slide_id: str, suffix: str = ".h5") -> str:
        """File of one slide, if the stage writes one; relative to the results folder.

        Address '256px_0.5mpp/tiles' gives '256px_0.5mpp/tiles/ID.h5'.
        """
        return f"{self.address}/{slide_id}{suffix}"


class TileWriter(ABC):
    """Makes the result of a stage from the tiles of one slide, while the stream decodes them.

    It is made before the first tile is decoded, and puts nothing on disk before `append` or
    `finish`. After an error it gets `abandon`, and nothing else.
    """

    # True if `measure` must see the pixels
    reads_pixels: ClassVar[bool] = False

    def measure(  # noqa: B027 - most writers see no pixels
        self, indices: npt.NDArray[np.int64], tiles: TileArray
    ) -> None:
        """Sees the pixels (b, tile_px, tile_px, 3) of tiles that the filters kept.

        Decode threads call it, several at a time and in any order. `indices` (b,) are row numbers
        in the table of the tiles to read.
        """

    @abstractmethod
    def append(self, batch: EmbeddedBatch["GridTiles"]) -> None:
        """Takes the next tiles that the filters kept, in the order of the table."""

    @abstractmethod
    def finish(self) -> Output[object]:
        """Completes the result: every tile was appended."""

    def abandon(self) -> None:  # noqa: B027 - most writers put nothing on disk
        """Removes the files that `append` put on disk."""


@dataclass(kw_only=True, eq=False)
class GridTiles(SlideTiles):
    """Tiles of one grid of a slide, and the stages whose results the stream makes from them.

    A slide has one `GridTiles` for each grid to read. They follow each other in the stream and
    share the opened slide. The prepare thread makes them; later the sink's thread uses their `work`
    and writers.
    """

    work: "SlideWork"
    # HDF5 attributes of every file that is made from its tiles
    attributes: PlainValues = field(default_factory=dict)
    # embedding dimension of each encoder, by the encoder's label
    dims: Mapping[str, int] = field(default_factory=dict)
    # stages whose results are made from its tiles, and their writers
    stages: tuple["AnyStage", ...] = ()
    writers: tuple[TileWriter, ...] = ()
    # stored rows of embeddings by the address of their stage; their tiles are not read again
    stored_rows: Mapping[str, RowMerger] = field(default_factory=dict)
    # remarks on how its tiles were changed, for the slide's record
    notes: tuple[str, ...] = ()
    is_first: bool = True  # first `GridTiles` of its slide
    is_last: bool = True  # last `GridTiles` of its slide


def path_before_edit(path: Path, settings_hash: str) -> Path:
    """Hidden path of a file of embeddings that an edited annotation has outdated."""
    return path.with_name(f".{path.name}{BEFORE_EDIT}{settings_hash}")


# a stage, whatever its value is
AnyStage = Stage[object]


class SlideWork:
    """Ledger and stage values of one slide, while a process works on it under the slide's lock.

    One thread uses it at a time: the stream's prepare thread until the slide is prepared, then the
    sink's thread from the slide's first batch to its end. The threads that decode and encode in
    between read only its `entry` and `num_tiles`.

    Args:
        entry: row of the cohort.
        out: the results folder.
        source: identity of the slide's pixels.
        ledger: the stored ledger.
        stages: all stages of the run; each comes after the stages that it needs.
        overwrite: True if results of another slide file or other settings may be replaced.
        slide_encoders: loaded slide encoders by name, for the stages that pool.
        times: `file_times` of the slide file before it was read; '' if times are not compared.
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
        times: str = "",
    ) -> None:
        self.entry = entry
        self.out = out
        self.source = source
        self.stages = stages
        self.overwrite = overwrite
        self.slide_encoders = slide_encoders or {}
        self.times = times
        # the slide, once it was opened; later stages may find it closed
        self.slide: Slide | None = None
        # computes the hash of the complete file in a thread; None if nothing is to be computed
        self.file_hash_job: WholeFileHash | None = None
        # number of tiles to read, over all grids
        self.num_tiles = 0
        # True if the stored ledger lacks facts of the slide's file or of its cohort row
        self.has_new_facts = False
        # first error of a grid, and its stage; the other grids are still read
        self.failure: tuple[str, Exception] | None = None
        facts = ledger.slide | cohort_facts(entry, ledger)
        self.ledger = replace(ledger, slide=facts)
        # stages that are not done
        self.missing: list[AnyStage] = []
        # what stages use again of their outdated results, by address; and the files of these
        self.taken_over: dict[str, object] = {}
        self._kept_files: dict[str, list[str]] = {}
        # False if everything is computed again, whatever is stored
        self.resumes = True
        # title of the stage at work, for the record of a failure
        self.stage_title = "open"
        # Embeddings that this run found outdated by an edited annotation. They stay in hidden files
        # until their own stage is made again, in this run or a later one, so that unchanged tiles
        # need not be encoded again. By file: the hash of the settings that its rows depend on.
        self.embeddings_before_edit: dict[Path, str] = {}
        # addresses of results that an edit removed and that no stage of this run makes again
        self.removed_by_edit: list[str] = []
        # sentences for the slide's line that are about this run, and so in no ledger
        self.run_notes: list[str] = []
        # `Stage.key` of each stage by its address
        self._keys: dict[str, str] = {}
        # value of each stage by its address
        self._values: dict[str, object] = {}
        # addresses of the stages that this object made
        self._made_addresses: list[str] = []

    def find_missing(self, *, resume: bool = True) -> None:
        """Sets `missing` to the stages that the ledger lacks; without `resume`, to all stages."""
        self.resumes = resume
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
        # "said" are the values of the cohort columns. The argument names are hashed too: another
        # name would make all stored results outdated.
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

    @property
    def opened(self) -> Slide:
        """The opened slide, for a stage that reads it."""
        assert self.slide is not None
        return self.slide

    def value(self, stage: Stage[T]) -> T:
        """Value of a stage: from this run if the run made it, else read from its files."""
        if stage.address not in self._values:
            self.fetch(stage)
            self._values[stage.address] = stage.load(self)
        return cast(T, self._values[stage.address])

    def fetch(self, stage: AnyStage) -> None:
        """Downloads the files of a finished stage if `out` is a URL and they are not here yet."""
        record = self.ledger.stages.get(stage.address)
        if record is not None:
            self.ledger = self.ledger.with_local_files(record)

    def perform(self, stage: Stage[T]) -> None:
        """Makes the result of a stage and records it; an outdated result is removed first."""
        self.stage_title = stage.title
        for need in stage.needs:
            self.fetch(need)
        self.remove_outdated(stage)
        self.record(stage, stage.make(self))

    def note_opened(self, slide: Slide) -> None:
        """Keeps the opened slide for stages that read it, and its metadata for the ledger."""
        self.slide = slide
        facts = slide_facts(slide, self.entry, self.ledger)
        self.ledger = replace(self.ledger, slide=facts)

    def note_file_hash(self, file_hash: str) -> None:
        """Adds the hash of the whole slide file to the ledger."""
        # "whole" is a field of `Identity`
        source = self.ledger.source | {"whole": file_hash}
        self.ledger = replace(self.ledger, source=source)

    def check_unchanged(self) -> None:
        """Checks that the slide file was not written while it was read.

        If it was, the results that this object made are removed; they may mix old and new bytes.

        Raises:
            StoreError: the slide file has changed.
        """
        path = self.entry.slide_path
        hash_of_sampled_bytes = self.ledger.source["samples"]
        same_times = True
        if self.times:
            same_times = file_times(path) == self.times
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
            if stage.cohort_columns or self._depends_on_edited_annotation(stage):
                continue
            raise StaleResultError(
                f"{stage.address} of {self.entry.slide_id!r} must come from the same slide "
                "file and settings, got a result of another slide file, resolution, weights "
                "or version; pass overwrite=True to replace it and all results that were made "
                "from it, or pass another out=..."
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
        was_edited = self._depends_on_edited_annotation(stage)
        taken = stage.take_over(self)
        if taken is not None:
            self.taken_over[stage.address] = taken
            self._kept_files[stage.address] = list(
                self.ledger.stages[stage.address].files
            )
        for address in addresses:
            record = self.ledger.stages[address]
            # the ledger names this hash "rows"; only results with embeddings have it
            settings_hash = record.facts.get("rows")
            for name in record.files:
                path = self.path(name)
                if was_edited and settings_hash and path.is_file():
                    # keep the file under a hidden name, to reuse the rows of unchanged tiles
                    hidden_path = path_before_edit(path, settings_hash)
                    # a hard link must not be written over
                    hidden_path.unlink(missing_ok=True)
                    link_or_copy(path, hidden_path)
                    self.embeddings_before_edit[hidden_path] = settings_hash
                if address != stage.address or taken is None:
                    path.unlink(missing_ok=True)
        if was_edited:
            made_by_run = {other.address for other in self.stages}
            self.removed_by_edit += [a for a in addresses if a not in made_by_run]
        self.ledger = self.ledger.without(addresses)
        self.ledger.save()

    def record(self, stage: Stage[T], output: Output[T]) -> None:
        """Records a result whose files are in place; removes other files of an earlier result."""
        earlier = self.ledger.stages.get(stage.address)
        earlier_files = self._kept_files.pop(stage.address, [])
        if earlier is not None:
            earlier_files += earlier.files
        for name in earlier_files:
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
        for name in output.files:
            self._drop_embeddings_before_edit(self.path(name))
        self._made_addresses.append(stage.address)
        self.missing = [
            other for other in self.missing if other.address != stage.address
        ]
        if output.value is not None:
            self._values[stage.address] = output.value

    def ready(self, reads: Reads) -> Iterator[AnyStage]:
        """Yields the missing stages with this `reads` whose needed stages are all done.

        The caller performs each stage before it asks for the next. That may make later stages
        ready.
        """
        for stage in list(self.missing):
            lacking = {other.address for other in self.missing}
            is_ready = lacking.isdisjoint(need.address for need in stage.needs)
            if stage.reads == reads and is_ready:
                yield stage

    def check_complete(self) -> None:
        """Raises TypeError if a stage was not made, although nothing failed."""
        if self.missing:
            stage = self.missing[0]
            raise TypeError(
                f"stage {stage.address} must be made before the slide ends, got no call for it; "
                "a stage that reads 'slide' must not need one that reads 'tiles', and the address "
                "of a stage that reads 'tiles' must lie in the folder of a grid"
            )

    def facts(self) -> Document:
        """Facts of the slide and of the run's stages, with all warnings joined into one text."""
        return ledger_facts(self.ledger, [stage.address for stage in self.stages])

    @property
    def note_on_removed(self) -> str:
        """Sentence that names the grids whose results an edit has removed; '' for none."""
        grids = {address.partition("/")[0] for address in self.removed_by_edit}
        grids.discard(SLIDES)
        if not grids:
            return ""
        return (
            f"edited areas have changed the tissue, so results in {', '.join(sorted(grids))} were "
            "removed; the next run of these grids copies the embeddings of tiles that stay"
        )

    def download_counts(self) -> dict[str, int]:
        """Bytes and requests spent on a slide read from a URL; empty for a local file.

        The fingerprint counts twice, since it is taken before and after the slide is read. The
        requests that check whether an earlier run is complete are not counted.
        """
        remote = None if self.slide is None else self.slide.source
        if remote is None:
            return {}
        sampled, requests = fingerprint_reads(remote.size)
        return {
            "fetched_bytes": remote.fetched_bytes + 2 * sampled,
            "file_bytes": remote.size,
            "requests": remote.requests + 2 * requests,
        }

    def _drop_embeddings_before_edit(self, path: Path) -> None:
        """Removes what was kept of a file from before an edit; the file is made again."""
        pattern = f".{escape(path.name)}{BEFORE_EDIT}*"
        for hidden_path in path.parent.glob(pattern):
            hidden_path.unlink(missing_ok=True)
            self.embeddings_before_edit.pop(hidden_path, None)

    def _depends_on_edited_annotation(self, stage: AnyStage) -> bool:
        """True if an annotation of this stage was edited since its stored result was made.

        A stage without an annotation, or without a stored result, gets the answer of the stages
        that it needs, directly or not. The pixels of the slide must be the same.
        """
        if stage.annotation_setting and stage.address in self.ledger.stages:
            return self._is_outdated(stage) and stage.is_only_edited(self)
        return any(self._depends_on_edited_annotation(need) for need in stage.needs)

    def _is_outdated(self, stage: AnyStage) -> bool:
        """True if the ledger has a result of the stage from other inputs or settings."""
        record = self.ledger.stages.get(stage.address)
        return record is not None and record.key != self.result_key(stage)
