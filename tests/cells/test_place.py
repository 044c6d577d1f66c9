"""Cells in a wrong frame are refused, and the message names the right one."""

import numpy as np
import pytest
from tests.support.cells import SLIDE

from thinsection.cells.place import CellSlide, PlacementCheck, placement_of
from thinsection.errors import InvalidInputError, MissingMppError
from thinsection.qc.tissue import TissueMask
from thinsection.types import Floats, MaskFrame

SIZE = (20_000, 31_000)
SHIFT = np.array([-1500, 2000])


def tissue() -> TissueMask:
    """Two pieces of tissue that no swap, scale or small shift maps onto themselves."""
    mask = np.zeros((310, 200), dtype=bool)
    mask[60:140, 100:160] = True
    mask[200:240, 30:90] = True
    return TissueMask(
        mask=mask,
        frame=MaskFrame(size_th=(200, 310), size_l0=SIZE),
        mask_mpp=(25.0, 30.0),
        thumbnail=np.zeros((310, 200, 3), dtype=np.uint8),
    )


def centers(count: int = 5000) -> Floats:
    """Centres on the tissue."""
    rows, columns = np.nonzero(tissue().mask)
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, len(rows), count)
    pixels = np.stack([columns, rows], axis=1)[chosen]
    return (pixels + rng.uniform(size=(count, 2))) * 100


def judged(given: Floats, frame: str, mask: TissueMask | None) -> PlacementCheck:
    """Sees the centres of a file in some pieces and judges them."""
    placement = placement_of(frame, SLIDE)
    check = PlacementCheck(SLIDE, placement, mask)
    for piece in np.array_split(placement.centers_l0(given), 7):
        check.add(piece)
    check.finish("a.geojson")
    return check


def test_cells_on_tissue_are_taken_in_each_frame() -> None:
    mpp = np.asarray(SLIDE.slide_mpp)
    assert judged(centers(), "px", tissue()).on_tissue == 1
    assert judged(centers() * mpp, "um", tissue()).on_tissue == 1
    assert judged(centers() * mpp / 0.5, "0.5", tissue()).on_tissue == 1
    assert judged(centers(), "px", None).on_tissue is None


@pytest.mark.parametrize(
    ("given", "frame", "remedy"),
    [
        (centers()[:, ::-1], "px", "100% would lie on tissue with x and y swapped"),
        (centers() * SLIDE.slide_mpp, "px", r"would lie on tissue as µm \(frame um\)"),
        (centers(), "um", r"would lie on tissue as px of level 0 \(frame px\)"),
        (centers() * SLIDE.slide_mpp / 2, "px", r"as px of 2 µm \(frame 2\)"),
        (centers() + SHIFT, "px", r"moved by \+1\d\d\d px in x and -\d{4} px"),
    ],
)
def test_a_wrong_frame_is_refused_and_the_right_one_named(
    given: Floats, frame: str, remedy: str
) -> None:
    with pytest.raises(InvalidInputError, match=remedy):
        judged(given, frame, tissue())


def test_the_offset_that_is_named_is_the_one_that_was_made() -> None:
    with pytest.raises(InvalidInputError, match="moved by") as caught:
        judged(centers() + SHIFT, "px", tissue())
    words = str(caught.value).rpartition("moved by ")[2].split()
    assert abs(float(words[0]) - 1500) < 250
    assert abs(float(words[5]) + 2000) < 250


def test_cells_anywhere_on_glass_are_refused_without_a_frame_to_name() -> None:
    rng = np.random.default_rng(0)
    anywhere = rng.uniform(0, SIZE, (4000, 2))
    with pytest.raises(InvalidInputError, match=r"on glass.*use this slide's own file"):
        judged(anywhere, "px", tissue())


def test_a_few_cells_outside_are_no_reason_to_refuse_the_others() -> None:
    given = centers()
    given[:40] += 40_000
    judged(given, "px", None)
    given[:100] += 40_000
    with pytest.raises(InvalidInputError, match="got 100 of 5,000 outside"):
        judged(given, "px", None)


def test_a_magnification_is_taken_relative_to_the_slide() -> None:
    stated = CellSlide(
        slide_id="a", size_l0=SIZE, slide_mpp=(0.2528, 0.2528), objective_power=40
    )
    usual = CellSlide(slide_id="a", size_l0=SIZE, slide_mpp=(0.2528, 0.2528))
    for slide in (stated, usual):
        assert placement_of("40x", slide).scale_xy == (1, 1)
        assert placement_of("20x", slide).scale_xy == (2, 2)


@pytest.mark.parametrize("frame", ["", "inches", "0", "-1", "nan", "inf", "x", "0x"])
def test_a_frame_that_is_none_is_refused(frame: str) -> None:
    with pytest.raises(InvalidInputError, match="frame of cells must be px"):
        placement_of(frame, SLIDE)


def test_micrometres_need_the_slides_resolution() -> None:
    slide = CellSlide(slide_id="a", size_l0=SIZE, slide_mpp=(float("nan"), 0.3))
    with pytest.raises(MissingMppError, match="slide_mpp is missing in 'a'"):
        placement_of("um", slide)
