"""Mask coverage of boxes against counting px."""

import numpy as np

from thinsection.qc.tissue import box_fractions
from thinsection.types import MaskFrame


def test_fractions_equal_counting_where_boxes_lie_on_mask_px() -> None:
    rng = np.random.default_rng(0)
    mask = rng.random((37, 53)) < 0.4
    frame = MaskFrame(size_th=(53, 37), size_l0=(53 * 16, 37 * 16))
    corners = rng.integers(0, (50, 34), (200, 2))
    got = box_fractions(mask, frame, corners.astype(np.int64) * 16, (48, 32))
    want = [mask[y : y + 2, x : x + 3].sum() / 6 for x, y in corners]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_box_that_cuts_px_counts_their_parts() -> None:
    mask = np.array([[True, False], [False, False]])
    frame = MaskFrame(size_th=(2, 2), size_l0=(20, 20))
    got = box_fractions(mask, frame, np.array([[5, 5], [0, 0], [9, 9]]), (10, 10))
    np.testing.assert_allclose(got, [0.25, 1.0, 0.01], atol=1e-6)


def test_a_box_that_sticks_out_counts_the_outside_as_empty() -> None:
    mask = np.ones((4, 4), dtype=bool)
    frame = MaskFrame(size_th=(4, 4), size_l0=(40, 40))
    got = box_fractions(mask, frame, np.array([[30, 0], [30, 30]]), (20, 20))
    np.testing.assert_allclose(got, [0.5, 0.25], atol=1e-6)


def test_boxes_of_many_bands_count_as_in_one_piece() -> None:
    rng = np.random.default_rng(1)
    # four times as many px as an integral image has, and boxes in any order
    mask = rng.random((4_099, 1_031)) < 0.5
    frame = MaskFrame(size_th=(1_031, 4_099), size_l0=(1_031 * 8, 4_099 * 8))
    corners = rng.integers((-20, -20), (1_030, 4_098), (400, 2))
    width, height = 37, 21
    got = box_fractions(mask, frame, corners * 8, (width * 8, height * 8))
    want = [
        mask[max(0, y) : y + height, max(0, x) : x + width].sum() / (width * height)
        for x, y in corners.tolist()
    ]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_no_box_and_a_box_outside_the_mask_have_no_tissue() -> None:
    mask = np.ones((4, 6), dtype=bool)
    frame = MaskFrame(size_th=(6, 4), size_l0=(60, 40))
    none = box_fractions(mask, frame, np.zeros((0, 2), dtype=np.int64), (20, 20))
    assert none.shape == (0,)
    outside = np.array([[-50, 0], [0, -50], [100, 0], [0, 100], [0, 0]])
    got = box_fractions(mask, frame, outside, (20, 20))
    np.testing.assert_array_equal(got, [0, 0, 0, 0, 1])
