"""Results onto disk, in a thread of its own, so that the encoders do not wait for it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinsection.stages.features import FeaturesStage, OpenResult, TokensStage
from thinsection.stages.stage import SlideWork
from thinsection.stages.tiles import TilesStage
from thinsection.stream import StageClock
from thinsection.stream.batches import Channel, ChannelClosed

if TYPE_CHECKING:
    from thinsection.encode.embed import EmbeddedBatch

# batches of embeddings that may wait for the disk: 4 x 256 x 2560 x 4 B = 10 MiB at the largest
_QUEUED = 4


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Marker: every batch of the slide was handed over."""

    work: SlideWork


@dataclass(frozen=True, kw_only=True)
class Fail:
    """Marker: the slide failed in the stream."""

    work: SlideWork
    stage: str
    error: Exception


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Tiles that pixel filters kept, where no encoder asks for them."""

    work: SlideWork
    indices: npt.NDArray[np.int64]


@dataclass(kw_only=True)
class _Growing:
    """The files of one slide under construction."""

    work: SlideWork
    files: list[tuple[int, OpenResult]]
    indices: list[npt.NDArray[np.int64]] = field(default_factory=list)


class ResultSink:
    """Takes embedded batches and markers, in order, and leaves finished slides.

    Args:
        dims: width of each encoder's embeddings by label, in the order of a batch's embeddings.
        on_end: called with each slide's work, failing stage and error (None when done), in the
            sink's thread.
        clock: busy time goes to 'write_busy' and 'aggregate_busy'.

    Memory: `_QUEUED` batches of embeddings; while one slide is pooled its (N, D) embeddings.
    """

    def __init__(
        self,
        *,
        dims: dict[str, int],
        on_end: Callable[[SlideWork, str, Exception | None], None],
        clock: StageClock,
    ) -> None:
        self._labels, self._dims = list(dims), dims
        self._on_end, self._clock = on_end, clock
        self._channel: Channel[EmbeddedBatch | Kept | Finish | Fail] = Channel(_QUEUED)
        self._open: _Growing | None = None
        self._given_up: SlideWork | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def put(self, item: "EmbeddedBatch | Kept | Finish | Fail") -> None:
        """Hands an item over, waiting for room.

        Raises:
            BaseException: whatever broke the sink itself.
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
        self._thread.join()
        self._abandon()
        if exc_type is None and self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while True:
                self._take(self._channel.get())
        except ChannelClosed:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the run's thread
            self._failure = error
            self._channel.close()

    def _take(self, item: "EmbeddedBatch | Kept | Finish | Fail") -> None:
        work: SlideWork = item.work if isinstance(item, Kept | Finish | Fail) else item.key
        if isinstance(item, Fail):
            self._abandon()
            if self._given_up is not work:
                self._on_end(work, item.stage, item.error)
            return
        if self._given_up is work:
            return
        try:
            if isinstance(item, Finish):
                self._finish(work)
            else:
                with self._clock.timed("write_busy"):
                    self._append(work, item)
                return
        except Exception as error:  # noqa: BLE001 - the per-slide boundary of writing
            self._abandon()
            self._given_up = work
            self._on_end(work, work.at, error)
            return
        self._on_end(work, "", None)

    def _growing(self, work: SlideWork) -> _Growing:
        """The files of the stages that the stream feeds and that the slide lacks."""
        if self._open is None:
            work.at = "write"
            self._open = _Growing(work=work, files=[])
            for stage in work.missing:
                if isinstance(stage, FeaturesStage | TokensStage):
                    source = stage if isinstance(stage, FeaturesStage) else stage.features
                    index = self._labels.index(source.encoder)
                    self._open.files.append((index, OpenResult(work, stage)))
        return self._open

    def _append(self, work: SlideWork, item: "EmbeddedBatch | Kept") -> None:
        growing = self._growing(work)
        growing.indices.append(item.indices)
        if isinstance(item, Kept):
            return
        for index, file in growing.files:
            tokens = isinstance(file.stage, TokensStage)
            values = (item.tokens if tokens else item.tile_embeddings)[index]
            assert values is not None
            file.append(item.coords_l0, values)

    def _finish(self, work: SlideWork) -> None:
        """Completes the files of the stream, then all that is made from what is stored."""
        with self._clock.timed("write_busy"):
            growing = self._growing(work)
            for stage in [s for s in work.missing if isinstance(s, TilesStage)]:
                kept = np.concatenate(growing.indices or [np.empty(0, dtype=np.int64)])
                table = work.values["candidates"].select(kept)
                work.at = stage.title
                work.begin(stage)
                work.finish(stage, stage.write(work, table))
            for index, file in growing.files:
                work.at = file.stage.title
                dim = self._dims[self._labels[index]]
                work.finish(file.stage, file.close((dim,)))
            self._open = None
        for stored in [s for s in work.stages if s.reads == "store" and s in work.missing]:
            clock = "aggregate_busy" if stored.title == "aggregate" else "write_busy"
            with self._clock.timed(clock):
                work.perform(stored)

    def _abandon(self) -> None:
        """Drops half-written files."""
        growing, self._open = self._open, None
        for _, file in growing.files if growing else ():
            file.abandon()
