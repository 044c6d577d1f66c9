"""Prov-GigaPath's slide encoder against a plain float64 implementation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.plain_gigapath import plain_gigapath, plain_position

from thinsection.attention.dilated import Branch
from thinsection.errors import (
    BudgetError,
    ConfigError,
    InvalidInputError,
    WeightsError,
)
from thinsection.pool import (
    GigaPathSlideEncoder,
    LoadOptions,
    SlideEncoder,
    TileLayout,
    load_slide_encoder,
    patient_embedding,
)
from thinsection.pool.gigapath import LongNetConfig, heads_at_a_time, position_embedding
from thinsection.testing import run_and_measure
from thinsection.types import GIB, MIB

BRANCHES = (
    (16, 1),
    (45, 2),
    (91, 4),
    (128, 8),
    (512, 16),
)  # the published ones, scaled down
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
        [rng.integers(0, 200_000, num_tiles), rng.integers(0, 90_000, num_tiles)],
        axis=1,
    )
    return tiles, coords


def exact(
    weights: dict[str, torch.Tensor],
    tiles: np.ndarray,
    coords: np.ndarray,
    *,
    tile_px_l0: int,
    tokens: str = "mean",
) -> np.ndarray:
    return plain_gigapath(
        weights,
        torch.from_numpy(tiles),
        torch.from_numpy(coords),
        tile_px_l0=tile_px_l0,
        branches=BRANCHES,
        num_heads=16,
        tokens=tokens,
    ).numpy()


def small(
    weights: dict[str, torch.Tensor], output: str = "", **options: object
) -> GigaPathSlideEncoder:
    loading = LoadOptions(device="cpu", output=output, **options)  # type: ignore[arg-type]
    return GigaPathSlideEncoder.from_state_dict(weights, config=SMALL, options=loading)


@pytest.mark.parametrize("tokens", ["mean", "cls"])
@pytest.mark.parametrize(
    ("num_tiles", "tile_px_l0"),
    [
        (1, 512),
        (14, 224),
        (15, 256),
        (16, 1024),
        (44, 512),
        (45, 448),
        (89, 515),
        (90, 256),
        (91, 512),
        (127, 1024),
        (128, 224),
        (200, 512),
    ],
)
def test_every_layer_is_that_of_float64(
    weights: dict[str, torch.Tensor], num_tiles: int, tile_px_l0: int, tokens: str
) -> None:
    """Token counts (tiles + 1) below, at and above the segment lengths, by size of tiles."""
    tiles, coords = slide(num_tiles)
    encoder = small(weights, tokens)
    got = encoder.encode_layers(tiles, coords, tile_px_l0=tile_px_l0)
    wanted = exact(weights, tiles, coords, tile_px_l0=tile_px_l0, tokens=tokens)
    assert got.shape == (4, 128)
    assert np.abs(got - wanted[:-1]).max() <= 1e-5
    embedding = encoder.encode(tiles, coords, tile_px_l0=tile_px_l0)
    np.testing.assert_array_equal(embedding, got[-1])


def test_the_same_tissue_has_one_embedding_at_every_magnification(
    weights: dict[str, torch.Tensor],
) -> None:
    rng = np.random.default_rng(3)
    cells = rng.permutation(90 * 70)[:60]
    cells = np.stack([cells % 90, cells // 90], axis=1)
    tiles = rng.standard_normal((60, 20), dtype=np.float32)
    encoder = small(weights)
    at_20x = encoder.encode(tiles, cells * 256 + 100, tile_px_l0=256)
    for edge in (128, 512, 1024):
        corners = cells * edge + 100 * edge // 256
        got = encoder.encode(tiles, corners, tile_px_l0=edge)
        np.testing.assert_array_equal(got, at_20x)


def test_a_slide_wider_than_256_000_px_is_encoded(
    weights: dict[str, torch.Tensor],
) -> None:
    tiles, _ = slide(30)
    columns = np.linspace(0, 999, 30).astype(np.int64)
    coords = np.stack([columns * 512, columns[::-1] * 256], axis=1)
    assert coords.max() > 500_000
    got = small(weights).encode(tiles, coords, tile_px_l0=512)
    wanted = exact(weights, tiles, coords, tile_px_l0=512)[-2]
    assert np.abs(got - wanted).max() <= 1e-5


def test_tiles_that_are_not_square_count_by_their_own_width_and_height(
    weights: dict[str, torch.Tensor],
) -> None:
    tiles, coords = slide(40)
    cells = coords // 256
    encoder = small(weights)
    wanted = encoder.encode(tiles, cells * 512, tile_px_l0=512)
    layout = TileLayout(size_l0=(512, 509), stride_l0=(512, 509))
    got = encoder.encode_tiles(tiles, cells * np.array([512, 509]), layout)
    np.testing.assert_array_equal(got, wanted)


def test_outputs_are_those_that_others_publish(
    weights: dict[str, torch.Tensor],
) -> None:
    """The mean of the last state by default; class token, layers and their final norm by name."""
    tiles, coords = slide(50)
    for tokens in ("mean", "cls"):
        wanted = exact(weights, tiles, coords, tile_px_l0=512, tokens=tokens)
        rows = {tokens: [3], f"{tokens}-2": [2], f"{tokens}-1-3": [1, 3]}
        rows[f"{tokens}-final"] = [4]
        for output, of_layers in rows.items():
            encoder = small(weights, output)
            assert encoder.name == f"gigapath:{output}"
            got = encoder.encode(tiles, coords, tile_px_l0=512)
            assert got.shape == (encoder.dim,) == (128 * len(of_layers),)
            assert np.abs(got - wanted[of_layers].ravel()).max() <= 1e-5
    default = small(weights).encode(tiles, coords, tile_px_l0=512)
    mean = small(weights, "mean").encode(tiles, coords, tile_px_l0=512)
    np.testing.assert_array_equal(default, mean)


def test_the_output_is_part_of_name_label_and_identity(
    weights: dict[str, torch.Tensor],
) -> None:
    encoders = [small(weights, output) for output in ("", "cls", "mean-1-3")]
    labels = [encoder.label("gigapath") for encoder in encoders]
    assert labels == ["gigapath-mean", "gigapath-cls", "gigapath-mean-1-3"]
    identities = [encoder.identity for encoder in encoders]
    assert [one["name"] for one in identities] == [
        "gigapath:mean",
        "gigapath:cls",
        "gigapath:mean-1-3",
    ]
    assert {one["version"] for one in identities} == {"2"}
    loaded = load_slide_encoder("gigapath:cls", pretrained=False, device="cpu")
    assert loaded.name == "gigapath:cls"


def test_an_output_that_is_none_is_refused(weights: dict[str, torch.Tensor]) -> None:
    for wrong in ("max", "mean-", "cls-a", "mean--1", "5-11"):
        with pytest.raises(ConfigError, match=f"must be mean, cls, .* got '{wrong}'"):
            small(weights, wrong)
    with pytest.raises(ConfigError, match=r"in 0\.\.3, got 4 in 'mean-4'"):
        small(weights, "mean-4")
    with pytest.raises(ConfigError, match="'mean' must be named without an output"):
        load_slide_encoder("mean:cls", device="cpu")


@pytest.mark.parametrize("tile_px_l0", [224, 512])
def test_early_fusion_of_one_slide_equals_late_fusion(
    weights: dict[str, torch.Tensor], tile_px_l0: int
) -> None:
    one = slide(60)
    encoder = small(weights)
    late = encoder.encode(*one, tile_px_l0=tile_px_l0)
    for fusion in ("early", "late"):
        got = patient_embedding(
            [one],
            slide_encoder=encoder,
            tile_px_l0=tile_px_l0,
            fusion=fusion,  # type: ignore[arg-type]
        )
        np.testing.assert_array_equal(got, late)


def test_early_fusion_knows_where_each_tile_lies(
    weights: dict[str, torch.Tensor],
) -> None:
    """Two slides of other magnifications are those of one slide, laid out by hand."""
    first, second = slide(40), slide(30)
    first_cells = first[1] // 1000
    second_cells = second[1] // 1000
    encoder = small(weights)

    def early(second_cells: np.ndarray) -> np.ndarray:
        return patient_embedding(
            [(first[0], first_cells * 512 + 7), (second[0], second_cells * 224 + 3)],
            slide_encoder=encoder,
            tile_px_l0=[512, 224],
            fusion="early",
        )

    right = first_cells[:, 0].max() + 3 - second_cells[:, 0].min()
    cells = np.concatenate([first_cells, second_cells + np.array([right, 0])])
    tiles = np.concatenate([first[0], second[0]])
    wanted = encoder.encode(tiles, cells * 300, tile_px_l0=300)
    np.testing.assert_allclose(early(second_cells), wanted, atol=1e-6)
    assert np.abs(early(second_cells[::-1]) - wanted).max() > 1e-3


def test_early_fusion_of_too_many_slides_says_what_to_do(
    weights: dict[str, torch.Tensor],
) -> None:
    tiles = np.ones((2, 20), np.float32)
    coords = np.array([[0, 0], [600 * 512, 0]])
    with pytest.raises(InvalidInputError, match=r"0\.\.999 tiles") as caught:
        patient_embedding(
            [(tiles, coords)] * 2,
            slide_encoder=small(weights),
            tile_px_l0=512,
            fusion="early",
        )
    (note,) = caught.value.__notes__
    assert "2 slides side by side, up to column 1203" in note
    assert "fusion='late'" in note


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
        tiles, coords, tile_px_l0=512
    )
    budget = 71 * MIB
    while heads_at_a_time(78, SMALL, budget_bytes=budget) > 1:
        budget -= 4096
    options = LoadOptions(device="cpu", budget_bytes=budget)
    tight = GigaPathSlideEncoder.from_state_dict(weights, config=SMALL, options=options)
    np.testing.assert_allclose(
        tight.encode(tiles, coords, tile_px_l0=512), wanted, atol=2e-6
    )
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
    torch.testing.assert_close(
        position_embedding(cells, 768).double(), wanted, rtol=0, atol=1e-7
    )


def test_tiles_outside_the_position_table_are_refused(
    weights: dict[str, torch.Tensor],
) -> None:
    tiles, coords = slide(3)
    encoder = small(weights)
    for wrong in (1000 * 224, -1):
        coords[1, 1] = wrong
        with pytest.raises(
            InvalidInputError,
            match=r"in 0\.\.999 tiles .* of 224 x 224 px; its position",
        ):
            encoder.encode(tiles, coords, tile_px_l0=224)
    coords[1, 1] = 1000 * 224 - 1
    assert np.isfinite(encoder.encode(tiles, coords, tile_px_l0=224)).all()


def test_published_names_load_strictly_and_safely(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert len(weights) == 2 + 1 + 3 * (5 * 2 + 2 + 3 * 2 + 2) + 2 + 2
    torch.save({"model": weights}, tmp_path / "slide_encoder.pth")
    encoder = GigaPathSlideEncoder.from_pretrained(tmp_path, config=SMALL)
    wanted = GigaPathSlideEncoder.from_state_dict(weights, config=SMALL)
    assert encoder.weights_hash == wanted.weights_hash
    with pytest.raises(WeightsError, match="misshapen"):
        load_slide_encoder("gigapath", weights=tmp_path, device="cpu")
    missing = {name: value for name, value in weights.items() if name != "norm.bias"}
    with pytest.raises(
        WeightsError, match=r"got 1 missing \(norm\.bias\) in 'gigapath'"
    ):
        GigaPathSlideEncoder.from_state_dict(missing, config=SMALL)
    with pytest.raises(WeightsError, match=r"1 unexpected \(pos_embed\)"):
        GigaPathSlideEncoder.from_state_dict(
            weights | {"pos_embed": torch.ones(1)}, config=SMALL
        )


def encode_random(num_tiles: int) -> None:
    """One slide through one published layer in a fresh process, for its peak memory."""
    torch.set_num_threads(1)
    config = LongNetConfig(num_layers=1)
    encoder = GigaPathSlideEncoder.from_state_dict(
        GigaPathSlideEncoder.random_weights(config, seed=0), config=config
    )
    encoder.encode(*slide(num_tiles, 1536), tile_px_l0=256)


@pytest.mark.check
def test_peak_memory_grows_by_kibibytes_a_tile() -> None:
    """States and head groups take 25 KiB a tile, the test's own input 6."""
    few, many = (
        run_and_measure(
            "tests.pool.test_gigapath", "encode_random", num_tiles=n
        ).growth_bytes
        for n in (500, 2_000)
    )
    assert many - few <= 1_500 * 36 * 1024 + 16 * MIB  # what the allocator keeps


def test_sixty_two_thousand_tiles_fit_a_gibibyte() -> None:
    assert heads_at_a_time(62_001, LongNetConfig(), budget_bytes=GIB) >= 1
