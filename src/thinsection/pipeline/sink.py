"""Results onto disk, in a thread of its own, so that the encoders do not wait for it."""

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Union

import numpy as np
import numpy.typing as npt

from thinsection.errors import OutputError
from thinsection.stages.leaves import MeasuresStage
from thinsection.stages.stage import SlideWork, Stage
from thinsection.stages.tiles import FeaturesStage, OpenResult, TilesStage, TokensStage
from thinsection.stream import StageClock, TileBatch
from thinsection.stream.batches import (
    Channel,
    ChannelClosed,
    SlideFailed,
    SlideFinished,
)

if TYPE_CHECKING:
    from thinsection.encode.embed import EmbeddedBatch

# what the sink takes, in order: of a batch without embeddings only which tiles filters kept
Item = Union["EmbeddedBatch", TileBatch, SlideFinished, SlideFailed]
OnEnd = Callable[[SlideWork, str, Exception | None], None]
# batches of embeddings that may wait for the disk: 4 x 256 x 2560 x 4 B = 10 MiB at the largest
_QUEUED = 4


def encoder_of(stage: Stage) -> str:
    """Label of the encoder that feeds a stage; '' for stages that none feeds."""
    source = stage.features if isinstance(stage, TokensStage) else stage
    return source.encoder if isinstance(source, FeaturesStage) else ""


class ResultSink:
    """Takes a stream's events, batches of tiles embedded, and leaves finished slides.

    `dims` is the width of each encoder's embeddings by label, in the order of a batch's; `on_end`
    is told of each slide's work, failing stage and error (None when done), in the sink's thread.

    Memory: `_QUEUED` batches of embeddings; while one slide is pooled its (N, D) embeddings.
    """

    def __init__(
        self, *, dims: dict[str, int], on_end: OnEnd, clock: StageClock
    ) -> None:
        self._dims, self._on_end, self._clock = dims, on_end, clock
        self._channel: Channel[Item] = Channel(_QUEUED)
        # of the slide at work: its files with their encoders' labels, and the tiles that were kept
        self._files: list[tuple[str, OpenResult]] | None = None
        self._kept: list[npt.NDArray[np.int64]] = []
        self._given_up: SlideWork | None = None
        self._failure: BaseException | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def put(self, item: Item) -> None:
        """Hands an item over, waiting for room.

        Raises BaseException: whatever broke the sink itself.
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
        finally:  # the wait may be interrupted: the slide at work is finished, no other is begun
            self._channel.close()
            self._done.wait()  # Thread.join that was interrupted takes the thread for ended
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

    def _take(self, item: Item) -> None:
        work: SlideWork = item.key
        if self._given_up is work:
            return
        if isinstance(item, SlideFailed):
            self._give_up(work, item.stage, item.error)
            return
        try:
            if not isinstance(item, SlideFinished):
                with self._clock.timed("write_busy"):
                    self._append(work, item)
                return
            self._finish(work)
        except OutputError:  # the next slide would fare the same
            raise
        except Exception as error:  # noqa: BLE001 - the per-slide boundary of writing
            self._give_up(work, work.at, error)
        else:
            self._on_end(work, "", None)

    def _give_up(self, work: SlideWork, stage: str, error: Exception) -> None:
        self._abandon()
        self._given_up = work
        self._on_end(work, stage, error)

    def _growing(self, work: SlideWork) -> list[tuple[str, OpenResult]]:
        """The files of the stages that the stream feeds and that the slide lacks."""
        if self._files is None:
            work.at, self._files, self._kept = "write", [], []
            for stage in work.missing:
                if isinstance(stage, FeaturesStage | TokensStage):
                    self._files.append((encoder_of(stage), OpenResult(work, stage)))
        return self._files

    def _append(self, work: SlideWork, item: "EmbeddedBatch | TileBatch") -> None:
        files, labels = self._growing(work), list(self._dims)
        self._kept.append(item.indices)
        if isinstance(item, TileBatch):
            return
        for label, file in files:
            tokens = isinstance(file.stage, TokensStage)
            values = (item.tokens if tokens else item.tile_embeddings)[
                labels.index(label)
            ]
            assert values is not None
            file.append(item.coords_l0, values)

    def _finish(self, work: SlideWork) -> None:
        """Completes the files of the stream, then all that is made from what is stored."""
        with self._clock.timed("write_busy"):
            files = self._growing(work)
            work.settle_source()
            work.check_unchanged()
            kept = np.concatenate(self._kept or [np.empty(0, dtype=np.int64)])
            for stage in [s for s in work.missing if isinstance(s, TilesStage)]:
                table = work.values["candidates"].select(kept)
                work.record(stage, partial(stage.write, work, table))
            for measures in [s for s in work.missing if isinstance(s, MeasuresStage)]:
                work.record(measures, partial(measures.write, work, kept))
            for label, file in files:
                work.at = file.stage.title
                work.finish(file.stage, file.close((self._dims[label],)))
            self._files = None
        for stored in [
            s for s in work.stages if s.reads == "store" and s in work.missing
        ]:
            pooling = stored.title == "aggregate"
            with self._clock.timed("aggregate_busy" if pooling else "write_busy"):
                work.perform(stored)

    def _abandon(self) -> None:
        """Drops half-written files."""
        files, self._files = self._files, None
        for _, file in files or ():
            file.abandon()
