"""Folds and bubbles by the shape of what the artefact network shows, on maps that are drawn."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from skimage.draw import disk
from skimage.morphology import convex_hull_image
from tests.qc.views import view_of
from tests.support.rings import SHAPE, ring

from thinsection.errors import ConfigError
from thinsection.qc.checks.artefacts import Bubbles, Folds
from thinsection.qc.checks.check import QcCheck
from thinsection.types import MaskArray

PX_UM = 8.0


def removed(
    check: QcCheck,
    class_name: str,
    p: npt.NDArray[np.float64],
    tissue: MaskArray | None = None,
) -> MaskArray:
    """Pixels of the tissue that a check removes if a class has these probabilities.

    Without `tissue`, all is tissue.
    """
    rgb = np.full((*p.shape, 3), 200, np.uint8)
    maps = {class_name: np.rint(p * 255).astype(np.uint8)}
    view = replace(view_of(rgb, tissue, mpp_th=PX_UM), artefact_maps=lambda: maps)
    return view.mask_use & ~np.asarray(check(view).mask_use)


def bar(width_px: int, length_px: int, p: float) -> npt.NDArray[np.float64]:
    """A bar with this probability, in the middle."""
    probability = np.zeros(SHAPE)
    top, left = 100 - width_px // 2, 120 - length_px // 2
    probability[top : top + width_px, left : left + length_px] = p
    return probability


@pytest.mark.parametrize(
    ("width_px", "length_px", "p", "is_fold"),
    [
        (10, 100, 0.7, True),  # narrow and long
        (20, 150, 0.7, False),  # as wide as epithelium
        (10, 30, 0.7, False),  # as short as an over-stained spot
        (20, 150, 0.95, True),  # wide, but sure
        (30, 30, 0.95, True),
        (10, 100, 0.5, False),  # nowhere likely
        (3, 12, 0.99, False),  # a speck
    ],
)
def test_a_fold_is_narrow_or_sure(
    width_px: int, length_px: int, p: float, is_fold: bool
) -> None:
    probability = bar(width_px, length_px, p)
    found = removed(Folds(), "fold", probability)
    if is_fold:
        assert found[probability > 0].mean() > 0.8
        assert (found & (probability == 0)).sum() < 0.2 * found.sum()
    else:
        assert not found.any()


def test_a_wide_region_of_which_little_is_sure_is_no_fold() -> None:
    probability = bar(20, 150, 0.7)
    probability[bar(20, 40, 1.0) > 0] = 0.95
    assert not removed(Folds(), "fold", probability).any()


@pytest.mark.parametrize("p", [0.7, 0.95])
def test_glass_beside_tissue_does_not_count_for_a_fold(p: float) -> None:
    """Two pieces of tissue, each with a short end of a long bar: specks."""
    tissue = np.ones(SHAPE, bool)
    tissue[:, 65:175] = False
    probability = bar(6, 120, p)
    assert removed(Folds(), "fold", probability).any()
    assert not removed(Folds(), "fold", probability, tissue).any()


def test_a_bubble_is_a_ring_and_what_it_encloses() -> None:
    probability = np.where(ring(100, 120, 50, aspect=1.3, turned=0.4), 0.9, 0.0)
    found = removed(Bubbles(), "bubble", probability)
    expected = convex_hull_image(probability > 0)
    assert (found & expected).sum() / (found | expected).sum() > 0.95


def test_pen_across_a_bubble_hides_no_bubble() -> None:
    probability = np.where(ring(100, 120, 60), 0.9, 0.0)
    probability[:, 90:130] = 0  # in front of the ring
    found = removed(Bubbles(), "bubble", probability)
    expected = convex_hull_image(ring(100, 120, 60))
    assert (found & expected).sum() / (found | expected).sum() > 0.95


def test_arcs_and_spots_are_no_bubbles() -> None:
    """An arc is a fibre or the edge of tissue; a spot is dense tissue."""
    arc = np.where(ring(100, 120, 50, degrees=(30, 130)), 0.9, 0.0)
    spot = np.zeros(SHAPE)
    spot[disk((100, 120), 30)] = 0.9
    faint = np.where(ring(100, 120, 50), 0.5, 0.0)
    for probability in (arc, spot, faint):
        assert not removed(Bubbles(), "bubble", probability).any()


def test_a_bubble_may_have_any_size_within_its_limits() -> None:
    probability = np.where(ring(100, 120, 30), 0.9, 0.0)
    assert removed(Bubbles(min_area="0 px"), "bubble", probability).sum() > 2500
    with pytest.raises(
        ConfigError,
        match=r"bubbles.min_area must be at most max_area, got '3 mm2' and '2.5 mm2'",
    ):
        removed(Bubbles(min_area="3 mm2"), "bubble", probability)


def test_what_is_larger_than_the_largest_bubble_is_none() -> None:
    probability = np.where(ring(100, 120, 60), 0.9, 0.0)
    um2 = np.pi * (60 * PX_UM) ** 2
    assert removed(Bubbles(max_area=f"{1.1 * um2} um2"), "bubble", probability).any()
    assert not removed(
        Bubbles(max_area=f"{0.9 * um2} um2"), "bubble", probability
    ).any()
