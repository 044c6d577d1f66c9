"""Arrays that are kept compressed come back as they were, and take little memory."""

import pickle

import numpy as np
import pytest
from scipy import ndimage

from thinsection.arrays import get_namespace
from thinsection.arrays.packed import PackedArrays, packed_arrays


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
