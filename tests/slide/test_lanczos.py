"""The filter in NumPy gives PyTorch's bytes, for pictures and sizes of every kind."""

import numpy as np
import pytest
import torch

from thinsection.slide.lanczos import reduce_tiles
from thinsection.slide.resize import FewTiles
from thinsection.testing.synthetic import he_texture

# source and target (height, width); common ones first: 40x to 20x and to 10x, odd mpp
SIZES = [
    ((512, 512), (256, 256)),
    ((508, 508), (256, 256)),
    ((1016, 1016), (256, 256)),
    ((444, 444), (224, 224)),
    ((257, 300), (256, 299)),
    ((256, 400), (256, 224)),
    ((9, 5), (2, 1)),
    ((1, 40), (1, 3)),
    ((33, 65), (32, 64)),
    ((700, 31), (11, 31)),
    ((20, 20), (29, 31)),
]


def by_torch(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    source = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    reduced = torch.ops.aten._upsample_lanczos2d_aa(source, list(size), False)
    return reduced.permute(0, 2, 3, 1).numpy()


def by_numpy(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    out = np.empty((len(pixels), *size, 3), np.uint8)
    reduce_tiles(pixels, out)
    return out


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_pictures_of_every_kind_have_pytorchs_bytes(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    rng = np.random.default_rng(4)
    noise = rng.integers(0, 256, (*source, 3))
    extremes = 255 * rng.integers(0, 2, (*source, 3))  # its ringing leaves 0 to 255
    tissue = np.tile(he_texture(rng), (3, 3, 1))[: source[0], : source[1]]
    pixels = np.stack([noise, extremes, np.resize(tissue, (*source, 3))]).astype(
        np.uint8
    )
    np.testing.assert_array_equal(by_numpy(pixels, target), by_torch(pixels, target))


def test_random_sizes_have_pytorchs_bytes() -> None:
    rng = np.random.default_rng(11)
    for _ in range(150):
        target = tuple(rng.integers(1, 90, 2).tolist())
        factors = np.exp(rng.uniform(0, np.log(9), 2))
        source = tuple(np.maximum(1, np.round(target * factors)).astype(int).tolist())
        pixels = rng.integers(0, 256, (1, *source, 3), dtype=np.uint8)
        equal = by_numpy(pixels, target) == by_torch(pixels, target)
        assert equal.all(), (source, target)


def test_a_cut_of_a_wider_picture_is_reduced_into_a_part_of_a_batch() -> None:
    rng = np.random.default_rng(2)
    around = rng.integers(0, 256, (2, 90, 80, 3), dtype=np.uint8)
    pixels = around[:, 5:-3, 2:-7]
    batch = np.zeros((4, 40, 31, 3), np.uint8)
    reduce_tiles(pixels, batch[1:3])
    expected = by_torch(np.ascontiguousarray(pixels), (40, 31))
    np.testing.assert_array_equal(batch[1:3], expected)
    assert not batch[0].any() and not batch[3].any()


def test_few_bytes_are_taken_until_none_is_left() -> None:
    few = FewTiles(100)
    assert [few.take(num) for num in (60, 50, 40, 1, 0)] == [
        True,
        False,
        True,
        False,
        True,
    ]
