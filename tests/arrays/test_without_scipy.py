"""Filters, labels and stains of our own are those of SciPy and scikit-image to the byte."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import ndimage
from skimage import color

from thinsection.arrays import filters, get_namespace, morphology
from thinsection.arrays.labels import find_regions

NS = get_namespace()
SHAPES = [(1, 1), (1, 9), (7, 1), (23, 41), (80, 57), (64, 33)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("edge_px", [2, 3, 5, 9, 21, 64])
def test_a_mirrored_box_is_scipys_uniform_filter(
    shape: tuple[int, int], dtype: type, edge_px: int
) -> None:
    image = (np.random.default_rng(edge_px).random(shape) * 7 - 1).astype(dtype)
    expected = ndimage.uniform_filter(image, edge_px)
    got = filters.box_mirrored(NS, image, edge_px)
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("edge_px", [2, 3, 7, 13, 41])
def test_a_box_with_zeros_outside_is_scipys_uniform_filter(
    shape: tuple[int, int], dtype: type, edge_px: int
) -> None:
    image = (np.random.default_rng(edge_px).random(shape) * 7 - 1).astype(dtype)
    expected = ndimage.uniform_filter(image, edge_px, mode="constant")
    got = filters.box_mean(NS, image, edge_px)
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_planes", [3, 7])
def test_a_mean_of_channels_is_numpys(
    shape: tuple[int, int], dtype: type, num_planes: int
) -> None:
    planes = np.random.default_rng(num_planes).normal(size=(*shape, num_planes))
    # sums in another order would differ
    planes[..., 1] *= 1e3
    image = planes.astype(dtype)[..., :3]
    got = filters.channel_mean(NS, image)
    assert got.dtype == dtype
    assert got.tobytes() == image.mean(axis=2).tobytes()


@pytest.mark.parametrize("stain", ["hed_from_rgb", "hdx_from_rgb"])
def test_the_vectors_of_our_pipelines_stains_are_scikit_images(stain: str) -> None:
    _, unmixing = filters.stain_tables(stain)
    # its inverse of a matrix may differ in the last place from machine to machine
    np.testing.assert_array_max_ulp(unmixing, getattr(color, stain), maxulp=8)


def test_a_kernel_that_callers_share_cannot_be_changed() -> None:
    kernel = filters.gaussian_kernel(1.5)
    assert filters.gaussian_kernel(1.5) is kernel
    with pytest.raises(ValueError, match="read-only"):
        kernel[0] = 1.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("edge_px", [3, 5, 9])
def test_an_opening_by_a_square_is_scipys(shape: tuple[int, int], edge_px: int) -> None:
    image = np.random.default_rng(1).random(shape).astype(np.float32)
    expected = ndimage.grey_opening(image, size=(edge_px, edge_px))
    got = filters.opened_by_square(NS, image, edge_px)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_a_median_around_each_pixel_is_scipys(
    shape: tuple[int, int], dtype: type
) -> None:
    rng = np.random.default_rng(3)
    image = (rng.random(shape) * 9).astype(dtype)
    if dtype is not np.uint8:
        image[rng.random(shape) < 0.4] = np.inf
    expected = ndimage.median_filter(image, size=3, mode="nearest")
    got = filters.median_around(NS, image)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.45, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("connectivity", [4, 8])
def test_labels_and_their_numbers_are_scipys(
    shape: tuple[int, int], share: float, connectivity: int
) -> None:
    mask = np.random.default_rng(2).random(shape) < share
    structure = np.ones((3, 3)) if connectivity == 8 else None
    expected, count = ndimage.label(mask, structure=structure)
    labels, own_count = morphology.labelled(NS, mask, connectivity=connectivity)
    assert own_count == count
    assert labels.dtype == expected.dtype
    np.testing.assert_array_equal(labels, expected)


def test_a_spiral_and_a_comb_are_one_region_each() -> None:
    """Paths of many runs, which no single pass joins."""
    spiral = np.zeros((61, 61), dtype=bool)
    row, column, length, step = 0, 0, 60, (0, 1)
    spiral[0, 0] = True
    turns = 0
    while length > 0:
        for _ in range(length):
            row, column = row + step[0], column + step[1]
            spiral[row, column] = True
        step = (step[1], -step[0])
        turns += 1
        if turns >= 3 and turns % 2 == 1:
            length -= 2
    comb = np.zeros((40, 81), dtype=bool)
    comb[:, ::2] = True
    comb[-1] = True
    for mask in (spiral, comb, comb[::-1], spiral.T):
        expected, count = ndimage.label(mask)
        labels, own_count = morphology.labelled(NS, mask)
        assert own_count == count == 1
        np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_are_dilated_and_eroded_as_by_scipy(shape: tuple[int, int]) -> None:
    mask = np.random.default_rng(3).random(shape) < 0.7
    assert (morphology.inner(mask) == ndimage.binary_erosion(mask)).all()
    for axis in (0, 1):
        for length_px in (2, 5, 75):
            longest = ndimage.maximum_filter1d(mask, length_px, axis=axis)
            got = morphology.dilated_along(NS, mask, length_px, axis)
            assert (got == longest).all()


def blobs(shape: tuple[int, int], sigma_px: float, share: float) -> np.ndarray:
    noise = np.random.default_rng(5).normal(size=shape)
    smooth = ndimage.gaussian_filter(noise, sigma_px)
    return np.asarray(smooth > np.quantile(smooth, 1 - share))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("sigma_px", [0.0, 2.0])
def test_boxes_of_regions_and_the_depth_of_a_mask_are_scipys(
    shape: tuple[int, int], share: float, sigma_px: float
) -> None:
    mask = blobs(shape, sigma_px, share)
    regions = find_regions(mask, corners=True)
    assert regions.boxes() == ndimage.find_objects(regions.labels())
    distances = ndimage.distance_transform_edt(np.pad(mask, 1))
    assert morphology.depth(mask) == distances.max()


def test_the_depth_of_long_and_slanted_shapes_is_scipys() -> None:
    rows, columns = np.mgrid[:90, :70]
    shapes = {
        "all": np.ones((90, 70), dtype=bool),
        "none": np.zeros((90, 70), dtype=bool),
        "slanted": abs(rows - columns) < 12,
        "disk": (rows - 40) ** 2 + (columns - 30) ** 2 < 28**2,
        "cross": (abs(rows - columns) < 3) | (abs(rows - 40) < 5),
    }
    for name, mask in shapes.items():
        distances = ndimage.distance_transform_edt(np.pad(mask, 1))
        assert morphology.depth(mask) == distances.max(), name


def test_the_deepest_pixel_among_small_holes_is_found_by_looking_at_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such masks took up to 80 times as long as SciPy."""
    holes = np.ones((330, 410), dtype=bool)
    lattice = holes.copy()
    holes.ravel()[np.random.default_rng(7).choice(holes.size, 40)] = False
    lattice[40::80, 40::80] = False
    exact = morphology._squared_depths
    looked_at = []

    def counted(*args: Any) -> Any:
        looked_at.append(len(args[2]))
        return exact(*args)

    monkeypatch.setattr(morphology, "_squared_depths", counted)
    for mask in (holes, lattice, lattice.T):
        looked_at.clear()
        distances = ndimage.distance_transform_edt(np.pad(mask, 1))
        assert morphology.depth(mask) == distances.max()
        assert sum(looked_at) < 0.05 * mask.size


def test_our_checks_of_a_slide_with_ink_import_nothing_that_they_do_not_use(
    tmp_path: Path,
) -> None:
    """SciPy and scikit-image take a third of a CPU-second, and what reads annotations .04."""
    code = """
import sys
import numpy as np
from PIL import Image
from thinsection.qc import run_qc
from thinsection.slide import open_slide
rng = np.random.default_rng(1)
pixels = rng.normal(244, 2, (700, 900, 3))
tissue = np.array([190, 120, 170])
pixels[100:600, 150:750] = tissue + rng.normal(0, 12, (500, 600, 1))
pixels[280:400, 60:840] *= (0.95, 0.2, 0.25)
Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(sys.argv[1])
with open_slide(sys.argv[1]) as slide:
    result = run_qc(slide, slide_mpp=8.0)
assert result.masks["ink"].sum() > 50_000, result.masks["ink"].sum()
assert result.scores["deconv_c0_mean"] > 0
unused = {"scipy", "skimage", "shapely", "thinsection.slide.annotations"}
assert not unused & set(sys.modules), unused & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True)
