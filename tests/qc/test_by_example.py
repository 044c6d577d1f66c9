"""Pixel models: seeded, cached without pickle, trained on anyone's examples."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.pixel_examples import (
    coverslip_examples,
    pen_examples,
    train_built_in,
)

from thinsection.arrays import get_namespace
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc.checks import pixel_model
from thinsection.qc.checks.by_example import ExampleCheck, trained_model
from thinsection.qc.checks.pixel_model import (
    Example,
    PixelModel,
    load_model,
    pixel_features,
    predict,
    probabilities,
    train,
)


@pytest.fixture
def own(tmp_path: Path) -> ExampleCheck:
    """Examples in which orange is what to find."""
    rgb = np.random.default_rng(2).integers(150, 255, (40, 60, 3), dtype=np.uint8)
    mask = np.zeros((40, 60), dtype=np.uint8)
    rgb[10:30, 20:40], mask[10:30, 20:40] = (250, 140, 20), 255
    Image.fromarray(rgb).save(tmp_path / "image.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    return ExampleCheck(
        model="own",
        example_images=(str(tmp_path / "image.png"),),
        example_masks=(str(tmp_path / "mask.png"),),
        features=("rgb", "laplace", "frangi"),
        num_samples=4096,
    )


def same(a: PixelModel, b: PixelModel) -> bool:
    same_weights = all(map(np.array_equal, a.weights, b.weights))
    return a.features == b.features and same_weights


def test_a_model_of_own_examples_finds_what_they_show(
    own: ExampleCheck, tmp_path: Path
) -> None:
    model = trained_model(own, tmp_path / "cache")
    picture = np.full((20, 30, 3), 200, np.uint8)
    picture[5:15, 10:20] = (245, 145, 30)
    ns = get_namespace("cpu")
    found = probabilities(ns, picture, {own: model})[own] > 0.5
    assert found[7:13, 12:18].all()
    assert not found[:, :8].any()


def test_a_network_is_its_formula_layer_by_layer() -> None:
    rng = np.random.default_rng(3)
    features, widths = rng.normal(size=(5, 9, 7)).astype(np.float32), (5, 6, 4, 1)
    drawn = [rng.normal(size=n).astype(np.float32) for n in itertools.pairwise(widths)]
    biases = [rng.normal(size=n).astype(np.float32) for n in widths[1:]]
    model = PixelModel(
        features=("rgb", "laplace", "texture"),
        weights=tuple(
            value for layer in zip(drawn, biases, strict=True) for value in layer
        ),
    )
    x = features.reshape(5, -1).T
    one = np.maximum(x @ drawn[0] + biases[0], 0)
    two = np.maximum(one @ drawn[1] + biases[1], 0)
    expected = 1 / (1 + np.exp(-(two @ drawn[2] + biases[2])))
    got = predict(get_namespace("cpu"), model, list(features))
    np.testing.assert_allclose(got, expected.reshape(9, 7), rtol=1e-4, atol=1e-6)


def test_bands_give_what_the_whole_image_gives(
    own: ExampleCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = replace(
        own, features=("smooth", "frangi", "texture", "ridge", "rgb", "laplace")
    )
    colours = replace(own, name="colours", features=("rgb",))
    models = {check: trained_model(check, tmp_path) for check in (every, colours)}
    ns = get_namespace("cpu")
    rng = np.random.default_rng(4)
    picture = rng.integers(0, 255, (190, 43, 3), dtype=np.uint8)
    whole = probabilities(ns, picture, models)
    monkeypatch.setattr(pixel_model, "_BAND_PX", 50 * 43)
    for check, expected in whole.items():
        got = probabilities(ns, picture, models)[check]
        np.testing.assert_allclose(got, expected, atol=1e-4)
        np.testing.assert_allclose(
            got, probabilities(ns, picture, {check: models[check]})[check], atol=1e-6
        )


def test_the_same_seed_gives_the_same_model_and_another_seed_another(
    own: ExampleCheck, tmp_path: Path
) -> None:
    first = trained_model(own, tmp_path / "a")
    assert same(first, trained_model(own, tmp_path / "b"))
    assert not same(first, trained_model(replace(own, seed=1), tmp_path / "a"))


def test_a_cached_model_is_read_and_a_damaged_one_trained_again(
    own: ExampleCheck, tmp_path: Path
) -> None:
    first = trained_model(own, tmp_path)
    (path,) = (tmp_path / "qc-models").iterdir()
    with np.load(path, allow_pickle=False) as arrays:
        assert set(arrays) == {"features", *pixel_model.WEIGHTS}
    stamp = path.stat().st_mtime_ns
    assert same(first, trained_model(own, tmp_path))
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(path.read_bytes()[:500])
    assert load_model(path) is None
    assert same(first, trained_model(own, tmp_path))


def test_another_mask_is_another_model(own: ExampleCheck, tmp_path: Path) -> None:
    trained_model(own, tmp_path)
    mask = np.asarray(Image.open(own.example_masks[0])).copy()
    mask[10:20] = 0
    Image.fromarray(mask).save(own.example_masks[0])
    trained_model(own, tmp_path)
    assert len(list((tmp_path / "qc-models").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "examples"), [("pen", pen_examples), ("coverslip", coverslip_examples)]
)
def test_a_model_that_comes_with_the_package_is_that_of_the_generated_examples(
    name: str, examples: Callable[[int], list[Example]], tmp_path: Path
) -> None:
    """Bit by bit on one machine; elsewhere a sum may round otherwise, so answers are compared."""
    shipped, anew = (
        trained_model(ExampleCheck(model=name), tmp_path),
        train_built_in(name),
    )
    assert not list(tmp_path.iterdir())
    assert shipped.features == anew.features
    picture, mask = examples(7)[2]
    found = probabilities(
        get_namespace("cpu"), picture, {"shipped": shipped, "anew": anew}
    )
    assert (abs(found["shipped"] - found["anew"]) < 0.05).mean() > 0.99
    assert (found["shipped"] > 0.5)[mask].mean() > 0.8
    assert (found["shipped"] > 0.5)[~mask].mean() < 0.05


def test_the_packages_models_have_their_own_features(tmp_path: Path) -> None:
    asked = ("rgb", "smooth", "laplace", "texture")
    assert (
        trained_model(ExampleCheck(model="pen", features=asked), tmp_path).features
        == asked
    )
    message = r"pen_markings.features must be those of the model 'coverslip' \(rgb, .*ridge\), got"
    with pytest.raises(ConfigError, match=message):
        trained_model(ExampleCheck(model="coverslip", features=asked), tmp_path)


def test_examples_that_do_not_pair_up_are_refused(
    own: ExampleCheck, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"one example mask per image, got 1 images and 0 masks"
    ):
        trained_model(replace(own, example_masks=()), tmp_path)
    Image.new("L", (9, 9)).save(own.example_masks[0])
    with pytest.raises(
        ConfigError, match=r"must have the size of .*, got \(9, 9\) and \(60, 40\)"
    ):
        trained_model(own, tmp_path)
    with pytest.raises(
        ConfigError, match=r"model must be one of coverslip, pen, own, got 'x'"
    ):
        trained_model(replace(own, model="x"), tmp_path)


def test_examples_without_a_positive_px_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"pixels of both classes, got none inside the masks"
    ):
        nothing = (np.zeros((9, 9, 3), np.uint8), np.zeros((9, 9), dtype=bool))
        train([nothing], ("rgb",), seed=0, num_samples=100)


def test_an_unknown_feature_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"features must be from rgb, .*got 'gabor'"):
        pixel_features(get_namespace("cpu"), np.zeros((4, 5, 3), np.uint8), ("gabor",))


def test_frangi_answers_to_dark_lines_only() -> None:
    picture = np.full((40, 50, 3), 200, np.uint8)
    picture[:, 20], picture[:, 40] = 40, 255
    ns = get_namespace("cpu")
    (response,) = pixel_features(ns, picture, ("frangi",))["frangi"]
    assert response[20, 20] > 10 * response[20, 40]
