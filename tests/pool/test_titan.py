"""TITAN against a plain float64 implementation; its weights, its input checks, its memory."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.plain_titan import plain_titan

from thinsection.errors import BudgetError, InvalidInputError, WeightsError
from thinsection.pool import (
    LoadOptions,
    SlideEncoder,
    TileLayout,
    TitanSlideEncoder,
    aggregate,
    check_fit,
    load_slide_encoder,
    patient_embedding,
)
from thinsection.pool.encoder import Precision
from thinsection.pool.published import HeadPlan
from thinsection.pool.titan import TitanNet, plan_tokens, token_grid
from thinsection.testing import run_and_measure
from thinsection.types import GIB, MIB

# below the smallest change that a wrong epsilon makes (1.5e-5), above float32 noise (3e-6)
ATOL = 1e-5


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return TitanSlideEncoder.random_weights(seed=3)


@pytest.fixture(scope="module")
def titan(weights: dict[str, torch.Tensor]) -> TitanSlideEncoder:
    return TitanSlideEncoder.from_state_dict(weights)


def slide(
    num_tiles: int, *, seed: int = 0, edge: int = 1024
) -> tuple[np.ndarray, np.ndarray]:
    """Non-square tissue with jittered corners, one shared cell and one tile of zeros."""
    rng = np.random.default_rng(seed)
    height = int(num_tiles**0.5) + 2
    spots = rng.permutation(height * (height + 9))[:num_tiles]
    coords = np.stack([spots // (height + 9), spots % (height + 9)], 1) * edge
    coords = coords + rng.integers(0, edge, (1, 2)) + 10 * edge
    tiles = rng.standard_normal((num_tiles, 768)).astype(np.float32)
    if num_tiles > 4:
        coords[3], tiles[2] = coords[1], 0
    return tiles, coords.astype(np.int64)


def exact(
    weights: dict[str, torch.Tensor], tiles: np.ndarray, coords: np.ndarray
) -> np.ndarray:
    tensors = torch.from_numpy(tiles), torch.from_numpy(coords)
    return plain_titan(weights, *tensors, 1024).numpy()


@pytest.mark.parametrize("num_tiles", [1, 2, 5, 120, 333])
def test_the_embedding_is_that_of_float64(
    titan: TitanSlideEncoder, weights: dict[str, torch.Tensor], num_tiles: int
) -> None:
    tiles, coords = slide(num_tiles)
    got, wanted = (
        titan.encode(tiles, coords, tile_px_l0=1024),
        exact(weights, tiles, coords),
    )
    assert got.dtype == np.float32
    assert np.abs(got - wanted).max() <= ATOL
    cosine = got @ wanted / np.linalg.norm(got) / np.linalg.norm(wanted)
    assert cosine >= 1 - 1e-7  # the float32 dot product itself


def test_fragments_far_apart_take_no_dense_grid(
    titan: TitanSlideEncoder, weights: dict[str, torch.Tensor]
) -> None:
    """10^5 columns between them: a dense grid would take 2 GiB for each of its 7 rows."""
    tiles, coords = slide(30)
    coords[15:, 1] += 100_000 * 1024
    got = titan.encode(tiles, coords, tile_px_l0=1024)
    assert np.isfinite(got).all()
    near = coords.copy()
    near[15:, 1] -= (
        30_000 * 1024
    )  # 2^-8 x 70,000 cells: the weight is 0 in float32 either way
    other = titan.encode(tiles, near, tile_px_l0=1024)
    assert np.abs(got - other).max() <= ATOL


def test_bfloat16_products_stay_near(weights: dict[str, torch.Tensor]) -> None:
    tiles, coords = slide(200)
    options = LoadOptions(device="cpu", precision="bf16")
    low = TitanSlideEncoder.from_state_dict(weights, options=options)
    got, wanted = (
        low.encode(tiles, coords, tile_px_l0=1024),
        exact(weights, tiles, coords),
    )
    cosine = got.astype(float) @ wanted / np.linalg.norm(got) / np.linalg.norm(wanted)
    assert cosine >= 0.9999
    assert np.abs(got - wanted).max() <= 0.05


def test_float16_embeddings_are_taken_as_they_are(titan: TitanSlideEncoder) -> None:
    tiles, coords = slide(60)
    half = tiles.astype(np.float16)
    got = titan.encode(half, coords, tile_px_l0=1024)
    wanted = titan.encode(half.astype(np.float32), coords, tile_px_l0=1024)
    np.testing.assert_array_equal(got, wanted)


def test_the_order_of_tiles_does_not_matter(titan: TitanSlideEncoder) -> None:
    tiles, coords = slide(50)
    shuffled = np.random.default_rng(1).permutation(50)
    a = titan.encode(tiles, coords, tile_px_l0=1024)
    b = titan.encode(tiles[shuffled], coords[shuffled], tile_px_l0=1024)
    assert np.abs(a - b).max() <= ATOL


def test_tokens_are_row_major_with_the_first_coordinate_as_row() -> None:
    tiles = torch.arange(1.0, 5)[:, None]
    coords = np.array([[10, 30], [20, 10], [10, 10], [29, 35]]) + 7
    grid = token_grid(tiles, coords, stride_l0=(10, 10))
    assert grid.cells.tolist() == [[0, 0], [0, 2], [1, 0], [1, 2]]
    features = grid.features(tiles, slice(0, 4), device="cpu", dtype=torch.float32)
    assert features[:, 0].tolist() == [3.0, 1.0, 2.0, 4.0]


def test_tiles_in_one_cell_add_up_and_cells_that_sum_to_zero_drop_out() -> None:
    tiles = torch.tensor([[1.0, 2.0], [5.0, 5.0], [3.0, 4.0], [-5.0, -5.0], [0.0, 0.0]])
    coords = np.array([[0, 0], [0, 90], [5, 9], [3, 95], [60, 60]])
    grid = token_grid(tiles, coords, stride_l0=(10, 10))
    assert grid.cells.tolist() == [[0, 0]]
    features = grid.features(tiles, slice(0, 1), device="cpu", dtype=torch.float32)
    assert features.tolist() == [[4.0, 6.0]]
    with pytest.raises(InvalidInputError, match="not all zero, got none"):
        token_grid(tiles[4:], coords[4:], stride_l0=(10, 10))


def overlapping(*, edge: int = 512, stride: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """64 tiles whose neighbours share half of their px."""
    rng = np.random.default_rng(7)
    columns, rows = np.meshgrid(np.arange(16), np.arange(4), indexing="ij")
    cells = np.stack([columns.ravel(), rows.ravel()], axis=1)
    return rng.standard_normal((64, 768)).astype(np.float32), cells * stride + 1000


def test_overlapping_tiles_are_a_token_each_by_their_stride(
    titan: TitanSlideEncoder, weights: dict[str, torch.Tensor]
) -> None:
    tiles, coords = overlapping()
    assert len(token_grid(torch.from_numpy(tiles), coords, stride_l0=(256, 256))) == 64
    tensors = torch.from_numpy(tiles), torch.from_numpy(coords)
    wanted = plain_titan(weights, *tensors, 256).numpy()
    layout = TileLayout((512, 512), (256, 256))
    got = titan.encode_tiles(tiles, coords, layout)
    assert np.abs(got - wanted).max() <= ATOL
    by_call = aggregate(
        tiles, coords, slide_encoder=titan, tile_px_l0=512, stride_l0=256
    )
    np.testing.assert_array_equal(by_call, got)
    for fusion in ("early", "late"):
        patient = patient_embedding(
            [(tiles, coords)],
            slide_encoder=titan,
            tile_px_l0=512,
            stride_l0=256,
            fusion=fusion,  # type: ignore[arg-type]
        )
        np.testing.assert_array_equal(patient, got)


def test_early_fusion_of_overlapping_tiles_keeps_a_token_each(
    titan: TitanSlideEncoder,
) -> None:
    (tiles, at_512), (_, at_224) = overlapping(), overlapping(edge=224, stride=112)
    slides = [(tiles, at_512), (tiles, at_224)]
    got = patient_embedding(
        slides,
        slide_encoder=titan,
        tile_px_l0=[512, 224],
        stride_l0=[256, 112],
        fusion="early",
    )
    # the last column of slide 0 holds 9 tiles' edges: 3 tiles on lie columns of slide 1
    first = (at_512 - at_512.min(0)) // 256
    columns = (at_512[:, 0] // 512).max() + 3
    # which is moved by less than a tile, onto the grid of slide 0
    laid = at_224 * 512 // 224
    laid = laid + at_512.min(0) % 512 - laid.min(0) % 512
    second = (laid - at_512.min(0)) // 256
    moved = columns - laid[:, 0].min() // 512
    second = second + np.array([2 * moved, 0])
    cells = np.concatenate([first, second])
    assert len(np.unique(cells, axis=0)) == 128
    wanted = titan.encode(np.concatenate([tiles, tiles]), cells * 64, tile_px_l0=64)
    assert np.abs(got - wanted).max() <= ATOL
    with pytest.raises(
        InvalidInputError, match="same fraction of tile_px_l0"
    ) as caught:
        patient_embedding(
            slides,
            slide_encoder=titan,
            tile_px_l0=[512, 224],
            stride_l0=[256, 224],
            fusion="early",
        )
    assert caught.value.__notes__ == ["slide 1 of the patient"]


def test_overlap_that_nobody_tells_is_refused(titan: TitanSlideEncoder) -> None:
    tiles, coords = overlapping()
    rule = "without overlap .* steps of 256 px between tiles of 512 px; pass stride_l0"
    with pytest.raises(InvalidInputError, match=rule):
        titan.encode(tiles, coords, tile_px_l0=512)
    rows_only = coords * np.array([2, 1])
    with pytest.raises(InvalidInputError, match=rule):
        titan.encode(tiles, rows_only, tile_px_l0=512)
    # two grids of another phase, as CLAM lays them: a cell may hold two tiles
    apart = coords * 2
    apart[32:] += np.array([301, 17])
    assert np.isfinite(titan.encode(tiles, apart, tile_px_l0=512)).all()


def test_tiles_that_are_not_square_are_a_token_each(titan: TitanSlideEncoder) -> None:
    """Px of 0.2500 x 0.2505 µm: tiles of 512 x 511 px, of which two fell into one cell."""
    tiles, coords = overlapping(edge=512, stride=512)
    wanted = titan.encode(tiles, coords, tile_px_l0=512)
    flat = (coords - 1000) // 512 * np.array([512, 511])
    got = titan.encode_tiles(tiles, flat, TileLayout((512, 511), (512, 511)))
    np.testing.assert_array_equal(got, wanted)


def test_groups_of_heads_within_a_small_budget_give_the_same(
    titan: TitanSlideEncoder, weights: dict[str, torch.Tensor]
) -> None:
    tiles, coords = slide(200)
    cells = torch.from_numpy(
        token_grid(torch.from_numpy(tiles), coords, stride_l0=(1024, 1024)).cells
    )
    wanted = titan.encode(tiles, coords, tile_px_l0=1024)
    tight = plan_tokens(len(cells) + 1, budget_bytes=GIB).peak_bytes - 1
    options = LoadOptions(device="cpu", budget_bytes=tight)
    assert plan_tokens(len(cells) + 1, budget_bytes=tight).heads_at_a_time == 6
    small = TitanSlideEncoder.from_state_dict(weights, options=options)
    got = small.encode(tiles, coords, tile_px_l0=1024)
    assert np.abs(got - wanted).max() <= 2e-6
    tiny = LoadOptions(device="cpu", budget_bytes=MIB)
    with pytest.raises(
        BudgetError, match=r"titan needs .* tokens, the budget is 1\.0 MiB"
    ):
        TitanSlideEncoder.from_state_dict(weights, options=tiny).encode(
            tiles, coords, tile_px_l0=1024
        )


def test_sixty_two_thousand_tiles_fit_a_gibibyte() -> None:
    plan = plan_tokens(62_001, budget_bytes=GIB)
    assert plan.peak_bytes <= GIB
    assert plan.heads_at_a_time == 12


@torch.inference_mode()
def test_in_float64_the_embedding_is_that_of_the_plain_network(
    weights: dict[str, torch.Tensor],
) -> None:
    tiles, coords = slide(40)
    grid = token_grid(torch.from_numpy(tiles), coords, stride_l0=(1024, 1024))
    net = TitanNet()
    net.load_state_dict(
        {k.removeprefix("vision_encoder."): v for k, v in weights.items()}
    )
    net.double()
    plain = torch.from_numpy(tiles).double()
    tokens = partial(grid.features, plain, device="cpu", dtype=torch.float64)
    count, cells = len(grid) + 1, torch.from_numpy(grid.cells)
    double = {k: v.double() for k, v in weights.items()}
    wanted = plain_titan(double, plain, torch.from_numpy(coords), 1024)
    for heads in (12, 4):
        got = net.pooled_(tokens, count, cells, HeadPlan(heads, GIB))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_published_names_load_strictly(weights: dict[str, torch.Tensor]) -> None:
    assert len(weights) == 1 + 2 + 6 * 12 + 2 + 2 * 9 + 1
    with_text = weights | {"text_encoder.weight": torch.ones(1)}
    hashes = {
        TitanSlideEncoder.from_state_dict(w).weights_hash for w in (weights, with_text)
    }
    assert len(hashes) == 1
    missing = {k: v for k, v in weights.items() if k != "vision_encoder.norm.bias"}
    with pytest.raises(WeightsError, match=r"got 1 missing \(norm\.bias\) in 'titan'"):
        TitanSlideEncoder.from_state_dict(missing)
    extra = weights | {"vision_encoder.pos_embed": torch.ones(1)}
    with pytest.raises(WeightsError, match=r"got 1 unexpected \(pos_embed\)"):
        TitanSlideEncoder.from_state_dict(extra)


def test_from_pretrained_reads_a_folder(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    titan = TitanSlideEncoder.from_pretrained(tmp_path)
    assert titan.weights_hash == TitanSlideEncoder.from_state_dict(weights).weights_hash
    named = load_slide_encoder("titan", weights=tmp_path, device="cpu")
    assert isinstance(named, SlideEncoder)
    assert named.weights_hash == titan.weights_hash


def test_random_weights_must_be_asked_for() -> None:
    titan = load_slide_encoder("titan", pretrained=False, device="cpu")
    assert titan.dim == 768
    with pytest.raises(WeightsError, match="omitted with pretrained=False"):
        load_slide_encoder("titan", pretrained=False, weights="x", device="cpu")


def test_it_says_which_tiles_it_expects(titan: TitanSlideEncoder) -> None:
    assert check_fit(titan, "conch_v15", 512, 0.5) == ()
    with pytest.raises(
        InvalidInputError, match="must be conch_v15 for slide encoder 'titan'"
    ):
        check_fit(titan, "uni_v2", 512, 0.5)


def test_bad_input_is_named(titan: TitanSlideEncoder) -> None:
    tiles, coords = slide(9)
    with pytest.raises(
        InvalidInputError,
        match=r"\(N, 768\), got \(9, 767\); check which tile encoder made",
    ):
        titan.encode(tiles[:, 1:], coords, tile_px_l0=1024)
    with pytest.raises(InvalidInputError, match="coords_l0 must be int64"):
        titan.encode(tiles, coords / 2, tile_px_l0=1024)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="tile_px_l0 must be an int > 0, got 0"):
        titan.encode(tiles, coords, tile_px_l0=0)


def encode_random(num_tiles: int) -> None:
    """One slide through one block in a fresh process, for its peak memory."""
    torch.set_num_threads(1)
    titan = TitanSlideEncoder.from_state_dict(TitanSlideEncoder.random_weights(seed=0))
    del titan.net.blocks.modules_list[1:]  # type: ignore[union-attr]
    titan.encode(*slide(num_tiles), tile_px_l0=1024)


@pytest.mark.check
def test_peak_memory_grows_by_kibibytes_a_tile() -> None:
    """States, q, k and v are 12 KiB a tile, the test's own input 9; the bias in full is 94."""
    small, large = (
        run_and_measure(
            "tests.pool.test_titan", "encode_random", num_tiles=n
        ).growth_bytes
        for n in (500, 2_000)
    )
    assert large - small <= 1_500 * 28 * 1024 + 8 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("precision", "atol"), [("fp32", ATOL), ("bf16", 0.05)])
def test_the_embedding_on_cuda_is_that_of_float64(
    weights: dict[str, torch.Tensor], precision: Precision, atol: float
) -> None:
    tiles, coords = slide(333)
    options = LoadOptions(device="cuda", precision=precision)
    got = TitanSlideEncoder.from_state_dict(weights, options=options).encode(
        tiles, coords, tile_px_l0=1024
    )
    assert np.abs(got - exact(weights, tiles, coords)).max() <= atol
