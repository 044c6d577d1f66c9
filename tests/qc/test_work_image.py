"""Work images: OpenSlide's thumbnails px by px, from one bounded pass."""

import numpy as np
import pytest
from PIL import Image
from tests.qc.slides import ArraySlide, needs_real_slide, real_slide, reduced

from thinsection.qc import histoqc_image
from thinsection.qc.histoqc_image import (
    coarsest_level,
    fitted_size,
    read_work_images,
)
from thinsection.qc.work_image import regions_at

BASE = np.random.default_rng(1).integers(0, 256, (1237, 913, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def many_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histoqc_image, "STRIP_BYTES", 1 << 19)


@needs_real_slide
@pytest.mark.parametrize("max_edge", [97, 185, 371, 1483, 2967, 4000])
def test_a_work_image_is_openslides_thumbnail_px_by_px(max_edge: int) -> None:
    import openslide
    from tests.qc.slides import REAL

    with openslide.OpenSlide(str(REAL)) as slide:
        expected = np.asarray(slide.get_thumbnail((max_edge, max_edge)))
    (got,) = read_work_images(real_slide(), [max_edge])
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("max_edge", [50, 77, 300, 400, 1237])
def test_a_work_image_is_pillows_thumbnail_of_the_best_level(max_edge: int) -> None:
    levels = [BASE, reduced(BASE, 4)]
    image = Image.fromarray(levels[0 if max_edge >= 400 else 1])
    image.thumbnail((max_edge, max_edge), Image.Resampling.LANCZOS)
    (got,) = read_work_images(ArraySlide(levels), [max_edge])
    assert np.array_equal(got, np.asarray(image))


@pytest.mark.parametrize(("size", "max_edge"), [((1125, 875), 281), ((300, 1237), 309)])
def test_the_axis_that_pillow_takes_first_is_left_to_it(
    size: tuple[int, int], max_edge: int
) -> None:
    base = (
        BASE[: size[1], : size[0]]
        if size[0] <= 913
        else BASE.swapaxes(0, 1)[: size[1], : size[0]]
    )
    image = Image.fromarray(base)
    image.thumbnail((max_edge, max_edge), Image.Resampling.LANCZOS)
    (got,) = read_work_images(ArraySlide([base]), [max_edge])
    assert np.array_equal(got, np.asarray(image))


def test_two_sizes_from_one_level_read_it_once() -> None:
    slide = ArraySlide([BASE])
    both = read_work_images(slide, [77, 300])
    assert slide.num_read_px == BASE.shape[0] * BASE.shape[1]
    alone = [read_work_images(ArraySlide([BASE]), [edge])[0] for edge in (77, 300)]
    assert all(np.array_equal(a, b) for a, b in zip(both, alone, strict=True))


@pytest.mark.parametrize("size", [(2220, 2967), (2967, 2220), (1000, 1000), (5000, 3)])
@pytest.mark.parametrize("max_edge", [1, 7, 185, 900])
def test_the_fitted_size_is_pillows(size: tuple[int, int], max_edge: int) -> None:
    image = Image.new("L", size)
    image.thumbnail((max_edge, max_edge), Image.Resampling.NEAREST)
    assert fitted_size(size, max_edge) == image.size


def test_no_level_coarser_than_wanted_is_read() -> None:
    slide = ArraySlide([BASE, reduced(BASE, 4), reduced(BASE, 16)])
    assert coarsest_level(slide.levels, 1237 / (1237 // 16 - 1)).index == 2
    assert coarsest_level(slide.levels, 1237 / (1237 // 16 + 2)).index == 1
    assert coarsest_level(slide.levels, 1237 / 1200).index == 0


def test_regions_are_parts_of_the_reduced_level() -> None:
    size, read = regions_at(ArraySlide([BASE]), 0.5, 1.0)
    assert size == (456, 618)
    whole = reduced(BASE[:1236, :912], 2)
    for left, top, right, bottom in (
        (0, 0, 456, 618),
        (64, 32, 128, 160),
        (448, 600, 512, 640),
    ):
        expected = whole[top:bottom, left:right]
        np.testing.assert_array_equal(read(left, top, right, bottom), expected)
