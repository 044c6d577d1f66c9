"""The ink network: what it is given, what it gives, and where it comes from."""

import json
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from training.ink import train as ink_training
from training.ink.biology import plant_biology
from training.ink.strokes import plant_strokes
from training.ink.train import (
    InkNetwork,
    Recipe,
    example,
    script_hashes,
    train,
)
from training.network import layer_arrays
from training.tuning_slide import tuning_slide

from thinsection.arrays import get_namespace
from thinsection.qc.checks.artefact_network import density_tables
from thinsection.qc.checks.ink_network import (
    MODEL,
    NUM_PLANES,
    ink_planes,
    ink_probability,
    usual_stain,
)
from thinsection.types import RgbArray

NS = get_namespace("cpu")
PINK = (215, 140, 190)
BLUE_PEN = (60, 90, 190)


@pytest.fixture(scope="module")
def network() -> InkNetwork:
    """A network of random weights, whose normalisation has seen some pixels."""
    torch.manual_seed(3)
    network = InkNetwork()
    network(torch.randn(4, NUM_PLANES, 64, 64))
    return network.eval()


def weights_of(network: InkNetwork) -> dict[str, npt.NDArray[np.float32]]:
    """As they come from a file, which has half precision."""
    return {k: v.astype(np.float32) for k, v in layer_arrays(network).items()}


def slide_with_stroke() -> RgbArray:
    """Pink tissue on glass, and a stroke across both."""
    rgb = np.full((120, 160, 3), (242, 241, 240), np.uint8)
    rgb[20:100, 30:130] = PINK
    rgb[50:60, 10:150] = BLUE_PEN
    return rgb


def test_the_network_in_numpy_gives_what_its_twin_in_torch_gives(
    network: InkNetwork,
) -> None:
    rgb = tuning_slide(9_510, size=(211, 133), mpp=16.0).rgb
    tables = density_tables(NS, rgb)
    planes = ink_planes(NS, rgb, tables, usual_stain(NS, rgb, tables))
    with torch.inference_mode():
        logits = network(torch.from_numpy(planes.transpose(2, 0, 1)[None].copy()))
    expected = torch.softmax(logits, 1)[0, 1, :133, :211].numpy()
    found = ink_probability(NS, rgb, weights=weights_of(network))
    assert found.shape == (133, 211)
    assert expected.std() > 0.01
    assert np.abs(found / 255 - expected).max() < 0.006


def test_what_the_usual_stain_explains_leaves_nothing_and_ink_leaves_its_hue() -> None:
    rgb = slide_with_stroke()
    tables = density_tables(NS, rgb)
    stain = usual_stain(NS, rgb, tables)
    planes = ink_planes(NS, rgb, tables, stain)
    assert planes.shape == (128, 160, NUM_PLANES)
    np.testing.assert_allclose(np.linalg.norm(stain), 1, atol=1e-5)
    np.testing.assert_allclose(planes[30, 40, 4:], 0, atol=1e-3)
    unexplained = planes[55, 40, 4:]
    np.testing.assert_allclose(unexplained @ stain, 0, atol=1e-4)
    # blue ink takes more red light than the pink tissue does
    assert unexplained[0] > 0.5 > unexplained[1]
    # rows beyond the picture repeat the last one
    np.testing.assert_array_equal(planes[119:, :, :4], planes[[119] * 9, :, :4])


def test_glass_and_a_few_stained_pixels_show_no_stain() -> None:
    rgb = np.full((64, 64, 3), 240, np.uint8)
    rgb[:8, :8] = PINK
    stain = usual_stain(NS, rgb, density_tables(NS, rgb))
    np.testing.assert_allclose(stain, 1 / np.sqrt(3), atol=1e-6)
    rgb[:40] = PINK
    stain = usual_stain(NS, rgb, density_tables(NS, rgb))
    assert stain.argmax() == 1


def test_memory_beyond_the_map_does_not_grow_with_the_height(
    network: InkNetwork,
) -> None:
    weights = weights_of(network)
    rng = np.random.default_rng(0)
    beyond = []
    for height in (512, 2048):
        rgb = rng.integers(90, 230, (height, 512, 3), dtype=np.uint8)
        tracemalloc.start()
        ink_probability(NS, rgb, weights=weights)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        beyond.append(peak - 2 * 512 * height)
    # the sample of the stain is a part of the picture
    assert beyond[1] < 1.6 * beyond[0]
    assert beyond[0] < 40_000 * 256 + 10e6


def test_a_planted_stroke_adds_one_density_wherever_it_lies() -> None:
    rng = np.random.default_rng(5)
    light = rng.uniform(0.3, 1, (96, 128, 3)).astype(np.float32)
    planted = 0
    for seed in range(12):
        inked = plant_strokes(light, np.random.default_rng(seed))
        untouched = ~inked.ink & ~inked.unsure
        assert not (inked.ink & inked.unsure).any()
        if not inked.ink.any():
            continue
        planted += 1
        added = np.log(light / inked.light).mean(axis=2)
        assert added[inked.ink].mean() > added[untouched].mean() + 0.02
    assert planted > 6


def test_an_example_without_ink_has_none_and_others_have_some() -> None:
    rgb = tuning_slide(9_512, size=(200, 180), mpp=16.0, stain="he").rgb
    background = (rgb, np.zeros(rgb.shape[:2], bool), False)
    shares = []
    for without_ink in (1.0, 0.0):
        recipe = Recipe(without_ink=without_ink, crop_px=96)
        inks = 0.0
        for seed in range(6):
            rng = np.random.default_rng(seed)
            planes, classes, weights = example(
                background, rng, recipe, with_biology=0.0
            )
            assert planes.shape == (NUM_PLANES, 96, 96)
            assert classes.shape == weights.shape == (96, 96)
            inks += float(classes.float().mean())
        shares.append(inks / 6)
    assert shares[0] == 0.0
    assert shares[1] > 0.02


def test_planted_biology_changes_tissue_of_any_stain_and_is_no_ink() -> None:
    rgb = tuning_slide(9_513, size=(200, 180), mpp=16.0, stain="he").rgb
    background = (rgb, np.zeros(rgb.shape[:2], bool), False)
    recipe = Recipe(without_ink=1.0, crop_px=96)
    for with_biology in (0.0, 1.0):
        marked = 0.0
        for seed in range(8):
            rng = np.random.default_rng(seed)
            _, classes, weights = example(
                background, rng, recipe, with_biology=with_biology
            )
            assert not classes.any()
            marked += float((weights == recipe.lookalike_weight).float().mean())
        assert (marked > 0.5) == (with_biology > 0)
    light = np.full((96, 128, 3), 0.5, np.float32)
    light[:, 100:] = 1
    for seed in range(12):
        changed, where = plant_biology(light, np.random.default_rng(seed), grey=True)
        # what is grey stays grey
        np.testing.assert_allclose(np.ptp(changed, axis=2), 0, atol=1e-5)
        differs = np.abs(changed - light).max(axis=2) > 0.02
        # a soft rim is left out
        assert where[differs].mean() > 0.3


def test_biology_comes_into_the_training_step_by_step() -> None:
    recipe = Recipe(with_biology=0.4, biology_steps=(100, 300))
    shares = [
        ink_training._biology_share(recipe, step) for step in (0, 100, 200, 300, 9_000)
    ]
    np.testing.assert_allclose(shares, [0, 0, 0.2, 0.4, 0.4])


def test_a_training_that_is_stopped_and_goes_on_makes_the_same_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rgb = tuning_slide(9_514, size=(130, 140), mpp=16.0, stain="he").rgb
    bank = [(rgb, np.zeros(rgb.shape[:2], bool), False)]
    monkeypatch.setattr(ink_training, "backgrounds", lambda *arguments: bank)
    recipe = Recipe(num_steps=3, crop_px=64, batch_size=2, num_backgrounds=1)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = train(recipe, tmp_path / "whole", seconds=1e9)
    assert whole is not None
    stops = 0
    while (parts := train(recipe, tmp_path / "parts", seconds=0.0)) is None:
        stops += 1
    assert stops == 2
    first = layer_arrays(whole)
    for name, array in layer_arrays(parts).items():
        np.testing.assert_array_equal(array, first[name], err_msg=name)


def test_the_file_was_made_by_the_scripts_and_the_data_that_it_records() -> None:
    with safe_open(MODEL, framework="numpy") as file:
        record = json.loads(file.metadata()["record"])
    assert record["scripts"] == script_hashes()
    assert record["recipe"] == json.loads(json.dumps(asdict(Recipe())))
    assert record["report"]["recall"] > 0.7
    assert MODEL.stat().st_size < 600_000
