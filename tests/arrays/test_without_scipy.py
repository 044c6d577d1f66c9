"""Filters and labels of our own are SciPy's to the byte, without its import."""

import numpy as np
import pytest
from scipy import ndimage

from thinsection.arrays import filters, get_namespace, morphology

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
