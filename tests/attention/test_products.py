"""fp32 products go through oneDNN only where they stay float32 and are faster."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from thinsection.attention import alibi2d_attention, alibi_slopes, products
from thinsection.attention.products import (
    MAX_ERROR,
    MIN_GAIN,
    fast_products,
    is_worth_it,
)

HAS_SWITCH = hasattr(torch.backends.mkldnn, "matmul")
needs_switch = pytest.mark.skipif(
    not HAS_SWITCH, reason="PyTorch before 2.9 has no such switch"
)


def products_switch() -> Any:
    return getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - unknown to mypy


def switch() -> str:
    return str(products_switch().fp32_precision)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Whatever a test does, the process is as it was."""
    before = switch() if HAS_SWITCH else None
    yield
    assert not HAS_SWITCH or switch() == before


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where oneDNN is the faster way."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)


@pytest.mark.parametrize(
    ("error", "own_s", "onednn_s", "worth_it"),
    [
        (1e-6, [2.0, 2.1], [1.0, 1.1], True),
        (1e-6, [2.0, 9.0], [1.0, 8.0], True),  # other load in the second turn
        (1e-6, [MIN_GAIN], [1.0], False),
        (1e-6, [1.0], [2.0], False),
        (3e-3, [9.0], [1.0], False),  # bfloat16, however fast
        (float("nan"), [9.0], [1.0], False),
    ],
)
def test_only_a_way_that_is_exact_and_faster_is_taken(
    error: float, own_s: list[float], onednn_s: list[float], worth_it: bool
) -> None:
    assert is_worth_it(error, own_s, onednn_s) == worth_it


def test_the_error_tells_float32_from_bfloat16() -> None:
    a, b = torch.rand(2, 96, 96, generator=torch.Generator().manual_seed(0))
    assert products.product_error(a, b) <= MAX_ERROR
    assert products.product_error(a.bfloat16(), b.bfloat16()) > 100 * MAX_ERROR


@needs_switch
def test_a_way_that_computes_in_bfloat16_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = products.product_error
    monkeypatch.setattr(
        products, "product_error", lambda a, b: plain(a.bfloat16(), b.bfloat16())
    )
    monkeypatch.setattr(
        products, "timeit", lambda *_, **__: 1.0 if switch() == "bf16" else 9.0
    )
    assert not products.onednn_is_faster.__wrapped__()
    monkeypatch.setattr(products, "product_error", plain)
    exact_here = products.onednn_is_faster.__wrapped__()
    a, b = torch.rand(2, 384, 384, generator=torch.Generator().manual_seed(1))
    with products._SWITCH:
        assert exact_here == (plain(a, b) <= MAX_ERROR)


@needs_switch
def test_products_within_a_block_stay_float32() -> None:
    a, b = torch.rand(2, 300, 300, generator=torch.Generator().manual_seed(2))
    with fast_products():
        assert products.product_error(a, b) <= MAX_ERROR


@needs_switch
@pytest.mark.usefixtures("faster")
def test_nested_blocks_and_errors_restore_what_was_found() -> None:
    found = switch()
    with pytest.raises(KeyError), fast_products():
        with fast_products():
            assert switch() == "bf16"
        assert switch() == "bf16"
        raise KeyError
    assert switch() == found

    @fast_products()
    def twice(depth: int) -> str:
        return switch() if depth == 0 else twice(depth - 1)

    assert twice(2) == "bf16"
    assert switch() == found


@needs_switch
@pytest.mark.usefixtures("faster")
def test_the_last_of_several_threads_restores() -> None:
    """The first to enter leaves first: what it found must not come back under the other."""
    found, entered, left, seen = switch(), threading.Event(), threading.Event(), []

    def second() -> None:
        with fast_products():
            entered.set()
            left.wait(10)
            seen.append(switch())

    thread = threading.Thread(target=second)
    with fast_products():
        thread.start()
        assert entered.wait(10)
    left.set()
    thread.join(10)
    assert seen == ["bf16"]
    assert switch() == found


@needs_switch
@pytest.mark.usefixtures("faster")
def test_a_users_own_setting_comes_back() -> None:
    found = switch()
    products_switch().fp32_precision = "ieee"
    try:
        with fast_products():
            assert switch() == "bf16"
        assert switch() == "ieee"
    finally:
        products_switch().fp32_precision = found


def test_nothing_is_switched_where_it_is_not_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    before = switch() if HAS_SWITCH else None
    with fast_products():
        assert not HAS_SWITCH or switch() == before


@needs_switch
@pytest.mark.usefixtures("faster")
def test_attention_runs_within_a_block_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from thinsection.attention import chunked

    seen: list[str] = []
    plain = chunked.Buffers.score_block

    def watched(self: chunked.Buffers, *args: object) -> chunked.ScoreBlock:
        seen.append(switch())
        return plain(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(chunked.Buffers, "score_block", watched)
    q, k, v = torch.randn(3, 1, 2, 31, 16).unbind(0)
    cells = torch.stack([torch.arange(30) // 7, torch.arange(30) % 7], 1)
    alibi2d_attention(q, k, v, cells, alibi_slopes(2))
    forward = len(seen)
    alibi2d_attention(q.requires_grad_(), k, v, cells, alibi_slopes(2)).sum().backward()
    assert len(seen) > 2 * forward
    assert set(seen) == {"bf16"}
