"""The default tissue mask on planted tissue, and where Otsu alone would go wrong."""

import numpy as np
import pytest

from thinsection.arrays.filters import otsu_level
from thinsection.errors import InvalidInputError
from thinsection.qc.tissue import (
    TissueConfig,
    segment_tissue,
    thumbnail_size,
)

PINK, WHITE, BLACK = (200, 120, 170), (243, 242, 244), (5, 4, 6)
PX_UM2 = 64.0


def canvas(color: tuple[int, int, int], *, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 2, (150, 200, 3))
    return np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)


def test_planted_tissue_is_found_to_within_its_border() -> None:
    image, truth = canvas(WHITE), np.zeros((150, 200), dtype=bool)
    truth[40:110, 30:150] = True
    image[truth] = canvas(PINK)[truth]
    mask, _ = segment_tissue(image, TissueConfig(), px_area_um2=PX_UM2)
    assert (mask & truth).sum() / (mask | truth).sum() > 0.98


def test_an_empty_slide_has_no_tissue() -> None:
    mask, threshold = segment_tissue(canvas(WHITE), TissueConfig(), px_area_um2=PX_UM2)
    assert not mask.any()
    assert threshold >= 15


def test_a_slide_full_of_tissue_is_all_tissue() -> None:
    image = canvas(PINK)
    image[:, 100:] = canvas((120, 60, 150), seed=1)[:, 100:]  # Otsu alone would split these two
    mask, _ = segment_tissue(image, TissueConfig(), px_area_um2=PX_UM2)
    assert mask.all()


def test_black_borders_are_not_tissue() -> None:
    image = canvas(WHITE)
    image[:, :40] = BLACK
    image[60:120, 100:180] = canvas(PINK)[60:120, 100:180]
    mask, _ = segment_tissue(image, TissueConfig(), px_area_um2=PX_UM2)
    assert not mask[:, :38].any()
    assert mask[65:115, 105:175].all()


def test_specks_go_and_small_holes_close_by_area_in_um2() -> None:
    image = canvas(WHITE)
    image[20:120, 20:160] = canvas(PINK)[20:120, 20:160]
    image[60:68, 60:68] = WHITE  # 64 px: 4096 µm²
    image[80:100, 100:130] = WHITE  # 600 px: 38,400 µm²
    image[135:145, 180:190] = PINK  # 100 px: 6,400 µm²
    mask, _ = segment_tissue(image, TissueConfig(), px_area_um2=PX_UM2)
    assert mask[60:68, 60:68].all()
    assert not mask[85:95, 105:125].any()
    assert not mask[135:145, 180:190].any()


@pytest.mark.parametrize("counts", [np.zeros(256), np.eye(1, 256, 7)[0]])
def test_otsu_of_nothing_or_of_one_value_is_a_number(counts: np.ndarray) -> None:
    assert np.isfinite(otsu_level(counts, np.arange(256)))


def test_thumbnails_keep_the_resolution_of_each_axis() -> None:
    assert thumbnail_size((80_000, 40_000), (0.25, 0.5), 8.0) == (2500, 2500)
    assert thumbnail_size((100, 50), (16.0, 16.0), 8.0) == (100, 50)
    assert max(thumbnail_size((100_000, 3), None, 8.0)) == 2048


def test_a_mask_resolution_must_be_positive() -> None:
    with pytest.raises(InvalidInputError, match="mask_mpp"):
        TissueConfig(mask_mpp=0)
