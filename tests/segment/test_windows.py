"""Windows of a network lie where they should, in pixels of its resolution and of level 0."""

from dataclasses import replace

import numpy as np
import pytest

from thinsection.errors import BudgetError, MissingMppError, UpsamplingError
from thinsection.segment.spec import SegmenterSpec
from thinsection.segment.windows import WindowGrid
from thinsection.testing.synthetic import ArraySlide
from thinsection.types import MaskFrame

SPEC = SegmenterSpec(name="net", outputs=("a", "b"), mpp=1.0, px=64, overlap=0.25)


def slide_of(width: int, height: int, mpp=(0.5, 0.25)) -> ArraySlide:
    return ArraySlide([np.zeros((height, width, 3), np.uint8)], slide_mpp=mpp)


def mask_of(slide: ArraySlide, boxes: list[tuple[int, int, int, int]]):
    """Tissue (x, y, width, height) in level-0 px, in a mask with a px for each of them."""
    width, height = slide.size
    mask = np.zeros((height, width), dtype=bool)
    for x, y, w, h in boxes:
        mask[y : y + h, x : x + w] = True
    return mask, MaskFrame(size_th=(width, height), size_l0=(width, height))


def test_a_map_has_the_slides_size_at_the_networks_resolution_on_both_axes() -> None:
    """0.5 and 0.25 µm/px at 1 µm/px: every 2 px along x and every 4 along y make one."""
    grid = WindowGrid.cover(slide_of(601, 803), SPEC)
    assert grid.scale == (2.0, 4.0)
    assert grid.size == (300, 201)  # 300.5 rounds to the even, 200.75 up
    assert WindowGrid.cover(slide_of(603, 801), SPEC).size == (302, 200)
    assert grid.plan.size_l0 == (128, 256)
    assert grid.plan.tile_px == 64


def test_a_level_that_is_read_is_reckoned_in_px_of_level_0() -> None:
    levels = [np.zeros((800, 640, 3), np.uint8), np.zeros((200, 160, 3), np.uint8)]
    slide = ArraySlide(levels, slide_mpp=(0.25, 0.25))
    grid = WindowGrid.cover(slide, SPEC)
    assert grid.plan.level == 1
    assert grid.scale == (4.0, 4.0)
    assert grid.size == (160, 200)


def test_the_overlap_is_rounded_to_px() -> None:
    grid = WindowGrid.cover(slide_of(400, 800), replace(SPEC, overlap=0.28))
    assert grid.column_starts.tolist() == [0, 46, 92, 136]  # of 17.92 px


def test_windows_step_by_their_edge_less_the_overlap_and_end_with_the_slide() -> None:
    grid = WindowGrid.cover(slide_of(400, 800), SPEC)  # a map of 200 x 200
    assert grid.column_starts.tolist() == [0, 48, 96, 136]
    other = WindowGrid.cover(slide_of(400, 640), replace(SPEC, overlap=0.5))
    assert other.column_starts.tolist() == [0, 32, 64, 96, 128, 136]
    assert other.row_starts.tolist() == [0, 32, 64, 96]


def test_without_overlap_windows_meet_edge_to_edge() -> None:
    grid = WindowGrid.cover(slide_of(384, 768), replace(SPEC, overlap=0.0))
    assert grid.column_starts.tolist() == [0, 64, 128]
    assert grid.row_starts.tolist() == [0, 64, 128]


@pytest.mark.parametrize("width", range(60, 200, 7))
def test_windows_cover_each_px_of_the_map_and_share_at_least_the_overlap(
    width: int,
) -> None:
    grid = WindowGrid.cover(slide_of(2 * width, 4 * width), SPEC)
    starts = grid.column_starts
    np.testing.assert_array_equal(starts, grid.row_starts)
    if width > 64:
        assert starts[0] == 0
        assert starts[-1] == width - 64
        assert (np.diff(starts) <= 48).all()
        assert (np.diff(starts) > 0).all()
        # one window fewer would leave a gap
        assert len(starts) == -(-(width - 64) // 48) + 1


def test_a_slide_that_is_smaller_than_a_window_lies_in_its_middle() -> None:
    grid = WindowGrid.cover(slide_of(80, 4 * 64), SPEC)  # a map of 40 x 64
    assert grid.column_starts.tolist() == [-12]
    assert grid.row_starts.tolist() == [0]
    tiny = WindowGrid.cover(slide_of(1, 3), SPEC)
    assert tiny.size == (1, 1)
    assert tiny.column_starts.tolist() == [-32]


def test_bands_are_as_wide_as_the_memory_allows() -> None:
    grid = WindowGrid.cover(slide_of(2 * 500, 4 * 100), SPEC)
    column_bytes = 4 * (2 + 1) * 64  # float32 sums of both outputs and the weights
    assert grid.bands(500 * column_bytes, 2) == [(0, 500)]
    narrow = grid.bands(500 * column_bytes - 1, 2)
    assert narrow == [(0, 499), (499, 500)]
    assert grid.bands(200 * column_bytes, 2) == [(0, 200), (200, 400), (400, 500)]
    assert grid.bands(128 * column_bytes, 2)[0] == (0, 128)


def test_a_band_holds_two_windows_or_the_memory_is_refused() -> None:
    grid = WindowGrid.cover(slide_of(2 * 500, 4 * 100), SPEC)
    least = 2 * 64 * 4 * (2 + 1) * 64
    assert len(grid.bands(least, 2)) == 4
    message = r"segment_memory must be >= 96\.0 KiB, got 96\.0 KiB"
    with pytest.raises(BudgetError, match=message):
        grid.bands(least - 1, 2)


def test_a_map_that_one_window_covers_needs_no_memory_for_two() -> None:
    for width in (64, 30):
        grid = WindowGrid.cover(slide_of(2 * width, 400), SPEC)
        assert grid.bands(1, 2) == [(0, width)]
    wider = WindowGrid.cover(slide_of(2 * 65, 400), SPEC)
    with pytest.raises(BudgetError):
        wider.bands(1, 2)


def test_windows_come_row_by_row() -> None:
    slide = slide_of(2 * 112, 4 * 160)
    grid = WindowGrid.cover(slide, SPEC)
    places = grid.places(mask_of(slide, [(0, 0, 224, 640)]), (0, 112))
    assert places.tolist() == [[0, 0], [48, 0], [0, 48], [48, 48], [0, 96], [48, 96]]


def test_a_window_belongs_to_a_band_when_they_share_a_column() -> None:
    """Windows of 64 px at 0, 48, 96 and 136 of a map of 200."""
    slide = slide_of(400, 256)
    grid = WindowGrid.cover(slide, SPEC)
    everywhere = mask_of(slide, [(0, 0, 400, 256)])

    def starts(first: int, last: int) -> list[int]:
        return grid.places(everywhere, (first, last))[:, 0].tolist()

    assert starts(0, 48) == [0]
    assert starts(0, 49) == [0, 48]
    assert starts(63, 96) == [0, 48]
    assert starts(64, 96) == [48]
    assert starts(111, 137) == [48, 96, 136]
    assert starts(112, 136) == [96]


def test_only_windows_with_a_px_of_tissue_are_read() -> None:
    """Tissue of one level-0 px at (128, 256): windows at 0 end before it, along both axes."""
    slide = slide_of(400, 800)
    grid = WindowGrid.cover(slide, SPEC)
    places = grid.places(mask_of(slide, [(128, 256, 1, 1)]), (0, 200))
    assert places.tolist() == [[48, 48]]
    before = grid.places(mask_of(slide, [(127, 255, 1, 1)]), (0, 200))
    assert before.tolist() == [[0, 0], [48, 0], [0, 48], [48, 48]]
    nothing = grid.places(mask_of(slide, []), (0, 200))
    assert nothing.shape == (0, 2)


def test_corners_are_rounded_to_px_of_level_0_on_each_axis() -> None:
    grid = WindowGrid.cover(slide_of(400, 800, mpp=(0.4, 0.3)), SPEC)
    # a window of 64 px is read from a whole number of px, 213 of 213.3 along y
    assert grid.scale == (2.5, 213 / 64)
    corners = grid.coords_l0(np.array([[0, 0], [1, 1], [3, 5], [-12, 7]]))
    assert corners.dtype == np.int64
    assert corners.tolist() == [[0, 0], [2, 3], [8, 17], [-30, 23]]
    assert grid.coords_l0(np.array([1, 1])).tolist() == [[2, 3]]


def test_a_slide_without_the_networks_resolution_is_named() -> None:
    with pytest.raises(MissingMppError, match=r"slide_mpp is missing in 'array\.svs'"):
        WindowGrid.cover(slide_of(400, 400, mpp=None), SPEC)
    with pytest.raises(UpsamplingError, match=r"array\.svs"):
        WindowGrid.cover(slide_of(400, 400, mpp=(2.0, 2.0)), SPEC)
