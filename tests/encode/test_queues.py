"""The GPU loop on a card made of clocks: what overlaps, what waits, and who may reuse what."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.timed_card import TimedCard

from thinsection.encode import TileEncoder, encoder_spec
from thinsection.encode.embed import BatchEncoder
from thinsection.encode.queues import CudaDevice
from thinsection.tiles import TileBatch
from thinsection.tiles.stream import EmbeddedBatch

CUDA = torch.device("cuda", 0)
DIM, EDGE, BATCH = 12, 4, 6
COMPUTE_S, DECODE_S = 1.0, 0.2


def expected(tiles: np.ndarray) -> np.ndarray:
    return tiles.reshape(len(tiles), -1)[:, :DIM].astype(np.float32) / 7


class OnCard(TileEncoder):
    """Takes `COMPUTE_S` a batch, and memory for `most` tiles."""

    spec, device, precision, weights_hash = (
        replace(encoder_spec("lunit_vits16"), dim=DIM),
        CUDA,
        "fp32",
        "0",
    )

    def __init__(
        self, card: TimedCard, *, most: int = BATCH, label: str = "one"
    ) -> None:
        self.card, self.most, self.seen = card, most, []
        self._label = label

    @property
    def label(self) -> str:
        return self._label

    def encode(self, tiles_u8: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(tiles_u8))
        if len(tiles_u8) > self.most:
            raise torch.OutOfMemoryError("simulated")
        out = self.card.empty((len(tiles_u8), DIM), torch.float32)
        self.card.run(
            COMPUTE_S,
            lambda target, tiles: np.copyto(target, expected(tiles)),
            out,
            tiles_u8,
        )
        return out

    def encode_with_tokens(
        self, tiles_u8: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.card.empty((len(tiles_u8), 2, DIM), torch.float32)
        self.card.run(
            0.1, lambda t, x: np.copyto(t, expected(x)[:, None]), tokens, tiles_u8
        )
        return self.encode(tiles_u8), tokens


class Source:
    """Batches in a few host buffers, each filled with rubbish as soon as it is given back."""

    def __init__(self, card: TimedCard, count: int, *, buffers: int = 2) -> None:
        rng = np.random.default_rng(3)
        sizes = [BATCH] * (count - 1) + [BATCH - 2]
        self.card = card
        self.tiles = [
            rng.integers(0, 255, (n, EDGE, EDGE, 3), dtype=np.uint8) for n in sizes
        ]
        self.free = [
            card.empty((BATCH, EDGE, EDGE, 3), torch.uint8).numpy()
            for _ in range(buffers)
        ]
        self.released: list[tuple[int, float]] = []

    def __iter__(self) -> Iterator[TileBatch]:
        for number, tiles in enumerate(self.tiles):
            self.card.now += DECODE_S
            buffer = (
                self.free.pop()
            )  # an IndexError: the loop holds more than the stream allows
            view = buffer[: len(tiles)]
            view[:] = tiles
            places = np.arange(len(tiles))
            coords = np.stack([places, places], 1)
            release = lambda n=number, b=buffer: self._release(n, b)  # noqa: E731
            yield TileBatch(number, places, coords, view, _release=release)

    def _release(self, number: int, buffer: np.ndarray) -> None:
        self.released.append((number, self.card.now))
        buffer[:] = 99
        self.free.append(buffer)


def run(
    card: TimedCard, *encoders: OnCard, count: int = 8, wanted=None
) -> list[EmbeddedBatch]:
    source = Source(card, count)
    loop = BatchEncoder(encoders, make_device=lambda device: card)
    found = [made for batch in source for made in loop.submit(batch, wanted)]
    found += loop.flush()
    assert [made.source for made in found] == list(range(count))
    assert sorted(n for n, _ in source.released) == list(range(count))
    for (number, when), (_, copied) in zip(
        source.released, card.streams[0].spans, strict=True
    ):
        assert when >= copied, f"buffer {number} was released before its copy ended"
    for made, tiles in zip(found, source.tiles, strict=True):
        for got in made.tile_embeddings.values():
            assert np.array_equal(got, expected(tiles))
    return found


def overlap(a: tuple[float, float], b: tuple[float, float]) -> float:
    return min(a[1], b[1]) - max(a[0], b[0])


def test_copy_compute_and_read_back_of_three_batches_run_side_by_side() -> None:
    card = TimedCard(copy_in_s=0.9, copy_out_s=0.9)
    run(card, OnCard(card))
    into, compute, out = (stream.spans for stream in card.streams)
    for k in range(2, len(compute) - 1):
        assert overlap(into[k + 1], compute[k]) >= 0.8
        assert overlap(out[k - 1], compute[k]) == pytest.approx(0.9)
        assert overlap(into[k + 1], out[k - 1]) > 0.7
    # from its first batch to its last one the card computes without a pause
    gaps = [later[0] - before[1] for before, later in itertools.pairwise(compute)]
    assert gaps == [pytest.approx(0.0)] * len(gaps)


def test_the_host_never_waits_for_what_was_queued_last() -> None:
    """Whenever it waits, until the last batch is queued, the card has further work."""
    card = TimedCard()
    encoder = OnCard(card)
    loop = BatchEncoder([encoder], make_device=lambda device: card)
    for batch in Source(card, 8):
        list(loop.submit(batch))
        compute = card.streams[1]
        assert compute.free_at > card.now
        assert all(
            name in ("in", "out") and end < compute.free_at
            for name, _, end in card.waits
        )


def test_slow_copies_hold_back_neither_order_nor_buffers() -> None:
    card = TimedCard(copy_in_s=3.0, copy_out_s=2.0)
    run(card, OnCard(card))
    into = card.streams[0].spans
    assert all(
        later[0] - before[1] < 2 * DECODE_S
        for before, later in itertools.pairwise(into)
    )


def test_answers_come_back_through_a_ring_that_does_not_grow() -> None:
    card = TimedCard()
    run(card, OnCard(card), OnCard(card, label="two"), count=20)
    assert card.num_pinned == 2 * 3


def test_tokens_and_embeddings_share_a_batch_and_its_copy() -> None:
    card = TimedCard()
    found = run(
        card, OnCard(card), OnCard(card, label="two"), wanted=["tokens", "embeddings"]
    )
    assert len(card.streams[0].spans) == 8
    for made in found:
        (tokens,) = made.tokens.values()
        assert np.array_equal(tokens[:, 1], made.tile_embeddings["one"])
        assert list(made.tokens) == ["one"]


def test_a_batch_that_the_card_cannot_hold_is_halved_and_said_so() -> None:
    card = TimedCard()
    encoder = OnCard(card, most=2)
    found = run(card, encoder)
    assert encoder.seen[:5] == [6, 3, 2, 2, 2]  # what did not fit is not tried again
    assert max(encoder.seen[2:]) == 2
    assert {made.notes for made in found} == {
        ("one: the GPU ran out of memory; continuing with 2 tiles at once",)
    }


def test_a_tile_that_the_card_cannot_hold_is_an_error() -> None:
    card = TimedCard()
    loop = BatchEncoder([OnCard(card, most=0)], make_device=lambda device: card)
    with pytest.raises(torch.OutOfMemoryError):
        list(loop.submit(next(iter(Source(card, 1)))))


@pytest.mark.parametrize("forgotten", ["wait", "record"])
def test_the_card_of_clocks_finds_out_who_forgets_an_event(forgotten: str) -> None:
    """The proofs above could fail."""

    class Careless(TimedCard):
        def wait(self, stream, event):
            if forgotten != "wait":
                super().wait(stream, event)

        def record(self, stream, *, for_host):
            event = super().record(stream, for_host=for_host)
            event.time = event.time if forgotten != "record" else 0.0
            return event

    card = Careless(copy_in_s=2.0)
    with pytest.raises(AssertionError):
        run(card, OnCard(card))


def test_the_card_of_clocks_finds_out_who_lets_go_of_memory_too_early() -> None:
    card = TimedCard()
    stream = card.stream()
    with card.on(stream):
        card.to_device(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="freed before 'in' was done"):
        card.record(stream, for_host=True).synchronize()


def test_the_host_sleeps_at_the_events_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    class Recorded:
        def __init__(self, *, blocking: bool) -> None:
            self.blocking = blocking
            made.append(self)

        def record(self, stream: str) -> None:
            self.stream = stream

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    card = CudaDevice(torch.device("cuda", 1))
    card.record("in", for_host=True)
    card.record("compute", for_host=False)
    assert [(e.stream, e.blocking) for e in made] == [("in", True), ("compute", False)]
