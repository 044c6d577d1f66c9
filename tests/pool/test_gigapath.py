"""Prov-GigaPath's slide encoder against a plain float64 implementation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.plain_gigapath import plain_gigapath, plain_position

from thinsection.attention.dilated import Branch
from thinsection.errors import BudgetError, InvalidInputError, WeightsError
from thinsection.pool import (
    GigaPathSlideEncoder,
    LoadOptions,
    SlideEncoder,
    load_slide_encoder,
)
from thinsection.pool.gigapath import LongNetConfig, heads_at_a_time, position_embedding
from thinsection.testing import run_and_measure
from thinsection.types import GIB, MIB

BRANCHES = ((16, 1), (45, 2), (91, 4), (128, 8), (512, 16))  # the published ones, scaled down
SMALL = LongNetConfig(
    tile_dim=20,
    dim=128,
    num_layers=3,
    mlp_dim=256,
    branches=tuple(Branch(length=s, dilation=r) for s, r in BRANCHES),
)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return GigaPathSlideEncoder.random_weights(SMALL, seed=1)


def slide(num_tiles: int, tile_dim: int = 20) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(num_tiles)
    tiles = rng.standard_normal((num_tiles, tile_dim), dtype=np.float32)
    coords = np.stack(
        [rng.integers(0, 200_000, num_tiles), rng.integers(0, 90_000, num_tiles)], axis=1
    )
    return tiles, coords


def exact(weights: dict[str, torch.Tensor], tiles: np.ndarray, coords: np.ndarray) -> np.ndarray:
    tensors = torch.from_numpy(tiles), torch.from_numpy(coords)
    return plain_gigapath(weights, *tensors, branches=BRANCHES, num_heads=16).numpy()


@pytest.mark.parametrize("num_tiles", [1, 14, 15, 16, 44, 45, 89, 90, 91, 127, 128, 200])
def test_every_layer_is_that_of_float64(weights: dict[str, torch.Tensor], num_tiles: int) -> None:
    """Token counts (tiles + 1) below, at and above the segment lengths."""
    tiles, coords = slide(num_tiles)
    encoder = GigaPathSlideEncoder.from_state_dict(weights, config=SMALL)
    got = encoder.encode_layers(tiles, coords, tile_px_l0=256)
    wanted = exact(weights, tiles, coords)
    assert got.shape == wanted.shape == (4, 128)
    assert np.abs(got - wanted).max() <= 1e-5
    np.testing.assert_array_equal(encoder.encode(tiles, coords, tile_px_l0=256), got[-1])


def test_the_published_sizes_are_the_defaults() -> None:
    config = LongNetConfig()
    branches = [(b.length, b.dilation) for b in config.branches]
    assert branches == [(1024, 1), (5792, 2), (32768, 4), (185363, 8), (1048576, 16)]
    encoder = load_slide_encoder("gigapath", pretrained=False, device="cpu")
    assert isinstance(encoder, SlideEncoder)
    assert encoder.dim == 768
    assert np.isfinite(encoder.encode(*slide(5, 1536), tile_px_l0=256)).all()


def test_groups_of_heads_within_a_small_budget_give_the_same(
    weights: dict[str, torch.Tensor],
) -> None:
    tiles, coords = slide(77)
    wanted = GigaPathSlideEncoder.from_state_dict(weights, config=SMALL).encode(
        tiles, coords, tile_px_l0=256
    )
    budget = 71 * MIB
    while heads_at_a_time(78, SMALL, budget_bytes=budget) > 1:
        budget -= 4096
    options = LoadOptions(device="cpu", budget_bytes=budget)
    tight = GigaPathSlideEncoder.from_state_dict(weights, config=SMALL, options=options)
    np.testing.assert_allclose(tight.encode(tiles, coords, tile_px_l0=256), wanted, atol=2e-6)
    with pytest.raises(BudgetError, match=r"gigapath needs .* the budget is 1\.0 MiB"):
        heads_at_a_time(78, SMALL, budget_bytes=MIB)


def test_the_order_of_tiles_matters(weights: dict[str, torch.Tensor]) -> None:
    tiles, coords = slide(100)
    encoder = GigaPathSlideEncoder.from_state_dict(weights, config=SMALL)
    a = encoder.encode(tiles, coords, tile_px_l0=256)
    b = encoder.encode(tiles[::-1].copy(), coords[::-1].copy(), tile_px_l0=256)
    assert np.abs(a - b).max() > 1e-3


def test_positions_are_rows_of_the_published_table() -> None:
    cells = np.array([[0, 0], [3, 998], [999, 1]])
    wanted = torch.stack([plain_position(int(r * 1000 + c), 768) for r, c in cells])
    torch.testing.assert_close(position_embedding(cells, 768).double(), wanted, rtol=0, atol=1e-7)


def test_tiles_outside_the_position_table_are_refused(weights: dict[str, torch.Tensor]) -> None:
    tiles, coords = slide(3)
    encoder = GigaPathSlideEncoder.from_state_dict(weights, config=SMALL)
    for wrong in (256_000, -1):
        coords[1, 1] = wrong
        with pytest.raises(InvalidInputError, match=r"in 0\.\.255999 .* its position table ends"):
            encoder.encode(tiles, coords, tile_px_l0=256)


def test_published_names_load_strictly_and_safely(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert len(weights) == 2 + 1 + 3 * (5 * 2 + 2 + 3 * 2 + 2) + 2 + 2
    torch.save({"model": weights}, tmp_path / "slide_encoder.pth")
    encoder = GigaPathSlideEncoder.from_pretrained(tmp_path, config=SMALL)
    wanted = GigaPathSlideEncoder.from_state_dict(weights, config=SMALL)
    assert encoder.weights_hash == wanted.weights_hash
    missing = {name: value for name, value in weights.items() if name != "norm.bias"}
    with pytest.raises(WeightsError, match=r"got 1 missing \(norm\.bias\) in 'gigapath'"):
        GigaPathSlideEncoder.from_state_dict(missing, config=SMALL)
    with pytest.raises(WeightsError, match=r"1 unexpected \(pos_embed\)"):
        GigaPathSlideEncoder.from_state_dict(weights | {"pos_embed": torch.ones(1)}, config=SMALL)


def encode_random(num_tiles: int) -> None:
    """One slide through one published layer in a fresh process, for its peak memory."""
    torch.set_num_threads(1)
    config = LongNetConfig(num_layers=1)
    encoder = GigaPathSlideEncoder.from_state_dict(
        GigaPathSlideEncoder.random_weights(config, seed=0), config=config
    )
    encoder.encode(*slide(num_tiles, 1536), tile_px_l0=256)


def test_peak_memory_grows_by_kibibytes_a_tile() -> None:
    """States and head groups take 25 KiB a tile, the test's own input 6."""
    small, large = (
        run_and_measure("tests.pool.test_gigapath", "encode_random", num_tiles=n).growth_bytes
        for n in (500, 2_000)
    )
    assert large - small <= 1_500 * 36 * 1024 + 16 * MIB  # what the allocator keeps


def test_sixty_two_thousand_tiles_fit_a_gibibyte() -> None:
    assert heads_at_a_time(62_001, LongNetConfig(), budget_bytes=GIB) >= 1
