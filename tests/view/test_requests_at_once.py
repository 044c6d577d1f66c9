"""Many requests at once share one allowance of memory, and get the answers of a single one."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.view.conftest import A, B

from thinsection.results.folder import Results
from thinsection.tiles.budget import MemoryAllowance
from thinsection.types import MIB
from thinsection.view.pixels import BytesCache
from thinsection.view.shown import ShownSlides, ViewConfig, ViewerConfig

CLIENTS = 40


class RecordedAllowance(MemoryAllowance):
    """Allowance that remembers the most bytes that were held at once."""

    def __init__(self, num_bytes: float) -> None:
        super().__init__(int(num_bytes))
        self._lock = threading.Lock()
        self._held = 0
        self.most = 0

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        with super().taken(num_bytes):
            with self._lock:
                self._held += num_bytes
                self.most = max(self.most, self._held)
            yield
            with self._lock:
                self._held -= num_bytes


def shown_slides(results: Results) -> ShownSlides:
    """Slides of a viewer with the least memory, which holds one open slide."""
    return ShownSlides(results, ViewConfig(view=ViewerConfig(memory="512MiB")))


def answers_of(shown: ShownSlides, slide_id: str, client: int) -> dict[str, bytes]:
    """Every layer, three pictures and a search of a slide; clients begin at different ones."""
    layers = shown.facts(slide_id)["layers"]
    assert isinstance(layers, list)
    calls = {
        f"layer {number}": (shown.layer, (slide_id, number))
        for number in range(len(layers))
    }
    calls["thumbnail"] = (shown.thumbnail, (slide_id,))
    calls["tile"] = (shown.tile, (slide_id, 0, 0, 0))
    calls["crop"] = (shown.crop, (slide_id, 100, 200, 600, 300))
    names = [*calls][client % len(calls) :] + [*calls][: client % len(calls)]
    answers = {}
    for name in names:
        function, arguments = calls[name]
        answers[name] = function(*arguments)
    answers["similar"] = b"".join(shown.similar(slide_id, 0, 300, 300))
    return answers


@pytest.mark.timeout(300)
def test_forty_clients_share_the_memory_and_get_what_one_client_gets(
    view_results: Results,
) -> None:
    alone = shown_slides(view_results)
    expected = {slide_id: answers_of(alone, slide_id, 0) for slide_id in (A, B)}
    shown = shown_slides(view_results)
    assert shown._max_open == 1
    work = RecordedAllowance(shown._work.total)
    shown._work = work
    most_open = 0

    def ask(client: int) -> None:
        nonlocal most_open
        slide_id = (A, B)[client % 2]
        assert answers_of(shown, slide_id, client) == expected[slide_id]
        most_open = max(most_open, len(shown._open))

    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in [pool.submit(ask, client) for client in range(CLIENTS)]:
            done.result()
    assert most_open == 1
    assert 14 * MIB <= work.most <= work.total


def test_threads_that_ask_for_one_key_wait_for_the_one_that_computes_it() -> None:
    cache = BytesCache(100)
    started = threading.Barrier(8)
    calls = []

    def make() -> bytes:
        calls.append(threading.get_ident())
        return b"x" * 60

    def ask(_: int) -> bytes:
        started.wait(timeout=20)
        return cache.get("key", make)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {b"x" * 60}
    assert len(calls) == 1
    # the next one drops it
    assert cache.get("other", lambda: b"y" * 60) == b"y" * 60
    cache.get("key", make)
    assert len(calls) == 2


def test_a_failure_does_not_block_those_that_wait_for_the_key() -> None:
    cache = BytesCache(100)

    def fail() -> bytes:
        raise OSError("gone")

    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            cache.get("key", fail)
    assert cache.get("key", lambda: b"now") == b"now"


def test_a_large_request_gets_its_turn_among_small_ones(tmp_path: Path) -> None:
    allowance = MemoryAllowance(10)
    order: list[str] = []
    holding = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with allowance.taken(6):
            holding.set()
            release.wait(20)

    def take(name: str, num_bytes: int) -> None:
        with allowance.taken(num_bytes):
            order.append(name)

    def waits(count: int) -> bool:
        with allowance._freed:
            return len(allowance._waiting) == count

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    assert holding.wait(20)
    for number, (name, num_bytes) in enumerate([("large", 9), ("small", 2)], start=1):
        thread = threading.Thread(target=take, args=(name, num_bytes))
        thread.start()
        threads.append(thread)
        while not waits(number):
            pass
    release.set()
    for thread in threads:
        thread.join(20)
    assert order == ["large", "small"]
