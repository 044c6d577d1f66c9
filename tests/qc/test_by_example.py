"""Forests of example pictures: HistoQC's features and training, cached without pickle."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from scipy import ndimage
from skimage.color import rgb2gray
from skimage.feature import hessian_matrix, hessian_matrix_eigvals
from sklearn.ensemble import RandomForestClassifier
from tests.qc.views import view_of

from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc.checks import forest
from thinsection.qc.checks.by_example import ExampleCheck, trained_forests
from thinsection.qc.checks.forest import (
    Forest,
    load_forest,
    pixel_features,
    predict,
    probabilities,
    save_forest,
    train,
)
from thinsection.types import MaskArray, RgbArray

# Pixels (y, x) of `lined_picture`, at two of its corners, on both lines, and on the dark column.
PLACES = ((0, 0), (52, 31), (89, 69), (20, 31))
# Features there, and their mean: by HistoQC's `compute_features` at commit b795612, with the
# `frangi` of scikit-image 0.19.3, which it requires
HISTOQCS = {
    "frangi": (1.90024607e-07, 6.23376338e-06, 0.0, 3.04466466e-05, 4.59512547e-06),
    "laplace": (-0.275562745, -0.158540392, 0.244872549, -0.0451431373, 0.0),
    "gaussian": (0.435171955, 0.0644991591, 0.682407677, 0.150934148, 0.467776735),
    "median": (0.384266667, 0.113877255, 0.725270196, 0.162700392, 0.457479029),
}


def lined_picture() -> RgbArray:
    """Noise with a dark column and a dark row."""
    rgb = np.random.default_rng(7).integers(0, 255, (90, 70, 3), dtype=np.uint8)
    rgb[:, 30:33] //= 4
    rgb[50:54] //= 3
    return rgb


@pytest.fixture
def own(tmp_path: Path) -> ExampleCheck:
    """Examples in which orange is what to find; the two pictures are not alike."""
    images = []
    masks = []
    for number, (height, width) in enumerate([(40, 60), (30, 50)]):
        rng = np.random.default_rng(number)
        rgb = rng.integers(150, 255, (height, width, 3), dtype=np.uint8)
        mask = np.zeros((height, width), dtype=np.uint8)
        rgb[10:25, 20:40], mask[10:25, 20:40] = (250, 140, 20), 255
        images.append(str(tmp_path / f"image{number}.png"))
        masks.append(str(tmp_path / f"mask{number}.png"))
        Image.fromarray(rgb).save(images[-1])
        Image.fromarray(mask).save(masks[-1])
    return ExampleCheck(example_images=tuple(images), example_masks=tuple(masks))


def trained_forest(check: ExampleCheck, cache_dir: Path) -> Forest:
    return trained_forests([check], cache_dir)[check]


def files_of(check: ExampleCheck) -> list[tuple[RgbArray, MaskArray]]:
    return [
        (np.asarray(Image.open(image)), np.asarray(Image.open(mask)) > 0)
        for image, mask in zip(check.example_images, check.example_masks)
    ]


def same(a: Forest, b: Forest) -> bool:
    names = ("starts", "left", "right", "feature", "threshold", "share")
    are_equal = [np.array_equal(getattr(a, n), getattr(b, n)) for n in names]
    return a.features == b.features and all(are_equal)


@pytest.mark.parametrize("name", HISTOQCS)
def test_a_feature_is_histoqcs(name: str) -> None:
    plane = pixel_features(lined_picture(), name)[..., 0]
    got = [float(plane[place]) for place in PLACES] + [float(plane.mean())]
    np.testing.assert_allclose(got, HISTOQCS[name], rtol=2e-5, atol=2e-9)


def test_frangi_is_its_formula_on_scikit_images_eigenvalues() -> None:
    """Of second differences of a blurred picture, as scikit-image had it until version 0.19."""
    picture = lined_picture()
    light = 1 - rgb2gray(picture)
    responses = []
    for sigma in (1, 3, 5, 7, 9):
        matrix = hessian_matrix(
            light, sigma, mode="reflect", use_gaussian_derivatives=False
        )
        values = hessian_matrix_eigvals([sigma**2 * part for part in matrix])
        along, across = np.take_along_axis(values, abs(values).argsort(0), 0)
        response = np.exp(-2 * (along / across) ** 2)
        response *= 1 - np.exp(-(along**2 + across**2) / 450)
        responses.append(np.where(across > 0, 0, response))
    got = pixel_features(picture, "frangi")[..., 0]
    np.testing.assert_allclose(got, np.max(responses, axis=0), rtol=1e-5, atol=1e-12)


def test_frangi_answers_to_dark_lines_only() -> None:
    picture = np.full((40, 50, 3), 200, np.uint8)
    picture[:, 20], picture[:, 40] = 40, 255
    response = pixel_features(picture, "frangi")[..., 0]
    assert response[20, 20] > 10 * response[20, 40]


def test_colours_are_in_255ths_and_an_unknown_feature_is_refused() -> None:
    picture = lined_picture()
    np.testing.assert_array_equal(pixel_features(picture, "rgb"), picture)
    message = r"features must be from rgb, laplace, frangi, gaussian, median, got 'lbp'"
    with pytest.raises(ConfigError, match=message):
        pixel_features(picture, "lbp")
    with pytest.raises(ConfigError, match=message):
        ExampleCheck(features=("lbp",))


def scikit_learns(
    own: ExampleCheck, state: np.random.RandomState, samples: int
) -> npt.NDArray[np.float64]:
    """Probabilities of `lined_picture` by scikit-learn's own forest, trained as HistoQC does it."""
    x = []
    y = []
    for rgb, mask in files_of(own):
        values = rgb.reshape(-1, 3).astype(float)
        labels = mask.ravel()
        if samples:
            state = np.random.RandomState(own.seed)
            drawn = state.choice(len(labels), size=samples)
            values, labels = values[drawn], labels[drawn]
        x.append(values)
        y.append(labels)
    classifier = RandomForestClassifier(random_state=state)
    classifier.fit(np.vstack(x), np.concatenate(y))
    answers = classifier.predict_proba(lined_picture().reshape(-1, 3))
    return np.asarray(answers[:, 1].reshape(90, 70))


@pytest.mark.parametrize(("seed", "samples"), [(0, 0), (5, 0), (5, 300)])
def test_a_forest_answers_as_scikit_learns_with_histoqcs_training(
    own: ExampleCheck, seed: int, samples: int
) -> None:
    own = replace(own, seed=seed)
    trees = train(files_of(own), ("rgb",), seed=seed, samples_per_example=samples)
    got = probabilities(lined_picture(), {"a": trees})["a"]
    assert len(trees.starts) == 101
    expected = scikit_learns(own, np.random.RandomState(seed), samples)
    assert 0.02 < (expected > 0.5).mean() < 0.98
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("samples", [0, 300])
def test_forests_of_one_seed_draw_from_one_generator_as_in_histoqc(
    own: ExampleCheck, tmp_path: Path, samples: int
) -> None:
    """The second forest is the same, whether the first was trained or is in the cache."""
    first = replace(own, features=("rgb",), seed=3, samples_per_example=samples)
    last = replace(first, name="last", samples_per_example=0)
    other = replace(last, name="other", seed=4)
    trained = trained_forests([first, other, last], tmp_path)
    assert len(list((tmp_path / "qc-models").iterdir())) == 3
    # the generator of HistoQC, which scikit-learn advances
    state = np.random.RandomState(3)
    train(files_of(first), ("rgb",), seed=3, samples_per_example=samples, rng=state)
    expected = scikit_learns(last, state, 0)
    got = probabilities(lined_picture(), {"a": trained[last]})["a"]
    np.testing.assert_allclose(got, expected, atol=1e-6)
    again = trained_forests([first, last], tmp_path)
    assert same(again[last], trained[last])
    assert len(list((tmp_path / "qc-models").iterdir())) == 3
    alone = trained_forest(last, tmp_path)
    assert not same(alone, trained[last])


def test_a_share_of_the_samples_is_that_many_of_each_example(own: ExampleCheck) -> None:
    examples = files_of(own)[:1]
    half = train(examples, ("rgb",), seed=1, samples_per_example=0.5)
    number = train(examples, ("rgb",), seed=1, samples_per_example=1200)
    assert same(half, number)
    assert not same(half, train(examples, ("rgb",), seed=1))


def test_a_check_removes_what_its_examples_show_and_drops_small_groups(
    own: ExampleCheck, tmp_path: Path
) -> None:
    picture = np.full((40, 60, 3), 200, np.uint8)
    picture[5:20, 10:20] = (250, 140, 20)
    picture[30:34, 40:44] = (250, 140, 20)
    own = replace(own, features=("rgb",), min_area="40 px")
    trees = trained_forest(own, tmp_path)
    view = replace(
        view_of(picture),
        probability_of=lambda check: probabilities(picture, {check: trees})[check],
    )
    outcome = own(view)
    assert outcome.affected_area is not None
    expected = np.zeros((40, 60), dtype=bool)
    expected[5:20, 10:20] = True
    np.testing.assert_array_equal(outcome.affected_area, expected)
    assert outcome.enforce
    assert outcome.scores == {"pen_markings": pytest.approx(150 / 2400)}
    wider = replace(own, dilate="5 px")(view).affected_area
    assert wider is not None
    assert wider.sum() == 19 * 14


def test_a_check_that_lacks_its_examples_is_left_out(own: ExampleCheck) -> None:
    outcome = replace(own, absent=("pen.png",))(view_of(lined_picture()))
    assert outcome.scores == {"pen_markings": "NA"}
    assert outcome.mask_use is None
    assert outcome.affected_area is None


def test_bands_give_what_the_whole_picture_gives(
    own: ExampleCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ("frangi", "gaussian", "median", "rgb", "laplace")
    forests = {
        "every": train(files_of(own), every, seed=0),
        "colours": train(files_of(own), ("rgb",), seed=1),
    }
    rng = np.random.default_rng(4)
    picture = rng.integers(0, 255, (190, 43, 3), dtype=np.uint8)
    whole = probabilities(picture, forests)
    heights = []

    def noted(rgb: RgbArray, name: str) -> npt.NDArray[np.float32]:
        heights.append(len(rgb))
        return pixel_features(rgb, name)

    monkeypatch.setattr(forest, "pixel_features", noted)
    monkeypatch.setattr(forest, "_BAND_PX", 50 * 43)
    banded = probabilities(picture, forests)
    assert max(heights) < 190
    for name, expected in whole.items():
        assert expected.std() > 0
        np.testing.assert_array_equal(banded[name], expected)


def test_the_rows_around_a_band_are_as_many_as_frangi_needs() -> None:
    """38: with as many the rest of the picture changes nothing, with 4 fewer it does."""
    noise = np.random.default_rng(3).normal(size=(160, 50))
    waves = ndimage.gaussian_filter(noise, 8)
    gray = (128 + 100 * waves / np.abs(waves).max()).astype(np.uint8)
    picture = np.stack([gray, gray, gray], axis=2)
    whole = pixel_features(picture, "frangi")[60:]
    for around, is_same in ((38, True), (34, False)):
        cut = pixel_features(picture[60 - around :], "frangi")[around:]
        assert np.array_equal(cut, whole) == is_same


def test_the_same_seed_gives_the_same_forest_and_another_seed_another(
    own: ExampleCheck, tmp_path: Path
) -> None:
    first = trained_forest(own, tmp_path / "a")
    assert same(first, trained_forest(own, tmp_path / "b"))
    for other in ({"seed": 1}, {"features": ("rgb",)}, {"samples_per_example": 400.0}):
        changed = replace(own, **other)
        assert not same(first, trained_forest(changed, tmp_path / "a"))
    assert len(list((tmp_path / "a" / "qc-models").iterdir())) == 4


def test_a_cached_forest_is_read_and_a_damaged_one_trained_again(
    own: ExampleCheck, tmp_path: Path
) -> None:
    first = trained_forest(own, tmp_path)
    (path,) = (tmp_path / "qc-models").iterdir()
    stamp = path.stat().st_mtime_ns
    assert same(first, trained_forest(own, tmp_path))
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(path.read_bytes()[:500])
    assert load_forest(path) is None
    assert same(first, trained_forest(own, tmp_path))


def test_another_mask_is_another_forest(own: ExampleCheck, tmp_path: Path) -> None:
    trained_forest(own, tmp_path)
    mask = np.asarray(Image.open(own.example_masks[1])).copy()
    mask[10:20] = 0
    Image.fromarray(mask).save(own.example_masks[1])
    trained_forest(own, tmp_path)
    assert len(list((tmp_path / "qc-models").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("left", 0, 0),  # a node that is its own child
        ("right", 0, 10**6),  # out of the tree
        ("right", 0, -1),
        ("feature", 0, 3),  # there are three columns
        ("feature", 0, -2),
        ("starts", 0, 1),
        ("starts", -1, 5),
    ],
)
def test_a_file_whose_trees_lead_elsewhere_is_no_forest(
    own: ExampleCheck, tmp_path: Path, name: str, place: int, value: int
) -> None:
    trees = train(files_of(own), ("rgb",), seed=0)
    path = tmp_path / "a.npz"
    save_forest(path, trees)
    read = load_forest(path)
    assert read is not None
    assert same(read, trees)
    array = getattr(trees, name).copy()
    array[place] = value
    save_forest(path, replace(trees, **{name: array}))
    assert load_forest(path) is None


def test_the_number_of_columns_decides_the_answer_of_a_forest(
    own: ExampleCheck,
) -> None:
    trees = train(files_of(own), ("rgb", "laplace"), seed=0)
    values = np.zeros((7, 4), np.float32)
    assert predict(trees, values).shape == (7,)
    assert np.ptp(predict(trees, values)) == 0


def test_examples_that_do_not_pair_up_are_refused(
    own: ExampleCheck, tmp_path: Path
) -> None:
    message = (
        r"pen_markings must have one example mask per image, got 2 images and 0 masks"
    )
    with pytest.raises(ConfigError, match=message):
        trained_forest(replace(own, example_masks=()), tmp_path)
    with pytest.raises(ConfigError, match=r"got 0 images and 0 masks"):
        trained_forest(ExampleCheck(), tmp_path)
    Image.new("L", (9, 9)).save(own.example_masks[1])
    message = r"example mask .*mask1.png' must have the size of .*, got \(9, 9\) and \(50, 30\)"
    with pytest.raises(ConfigError, match=message):
        trained_forest(own, tmp_path)
    with pytest.raises(ConfigError, match=r"samples_per_example must be >= 0, got -1"):
        ExampleCheck(samples_per_example=-1)


@pytest.mark.parametrize(("value", "side"), [(False, "inside"), (True, "outside")])
def test_examples_of_one_class_are_refused(value: bool, side: str) -> None:
    example = (np.zeros((9, 8, 3), np.uint8), np.full((9, 8), value))
    with pytest.raises(InvalidInputError, match=f"both classes, got none {side} the"):
        train([example, example], ("rgb",), seed=0)
