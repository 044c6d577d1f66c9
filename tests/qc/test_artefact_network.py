"""The artefact network behind folds, bubbles and dirt: what it gives, where it comes from."""

import json
import pickle
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.qc.slides import REAL
from tests.qc.views import view_of
from training import real_tissue
from training.lookalikes import LOOKALIKES
from training.network import ArtefactNetwork, layer_arrays
from training.scenes import TrainingScene
from training.train_artefacts import Recipe, script_hashes, train
from training.tuning_slide import tuning_slide

from thinsection.arrays import get_namespace
from thinsection.qc.checks import artefact_network, unet
from thinsection.qc.checks.artefact_network import (
    CLASSES,
    MODEL,
    artefact_maps,
    density_tables,
    input_planes,
    is_purple,
    without_stain,
)
from thinsection.qc.checks.artefacts import Unsure

Weights = dict[str, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def networks() -> list[ArtefactNetwork]:
    """Networks of random weights, whose normalisation has seen some pixels."""
    torch.manual_seed(1)
    networks = []
    for _ in range(2):
        network = ArtefactNetwork()
        network(torch.randn(4, 4, 64, 64))
        networks.append(network.eval())
    return networks


def record_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="numpy") as file:
        return dict(json.loads(file.metadata()["record"]))


def weights_of(networks: Sequence[ArtefactNetwork]) -> Weights:
    """As they come from a file, which has half precision."""
    return {
        f"{number}.{name}": array.astype(np.float32)
        for number, network in enumerate(networks)
        for name, array in layer_arrays(network).items()
    }


def stacked(rgb: npt.NDArray[np.uint8], mpp: float, weights: Weights) -> Weights:
    maps = artefact_maps(get_namespace("cpu"), rgb, mpp, weights=weights)
    return {name: plane.astype(np.float32) for name, plane in maps.items()}


def test_the_networks_in_numpy_give_what_their_twins_in_torch_give(
    networks: list[ArtefactNetwork],
) -> None:
    rgb = tuning_slide(9_500, size=(411, 333), mpp=8.0).rgb
    ns = get_namespace("cpu")
    planes = input_planes(ns, rgb, density_tables(ns, rgb), 1).transpose(2, 0, 1)
    inputs = torch.from_numpy(planes[None].copy())
    with torch.inference_mode():
        each = [torch.softmax(network(inputs), 1) for network in networks]
    # networks that agree would show no mean
    assert (each[0] - each[1]).abs().max() > 0.03
    expected = torch.stack(each).mean(0)[0, :, :333, :411].numpy()
    maps = stacked(rgb, 8.0, weights_of(networks))
    for name, plane in zip(CLASSES, expected):
        # two steps of rounding of half of 1/255 each, and weights of half precision
        assert np.abs(maps[name] / 255 - plane).max() < 0.006, name


@pytest.mark.parametrize(
    ("density", "purple"),
    [
        # of HistoQC's real pens, and of black pen over haematoxylin and eosin
        ((2.41, 2.53, 2.81), False),
        ((1.05, 0.30, 0.40), False),
        ((0.16, 1.61, 1.17), False),
        ((1.66, 1.05, 0.21), False),
        ((2.9, 3.2, 3.1), False),
        # of haematoxylin, and of both stains
        ((0.65, 0.70 + 0.5, 0.29 + 0.05), True),
        ((1.1, 1.6, 1.1), True),
        # too pale for a hue
        ((0.2, 0.3, 0.2), False),
    ],
)
def test_purple_is_the_hue_of_stained_tissue_alone(
    density: tuple[float, float, float], purple: bool
) -> None:
    assert bool(is_purple(np.array([density], dtype=np.float32))[0]) == purple


GLASS, STAINED, DARK, GREEN_PEN = (
    (240, 240, 242),
    (200, 110, 170),
    (80, 42, 78),
    (60, 150, 120),
)


def slide_with(
    tissue: tuple[int, int, int], pen: tuple[int, int, int]
) -> npt.NDArray[np.uint8]:
    """Tissue on glass, and a stroke across it."""
    rgb = np.full((120, 160, 3), GLASS, np.uint8)
    rgb[20:100, 30:130] = tissue
    rgb[50:70, 20:140] = pen
    return rgb


def test_stained_tissue_is_no_ink_and_ink_on_it_stays() -> None:
    ns = get_namespace("cpu")
    stroke = np.zeros((120, 160), bool)
    stroke[50:70, 20:140] = True
    tissue = np.zeros_like(stroke)
    tissue[20:100, 30:130] = True
    # a network that takes all dark tissue for ink, and a stroke of green on it
    left = without_stain(ns, tissue | stroke, slide_with(DARK, GREEN_PEN))
    assert left[tissue & ~stroke].mean() < 0.1
    # its rims are uncertain
    assert left[stroke].mean() > 0.6
    # one that takes half of it
    half = tissue.copy()
    half[:, :80] = False
    left = without_stain(ns, half, slide_with(DARK, DARK))
    assert not left.any()
    # thin black on pink is purple too
    left = without_stain(ns, stroke, slide_with(STAINED, DARK))
    assert np.array_equal(left, stroke)


@pytest.mark.parametrize("block_squares", [1, 700, 5000])
def test_blocks_of_rows_do_not_show(
    block_squares: int,
    networks: list[ArtefactNetwork],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rgb = tuning_slide(9_502, size=(333, 401), mpp=8.0).rgb
    weights = weights_of(networks)
    monkeypatch.setattr(unet, "_BLOCK_SQUARES", 1_000_000)
    whole = stacked(rgb, 8.0, weights)
    monkeypatch.setattr(unet, "_BLOCK_SQUARES", block_squares)
    parts = stacked(rgb, 8.0, weights)
    for name, plane in whole.items():
        assert np.array_equal(plane, parts[name]), name
    # a map that is the same everywhere would show no block
    assert sum(plane.std() > 0.5 for plane in whole.values()) > len(CLASSES) / 2


def test_rows_far_from_anything_but_glass_are_glass_and_leave_the_others_as_they_are(
    networks: list[ArtefactNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    rgb = np.full((1700, 150, 3), 240, np.uint8)
    slide = tuning_slide(9_503, size=(150, 90), mpp=8.0, stain="he").rgb
    rgb[700:790] = slide
    rgb[1690:] = slide[:10]
    weights = weights_of(networks)
    skipping = stacked(rgb, 8.0, weights)
    monkeypatch.setattr(artefact_network, "_GLASS_DENSITY", -1.0)
    complete = stacked(rgb, 8.0, weights)
    near = np.zeros(len(rgb), bool)
    near[700 - 192 : 790 + 192] = near[1690 - 192 :] = True
    for name, plane in complete.items():
        assert np.array_equal(skipping[name][near], plane[near]), name
    assert (skipping["glass"][:300] == 255).all()
    assert (skipping["glass"][1200:1400] == 255).all()
    # these networks do not take glass for glass, so that skipped rows can be told
    assert (complete["glass"][:300] < 255).any()


def test_memory_does_not_grow_with_the_height_of_a_picture(
    networks: list[ArtefactNetwork],
) -> None:
    weights = weights_of(networks)
    rng = np.random.default_rng(0)
    peaks = []
    for height in (512, 2048):
        rgb = rng.integers(90, 230, (height, 256, 3), dtype=np.uint8)
        tracemalloc.start()
        maps = artefact_maps(get_namespace("cpu"), rgb, 8.0, weights=weights)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        peaks.append(peak - len(pickle.dumps(maps)))
    assert peaks[1] < 1.2 * peaks[0]
    # as the docstrings say: of the network for each square of a row, and of 256 rows of the maps
    each_network = 128 * 20_000 + 10e6
    assert peaks[0] < len(networks) * each_network + 256 * 256 * len(CLASSES)


def test_the_share_without_a_likely_class_is_a_column() -> None:
    view = view_of(np.full((40, 60, 3), 200, np.uint8))
    maps = {name: np.full((40, 60), 30, np.uint8) for name in CLASSES}
    maps["tissue"][:10] = 200
    outcome = Unsure()(replace(view, artefact_maps=lambda: maps))
    assert outcome.mask_use is None
    assert outcome.scores == {"unsure_percent": pytest.approx(0.75)}


@pytest.mark.parametrize("mpp", [4.0, 8.0, 11.0])
def test_maps_have_the_shape_of_their_image_and_are_probabilities(mpp: float) -> None:
    rgb = tuning_slide(9_501, size=(301, 203), mpp=4.0, stain="he").rgb
    maps = artefact_maps(get_namespace("cpu"), rgb, mpp)
    assert list(maps) == list(CLASSES)
    assert all(plane.shape == (203, 301) for plane in maps.values())
    assert all(plane.dtype == np.uint8 for plane in maps.values())
    total = sum(plane.astype(int) for plane in maps.values())
    assert np.abs(total - 255).max() <= len(CLASSES) / 2


def test_the_file_was_made_by_the_scripts_and_the_data_that_it_records() -> None:
    record = record_of(MODEL)
    assert record["classes"] == list(CLASSES)
    assert record["scripts"] == script_hashes()
    assert record["recipe"] == json.loads(json.dumps(asdict(Recipe())))
    assert MODEL.stat().st_size < 2_000_000
    tcga = REAL.with_name("tcga-cr-7395-01a-01-ts1.svs")
    polygons = [f"{name}.parquet" for pair in real_tissue._LAYOUTS for name in pair]
    assert set(record["data"]) == {*polygons, *real_tissue._CROPS, tcga.name}
    if tcga.is_file():
        assert record["data"][tcga.name] == real_tissue.sha256(tcga)


SMALL = Recipe(
    num_steps=6,
    decay_steps=2,
    save_steps=2,
    report_steps=100,
    scene_size=(320, 256),
    first_scenes=3,
    steps_per_scene=2,
    num_report_scenes=2,
    num_crops=2,
    crop_px=64,
    num_networks=2,
    num_threads=1,
    real_tissue=False,
)


def test_a_training_that_is_stopped_and_goes_on_makes_the_same_file(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole.safetensors"
    train(SMALL, tmp_path / "a", whole)
    shorter = replace(SMALL, num_steps=4)
    train(shorter, tmp_path / "b", tmp_path / "shorter.safetensors")
    goes_on = tmp_path / "goes_on.safetensors"
    train(SMALL, tmp_path / "b", goes_on)
    assert goes_on.read_bytes() == whole.read_bytes()
    weights = {name: a.astype(np.float32) for name, a in load_file(whole).items()}
    rgb = tuning_slide(9_503, size=(160, 120), mpp=8.0, stain="he").rgb
    maps = stacked(rgb, 8.0, weights)
    assert all(np.isfinite(plane).all() for plane in maps.values())
    report = record_of(whole)["report"]
    assert {"tissue recall", "fold precision", "melanin lost"} <= set(report)


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_look_alike_changes_tissue_and_stays_tissue(name: str) -> None:
    changed = 0.0
    for seed in range(6):
        scene = TrainingScene(seed, (300, 240), 8.0, "he")
        scene.layouts = []
        scene.draw_tissue()
        before = scene.light.copy()
        tissue = scene.masks["tissue"].copy()
        where = LOOKALIKES[name](scene)
        moved = np.abs(scene.light - before).max(axis=2) > 0.02
        assert not moved[~tissue].any()
        assert not where[~tissue].any()
        np.testing.assert_array_equal(scene.masks["tissue"], tissue)
        assert np.isfinite(scene.light).all()
        changed += float(moved.mean())
    assert changed > 0.01


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.5, 0.6, 0.8, 1.0])
def test_probabilities_are_compared_as_bytes_with_the_answer_of_floats(
    threshold: float,
) -> None:
    steps = np.arange(256, dtype=np.uint8).reshape(16, 16)
    maps = {"bubble": steps, "dust": steps.T[::-1]}
    view = view_of(np.full((16, 16, 3), 200, np.uint8))
    view = replace(view, artefact_maps=lambda: maps)
    for name in maps:
        expected = view.artefact_probability(name) > threshold
        found = view.artefact_exceeds(name, threshold)
        assert np.array_equal(found, expected)
        assert (found.sum() == 0) == (threshold == 1.0)
