"""Work band by band gives what work on the whole picture gives."""

import tracemalloc
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


def drawn(seed: int) -> np.ndarray:
    """A mask with blobs of all sizes, some of which touch the border, and single pixels."""
    rng = np.random.default_rng(seed)
    coarse = rng.random((31, 43)) > 0.6
    mask = coarse.repeat(9, axis=0).repeat(7, axis=1)
    return np.asarray(mask ^ (rng.random(mask.shape) > 0.97))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("connectivity", [4, 8])
@pytest.mark.parametrize("band_rows", [7, 1000])
def test_regions_of_runs_are_those_of_a_picture_of_labels(
    seed: int, connectivity: int, band_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU regions are runs; on a GPU they are labelled as SciPy does it."""
    monkeypatch.setattr(bands, "BAND_ROWS", band_rows)
    mask = drawn(seed)
    marked = drawn(seed + 10)
    runs = morphology.regions_of(NS, mask, connectivity=connectivity)
    labels = morphology.labelled_regions(NS, mask, connectivity=connectivity)
    assert runs.count == labels.count > 20
    assert np.array_equal(runs.labels(), labels.labels())
    assert np.array_equal(runs.areas(), labels.areas())
    assert np.array_equal(runs.hits(marked), labels.hits(marked))
    assert np.array_equal(runs.moments(), labels.moments())
    assert np.array_equal(runs.at_border(), labels.at_border())
    assert 0 < np.count_nonzero(runs.at_border()) < runs.count
    keep = np.arange(runs.count + 1) % 3 != 1
    assert np.array_equal(runs.mask(keep), labels.mask(keep))
    assert not (runs.mask(keep) & ~mask).any()


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("radius_px", [1.5, 9, 40])
def test_disks_dilate_in_bands_of_any_height_as_on_the_whole_picture(
    seed: int, radius_px: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = drawn(seed) & (np.random.default_rng(seed).random((279, 301)) > 0.999)
    found = []
    for rows in (5, 64, 1000):
        monkeypatch.setattr(bands, "BAND_ROWS", rows)
        found.append(morphology.dilated_by_disk(NS, few, radius_px))
    assert few.sum() < found[-1].sum() < few.size
    assert np.array_equal(found[0], found[-1])
    assert np.array_equal(found[1], found[-1])


@pytest.mark.parametrize("seed", [5, 6])
def test_masks_of_regions_take_three_bytes_a_pixel_at_most(seed: int) -> None:
    """Labels alone would take four."""
    mask = drawn(seed).repeat(8, axis=0).repeat(8, axis=1)
    marked = drawn(seed + 10).repeat(8, axis=0).repeat(8, axis=1)
    for work in (
        lambda: morphology.drop_small(NS, mask, 2000),
        lambda: morphology.fill_small(NS, mask, 2000),
        lambda: morphology.mostly(NS, mask, marked, 0.4),
        lambda: morphology.keep_elongated(NS, mask, 4.0, 600),
        lambda: morphology.dilated_by_disk(NS, mask, 9),
    ):
        tracemalloc.start()
        result = work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert result.any()
        assert peak < 3 * mask.size
