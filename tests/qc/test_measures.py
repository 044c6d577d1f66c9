"""Measures and checks against scikit-image and NumPy directly, on generated pictures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import color, filters
from skimage.feature import graycomatrix, graycoprops
from tests.qc.views import view_of

from thinsection.arrays import bands, get_namespace
from thinsection.errors import ConfigError
from thinsection.qc.checks import masking, measures
from thinsection.qc.checks.check import EMPTY_SCORE, QcCheck

RGB = np.random.default_rng(3).integers(0, 256, (57, 91, 3), dtype=np.uint8)
MASK = np.random.default_rng(4).random((57, 91)) > 0.4


def test_contrast_is_the_formula_on_scikit_images_sobel() -> None:
    got = measures.Contrast()(view_of(RGB, MASK)).scores
    gray = color.rgb2gray(RGB)
    inside = gray[MASK]
    tenengrad = np.sqrt((filters.sobel(gray) ** 2)[MASK].sum()) / MASK.sum()
    assert got["tenenGrad_contrast"] == pytest.approx(tenengrad, rel=1e-9)
    michelson = (inside.max() - inside.min()) / (inside.max() + inside.min())
    assert got["michelson_contrast"] == pytest.approx(michelson)
    assert got["rms_contrast"] == pytest.approx(inside.std())


@pytest.mark.parametrize("space", ["gray", "RGB", "YUV"])
def test_brightness_is_mean_and_population_std_of_each_channel(space: str) -> None:
    got = measures.Brightness(space=space)(view_of(RGB, MASK)).scores  # type: ignore[arg-type]
    images = {
        "gray": color.rgb2gray(RGB)[..., None],
        "RGB": RGB.astype(float),
        "YUV": color.convert_colorspace(RGB, "RGB", "YUV"),
    }
    expected = [
        f(images[space][MASK][:, c])
        for c in range(images[space].shape[2])
        for f in (np.mean, np.std)
    ]
    assert list(got.values()) == pytest.approx(expected, rel=1e-9)


def test_an_empty_mask_measures_minus_100_with_a_warning() -> None:
    view = view_of(RGB, np.zeros_like(MASK))
    for outcome in (
        measures.Contrast()(view),
        measures.Stains()(view),
    ):
        assert set(outcome.scores.values()) == {EMPTY_SCORE}
        assert "no tissue is left" in outcome.warnings[0]
    gray = measures.Brightness()(view).scores
    assert gray == {
        "grayscale_brightness": EMPTY_SCORE,
        "grayscale_brightness_std": 0.0,
    }


def test_stains_are_clipped_to_the_whole_images_quantile() -> None:
    got = measures.Stains(stain="hdx_from_rgb")(view_of(RGB, MASK)).scores
    stains = color.separate_stains(RGB, color.hdx_from_rgb)
    for c in range(3):
        clipped = np.clip(stains[..., c], 0, np.quantile(stains[..., c], 0.99))[MASK]
        assert got[f"deconv_c{c}_mean"] == pytest.approx(clipped.mean(), rel=1e-9)
        assert got[f"deconv_c{c}_std"] == pytest.approx(clipped.std(), rel=1e-9)


def test_the_histogram_is_numpys_density_and_templates_are_compared_by_it(
    tmp_path: Path,
) -> None:
    other = np.random.default_rng(5).integers(0, 200, (40, 30, 3), dtype=np.uint8)
    path = tmp_path / "template1.png"
    Image.fromarray(other).save(path)
    outcome = measures.Histogram(templates=(str(path),))(view_of(RGB, MASK))

    def density(values: np.ndarray) -> np.ndarray:
        return np.histogram(values, bins=20, range=(0, 255), density=True)[0]

    own = np.stack([density(RGB[..., c][MASK]) for c in range(3)], axis=1)
    theirs = np.stack([density(other[..., c]) for c in range(3)], axis=1)
    np.testing.assert_allclose(outcome.tables["histogram"], own, rtol=1e-12)
    assert outcome.scores["template1_MSE_hist"] == pytest.approx(
        ((own - theirs) ** 2).sum()
    )


def test_a_missing_template_is_named() -> None:
    params = measures.Histogram(templates=("no/such.png",))
    with pytest.raises(
        ConfigError, match=r"picture must be a readable image file, got 'no/such"
    ):
        params(view_of(RGB, MASK))


def test_texture_is_scikit_images_cooccurrence_square_by_square() -> None:
    view = view_of(RGB)
    params = measures.Texture(num_squares=4)
    rows, columns = np.array([0, 3, 40, 56]), np.array([0, 17, 70, 20])
    got = params.measured(view.gray, rows, columns)
    for n, (r, c) in enumerate(zip(rows, columns)):
        square = np.digitize(
            view.gray[r : r + 32, c : c + 32], np.linspace(0, 1, 8), right=True
        )
        matrix = graycomatrix(square, [5], [0], levels=8, symmetric=True, normed=True)
        for name, values in got.items():
            assert values[n] == pytest.approx(graycoprops(matrix, name)[0, 0], rel=1e-9)


def test_texture_is_the_same_for_the_same_seed_and_warns_without_a_place() -> None:
    params = measures.Texture(num_squares=50, prefix="final")
    first, again = (params(view_of(RGB, MASK)).scores for _ in range(2))
    other = replace(params, seed=1)(view_of(RGB, MASK)).scores
    assert first == again != other
    assert set(first) >= {"final_contrast", "final_ASM_std"}
    empty = params(view_of(RGB, np.zeros_like(MASK)))
    assert not empty.scores
    assert "no pixels in the mask" in empty.warnings[0]


def test_intensity_keeps_what_lies_strictly_between_its_limits() -> None:
    params = masking.Intensity(
        upper_gray=0.6, lower_gray=0.2, lower_std=10.0, upper_std=90.0
    )
    outcome = params(view_of(RGB, MASK))
    gray, std = color.rgb2gray(RGB), RGB.std(axis=2)
    kept = MASK & (gray > 0.2) & (gray < 0.6) & (std > 10) & (std < 90)
    assert np.array_equal(outcome.mask_use, kept)
    assert np.array_equal(outcome.affected_area, MASK & ~kept)
    assert outcome.scores["bright"] == 1 - kept.sum() / MASK.sum()


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [("relative2mask", 0.5), ("relative2image", 0.25), ("absolute", 12.0)],
)
def test_a_share_is_written_in_the_pipelines_statistics(
    statistics: str, expected: float
) -> None:
    mask = np.zeros((6, 8), dtype=bool)
    mask[:3] = True
    view = replace(view_of(np.zeros((6, 8, 3), np.uint8), mask), statistics=statistics)
    new = mask.copy()
    new[:, 4:] = False
    assert view.share(new) == expected


def test_local_minimum_keeps_what_has_something_dark_nearby() -> None:
    rgb = np.full((40, 60, 3), 240, np.uint8)
    rgb[20, 30] = 10
    kept = masking.LocalMinimum()(view_of(rgb)).mask_use
    assert kept.sum() == 81  # the disk of radius 5
    assert kept[20, 25]
    assert not kept[20, 24]


def test_otsu_and_the_brightest_cluster_part_tissue_from_glass() -> None:
    rgb = np.full((40, 60, 3), 240, np.uint8)
    rgb[:, :20], rgb[:10, :20] = 120, 60
    for outcome in (
        masking.Otsu()(view_of(rgb)),
        masking.BrightestCluster()(view_of(rgb)),
    ):
        assert np.array_equal(outcome.mask_use, rgb[..., 0] < 200)


def test_flat_areas_below_the_area_do_not_count() -> None:
    rgb = np.random.default_rng(6).integers(0, 256, (80, 90, 3), dtype=np.uint8)
    rgb[10:50, 10:50] = 128
    rgb[60:75, 60:75] = 128
    found = masking.Flat()(view_of(rgb)).affected_area
    assert found[20:40, 20:40].all()
    assert not found[55:].any()


def test_fat_is_many_holes_close_together() -> None:
    mask = np.ones((120, 130), dtype=bool)
    for y in range(20, 70, 8):
        for x in range(20, 70, 8):
            mask[y : y + 4, x : x + 4] = False
    mask[100:104, 100:104] = False
    rgb = np.zeros((120, 130, 3), np.uint8)
    outcome = masking.Fat()(view_of(rgb, mask))
    assert outcome.scores["fatlike_tissue_removed_num_regions"] == 1
    assert not outcome.mask_use[24:64, 24:64].any()
    assert outcome.mask_use[90:110, 90:110].sum() == 384


def test_lengths_and_areas_in_um_follow_the_resolution() -> None:
    mask = np.zeros((60, 70), dtype=bool)
    mask[10:20, 10:20] = True
    rgb = np.zeros((60, 70, 3), np.uint8)
    params = masking.Fragments(min_area="0.01 mm2")
    for mpp_th, kept in ((8.0, False), (10.5, True)):
        view = replace(view_of(rgb, mask), mpp_th=mpp_th)
        assert bool(params(view).mask_use.any()) is kept


@pytest.mark.parametrize(
    "check",
    [measures.Contrast(), measures.Brightness(space="YUV"), measures.Stains()],
)
def test_measures_are_the_same_in_bands_of_any_height(
    check: QcCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    rgb = rng.integers(0, 256, (101, 77, 3)).astype(np.uint8)
    mask = rng.random((101, 77)) > 0.4
    mask[:20] = False
    outcomes = []
    for rows in (7, 1000):
        monkeypatch.setattr(bands, "BAND_ROWS", rows)
        outcomes.append(check(view_of(rgb, mask)))
    in_bands, whole = outcomes
    assert len(whole.scores) >= 3
    assert in_bands.scores == pytest.approx(whole.scores, rel=1e-12)
    for name, picture in whole.tables.items():
        assert np.array_equal(in_bands.tables[name], picture)


def test_the_upper_quantile_is_numpys() -> None:
    rng = np.random.default_rng(6)
    ns = get_namespace("cpu")
    for shape in ((1, 1), (3, 5), (300, 41), (513, 7)):
        values = rng.normal(size=shape)
        for share in (0.9, 0.99, 1.0):
            expected = np.quantile(values, share)
            assert measures._high_quantile(ns, values, share) == pytest.approx(
                expected, 1e-14
            )
