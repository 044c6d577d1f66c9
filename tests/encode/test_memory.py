"""The memory of a batch is known before it runs: near the measured peak, and never below it."""

import sys

import pytest
import torch

from thinsection.encode import (
    batch_bytes,
    largest_batch_size,
    load_encoder,
    weights_bytes,
)
from thinsection.encode.sizes import CPU_TILES
from thinsection.errors import BudgetError, InvalidInputError
from thinsection.testing import run_and_measure
from thinsection.types import GIB, MIB

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM of /proc")


@pytest.fixture(scope="module")
def lite0():
    return load_encoder(
        "efficientnet_lite0", device="cpu", precision="fp32", engine="torch"
    )


@pytest.mark.check
@needs_proc
@pytest.mark.parametrize("batch_size", [4, 48])
def test_the_estimate_is_near_the_measured_peak_and_not_under(
    lite0, batch_size: int
) -> None:
    measured = run_and_measure(
        "tests.encode.measured_encoding",
        "encode",
        setup="load",
        name="efficientnet_lite0",
        tile_px=256,
        batch_size=batch_size,
    )
    estimate = batch_bytes(lite0, batch_size=batch_size, tile_px=256)
    # of a few tiles the heap may hold some since the first one
    assert measured.growth_bytes <= estimate <= 1.8 * measured.growth_bytes


@pytest.mark.check
@needs_proc
def test_the_estimate_of_a_transformer_is_not_under_the_measured_peak() -> None:
    encoder = load_encoder(
        "lunit_vits16", device="cpu", precision="fp32", pretrained=False
    )
    kwargs = {"name": "lunit_vits16", "tile_px": 256, "batch_size": 4}
    # what loading left free in the heap hides 0 to 13 MB of the growth: the largest of three
    growths = [
        run_and_measure(
            "tests.encode.measured_encoding", "encode", setup="load", **kwargs
        ).growth_bytes
        for _ in range(3)
    ]
    estimate = batch_bytes(encoder, batch_size=4, tile_px=256)
    assert max(growths) <= estimate <= 2.5 * max(growths)


def test_the_estimate_grows_with_the_batch_and_allocates_nothing(lite0) -> None:
    sizes = [batch_bytes(lite0, batch_size=n) for n in (1, 2, 4)]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])
    assert (
        batch_bytes(lite0, batch_size=16, tile_px=32_768) > 100 * GIB
    )  # would not run here
    with pytest.raises(InvalidInputError, match="got 0"):
        batch_bytes(lite0, batch_size=0)


def test_tiles_beyond_those_that_a_cpu_takes_at_once_cost_only_themselves(
    lite0,
) -> None:
    more = batch_bytes(lite0, batch_size=CPU_TILES + 10) - batch_bytes(
        lite0, batch_size=CPU_TILES + 9
    )
    assert more == 256 * 256 * 3 + 4 * lite0.dim


def test_a_batch_in_parts_is_the_parts(lite0) -> None:
    tiles = torch.randint(0, 256, (CPU_TILES + 3, 64, 64, 3), dtype=torch.uint8)
    parts = [lite0.encode(tiles[:CPU_TILES]), lite0.encode(tiles[CPU_TILES:])]
    assert torch.equal(lite0.encode(tiles), torch.cat(parts))
    tokens = [lite0.encode_tokens(t) for t in (tiles[:CPU_TILES], tiles[CPU_TILES:])]
    assert torch.equal(lite0.encode_tokens(tiles), torch.cat(tokens))


@pytest.mark.parametrize("budget", [100 * MIB, 250 * MIB, 1 * GIB])
def test_the_largest_batch_fits_and_one_more_tile_does_not(lite0, budget: int) -> None:
    size = largest_batch_size(lite0, budget_bytes=budget)
    assert batch_bytes(lite0, batch_size=size) <= budget
    assert batch_bytes(lite0, batch_size=size + 1) > budget


def test_a_budget_for_less_than_a_tile_is_refused(lite0) -> None:
    with pytest.raises(BudgetError, match=r"one tile of 'efficientnet_lite0' needs"):
        largest_batch_size(lite0, budget_bytes=1 * MIB)


def test_weights_count_their_half_precision_copies(lite0) -> None:
    assert weights_bytes(lite0) == pytest.approx(4 * 3_371_008, rel=0.02)
    half = load_encoder(
        "efficientnet_lite0", device="cpu", precision="bf16", engine="torch"
    )
    assert weights_bytes(half) == weights_bytes(lite0) * 3 // 2
