"""Disks of rings, against circles that are drawn and against scikit-image's fit."""

import numpy as np
import pytest
from skimage.draw import disk, line
from skimage.measure import CircleModel

from thinsection.arrays import ArrayNamespace
from thinsection.arrays.rings import disks_of_rings
from thinsection.types import MaskArray

SHAPE = (200, 240)


def ring(
    y: float, x: float, radius: float, *, degrees: tuple[float, float] = (0, 360)
) -> MaskArray:
    """A ring of 3 px between two angles."""
    rows, columns = np.mgrid[: SHAPE[0], : SHAPE[1]]
    away = np.hypot(rows - y, columns - x)
    angle = np.degrees(np.arctan2(rows - y, columns - x)) % 360
    return (abs(away - radius) <= 1.5) & (angle >= degrees[0]) & (angle <= degrees[1])


def full(y: float, x: float, radius: float) -> MaskArray:
    mask = np.zeros(SHAPE, bool)
    mask[disk((y, x), radius, shape=SHAPE)] = True
    return mask


def disks(
    ns: ArrayNamespace,
    mask: MaskArray,
    *,
    min_seen: float = 0.4,
    max_radius_px: float = 100.0,
) -> MaskArray:
    found = disks_of_rings(
        ns, ns.upload(mask), min_seen=min_seen, max_radius_px=max_radius_px
    )
    return np.asarray(ns.download(found))


@pytest.mark.parametrize("degrees", [(0, 360), (20, 250), (100, 270)])
def test_a_ring_or_a_large_part_of_one_gives_its_disk(
    ns: ArrayNamespace,
    degrees: tuple[float, float],
) -> None:
    found = disks(ns, ring(90, 110, 40, degrees=degrees))
    expected = full(90, 110, 40)
    assert (found & expected).sum() / (found | expected).sum() > 0.97


@pytest.mark.parametrize(
    ("y", "x"), [(5, 110), (194, 110), (90, 5), (90, 234), (28, 28), (171, 211)]
)
def test_a_ring_that_the_border_cuts_is_judged_by_what_is_shown(
    ns: ArrayNamespace, y: float, x: float
) -> None:
    found = disks(ns, ring(y, x, 40), min_seen=0.9)
    expected = full(y, x, 40)
    assert (found & expected).sum() / (found | expected).sum() > 0.97


def test_a_ring_of_which_the_border_shows_too_little_has_no_disk(
    ns: ArrayNamespace,
) -> None:
    assert not disks(ns, ring(-22, 110, 40), min_seen=0.9).any()


def test_rings_side_by_side_have_disks_of_their_own(
    ns: ArrayNamespace,
) -> None:
    found = disks(ns, ring(60, 60, 30) | ring(140, 170, 45))
    expected = full(60, 60, 30) | full(140, 170, 45)
    assert (found & expected).sum() / (found | expected).sum() > 0.97


def test_what_is_no_ring_has_no_disk(ns: ArrayNamespace) -> None:
    straight = np.zeros(SHAPE, bool)
    straight[line(10, 10, 150, 200)] = True
    short = ring(90, 110, 40, degrees=(0, 120))
    bar = np.zeros(SHAPE, bool)
    bar[50:70, 20:200] = True
    for mask in (straight, short, bar, full(90, 110, 40), np.zeros(SHAPE, bool)):
        assert not disks(ns, mask).any()
    assert not disks(ns, ring(90, 110, 40), max_radius_px=35.0).any()


def test_the_circle_is_that_of_scikit_image(ns: ArrayNamespace) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        y, x = rng.uniform(70, 120, 2)
        radius = rng.uniform(15, 60)
        start = rng.uniform(0, 150)
        mask = ring(y, x, radius, degrees=(start, start + 200))
        # spots beside the rim, which belong to the region
        mask |= np.roll(mask, 3, axis=int(rng.integers(2))) & (rng.random(SHAPE) > 0.5)
        model = CircleModel.from_estimate(np.argwhere(mask))
        found = disks(ns, mask)
        row, column = model.center
        expected = full(row, column, model.radius)
        assert (found & expected).sum() / (found | expected).sum() > 0.98
