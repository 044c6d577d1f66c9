"""Writes results to disk in a separate thread, so that the encoders do not wait for it."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Union

import numpy as np
import numpy.typing as npt

from thinsection.errors import OutputError
from thinsection.pipeline.slide_states import ClaimedSlide, PreparedSlide, SlideEnd
from thinsection.stages.features import FeaturesStage, OpenResult, TokensStage
from thinsection.stages.measures import MeasuresStage
from thinsection.stages.stage import AnyStage
from thinsection.stages.tiles import TilesStage
from thinsection.stream import StageClock, TileBatch
from thinsection.stream.batches import SlideFailed, SlideFinished
from thinsection.stream.threads import Channel, ChannelClosed

if TYPE_CHECKING:
    from thinsection.encode.embed import EmbeddedBatch

# handled in order; a tile batch without embeddings only reports the tiles that filters kept
SinkItem = Union[
    "EmbeddedBatch[PreparedSlide]",
    TileBatch[PreparedSlide],
    SlideFinished[PreparedSlide],
    SlideFailed[PreparedSlide],
]
# batches of embeddings that may wait for the disk: at most 4 x 256 x 2560 x 4 B = 10 MiB
_QUEUED = 4


def encoder_of(stage: AnyStage) -> str:
    """Label of the encoder that feeds a stage; '' if no encoder feeds it."""
    source = stage.features if isinstance(stage, TokensStage) else stage
    return source.encoder if isinstance(source, FeaturesStage) else ""


class ResultSink:
    """Receives a stream's events, with embedded batches, and writes finished slides.

    Its thread owns a slide's `SlideWork` from the slide's first item on.

    Args:
        dims: width of each encoder's embeddings by label, in the order within a batch.
        on_end: called with each slide's end, in the sink's thread.
        clock: sums the time of writing and pooling.

    Memory: `_QUEUED` batches of embeddings; while a slide is pooled, its (N, D) embeddings.
    """

    def __init__(
        self,
        *,
        dims: dict[str, int],
        on_end: Callable[[SlideEnd], None],
        clock: StageClock,
    ) -> None:
        self._dims = dims
        self._on_end = on_end
        self._clock = clock
        self._channel: Channel[SinkItem] = Channel(_QUEUED)
        self._open: _OpenSlide | None = None  # slide in progress
        # failed slide whose further items are dropped
        self._given_up: ClaimedSlide | None = None
        self._failure: BaseException | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def put(self, item: SinkItem) -> None:
        """Queues an item, and waits if the queue is full.

        Raises BaseException: an error that ended the sink's thread.
        """
        try:
            self._channel.put(item)
        except ChannelClosed:
            raise self._failure or RuntimeError("the sink has ended") from None

    def __enter__(self) -> "ResultSink":
        self._thread.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self._channel.finish()
        else:
            self._channel.close()
        try:
            self._done.wait()
        finally:
            # if the wait is interrupted, the current slide is finished and no other is begun
            self._channel.close()
            # after an interrupt, Thread.join would report a running thread as ended
            self._done.wait()
            self._abandon()
        if exc_type is None and self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            for item in self._channel:
                self._take(item)
        except BaseException as error:  # noqa: BLE001 - raised again in the run's thread
            self._failure = error
            self._channel.close()
        finally:
            self._done.set()

    def _take(self, item: SinkItem) -> None:
        prepared = item.key
        if self._given_up is prepared.claimed:
            return
        if isinstance(item, SlideFailed):
            self._give_up(prepared, item.stage, item.error)
            return
        try:
            if not isinstance(item, SlideFinished):
                with self._clock.timed("write_busy"):
                    self._opened(prepared).append(item)
                return
            self._finish(prepared)
        except OutputError:  # the next slide would fail in the same way
            raise
        except Exception as error:  # noqa: BLE001 - the per-slide boundary of writing
            self._give_up(prepared, prepared.work.stage_title, error)
        else:
            if prepared.is_last:
                self._end_slide(prepared)

    def _end_slide(self, prepared: PreparedSlide) -> None:
        work = prepared.work
        work.drop_embeddings_before_edit()
        facts = work.facts() | prepared.fetched()
        self._on_end(SlideEnd(entry=work.entry, facts=facts))

    def _give_up(self, prepared: PreparedSlide, stage: str, error: Exception) -> None:
        self._abandon()
        self._given_up = prepared.claimed
        prepared.work.drop_embeddings_before_edit()
        self._on_end(SlideEnd(entry=prepared.entry, error=error, stage=stage))

    def _opened(self, prepared: PreparedSlide) -> "_OpenSlide":
        """Slide with open files for the stages that the stream feeds."""
        if self._open is None:
            self._open = _OpenSlide(prepared, self._dims)
        return self._open

    def _finish(self, prepared: PreparedSlide) -> None:
        """Completes the files of a grid, then runs the stages that read stored results."""
        with self._clock.timed("write_busy"):
            self._opened(prepared).finish()
            self._open = None
        work = prepared.work
        for stage in work.ready_stages():
            name = "aggregate_busy" if stage.title == "aggregate" else "write_busy"
            with self._clock.timed(name):
                work.perform(stage)

    def _abandon(self) -> None:
        """Deletes incomplete files."""
        if self._open is not None:
            self._open.abandon()
            self._open = None


class _OpenSlide:
    """Slide whose tiles arrive: open files of the stages that they feed, and the tiles kept."""

    def __init__(self, prepared: PreparedSlide, dims: dict[str, int]) -> None:
        self._prepared = prepared
        self._dims = dims
        self._labels = list(dims)  # in the order of a batch's embeddings
        self._kept = [np.empty(0, dtype=np.int64)]
        self._warnings = list(prepared.warnings)
        self._files: list[OpenResult] = []
        prepared.work.stage_title = "write"
        for stage in prepared.streamed_stages:
            if isinstance(stage, FeaturesStage | TokensStage):
                known = prepared.known_rows.get(stage.address)
                file = OpenResult(prepared.work, stage, prepared.attributes, known)
                self._files.append(file)

    def append(
        self, item: "EmbeddedBatch[PreparedSlide] | TileBatch[PreparedSlide]"
    ) -> None:
        """Adds a batch: the tiles that were kept, and their embeddings."""
        self._kept.append(item.indices)
        if isinstance(item, TileBatch):
            return
        self._warnings += [note for note in item.notes if note not in self._warnings]
        for file in self._files:
            place = self._labels.index(encoder_of(file.stage))
            parts = (
                item.tokens
                if isinstance(file.stage, TokensStage)
                else item.tile_embeddings
            )
            values = parts[place]
            assert values is not None
            file.append(item.coords_l0, values)

    def finish(self) -> None:
        """Completes and records the files of all stages that the stream feeds."""
        prepared = self._prepared
        work = prepared.work
        if prepared.whole_sum is not None:
            work.note_file_hash(prepared.whole_sum.result())
        if prepared.slide is not None:
            work.check_unchanged(prepared.claimed.times)
        kept = np.concatenate(self._kept)
        for stage in prepared.streamed_stages:
            if isinstance(stage, TilesStage):
                self._write_grid(stage, kept)
        for stage in prepared.streamed_stages:
            if isinstance(stage, MeasuresStage):
                self._write_measures(stage, kept)
        for file in self._files:
            work.stage_title = file.stage.title
            width = self._dims[encoder_of(file.stage)]
            work.record(file.stage, file.close((width,), self._warnings))

    def _write_grid(self, stage: TilesStage, kept: npt.NDArray[np.int64]) -> None:
        prepared = self._prepared
        assert prepared.table is not None
        table = prepared.table.select(kept)
        prepared.work.make_and_record(
            stage,
            lambda: stage.write(
                prepared.work, prepared.slide, table, prepared.attributes
            ),
        )

    def _write_measures(
        self, stage: MeasuresStage, kept: npt.NDArray[np.int64]
    ) -> None:
        prepared = self._prepared
        measures = prepared.measures
        assert measures is not None
        prepared.work.make_and_record(
            stage,
            lambda: stage.write(prepared.work, measures, kept, prepared.attributes),
        )

    def abandon(self) -> None:
        """Deletes incomplete files."""
        for file in self._files:
            file.abandon()
