"""The real slide: every reader gives OpenSlide's pixels, names and numbers."""

import os
from pathlib import Path

import numpy as np
import pytest

from thinsection.slide import open_slide
from thinsection.slide.auto_reader import interpolated
from thinsection.testing.slide_contract import crop_on_white, regions

ROOT = Path(__file__).parents[2]
FOLDER = Path(
    os.environ.get("THINSECTION_TEST_SLIDES", ROOT.parent / "shared" / "slides")
)
SLIDE = FOLDER / "CMU-1-Small-Region.svs"

TCGA = FOLDER / "tcga-cr-7395-01a-01-ts1.svs"  # JPEG 2000; levels 1 and 2.0005

pytestmark = pytest.mark.skipif(not SLIDE.is_file(), reason=f"no test slide at {SLIDE}")


@pytest.fixture(params=["auto", "tiff", "openslide"])
def reader(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_px_are_openslides_everywhere(reader: str) -> None:
    with open_slide(SLIDE, reader=reader) as slide:
        with open_slide(SLIDE, reader="openslide") as reference:
            whole = reference.read_region((0, 0), 0, reference.size)
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, slide.size), whole)
        for origin, size in regions(slide.size):
            expected = crop_on_white(whole, origin, 1.0, size)
            np.testing.assert_array_equal(slide.read_region(origin, 0, size), expected)


def test_metadata_are_openslides(reader: str) -> None:
    with open_slide(SLIDE, reader=reader) as slide:
        assert slide.size == (2220, 2967)
        assert slide.slide_mpp == (0.499, 0.499)
        assert slide.objective_power == 20.0
        assert slide.vendor == "aperio"
        assert slide.properties["aperio.MPP"] == "0.4990"


def test_associated_images_are_openslides(reader: str) -> None:
    with (
        open_slide(SLIDE, reader=reader) as slide,
        open_slide(SLIDE, reader="openslide") as reference,
    ):
        assert set(slide.associated_names) == {"label", "macro", "thumbnail"}
        for name in slide.associated_names:
            image = slide.associated_image(name)
            assert image.flags.c_contiguous
            np.testing.assert_array_equal(image, reference.associated_image(name))


def test_auto_takes_the_tiff_reader() -> None:
    with open_slide(SLIDE) as slide:
        assert slide.choice == "tiff: fastest reader that agrees with OpenSlide"


@pytest.mark.skipif(not TCGA.is_file(), reason=f"no test slide at {TCGA}")
def test_auto_takes_the_tiff_reader_where_a_downsample_is_no_whole_number() -> None:
    with open_slide(TCGA) as slide, open_slide(TCGA, reader="openslide") as reference:
        assert slide.choice == "tiff: fastest reader that agrees with OpenSlide"
        level = slide.levels[1]
        assert level.downsample != round(level.downsample)
        for x, y in (
            (0, 0),
            (403, 217),
            (901, 1203),
            (level.size[0] - 90, level.size[1] - 70),
        ):
            origin = (round(x * level.downsample), round(y * level.downsample))
            theirs = reference.read_region(origin, 1, (90, 70))
            difference = np.abs(interpolated(slide, origin, 1, (90, 70)) - theirs)
            assert difference.max() <= 2
            assert difference.mean() <= 0.4
