"""Disks of rings, against ellipses that are drawn and against scikit-image's fit and Hough."""

import numpy as np
import pytest
from skimage.draw import disk, line
from skimage.measure import EllipseModel
from skimage.transform import hough_circle, hough_circle_peaks
from tests.support.rings import SHAPE, disk_of, ring

from thinsection.arrays.rings import disks_of_rings
from thinsection.types import MaskArray


def disks(
    mask: MaskArray, *, min_seen: float = 0.35, max_radius_px: float = 100.0
) -> MaskArray:
    return disks_of_rings(
        mask, min_seen=min_seen, min_radius_px=7.0, max_radius_px=max_radius_px
    )


def overlap(one: MaskArray, other: MaskArray) -> float:
    return float((one & other).sum() / (one | other).sum())


@pytest.mark.parametrize("degrees", [(0, 360), (20, 250), (100, 270)])
def test_a_ring_or_a_large_part_of_one_gives_its_disk(
    degrees: tuple[float, float],
) -> None:
    assert (
        overlap(disks(ring(90, 110, 40, degrees=degrees)), disk_of(90, 110, 40)) > 0.96
    )


@pytest.mark.parametrize(
    ("radius", "width_px"), [(8, 2), (8, 3), (12, 3), (40, 1), (40, 6), (60, 15)]
)
def test_a_ring_may_be_small_and_its_rim_thin_or_thick(
    radius: float, width_px: float
) -> None:
    expected = disk_of(100, 120, radius, wider_px=width_px / 2)
    assert overlap(disks(ring(100, 120, radius, width_px=width_px)), expected) > 0.93


def test_arcs_of_one_ring_count_together() -> None:
    arcs = ring(90, 110, 50, degrees=(10, 80)) | ring(90, 110, 50, degrees=(170, 260))
    assert overlap(disks(arcs), disk_of(90, 110, 50)) > 0.96
    assert not disks(arcs, min_seen=0.6).any()


@pytest.mark.parametrize("radius", [12, 45])
@pytest.mark.parametrize("aspect", [1.2, 1.5, 1.8])
@pytest.mark.parametrize("turned", [0.0, 0.6, 2.0])
def test_a_ring_may_be_an_ellipse(radius: float, aspect: float, turned: float) -> None:
    found = disks(ring(100, 120, radius, aspect=aspect, turned=turned))
    expected = disk_of(100, 120, radius, aspect=aspect, turned=turned)
    assert overlap(found, expected) > 0.93


def test_a_ring_that_is_far_longer_than_wide_is_not_filled() -> None:
    """Its two ends may be taken for rings of their own."""
    found = disks(ring(100, 120, 45, aspect=3.0))
    assert overlap(found, disk_of(100, 120, 45, aspect=3.0)) < 0.6


@pytest.mark.parametrize(
    ("y", "x"),
    [(5, 110), (194, 110), (90, 5), (90, 234), (28, 28), (171, 211), (-6, 110)],
)
def test_a_ring_that_the_border_cuts_is_judged_by_what_is_shown(
    y: float, x: float
) -> None:
    found = disks(ring(y, x, 40), min_seen=0.9)
    assert overlap(found, disk_of(y, x, 40)) > 0.95


def test_a_ring_of_which_the_border_shows_too_little_has_no_disk() -> None:
    assert not disks(ring(-22, 110, 40), min_seen=0.9).any()


@pytest.mark.parametrize("distance", [80, 110])
def test_rings_side_by_side_have_disks_of_their_own(distance: float) -> None:
    """At 80 px they touch."""
    found = disks(ring(100, 60, 36) | ring(100, 60 + distance, 41))
    expected = disk_of(100, 60, 36) | disk_of(100, 60 + distance, 41)
    assert overlap(found, expected) > 0.96


def test_many_rings_do_not_hide_one_of_which_little_is_seen() -> None:
    mask = np.zeros((1000, 1200), bool)
    expected = np.zeros_like(mask)
    for top in range(0, 1000, 200):
        for left in range(0, 1200, 240):
            degrees = (0, 160) if (top, left) == (400, 480) else (0, 360)
            window = slice(top, top + 200), slice(left, left + 240)
            for x in (60, 180):
                mask[window] |= ring(100, x, 50, degrees=degrees)
                expected[window] |= disk_of(100, x, 50)
    found = disks(mask)
    assert overlap(found, expected) > 0.96
    window = slice(400, 600), slice(480, 720)
    assert overlap(found[window], expected[window]) > 0.9


def test_what_is_no_ring_has_no_disk() -> None:
    straight = np.zeros(SHAPE, bool)
    straight[line(10, 10, 150, 200)] = True
    short = ring(90, 110, 40, degrees=(0, 110))
    bar = np.zeros(SHAPE, bool)
    bar[50:70, 20:200] = True
    square = np.zeros(SHAPE, bool)
    square[90:110, 90:110] = True
    noise = np.random.default_rng(2).random(SHAPE) > 0.9
    full = np.ones(SHAPE, bool)
    for mask in (straight, short, bar, square, noise, full, np.zeros(SHAPE, bool)):
        assert not disks(mask).any()
    assert not disks(ring(90, 110, 40), max_radius_px=35.0).any()
    assert not disks(ring(90, 110, 5)).any()


@pytest.mark.parametrize("radius", [5, 8, 10, 12, 20, 40])
def test_a_filled_disk_is_no_ring(radius: float) -> None:
    mask = np.zeros(SHAPE, bool)
    mask[disk((100, 120), radius)] = True
    assert not disks(mask).any()


def test_a_picture_may_be_smaller_than_any_ring() -> None:
    for shape in ((1, 1), (3, 50), (6, 6)):
        assert not disks(np.ones(shape, bool)).any()


def test_the_disk_is_that_of_scikit_images_ellipse() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        y, x = rng.uniform(80, 110, 2)
        radius = rng.uniform(15, 50)
        aspect = rng.uniform(1, 1.4)
        mask = ring(y, x, radius, aspect=aspect, turned=rng.uniform(0, 3))
        model = EllipseModel.from_estimate(np.argwhere(mask)[:, ::-1].astype(float))
        along, across = model.axis_lengths
        column, row = model.center
        expected = disk_of(
            row,
            column,
            (along * across) ** 0.5,
            aspect=along / across,
            turned=model.theta,
        )
        assert overlap(disks(mask), expected) > 0.95
        # spots of dust beside the ring change little
        spots = rng.random(SHAPE) > 0.995
        assert overlap(disks(mask | spots), expected) > 0.95


def test_circles_are_found_where_scikit_image_finds_them() -> None:
    rng = np.random.default_rng(5)
    for _ in range(10):
        y, x = rng.uniform(70, 120, 2)
        start = rng.uniform(0, 120)
        mask = ring(y, x, rng.uniform(20, 60), degrees=(start, start + 220))
        radii = np.arange(15, 66)
        _, (column,), (row,), (radius,) = hough_circle_peaks(
            hough_circle(mask, radii), radii, total_num_peaks=1
        )
        assert overlap(disks(mask), disk_of(row, column, radius)) > 0.9
