"""Writes results to disk in a separate thread, so that the encoders do not wait for it."""

import threading
from collections.abc import Callable

from thinsection.errors import OutputError
from thinsection.stages.stage import GridTiles, SlideWork
from thinsection.tiles import StepTimer
from thinsection.tiles.budget import Channel, ChannelClosed
from thinsection.tiles.stream import EmbeddedBatch, SlideFailed, SlideFinished

# handled in order; a batch without embeddings only reports the tiles that filters kept
SinkItem = EmbeddedBatch[GridTiles] | SlideFinished[GridTiles] | SlideFailed[GridTiles]
# called with a slide that ended; with the stage and the error if it failed
OnEnd = Callable[[SlideWork, tuple[str, Exception] | None], None]
# batches of embeddings that may wait for the disk: at most 4 x 256 x 2560 x 4 B = 10 MiB
_QUEUED = 4


class ResultSink:
    """Receives a stream's events, with embedded batches, and writes finished slides.

    Its thread owns a slide's `SlideWork` from the slide's first item on.

    Args:
        on_end: called with each slide's end, in the sink's thread.
        clock: sums the time of writing and pooling.

    Memory: `_QUEUED` batches of embeddings; while a slide is pooled, its (N, D) embeddings.
    """

    def __init__(self, *, on_end: OnEnd, clock: StepTimer) -> None:
        self._on_end = on_end
        self._clock = clock
        self._channel: Channel[SinkItem] = Channel(_QUEUED)
        self._open: GridTiles | None = None  # tiles whose writers are at work
        # failed slide whose further items are dropped
        self._given_up: SlideWork | None = None
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
        # Wait for the sink's thread. If Ctrl-C interrupts the wait, drop the queued items, let the
        # thread finish the current one, and wait again. After an interrupt, Thread.join would
        # report a running thread as ended.
        try:
            self._done.wait()
        finally:
            self._channel.close()
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
        work = item.source.work
        if self._given_up is work:
            return
        if isinstance(item, SlideFailed):
            self._give_up(work, item.stage, item.error)
            return
        try:
            if isinstance(item, SlideFinished):
                self._finish(item.source)
            else:
                with self._clock.timed("write_busy"):
                    self._open = item.source
                    work.stage_title = "write"
                    for writer in item.source.writers:
                        writer.append(item)
        except OutputError:  # the next slide would fail in the same way
            raise
        except Exception as error:  # noqa: BLE001 - the per-slide boundary of writing
            self._give_up(work, work.stage_title, error)

    def _finish(self, tiles: GridTiles) -> None:
        """Completes the results of a grid, then runs the stages that read stored results."""
        work = tiles.work
        with self._clock.timed("write_busy"):
            self._open = tiles
            work.stage_title = "write"
            if tiles.is_last and work.file_hash_job is not None:
                work.note_file_hash(work.file_hash_job.result())
            if work.slide is not None:
                work.check_unchanged()
            for stage, writer in zip(tiles.stages, tiles.writers):
                work.stage_title = stage.title
                work.remove_outdated(stage)
                work.record(stage, writer.finish())
            self._open = None
        for stage in work.ready("store"):
            name = "aggregate_busy" if stage.title == "aggregate" else "write_busy"
            with self._clock.timed(name):
                work.perform(stage)
        if tiles.is_last:
            if work.failure is None:
                work.check_complete()
            self._on_end(work, work.failure)

    def _give_up(self, work: SlideWork, stage: str, error: Exception) -> None:
        self._abandon()
        self._given_up = work
        self._on_end(work, (stage, error))

    def _abandon(self) -> None:
        """Deletes incomplete files."""
        if self._open is not None:
            for writer in self._open.writers:
                writer.abandon()
            self._open = None
