"""Mean, max and attention pooling; the registry; what fits; patients."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from thinsection.errors import (
    ConfigError,
    DeviceError,
    InvalidInputError,
    UnknownEncoderError,
    WeightsError,
)
from thinsection.pool import (
    AbmilSlideEncoder,
    SlideEncoder,
    aggregate,
    load_slide_encoder,
    patient_embedding,
)
from thinsection.pool.encoder import BLOCK_ROWS, SLIDE_ENCODERS
from thinsection.slide.geometry import ReadPlan
from thinsection.tiles import TileTable
from thinsection.weights.origin import Origin


def slide(
    num_tiles: int = 37, dim: int = 5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tiles = rng.standard_normal((num_tiles, dim)).astype(np.float32)
    coords = np.stack([np.arange(num_tiles) % 7, np.arange(num_tiles) // 7], 1) * 256
    return tiles, coords.astype(np.int64)


def abmil_weights(*, gated: bool, dim: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = {"V.weight": (4, dim), "V.bias": (4,), "w.weight": (1, 4), "w.bias": (1,)}
    if gated:
        names |= {"U.weight": (4, dim), "U.bias": (4,)}
    return {
        name: torch.randn(shape, generator=generator) for name, shape in names.items()
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_mean_and_max_have_the_bytes_of_the_former_form_in_pytorch(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(5)
    stored = torch.randn(2 * BLOCK_ROWS + 77, 96, generator=generator).to(dtype)
    coords = np.zeros((len(stored), 2), dtype=np.int64)
    total = torch.zeros(96, dtype=torch.float64)
    for block in torch.split(stored, BLOCK_ROWS):
        total += block.double().sum(0)
    wanted = {"mean": total / len(stored), "max": stored.amax(0)}
    for name, vector in wanted.items():
        for form in (stored, stored.numpy()):
            found = aggregate(form, coords, slide_encoder=name, tile_px_l0=256)
            assert found.dtype == np.float32
            assert found.tobytes() == vector.float().numpy().tobytes()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64]
)
def test_mean_is_the_float64_mean_of_what_was_stored(dtype: torch.dtype) -> None:
    tiles, coords = slide(20_000, 3)
    stored = torch.from_numpy(tiles).to(dtype)
    got = aggregate(stored, coords, slide_encoder="mean", tile_px_l0=256)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, stored.double().mean(0).float().numpy())


def test_max_is_the_maximum_and_a_single_tile_is_itself() -> None:
    tiles, coords = slide()
    got = aggregate(tiles, coords, slide_encoder="max", tile_px_l0=256)
    np.testing.assert_array_equal(got, tiles.max(0))
    one = aggregate(tiles[:1], coords[:1], slide_encoder="max", tile_px_l0=256)
    np.testing.assert_array_equal(one, tiles[0])


def test_a_tile_table_says_places_and_size() -> None:
    tiles, coords = slide(12, 768)
    plan = ReadPlan(
        tile_px=128,
        tile_mpp=0.5,
        level=0,
        downsample=1.0,
        size_lv=(256, 256),
        size_l0=(256, 256),
        stride_l0=(256, 256),
    )
    table = TileTable(coords_l0=coords, plan=plan)
    titan = load_slide_encoder("titan", device="cpu", pretrained=False)
    got = aggregate(tiles, tiles=table, slide_encoder=titan)
    wanted = aggregate(tiles, coords, tile_px_l0=256, slide_encoder=titan)
    np.testing.assert_array_equal(got, wanted)
    for wrong in (
        {},
        {"coords_l0": coords},
        {"tile_px_l0": 256},
        {"tiles": table, "coords_l0": coords},
        {"tiles": table, "tile_px_l0": 256},
        {"tiles": table, "stride_l0": 256},
    ):
        with pytest.raises(
            InvalidInputError, match="needs tiles, or coords_l0 with tile_px_l0"
        ):
            aggregate(tiles, **wrong)


@pytest.mark.parametrize("gated", [False, True])
def test_abmil_agrees_with_loops_in_float64(gated: bool) -> None:
    tiles, coords = slide(23)
    weights = abmil_weights(gated=gated)
    w = {name: value.double().numpy() for name, value in weights.items()}
    scores = []
    for tile in tiles.astype(np.float64):
        hidden = np.tanh(w["V.weight"] @ tile + w["V.bias"])
        if gated:
            hidden = hidden / (1 + np.exp(-(w["U.weight"] @ tile + w["U.bias"])))
        scores.append(math.exp(float((w["w.weight"] @ hidden)[0] + w["w.bias"][0])))
    wanted = sum(s * t for s, t in zip(scores, tiles.astype(np.float64))) / sum(scores)
    got = AbmilSlideEncoder(weights).encode(tiles, coords, tile_px_l0=256)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


def test_abmil_loads_from_a_file_and_knows_its_weights(tmp_path: Path) -> None:
    weights = abmil_weights(gated=True)
    save_file(weights, tmp_path / "abmil.safetensors")
    encoder = load_slide_encoder("abmil", weights=tmp_path, device="cpu")
    assert encoder.weights_hash == AbmilSlideEncoder(weights).weights_hash
    changed = weights | {"w.bias": weights["w.bias"] + 1}
    assert encoder.weights_hash != AbmilSlideEncoder(changed).weights_hash


def test_abmil_refuses_names_and_shapes_that_do_not_fit() -> None:
    weights = abmil_weights(gated=True)
    with pytest.raises(WeightsError, match=r"got .*U.bias"):
        AbmilSlideEncoder({k: v for k, v in weights.items() if k != "U.weight"})
    with pytest.raises(WeightsError, match=r"w.weight \(4, 1\) for \(1, 4\)"):
        AbmilSlideEncoder(weights | {"w.weight": torch.zeros(4, 1)})


def test_every_name_is_a_slide_encoder_without_weights_or_says_what_it_needs() -> None:
    assert {"mean", "max", "abmil"} <= set(SLIDE_ENCODERS.names())
    for name in ("mean", "max"):
        encoder = load_slide_encoder(name, device="cpu")
        assert isinstance(encoder, SlideEncoder)
        assert encoder.name == name
    with pytest.raises(
        WeightsError, match="'abmil' has no published weights; pass weights=FILE"
    ):
        load_slide_encoder("abmil", device="cpu")


def test_wrong_options_are_named() -> None:
    with pytest.raises(UnknownEncoderError, match="'maen'; did you mean 'mean'"):
        load_slide_encoder("maen")
    with pytest.raises(
        ConfigError, match="precision must be one of auto, fp32, bf16, got 'fp8'"
    ):
        load_slide_encoder("mean", precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="got 'tpu'"):
        load_slide_encoder("mean", device="tpu")
    with pytest.raises(DeviceError, match="'cuda:99' with"):
        load_slide_encoder("mean", device="cuda:99")
    with pytest.raises(WeightsError, match="'mean', which has none"):
        load_slide_encoder("mean", weights="x.safetensors", device="cpu")


def test_bad_input_is_named_with_what_was_got() -> None:
    tiles, coords = slide()
    encoder = load_slide_encoder("mean", device="cpu")
    with pytest.raises(
        InvalidInputError, match=r"int64 of shape \(N, 2\), got float32 \(37, 2\)"
    ):
        encoder.encode(tiles, coords.astype(np.float32), tile_px_l0=256)
    with pytest.raises(
        InvalidInputError, match=r"one row per tile embedding \(37\), got 36"
    ):
        encoder.encode(tiles, coords[:-1], tile_px_l0=256)
    with pytest.raises(
        InvalidInputError, match="tile_px_l0 must be an int > 0, got -256"
    ):
        encoder.encode(tiles, coords, tile_px_l0=-256)
    tiles[7, 2] = np.nan
    with pytest.raises(InvalidInputError, match="finite, got NaN or inf in row 7"):
        encoder.encode(tiles, coords, tile_px_l0=256)
    with pytest.raises(InvalidInputError, match=r"N >= 1, got float32 \(0, 5\)"):
        encoder.encode(tiles[:0], coords[:0], tile_px_l0=256)


def test_late_fusion_weighs_slides_and_early_fusion_weighs_tiles() -> None:
    first, second = slide(10, seed=1), slide(30, seed=2)
    late = patient_embedding([first, second], tile_px_l0=256, fusion="late")
    early = patient_embedding([first, second], tile_px_l0=[256, 512], fusion="early")
    means = [first[0].mean(0, dtype=np.float64), second[0].mean(0, dtype=np.float64)]
    np.testing.assert_allclose(late, (means[0] + means[1]) / 2, atol=1e-7)
    np.testing.assert_allclose(early, 0.25 * means[0] + 0.75 * means[1], atol=1e-7)


def test_early_fusion_lays_slides_side_by_side_without_overlap() -> None:
    class Spy(SlideEncoder):
        name = "spy"
        coords = np.zeros((0, 2))

        def encode(self, tiles, coords, *, tile_px_l0):  # type: ignore[no-untyped-def]
            self.coords = coords // tile_px_l0
            return tiles[0]

    spy = Spy()
    first, second = slide(9), slide(15)
    shifted = (second[0], second[1] * 2 + 1000)
    patient_embedding(
        [first, shifted],
        slide_encoder=spy,
        tile_px_l0=[256, 512],
        fusion="early",
    )
    assert len(np.unique(spy.coords, axis=0)) == 24
    gap = spy.coords[9:, 0].min() - spy.coords[:9, 0].max()
    assert gap == 3
    np.testing.assert_array_equal(
        np.diff(spy.coords[9:], axis=0), np.diff(second[1] // 256, axis=0)
    )


def test_a_patient_without_slides_or_with_a_bad_one_is_named() -> None:
    with pytest.raises(InvalidInputError, match="at least one slide"):
        patient_embedding([], tile_px_l0=256)
    good, bad = slide(), slide()
    bad[0][0, 0] = np.inf
    with pytest.raises(InvalidInputError, match="finite") as caught:
        patient_embedding([good, bad], tile_px_l0=256)
    assert caught.value.__notes__ == ["slide 1 of the patient"]
    with pytest.raises(
        InvalidInputError, match="fusion must be 'early' or 'late', got 'middle'"
    ):
        patient_embedding([good], tile_px_l0=256, fusion="middle")  # type: ignore[arg-type]


def test_a_label_names_the_tile_embeddings_that_it_was_made_of() -> None:
    assert load_slide_encoder("mean").label("uni2_h") == "mean-uni2_h"
    assert load_slide_encoder("max", pretrained=False).label("a_bf16") == "max-a_bf16"
    titan = load_slide_encoder(
        "titan", device="cpu", precision="bf16", pretrained=False
    )
    assert titan.label("conch_v15") == "titan_bf16_seed0"
    assert titan.label("conch_v15_bf16") == "titan_bf16_seed0-conch_v15_bf16"
    assert titan.identity == {
        "name": "titan",
        "weights_hash": titan.weights_hash,
        "precision": "bf16",
        "version": "2",
    }
    titan.origin = Origin()
    titan.precision = "fp32"
    assert titan.label("conch_v15") == "titan"


def test_given_weights_show_in_the_label(tmp_path: Path) -> None:
    save_file(abmil_weights(gated=False), weights := tmp_path / "mine.safetensors")
    encoder = load_slide_encoder("abmil", weights=weights, device="cpu")
    assert encoder.weights_hash is not None
    assert encoder.label("uni") == f"abmil_w{encoder.weights_hash[:6]}-uni"
