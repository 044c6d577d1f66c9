"""The whole slide at a small size: Pillow's own reduction, also where it is made in parts."""

import numpy as np
import pytest
from PIL import Image

from thinsection.errors import InvalidInputError
from thinsection.slide import read_resized, resize
from thinsection.testing.synthetic import ArraySlide, he_texture

PIXELS = np.tile(he_texture(np.random.default_rng(1)), (2, 1, 1))[:1403, :917]
SIZES = [(91, 140), (300, 459), (917, 1403), (1, 1), (57, 1000)]


def plain(size_th: tuple[int, int]) -> np.ndarray:
    return np.asarray(Image.fromarray(PIXELS).resize(size_th, Image.Resampling.LANCZOS))


@pytest.mark.parametrize("size_th", SIZES)
def test_a_thumbnail_is_pillows_to_the_bit(size_th: tuple[int, int]) -> None:
    slide = ArraySlide([PIXELS], segment=(256, 256))
    np.testing.assert_array_equal(read_resized(slide, size_th), plain(size_th))


@pytest.mark.parametrize("size_th", SIZES)
@pytest.mark.parametrize("rows", [1, 100, 700])
def test_in_parts_single_values_differ_by_one_at_most(
    size_th: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resize, "_EXACT_BYTES", 3 * size_th[0] * rows)
    found = read_resized(ArraySlide([PIXELS]), size_th).astype(int)
    assert found.shape == (size_th[1], size_th[0], 3)
    assert np.abs(found - plain(size_th)).max() <= 1


def test_a_size_beyond_the_slides_is_refused() -> None:
    for size_th in ((918, 100), (0, 5)):
        with pytest.raises(
            InvalidInputError, match=r"size_th must be from \(1, 1\) to \(917, 1"
        ):
            read_resized(ArraySlide([PIXELS]), size_th)


@pytest.mark.parametrize(
    "size", [(512, 512), (508, 508), (402, 307), (600, 640), (257, 256)]
)
@pytest.mark.parametrize("noise", [0, 60])
def test_a_tile_is_pillows_within_a_level(size: tuple[int, int], noise: int) -> None:
    spread = np.random.default_rng(2).integers(-noise, noise + 1, (*size[::-1], 3))
    pixels = (
        (PIXELS[: size[1], : size[0]].astype(int) + spread)
        .clip(0, 255)
        .astype(np.uint8)
    )
    wanted = Image.fromarray(pixels).resize((256, 256), Image.Resampling.LANCZOS)
    around = np.full(
        (size[1] + 9, size[0] + 5, 3), 77, np.uint8
    )  # a cut of a wider picture
    around[4:-5, 2:-3] = pixels
    batch = np.zeros((3, 256, 256, 3), np.uint8)
    resize.resample(around[None, 4:-5, 2:-3], batch[1:2])
    difference = np.abs(batch[1].astype(int) - np.asarray(wanted))
    assert difference.max() <= (2 if noise else 1)
    assert difference.mean() <= 0.02
    assert not batch[0].any()
    assert not batch[2].any()
