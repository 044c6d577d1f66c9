"""The small network that finds candidates of pen ink."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from tests.support.pixel_examples import pen_examples, save_model, train_pen

from thinsection.arrays import get_namespace
from thinsection.qc.checks import pixel_model
from thinsection.qc.checks.pixel_model import (
    PixelModel,
    load_model,
    predict,
    probabilities,
)


def shipped_model() -> PixelModel:
    model = load_model(Path(pixel_model.__file__).parent / "models" / "pen.npz")
    assert model is not None
    return model


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


def test_bands_give_what_the_whole_picture_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = {"pen": shipped_model()}
    ns = get_namespace("cpu")
    rng = np.random.default_rng(4)
    picture = rng.integers(0, 255, (190, 43, 3), dtype=np.uint8)
    whole = probabilities(ns, picture, models)["pen"]
    monkeypatch.setattr(pixel_model, "_BAND_PX", 50 * 43)
    banded = probabilities(ns, picture, models)["pen"]
    assert whole.std() > 0
    np.testing.assert_allclose(banded, whole, atol=1e-4)


def test_the_network_of_the_package_is_that_of_the_generated_examples(
    tmp_path: Path,
) -> None:
    """Bit by bit on one machine; elsewhere a sum may round otherwise, so answers are compared."""
    save_model(tmp_path / "pen.npz", train_pen())
    anew = load_model(tmp_path / "pen.npz")
    assert anew is not None
    models = {"shipped": shipped_model(), "anew": anew}
    assert models["shipped"].features == anew.features
    picture, mask = pen_examples(7)[2]
    answers = probabilities(get_namespace("cpu"), picture, models)
    assert (abs(answers["shipped"] - answers["anew"]) < 0.05).mean() > 0.99
    assert (answers["shipped"] > 0.5)[mask].mean() > 0.8
    assert (answers["shipped"] > 0.5)[~mask].mean() < 0.05


def test_a_file_that_is_incomplete_is_no_network(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save_model(path, shipped_model())
    path.write_bytes(path.read_bytes()[:500])
    assert load_model(path) is None
    assert load_model(tmp_path / "nowhere.npz") is None
