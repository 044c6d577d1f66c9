"""Opening: the choice of a reader, what it says, and files that are no slides."""

from pathlib import Path

import fsspec
import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image
from tests.slide.test_contract import JUDGED, OURS_ALONE

from thinsection.errors import ConfigError, InvalidInputError, SlideOpenError
from thinsection.slide import available_readers, open_slide
from thinsection.slide.auto_reader import find_difference
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.testing.slide_contract import KINDS, SIZE, STRIPED
from thinsection.testing.synthetic import (
    PyramidKind,
    he_texture,
    position_pixels,
    write_pyramid,
)
from thinsection.types import RgbArray


@pytest.mark.parametrize("kind", (KINDS | JUDGED).values(), ids=(KINDS | JUDGED).keys())
def test_auto_takes_the_tiff_reader_where_its_px_are_openslides(
    tmp_path: Path, kind: PyramidKind
) -> None:
    write_pyramid(tmp_path / "a.tif", SIZE, kind)
    with (
        open_slide(tmp_path / "a.tif") as slide,
        open_slide(tmp_path / "a.tif", reader="openslide") as reference,
    ):
        assert slide.reader == "tiff"
        assert slide.choice == "tiff: fastest reader that agrees with OpenSlide"
        for level in slide.levels:
            pixels = slide.read_region((0, 0), level.index, level.size)
            expected = reference.read_region((0, 0), level.index, level.size)
            np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("kind", (STRIPED | OURS_ALONE).values())
def test_auto_says_that_openslide_was_no_judge(
    tmp_path: Path, kind: PyramidKind
) -> None:
    write_pyramid(tmp_path / "a.tif", SIZE, kind)
    with open_slide(tmp_path / "a.tif") as slide:
        assert slide.choice == "tiff: OpenSlide does not know the format"


class OffByOne(TiffSlide):
    """A reader that is wrong by one level of grey in one probe region."""

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        super()._fill(origin_lv, level, out)
        if origin_lv[0] > 300:
            out[0, 0, 0] ^= 1


def test_a_reader_that_differs_in_one_value_of_level_0_does_not_agree(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.tif"
    write_pyramid(path, SIZE)
    with open_slide(path, reader="openslide") as reference:
        with OffByOne(str(path)) as slide:
            assert "differ by up to 1" in find_difference(slide, reference)
        with TiffSlide(str(path)) as slide:
            assert find_difference(slide, reference) == ""
        with TiffSlide(str(path), slide_mpp=(0.5, 0.4)) as slide:
            assert (
                "its resolution is (0.5, 0.4), but OpenSlide reads"
                in find_difference(slide, reference)
            )


def write_between(path: Path, down: float, pixels: RgbArray) -> None:
    """A pyramid whose second level has `down`, which need not be a whole number."""
    height, width = pixels.shape[:2]
    smaller = Image.fromarray(pixels).resize((int(width / down), int(height / down)))
    with tifffile.TiffWriter(path) as writer:
        for level in (pixels, np.asarray(smaller)):
            options = {"compression": "deflate", "photometric": "rgb", "metadata": None}
            writer.write(
                level, tile=(128, 128), subfiletype=int(level is not pixels), **options
            )


DOWNSAMPLES = [1.3, 2.0005, 2.5, 3.9, 4.0, 7.7]


@pytest.mark.parametrize("noise", [False, True], ids=["tissue", "noise"])
@pytest.mark.parametrize("down", DOWNSAMPLES)
def test_auto_allows_for_openslides_shift_on_levels_of_any_downsample(
    tmp_path: Path, down: float, noise: bool
) -> None:
    rng = np.random.default_rng(1)
    pixels = np.tile(he_texture(rng), (1, 2, 1))[:989, :1411]
    if noise:
        pixels = rng.integers(0, 256, pixels.shape).astype(np.uint8)
    write_between(tmp_path / "a.tif", down, pixels)
    with open_slide(tmp_path / "a.tif") as slide:
        assert slide.choice == "tiff: fastest reader that agrees with OpenSlide"


class Moved(TiffSlide):
    """A reader whose lower levels lie one px beside where they belong."""

    by = (1, 0)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        dx, dy = self.by if level else (0, 0)
        size = self.levels[level].size
        whole = np.empty((size[1], size[0], 3), np.uint8)
        super()._fill((0, 0), level, whole)
        moved = np.roll(whole, (dy, dx), (0, 1))
        x, y = origin_lv
        out[:] = moved[y : y + out.shape[0], x : x + out.shape[1]]


@pytest.mark.parametrize("by", [(1, 0), (0, 1), (-1, 0), (0, -1)])
@pytest.mark.parametrize("down", DOWNSAMPLES)
def test_a_lower_level_that_lies_one_px_off_does_not_agree(
    tmp_path: Path, down: float, by: tuple[int, int]
) -> None:
    path = tmp_path / "a.tif"
    write_between(
        path,
        down,
        np.tile(he_texture(np.random.default_rng(1)), (1, 2, 1))[:989, :1411],
    )
    with open_slide(path, reader="openslide") as reference, Moved(str(path)) as slide:
        slide.by = (0, 0)
        assert find_difference(slide, reference) == ""
        slide.by = by
        assert "pixels of level 1 at" in find_difference(slide, reference)


class Brighter(TiffSlide):
    """A reader whose lower levels are a little brighter than the file says."""

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        super()._fill(origin_lv, level, out)
        if level:
            np.copyto(out, out + 2, where=out < 253)


def test_a_lower_level_of_another_picture_does_not_agree(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    write_between(path, 2.5, he_texture(np.random.default_rng(1))[:901])
    with (
        open_slide(path, reader="openslide") as reference,
        Brighter(str(path)) as slide,
    ):
        assert "pixels of level 1 at" in find_difference(slide, reference)


def test_a_file_that_only_openslide_reads_says_why_the_others_were_not_taken(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.tif"
    write_pyramid(path, SIZE, PyramidKind(compression="packbits", downsamples=(1,)))
    with open_slide(path) as slide:
        assert slide.reader == "openslide"
        assert slide.choice == "openslide: tiff: compression 32773 is not supported"


def test_slide_mpp_replaces_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    write_pyramid(path, SIZE, PyramidKind(mpp=(0.5, 0.5)))
    for reader in ("auto", "tiff", "openslide"):
        with open_slide(path, reader=reader, slide_mpp=(0.25, 0.26)) as slide:
            assert slide.slide_mpp == (0.25, 0.26)
        with open_slide(path, reader=reader, slide_mpp=0.3) as slide:
            assert slide.slide_mpp == (0.3, 0.3)
    with pytest.raises(
        InvalidInputError, match=r"slide_mpp must be > 0 and finite, got \(0.5, 0"
    ):
        open_slide(path, slide_mpp=(0.5, 0.0))
    with pytest.raises(InvalidInputError, match="must be one number, two numbers"):
        open_slide(path, slide_mpp="0.5")  # type: ignore[arg-type]


def test_no_reader_opens_text_called_svs_and_each_says_why(tmp_path: Path) -> None:
    path = tmp_path / "notes.svs"
    path.write_text("this is not a slide\n" * 50)
    with pytest.raises(
        SlideOpenError,
        match=r"no reader opens 'notes.svs': tiff: not a readable TIFF: .*; openslide: .*; "
        r"image: not a PNG, JPEG or TIFF",
    ):
        open_slide(path)


def test_an_empty_and_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.svs").touch()
    with pytest.raises(
        SlideOpenError, match=r"slide must not be empty, got 0 bytes in .*empty"
    ):
        open_slide(tmp_path / "empty.svs")
    with pytest.raises(
        SlideOpenError, match=r"slide must be an existing file, got .*none\.svs"
    ):
        open_slide(tmp_path / "none.svs")
    with pytest.raises(SlideOpenError, match="slide must be an existing file"):
        open_slide(tmp_path)


@pytest.mark.parametrize("keep", [4, 9, 100, 300])
def test_a_file_cut_within_its_structure_does_not_open(
    tmp_path: Path, keep: int
) -> None:
    path = tmp_path / "cut.svs"
    write_pyramid(path, SIZE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SlideOpenError, match=r"no reader opens 'cut\.svs'"):
        open_slide(path)


def test_an_unknown_reader_is_answered_with_the_nearest(tmp_path: Path) -> None:
    write_pyramid(tmp_path / "a.tif", SIZE)
    with pytest.raises(ConfigError, match="did you mean 'openslide'"):
        open_slide(tmp_path / "a.tif", reader="open-slide")


def test_available_readers_name_their_versions() -> None:
    found = {status.name: status for status in available_readers()}
    assert set(found) == {"tiff", "openslide", "dicom", "image", "zarr"}
    assert found["openslide"].available
    assert openslide.__version__ in found["openslide"].detail


@pytest.mark.parametrize("by_url", [False, True])
def test_a_decimal_comma_of_an_aperio_slide_is_a_resolution(
    tmp_path: Path, *, by_url: bool
) -> None:
    path = tmp_path / "a.svs"
    pixels = position_pixels((300, 200))
    text = "Aperio Image Library v12.0.0\r\n300x200|AppMag = 20|MPP = 0,4990"
    tifffile.imwrite(
        path,
        pixels,
        tile=(128, 128),
        photometric="rgb",
        compression="jpeg",
        description=text,
        metadata=None,
    )
    if by_url:
        fsspec.filesystem("memory").pipe("/comma/a.svs", path.read_bytes())
        with open_slide("memory://comma/a.svs") as slide:
            assert slide.slide_mpp == (0.499, 0.499)
        return
    found = {}
    for reader in ("auto", "tiff", "openslide"):
        with open_slide(path, reader=reader) as slide:
            found[reader] = (slide.slide_mpp, slide.reader)
    assert found["openslide"] == ((0.499, 0.499), "openslide")  # the outside judge
    assert found["auto"] == found["tiff"] == ((0.499, 0.499), "tiff")
