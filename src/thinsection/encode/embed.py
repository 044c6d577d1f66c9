"""Encodes tiles; batches are decoded and transferred while other batches are encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, Never, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.encode.answers import check_attributes, encoded, encoded_by_numpy
from thinsection.encode.base import NUMPY, TileEncoder
from thinsection.errors import InvalidInputError
from thinsection.slide import Slide
from thinsection.tiles import (
    StepTimer,
    StreamConfig,
    TileBatch,
    TileFilter,
    TileTable,
    iter_tiles,
)
from thinsection.tiles.stream import EmbeddedBatch, S, SlideTiles
from thinsection.types import RgbArray, TileArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    # CUDA streams; a process without a GPU needs none
    from thinsection.encode.queues import (
        Arrays,
        CudaDevice,
        DeviceStreams,
        Encode,
        Halving,
        PendingResult,
        Sent,
    )

# batches on a GPU: one in transfer to it, one in computation, one in transfer back
_IN_FLIGHT = 3

# request to an encoder for a batch: nothing, embeddings, or embeddings and tokens
EncoderRequest = Literal["", "embeddings", "tokens"]
Item = TypeVar("Item")  # type of the caller's items that pass between batches


@dataclass(frozen=True, eq=False)
class _Pending(Generic[S]):
    """Batch in computation, with one result per encoder."""

    batch: TileBatch[S]
    results: list[PendingResult | Arrays | None]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _PassThrough(Generic[Item]):
    """Item of the caller that passes through the queue between batches."""

    value: Item


class BatchEncoder(Generic[S, Item]):
    """Gives each batch to every encoder from one buffer and returns embeddings in order.

    On CUDA, batch k+1 is copied to the device, batch k is encoded and batch k-1 is copied back at
    the same time (`DeviceStreams`); elsewhere a batch is processed at once. Each encoder gets the
    same batches as if it ran alone. A batch that exceeds the device's memory is halved, and `notes`
    report that.

    Args:
        encoders: encoders on any devices, with different labels.
        clock: adds up the time of transfers and of encoding.
        make_device: wraps a CUDA device, by default in `CudaDevice`; tests pass a simulated device.

    Memory: `_IN_FLIGHT` batches of tiles and results, and the activations of the largest encoder,
    as encoders run one after the other. The weights of all encoders come on top.
    """

    def __init__(
        self,
        encoders: Sequence[TileEncoder],
        *,
        clock: StepTimer | None = None,
        make_device: Callable[[torch.device], CudaDevice] | None = None,
    ) -> None:
        if not encoders:
            raise InvalidInputError("encoders must name at least one encoder, got none")
        self._encoders = tuple(encoders)
        for encoder in self._encoders:
            check_attributes(encoder)
        self._labels = [encoder.label for encoder in encoders]
        if len(set(self._labels)) < len(self._labels):
            raise InvalidInputError(
                f"encoders must have different labels, got {', '.join(self._labels)}"
            )
        self._clock = clock or StepTimer()
        self._streams: dict[torch.device, DeviceStreams] = {}
        self._halving: list[Halving | None] = []
        for encoder in self._encoders:
            device = encoder.device
            if device.type != "cuda":
                self._halving.append(None)
                continue
            from thinsection.encode import queues

            if device not in self._streams:
                wrapped = (make_device or queues.CudaDevice)(device)
                self._streams[device] = queues.DeviceStreams(wrapped)
            free_unused = self._streams[device].device.free_unused
            self._halving.append(queues.Halving(free_unused))
        self._max_pending = _IN_FLIGHT - 1 if self._streams else 0
        self._pending: deque[_Pending[S] | _PassThrough[Item]] = deque()
        self._copying: deque[tuple[TileBatch[S], list[Sent]]] = deque()

    def submit(
        self, batch: TileBatch[S], requests: Sequence[EncoderRequest] | None = None
    ) -> Iterator[EmbeddedBatch[S] | Item]:
        """Encode a batch, with one request per encoder; yields finished batches.

        Without `requests` every encoder gives embeddings.

        The batch's buffer is released when all encoders have read it, at most one batch later.
        """
        if not requests:
            requests = ["embeddings"] * len(self._encoders)
        with self._clock.timed("transfer_busy"):
            host = None
            if any(encoder.device is not NUMPY for encoder in self._encoders):
                import torch

                host = torch.from_numpy(batch.tiles)
            sent = {
                device: streams.send(host)
                for device, streams in self._streams.items()
                if host is not None
            }
        self._copying.append((batch, list(sent.values())))
        with self._clock.timed("encode_busy"):
            results = [
                self._encode_with(number, sent, batch.tiles, host, request)
                if request
                else None
                for number, request in enumerate(requests)
            ]
        self.release(leave=1 if sent else 0)
        notes = tuple(
            f"{encoder.label}: the GPU ran out of memory; continuing with {halving.at_once} "
            "tiles at once"
            for encoder, halving in zip(self._encoders, self._halving, strict=True)
            if halving is not None and halving.at_once
        )
        self._pending.append(_Pending(batch, results, notes))
        yield from self._drain(self._max_pending)

    def queue_in_order(self, item: Item) -> Iterator[EmbeddedBatch[S] | Item]:
        """Pass an item through the queue: it comes out after every batch submitted before it."""
        self._pending.append(_PassThrough(item))
        yield from self._drain(self._max_pending)

    def flush(self) -> Iterator[EmbeddedBatch[S] | Item]:
        """Yield all batches that are not finished yet."""
        self.release()
        yield from self._drain(0)

    def release(self, *, leave: int = 0) -> None:
        """Release the buffers whose copies to all devices have ended, oldest first.

        Waits for copies only while more than `leave` buffers are in use.
        """
        while self._copying:
            batch, sent = self._copying[0]
            may_stay = len(self._copying) <= leave
            if may_stay and not all(copy.copied.query() for copy in sent):
                return
            for copy in sent:
                copy.copied.synchronize()
            batch.release()
            self._copying.popleft()

    def _encode_with(
        self,
        number: int,
        sent: dict[torch.device, Sent],
        tiles: TileArray,
        host: Tensor | None,
        request: EncoderRequest,
    ) -> PendingResult | Arrays:
        """Runs one encoder; returns a copy that is in progress on a GPU, else the arrays."""
        encoder = self._encoders[number]
        with_tokens = request == "tokens"
        if host is None or encoder.device is NUMPY:
            return encoded_by_numpy(encoder, tiles, with_tokens=with_tokens)
        encode: Encode = partial(encoded, encoder, with_tokens=with_tokens)
        halving = self._halving[number]
        if halving is None:
            return tuple(x.float().cpu().numpy() for x in encode(host))
        in_parts = partial(halving.encode, encode)
        return self._streams[encoder.device].encode(sent[encoder.device], in_parts)

    def _drain(self, leave: int) -> Iterator[EmbeddedBatch[S] | Item]:
        """Yield from the front of the queue until only `leave` batches remain."""
        while self._pending:
            first = self._pending[0]
            if isinstance(first, _PassThrough):
                self._pending.popleft()
                yield first.value
                continue
            num_batches = sum(isinstance(item, _Pending) for item in self._pending)
            if num_batches <= leave:
                return
            self._pending.popleft()
            yield self._fetch(first)

    def _fetch(self, pending: _Pending[S]) -> EmbeddedBatch[S]:
        """Batch with its encoders' results on the host."""
        embeddings: dict[str, npt.NDArray[np.float32]] = {}
        tokens: dict[str, npt.NDArray[np.float32]] = {}
        with self._clock.timed("encode_busy"):
            for encoder, label, result in zip(
                self._encoders, self._labels, pending.results, strict=True
            ):
                if result is None or isinstance(result, tuple):
                    arrays = result or ()
                else:
                    arrays = self._streams[encoder.device].fetch(result)
                if arrays:
                    embeddings[label] = arrays[0]
                if len(arrays) > 1:
                    tokens[label] = arrays[1]
        return EmbeddedBatch(
            source=pending.batch.source,
            indices=pending.batch.indices,
            coords_l0=pending.batch.coords_l0,
            tile_embeddings=embeddings,
            tokens=tokens,
            notes=pending.notes,
        )


def pinned_allocator(
    encoders: Sequence[TileEncoder],
) -> Callable[[tuple[int, ...]], RgbArray]:
    """Allocator of batch buffers, page-locked if an encoder's device copies asynchronously."""
    pin_memory = any(encoder.device.type == "cuda" for encoder in encoders)
    if all(encoder.device is NUMPY for encoder in encoders):
        return lambda shape: np.empty(shape, dtype=np.uint8)
    import torch

    def allocate(shape: tuple[int, ...]) -> RgbArray:
        buffer = torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory)
        return np.asarray(buffer.numpy())

    return allocate


def embed_tiles(
    slide: Slide,
    tiles: TileTable,
    encoder: TileEncoder,
    *,
    batch_size: int = 32,
    filters: Sequence[TileFilter] = (),
    config: StreamConfig | None = None,
) -> tuple[npt.NDArray[np.float32], TileTable]:
    """Embeddings float32 (N, D) of a slide's tiles, and the table of those N tiles.

    Args:
        slide, tiles, encoder: from `open_slide` (it stays open), `tile_grid` and `load_encoder`.
        batch_size: tiles that are encoded together.
        filters: pixel filters; tiles that one of them rejects are left out.
        config: memory and decoding threads of the stream.

    Memory: the stream's budget, the encoder's activations, and 4 N D bytes for the result.
    Raises:
        SlideReadError: a region cannot be decoded.
        InvalidInputError: the tiles are of another slide.
    """
    if not isinstance(encoder, TileEncoder):
        raise InvalidInputError(
            f"encoder must be a tile encoder, got {type(encoder).__name__}; pass the result of "
            "load_encoder, or of make_encoder for a network of your own"
        )
    worker: BatchEncoder[SlideTiles, Never] = BatchEncoder([encoder])
    batches: list[EmbeddedBatch[SlideTiles]] = []
    for batch in iter_tiles(
        slide, tiles, batch_size=batch_size, filters=filters, config=config
    ):
        batches += worker.submit(batch)
        # `iter_tiles` reuses the buffer when it is asked for the next batch, so wait until the copy
        # to the device has ended
        worker.release()
    batches += worker.flush()
    indices = [np.arange(0)]
    embeddings = [np.empty((0, encoder.dim), dtype=np.float32)]
    for embedded in batches:
        indices.append(embedded.indices)
        embeddings.append(embedded.tile_embeddings[encoder.label])
    return np.concatenate(embeddings), tiles.select(np.concatenate(indices))
