"""The file's colour profile, applied where a person asks for it."""

import io
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageCms
from tests.conftest import REAL_SLIDES

from thinsection.errors import SlideOpenError
from thinsection.slide import open_slide
from thinsection.slide.look import Look
from thinsection.testing.synthetic import position_pixels

ICC, SIZE = Look(icc=True), (610, 470)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# sRGB with the primaries of red and blue exchanged: every colour changes much
SWAPPED = (
    SRGB.replace(b"rXYZ", b"----").replace(b"bXYZ", b"rXYZ").replace(b"----", b"bXYZ")
)


def written(path: Path, profile: bytes | None) -> Path:
    tifffile.imwrite(path, position_pixels(SIZE), tile=(128, 256), iccprofile=profile)
    return path


@pytest.mark.parametrize("reader", ["auto", "tiff", "openslide"])
def test_px_are_those_of_pillows_conversion(reader: str, tmp_path: Path) -> None:
    path, pixels = written(tmp_path / "a.tif", SWAPPED), position_pixels(SIZE)
    own = ImageCms.ImageCmsProfile(io.BytesIO(SWAPPED))
    intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
    srgb = ImageCms.createProfile("sRGB")
    expected = np.asarray(
        ImageCms.profileToProfile(
            Image.fromarray(pixels), own, srgb, renderingIntent=intent
        )
    )
    assert np.abs(expected.astype(int) - pixels).mean() > 20
    with open_slide(path, reader=reader, look=ICC) as slide:
        assert (slide.read_region((0, 0), 0, SIZE) == expected).all()
        tiles = np.empty((2, 128, 256, 3), np.uint8)
        slide.read_regions(np.array([[0, 0], [256, 128]]), 0, out=tiles)
        assert (tiles[1] == expected[128:256, 256:512]).all()
        assert slide.rendering.startswith("ICC profile 'sRGB")
    with open_slide(path, reader=reader) as slide:
        assert (slide.read_region((0, 0), 0, SIZE) == pixels).all()
        assert not slide.rendering


def test_a_file_without_a_profile_is_read_as_it_is_with_a_word(tmp_path: Path) -> None:
    with open_slide(written(tmp_path / "a.tif", None), look=ICC) as slide:
        assert (slide.read_region((0, 0), 0, SIZE) == position_pixels(SIZE)).all()
        assert slide.notes == (
            "no ICC profile found by reader 'tiff': colours are as they are stored",
        )


def test_a_profile_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tif", SRGB[:200])
    with pytest.raises(
        SlideOpenError,
        match=r"icc profile must be a readable profile for RGB.*leave out icc=True",
    ):
        open_slide(path, look=ICC)


def test_the_real_slide_has_the_profile_of_srgb() -> None:
    path = REAL_SLIDES / "tcga-cr-7395-01a-01-ts1.svs"
    if not path.is_file():
        pytest.skip(f"no real slide at {path}; set THINSECTION_TEST_SLIDES")
    with open_slide(path) as plain, open_slide(path, look=ICC) as slide:
        assert (
            slide.rendering
            == "ICC profile 'sRGB IEC61966-2.1' to sRGB, relative colorimetric"
        )
        got, stored = (
            s.read_region((2000, 1500), 0, (300, 300)) for s in (slide, plain)
        )
        assert np.abs(got.astype(int) - stored).max() <= 1
