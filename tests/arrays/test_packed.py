"""Arrays that are kept compressed come back as they were, and take little memory."""

import pickle

import numpy as np
import pytest
from scipy import ndimage

from thinsection.arrays import get_namespace
from thinsection.arrays.packed import PackedArrays, packed_arrays, packed_rows


def blobs(shape: tuple[int, int], seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=shape)
    return np.asarray(ndimage.gaussian_filter(noise, 15) > 0.01)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (256, 8), (601, 333), (0, 4)])
def test_masks_and_pictures_come_back_as_they_were(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    arrays = PackedArrays()
    masks = {
        "noise": rng.random(shape) > 0.5,
        "blobs": blobs(shape, 1),
        "none": np.zeros(shape, dtype=bool),
    }
    pictures = {
        "grey": rng.integers(0, 256, shape).astype(np.uint8),
        "colour": rng.integers(0, 256, (*shape, 3)).astype(np.uint8),
    }
    arrays.update(masks | pictures)
    assert list(arrays) == [*masks, *pictures]
    for name, array in (masks | pictures).items():
        assert arrays[name].dtype == array.dtype
        assert np.array_equal(arrays[name], array)


def test_a_view_that_is_not_contiguous_is_packed_too() -> None:
    mask = blobs((90, 120), 2)
    arrays = PackedArrays()
    arrays["turned"] = mask.T
    arrays["thinned"] = mask[::2, ::3]
    assert np.array_equal(arrays["turned"], mask.T)
    assert np.array_equal(arrays["thinned"], mask[::2, ::3])


def test_what_a_reader_writes_into_its_array_changes_nothing() -> None:
    arrays = PackedArrays()
    mask = blobs((40, 50), 3)
    arrays["mask"] = mask
    arrays["mask"][:] = True
    assert not mask.all()
    assert np.array_equal(arrays["mask"], mask)


def test_masks_of_regions_take_a_thirtieth_of_their_pixels() -> None:
    arrays = PackedArrays()
    for seed in range(8):
        arrays[str(seed)] = blobs((1000, 1200), seed)
    num_bytes = len(pickle.dumps(arrays))
    assert 0 < num_bytes < 8 * 1000 * 1200 / 30


def test_a_name_can_be_asked_for_replaced_and_removed() -> None:
    arrays = packed_arrays(get_namespace("cpu"))
    assert isinstance(arrays, PackedArrays)
    arrays["a"] = np.zeros((2, 3), dtype=bool)
    arrays["b"] = np.ones((2, 3), dtype=bool)
    arrays["a"] = np.ones((4, 3), dtype=bool)
    assert "a" in arrays
    assert arrays["a"].shape == (4, 3)
    assert arrays.get("c") is None
    assert arrays.pop("a").all()
    assert "a" not in arrays
    assert len(arrays) == 1


@pytest.mark.parametrize(("width", "is_packed"), [(50, False), (5_000, True)])
def test_blocks_of_rows_come_back_as_pictures_and_only_large_ones_are_compressed(
    width: int, is_packed: bool
) -> None:
    rng = np.random.default_rng(6)
    pictures = rng.integers(0, 3, (2, 600, width)).astype(np.uint8)
    blocks = np.split(pictures, [7, 300, 301, 590], axis=1)
    maps = packed_rows(get_namespace("cpu"), ["a", "b"], (600, width), blocks)
    assert isinstance(maps, PackedArrays) == is_packed
    for name, picture in zip("ab", pictures, strict=True):
        np.testing.assert_array_equal(maps[name], picture)
    if not is_packed:
        # all readers share the array
        with pytest.raises(ValueError, match="read-only"):
            maps["a"][:] = 0
