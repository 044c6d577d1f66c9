"""Work band by band gives what work on the whole picture gives."""

from itertools import pairwise

import numpy as np
import pytest

from thinsection.arrays import bands, get_namespace, morphology

NS = get_namespace("cpu")


@pytest.mark.parametrize(("height", "reach"), [(1, 0), (256, 3), (257, 4), (900, 300)])
def test_bands_cover_each_row_once_and_stay_in_the_picture(
    height: int, reach: int
) -> None:
    rows = np.arange(height)
    found = list(bands.row_bands(height, reach))
    assert np.array_equal(np.concatenate([rows[band.inside] for band in found]), rows)
    for band in found:
        around = rows[band.around]
        assert np.array_equal(around[band.own], rows[band.inside])
        assert around[0] == max(0, band.inside.start - reach)
        assert around[-1] == min(height, band.inside.stop + reach) - 1
    for band, following in pairwise(found):
        assert band.inside.stop == following.inside.start


def test_regions_are_the_same_in_bands_of_any_height(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = np.random.default_rng(5).random((90, 130))
    mask = noise > 0.55
    marked = noise > 0.8
    found = []
    for rows in (7, 1000):
        monkeypatch.setattr(bands, "BAND_ROWS", rows)
        found.append(
            [
                morphology.drop_small(NS, mask, 20),
                morphology.fill_small(NS, mask, 20),
                morphology.mostly(NS, mask, marked, 0.4),
                morphology.keep_elongated(NS, mask, 4.0, 6),
                morphology.at_border(NS, mask),
                morphology.region_areas(NS, mask),
            ]
        )
    for in_bands, whole in zip(*found, strict=True):
        assert in_bands.any()
        assert np.array_equal(in_bands, whole)


def test_regions_at_the_border_are_those_that_touch_a_side() -> None:
    mask = np.zeros((9, 12), dtype=bool)
    mask[0, 5] = mask[3, 11] = mask[8, 2] = mask[4, 0] = True
    expected = mask.copy()
    mask[4:6, 4:6] = True
    assert np.array_equal(morphology.at_border(NS, mask), expected)
    assert not morphology.at_border(NS, np.zeros((4, 5), dtype=bool)).any()
