"""The feature cache keeps every bit, within the budget, in any order."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.store.cache_data import SHAPE, bits, features, key, write

from thinsection.errors import BudgetError, InvalidInputError, StoreError
from thinsection.store.cache import CacheWriter, FeatureCache, open_or_write
from thinsection.store.cache import rows as stored_rows
from thinsection.store.cache.dtypes import ITEM_BYTES, narrow, narrowest, widen_into

ROW = 4 * SHAPE[1] * SHAPE[2]  # bytes of a row in float32
RAM, DISK = 1 << 20, 16 * ROW  # budgets under which the whole fits, and does not


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("budget", [RAM, DISK])
def test_every_bit_comes_back_in_any_order(
    kind: str, budget: int, tmp_path: Path
) -> None:
    x = features(kind)
    folder, manifest = write(tmp_path, x, budget_bytes=budget)
    assert manifest.dtype_rows == {kind: len(x)}
    assert manifest.loss is None
    order = np.random.default_rng(3).permutation(len(x))
    with FeatureCache(folder, budget_bytes=budget) as cache:
        for rows in (order, np.arange(len(x)), order[:3]):
            got = [b.numpy().copy() for b in cache.batches(rows, 4)]
            assert [len(b) for b in got[:-1]] == [4] * (len(got) - 1)
            assert np.array_equal(bits(np.concatenate(got)), bits(x[rows]))
        assert cache.in_ram == (budget == RAM)
        assert cache.prefetch > 0
        assert np.array_equal(bits(cache.read([5, 5, 0])), bits(x[[5, 5, 0]]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("budget", [RAM, DISK])
def test_a_forked_child_reads_batches_too(budget: int, tmp_path: Path) -> None:
    """As a DataLoader's worker does: before, between and during the parent's own batches."""
    x = features("fp32")
    folder, _ = write(tmp_path, x, budget_bytes=budget)
    fork = multiprocessing.get_context("fork")
    order = np.arange(len(x))[::-1]

    def read_all(cache: FeatureCache, parts: Iterator[torch.Tensor] | None) -> None:
        if parts is not None:  # begun by the parent: it must say so, not wait for ever
            with pytest.raises(
                InvalidInputError, match=r"in the process .*forked child"
            ):
                list(parts)
            del parts
        got = [batch.numpy().copy() for batch in cache.batches(order, 4)]
        assert np.array_equal(bits(np.concatenate(got)), bits(x[order]))
        cache.close()

    def in_child(cache: FeatureCache, parts: Iterator[torch.Tensor] | None) -> None:
        child = fork.Process(target=read_all, args=(cache, parts))
        child.start()
        child.join(timeout=20)
        alive = child.is_alive()
        if alive:
            child.kill()
            child.join()
        assert not alive, "the child waits for a thread that is not there"
        assert child.exitcode == 0

    with FeatureCache(folder, budget_bytes=budget) as cache:
        in_child(cache, None)
        assert len(list(cache.batches(order, 4))) > 1
        in_child(cache, None)
        parts = iter(cache.batches(order, 4))
        begun = [next(parts).numpy().copy()]
        in_child(cache, parts)
        in_child(cache, None)
        begun += [batch.numpy().copy() for batch in parts]
        assert np.array_equal(bits(np.concatenate(begun)), bits(x[order]))


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_neighbouring_rows_are_read_in_one_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, reads, plain = features(kind), [], os.preadv
    folder, manifest = write(tmp_path, x, budget_bytes=40 * ROW)  # ten rows a chunk

    def counted(file: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(
            sum(b.nbytes for b in buffers) // (ROW if kind == "fp32" else ROW // 2)
        )
        return plain(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(stored_rows, "RUN_BYTES", 6 * ROW)
    with FeatureCache(folder) as cache:
        for rows in (np.arange(37), np.array([4, 5, 6, 3, 9, 10, 11, 12, 0, 0])):
            assert np.array_equal(bits(cache.read(rows)), bits(x[rows]))
    assert [chunk.rows for chunk in manifest.chunks] == [10, 10, 10, 7]
    # a read ends with its chunk, and with a run of RUN_BYTES where values are converted
    if kind == "fp32":
        assert reads == [10, 10, 10, 7, *(3, 1, 1, 3, 1, 1)]
    else:
        assert reads == [6, 4, 2, 6, 2, 4, 6, 6, 1, *(3, 1, 1, 1, 2, 1, 1)]


def test_each_chunk_takes_its_own_narrowest_dtype(tmp_path: Path) -> None:
    x = np.concatenate([features(k, (6, 5, 24)) for k in ("bf16", "fp32", "fp16")])
    folder, manifest = write(tmp_path, x, budget_bytes=24 * ROW)  # six rows a chunk
    assert [(c.dtype, c.rows) for c in manifest.chunks] == [
        ("bf16", 6),
        ("fp32", 6),
        ("fp16", 6),
    ]
    assert all(c.offset % 4096 == 0 for c in manifest.chunks)
    order = np.random.default_rng(0).permutation(18)
    with FeatureCache(folder, budget_bytes=DISK) as cache:
        got = np.concatenate([b.numpy().copy() for b in cache.batches(order, 5)])
    assert np.array_equal(bits(got), bits(x[order]))


@given(
    arrays(
        np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False)
    )
)
def test_the_chosen_dtype_is_exact_and_no_narrower_one_is(x: np.ndarray) -> None:
    dtype = narrowest(x)
    out = np.empty_like(x)
    widen_into(narrow(x, dtype).copy(), dtype, out)
    assert np.array_equal(bits(out), bits(x))
    if dtype == "fp32":
        for other in (torch.bfloat16, torch.float16):
            back = torch.from_numpy(x).to(other).float().numpy()
            assert not np.array_equal(bits(back), bits(x))


@pytest.mark.parametrize(
    "value", [2.0**-24, -(2.0**-14), 65504.0, -0.0, 2.0**-133, 3.0e38]
)
def test_edge_values_keep_their_bits_wherever_they_stand(value: float) -> None:
    for place in (0, 32_767, 32_768, 70_000):  # either side of a block's end
        x = np.zeros(70_001, dtype=np.float32)
        x[place] = value
        out = np.empty_like(x)
        dtype = narrowest(x)
        stored = narrow(x, dtype)
        assert stored.size == x.size * ITEM_BYTES[dtype]
        widen_into(stored, dtype, out)
        assert np.array_equal(bits(out), bits(x))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_row(
    bad: float, tmp_path: Path
) -> None:
    x = features("fp32")
    x[20, 3, 7] = bad
    with pytest.raises(
        InvalidInputError, match=f"must be finite, got {bad} in row 20; check"
    ):
        write(tmp_path, x, budget_bytes=DISK)
    assert FeatureCache.find(tmp_path, key()) is None


def test_a_forced_dtype_records_its_largest_error(tmp_path: Path) -> None:
    x = features("fp32")
    folder, manifest = write(tmp_path, x, storage="fp16")
    stored = x.astype(np.float16).astype(np.float32)
    assert manifest.loss is not None
    assert manifest.loss.max_abs_error == np.abs(stored.astype(np.float64) - x).max()
    assert manifest.loss.changed == np.count_nonzero(stored != x)
    assert manifest.loss.values == x.size
    with FeatureCache(folder) as cache:
        assert cache.manifest.loss == manifest.loss
        assert np.array_equal(bits(cache.read(np.arange(len(x)))), bits(stored))


def test_a_forced_dtype_that_overflows_is_refused(tmp_path: Path) -> None:
    x = features("fp32")
    x[9, 2, 1] = 70_000.0
    with pytest.raises(
        InvalidInputError, match="must fit fp16, got 70000 in row 9, which becomes"
    ):
        write(tmp_path, x, storage="fp16")


def test_a_lossy_cache_is_not_taken_for_a_lossless_one(tmp_path: Path) -> None:
    write(tmp_path, features("fp32"), storage="fp16")
    assert FeatureCache.find(tmp_path, key()) is None


def test_the_second_probe_reuses_what_the_first_computed(tmp_path: Path) -> None:
    x, asked = features("fp32"), []

    def produce(start: int) -> list[torch.Tensor]:
        asked.append(start)
        return [torch.from_numpy(x[start:20]), torch.from_numpy(x[20:])]

    for _ in range(2):
        with open_or_write(tmp_path, key(), x.shape, produce) as cache:
            assert np.array_equal(bits(cache.read(np.arange(len(x)))), bits(x))
    assert asked == [0]
    with open_or_write(tmp_path, key(weights_hash="other"), x.shape, produce):
        assert asked == [0, 0]


def test_embeddings_without_tokens_and_half_precision_input_fit_as_well(
    tmp_path: Path,
) -> None:
    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(0)).to(
        torch.bfloat16
    )
    with CacheWriter(tmp_path, key(), (300, 16)) as writer:
        writer.append(x)
        assert writer.finish().dtype_rows == {"bf16": 300}
    with FeatureCache(writer.folder) as cache:
        got = torch.cat([b.clone() for b in cache.batches(np.arange(300), 64)])
    assert torch.equal(got, x.float())


def test_a_budget_for_one_batch_reads_without_prefetch_and_below_it_says_so(
    tmp_path: Path,
) -> None:
    x = features("fp32")
    folder, _ = write(tmp_path, x)
    with FeatureCache(folder, budget_bytes=8 * ROW) as cache:
        got = np.concatenate(
            [b.numpy().copy() for b in cache.batches(np.arange(37), 8)]
        )
        assert cache.prefetch == 0
        assert np.array_equal(bits(got), bits(x))
    with (
        FeatureCache(folder, budget_bytes=8 * ROW - 1) as cache,
        pytest.raises(
            BudgetError,
            match=r"must be >= .* for a batch of 8 rows.* raise cache_memory=",
        ),
    ):
        next(cache.batches(np.arange(37), 8))
    with pytest.raises(BudgetError, match="two and a half rows"):
        CacheWriter(tmp_path / "b", key(), x.shape, budget_bytes=2 * ROW)


def test_a_larger_batch_sends_the_file_back_to_disk(tmp_path: Path) -> None:
    x = features("fp32")
    folder, manifest = write(tmp_path, x)
    with FeatureCache(folder, budget_bytes=manifest.data_bytes + 8 * ROW) as cache:
        for size, in_ram in ((4, True), (37, False), (2, True)):
            got = np.concatenate(
                [b.numpy().copy() for b in cache.batches(np.arange(37), size)]
            )
            assert cache.in_ram == in_ram
            assert np.array_equal(bits(got), bits(x))


def test_buffers_are_reused_and_one_iteration_runs_at_a_time(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, features("fp32"))
    with FeatureCache(folder, budget_bytes=DISK) as cache:
        first = {b.data_ptr() for b in cache.batches(np.arange(37), 4)}
        assert len(first) == 1 + cache.prefetch
        assert {b.data_ptr() for b in cache.batches(np.arange(37), 4)} == first
        running: Any = cache.batches(np.arange(37), 4)
        next(running)
        with pytest.raises(InvalidInputError, match="one iteration at a time"):
            next(cache.batches(np.arange(3), 4))
        running.close()
        assert len(list(cache.batches(np.arange(3), 4))) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            np.zeros((2, 5, 24)),
            r"must be float32, .* of shape \(B, 5, 24\), got float64 \(2, 5, 24",
        ),
        (np.zeros((2, 4, 24), np.float32), r"got float32 \(2, 4, 24\)"),
        (np.zeros((38, 5, 24), np.float32), r"rows must be 37, as announced, got 38"),
    ],
)
def test_rows_of_another_form_are_refused(
    rows: np.ndarray, message: str, tmp_path: Path
) -> None:
    with (
        CacheWriter(tmp_path, key(), SHAPE) as writer,
        pytest.raises(InvalidInputError, match=message),
    ):
        writer.append(rows)


def test_rows_that_are_not_there_and_missing_rows_are_refused(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "a", key(), SHAPE) as writer:
        writer.append(features("fp32")[:36])
        with pytest.raises(InvalidInputError, match="must be 37, as announced, got 36"):
            writer.finish()
    folder, _ = write(tmp_path, features("fp32"))
    with (
        FeatureCache(folder) as cache,
        pytest.raises(InvalidInputError, match=r"0\.\.36, got 37"),
    ):
        cache.read([37])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("budget", [RAM, DISK])
def test_batches_on_cuda_have_every_bit(budget: int, tmp_path: Path) -> None:
    x = torch.from_numpy(features("fp32"))
    with CacheWriter(tmp_path, key(), SHAPE, budget_bytes=budget) as writer:
        writer.append(x.cuda())
        writer.finish()
    with FeatureCache(writer.folder, budget_bytes=budget) as cache:
        got = torch.cat(
            [b.clone() for b in cache.batches(np.arange(37), 4, device="cuda")]
        )
    assert torch.equal(got.cpu(), x)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("budget", [1 << 30, 24 << 10])
def test_small_batches_of_one_task_are_those_of_plain_indexing(
    kind: str, budget: int, tmp_path: Path
) -> None:
    """Several batches share a read; order, sizes and bits are the caller's."""
    x = features(kind, (400, 3, 8), seed=4)
    x[200:] = features("fp32", (200, 3, 8), seed=5)  # chunks of two types
    folder, _ = write(tmp_path, x, budget_bytes=8 << 10)
    order = np.random.default_rng(6).integers(0, 400, 1001)
    with FeatureCache(folder, budget_bytes=budget) as cache:
        for size in (1, 7, 64):
            batches = [b.numpy().copy() for b in cache.batches(order, size)]
            assert [len(b) for b in batches[:-1]] == [size] * (len(batches) - 1)
            assert np.array_equal(bits(np.concatenate(batches)), bits(x[order]))
        assert cache.in_ram == (budget > 1 << 20)


def test_an_error_is_raised_at_its_batch_and_no_earlier(tmp_path: Path) -> None:
    x = features("fp32", (60, 3, 8))
    folder, _ = write(tmp_path, x)
    data = bytearray((folder / "features.bin").read_bytes())
    data[33 * 96 + 5] ^= 1
    (folder / "features.bin").write_bytes(data)
    with FeatureCache(folder, budget_bytes=4 << 10) as cache:
        for _ in range(2):  # the second time good rows are no longer compared
            got = []
            with pytest.raises(StoreError, match="in row 33"):
                for batch in cache.batches(np.arange(60), 4):
                    got.append(batch.numpy().copy())
            assert np.array_equal(bits(np.concatenate(got)), bits(x[:32]))
