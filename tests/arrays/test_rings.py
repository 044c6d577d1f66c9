"""Insides of rings, against ellipses that are drawn and against scikit-image's fit and Hough."""

import numpy as np
import pytest
from skimage.draw import disk, ellipse, line
from skimage.measure import EllipseModel
from skimage.transform import hough_circle, hough_circle_peaks

from thinsection.arrays.rings import disks_of_rings
from thinsection.types import MaskArray

SHAPE = (200, 240)
HALF_WIDTH_PX = 1.5


def ring(
    y: float,
    x: float,
    radius: float,
    *,
    aspect: float = 1.0,
    turned: float = 0.0,
    degrees: tuple[float, float] = (0, 360),
) -> MaskArray:
    """A ring of 3 px between two angles; its longer axis is `aspect` times the shorter one."""
    rows, columns = np.mgrid[: SHAPE[0], : SHAPE[1]]
    along = (columns - x) * np.cos(turned) + (rows - y) * np.sin(turned)
    across = (rows - y) * np.cos(turned) - (columns - x) * np.sin(turned)
    away = np.hypot(along / aspect**0.5, across * aspect**0.5)
    angle = np.degrees(np.arctan2(across, along)) % 360
    is_near = abs(away - radius) <= HALF_WIDTH_PX
    return is_near & (angle >= degrees[0]) & (angle <= degrees[1])


def full(
    y: float, x: float, radius: float, *, aspect: float = 1.0, turned: float = 0.0
) -> MaskArray:
    """A ring and its inside."""
    mask = np.zeros(SHAPE, bool)
    long, short = radius * aspect**0.5, radius / aspect**0.5
    axes = short + HALF_WIDTH_PX, long + HALF_WIDTH_PX
    mask[ellipse(y, x, *axes, shape=SHAPE, rotation=-turned)] = True
    return mask


def disks(
    mask: MaskArray, *, min_seen: float = 0.4, max_radius_px: float = 100.0
) -> MaskArray:
    return disks_of_rings(mask, min_seen=min_seen, max_radius_px=max_radius_px)


def overlap(one: MaskArray, other: MaskArray) -> float:
    return float((one & other).sum() / (one | other).sum())


@pytest.mark.parametrize("degrees", [(0, 360), (20, 250), (100, 270)])
def test_a_ring_or_a_large_part_of_one_gives_its_disk(
    degrees: tuple[float, float],
) -> None:
    found = disks(ring(90, 110, 40, degrees=degrees))
    assert overlap(found, full(90, 110, 40)) > 0.96


def test_arcs_of_one_ring_count_together() -> None:
    arcs = ring(90, 110, 50, degrees=(10, 80)) | ring(90, 110, 50, degrees=(170, 260))
    assert overlap(disks(arcs), full(90, 110, 50)) > 0.96
    assert not disks(arcs, min_seen=0.6).any()


@pytest.mark.parametrize("aspect", [1.2, 1.5, 1.8])
@pytest.mark.parametrize("turned", [0.0, 0.6, 2.0])
def test_a_ring_may_be_an_ellipse(aspect: float, turned: float) -> None:
    found = disks(ring(100, 120, 45, aspect=aspect, turned=turned))
    assert overlap(found, full(100, 120, 45, aspect=aspect, turned=turned)) > 0.96


@pytest.mark.parametrize(
    ("y", "x"), [(5, 110), (194, 110), (90, 5), (90, 234), (28, 28), (171, 211)]
)
def test_a_ring_that_the_border_cuts_is_judged_by_what_is_shown(
    y: float, x: float
) -> None:
    found = disks(ring(y, x, 40), min_seen=0.9)
    assert overlap(found, full(y, x, 40)) > 0.96


def test_a_ring_of_which_the_border_shows_too_little_has_no_disk() -> None:
    assert not disks(ring(-22, 110, 40), min_seen=0.9).any()


@pytest.mark.parametrize("distance", [80, 110])
def test_rings_side_by_side_have_disks_of_their_own(distance: float) -> None:
    """At 80 px they touch."""
    found = disks(ring(100, 60, 36) | ring(100, 60 + distance, 41))
    expected = full(100, 60, 36) | full(100, 60 + distance, 41)
    assert overlap(found, expected) > 0.96


def test_what_is_no_ring_has_no_disk() -> None:
    straight = np.zeros(SHAPE, bool)
    straight[line(10, 10, 150, 200)] = True
    short = ring(90, 110, 40, degrees=(0, 120))
    bar = np.zeros(SHAPE, bool)
    bar[50:70, 20:200] = True
    filled = np.zeros(SHAPE, bool)
    filled[disk((90, 110), 40)] = True
    noise = np.random.default_rng(2).random(SHAPE) > 0.9
    for mask in (straight, short, bar, filled, noise, np.zeros(SHAPE, bool)):
        assert not disks(mask).any()
    assert not disks(ring(90, 110, 40), max_radius_px=35.0).any()


def test_the_inside_is_that_of_scikit_images_ellipse() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        y, x = rng.uniform(80, 110, 2)
        radius, aspect, turned = (
            rng.uniform(15, 50),
            rng.uniform(1, 1.4),
            rng.uniform(0, 3),
        )
        mask = ring(y, x, radius, aspect=aspect, turned=turned)
        model = EllipseModel.from_estimate(np.argwhere(mask)[:, ::-1].astype(float))
        column, row = model.center
        expected = np.zeros(SHAPE, bool)
        along, across = model.axis_lengths
        axes = across + HALF_WIDTH_PX, along + HALF_WIDTH_PX
        expected[ellipse(row, column, *axes, shape=SHAPE, rotation=-model.theta)] = True
        # spots of dust beside the ring change little
        spots = rng.random(SHAPE) > 0.995
        assert overlap(disks(mask), expected) > 0.95
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
        assert overlap(disks(mask), full(row, column, radius)) > 0.9
