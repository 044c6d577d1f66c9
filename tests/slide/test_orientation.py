"""Slides that are stored mirrored or turned are shown upright, as Pillow shows them, or refused."""

from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps

from thinsection.errors import SlideOpenError, SlideReadError
from thinsection.slide import Slide, open_slide, read_resized, resize
from thinsection.slide.convert import convert
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.slide.geometry import plan_read
from thinsection.slide.look import Look
from thinsection.testing.slide_contract import KINDS, STRIPED, crop_on_white, regions
from thinsection.testing.synthetic import (
    PyramidKind,
    position_pixels,
    reduced_pixels,
    write_pyramid,
)
from thinsection.types import Mpp, RgbArray, Size

SIZE: Size = (331, 212)  # not square, no multiple of a tile
TAG = 274
TURNED = range(2, 9)
SWAPPED = (5, 6, 7, 8)
ORIGINS = ((0, 0), (7, 31), (150, 97), (-9, -5), (130, 300), (300, 130))
LAYOUTS = {
    "tiles-none": PyramidKind(compression=None, tile=(64, 64)),
    "tiles-deflate": PyramidKind(compression="deflate", tile=(48, 64)),
    "tiles-lzw": PyramidKind(compression="lzw", tile=(64, 64)),
    "tiles-zstd": PyramidKind(compression="zstd", tile=(64, 64)),
    "tiles-webp": PyramidKind(compression="webp", tile=(64, 64)),
    "tiles-jpegxl": PyramidKind(compression="jpegxl", tile=(64, 64)),
    "tiles-jpeg2000": replace(KINDS["jpeg2000-aperio"], tile=(64, 64)),
    "strips-none": STRIPED["strips-uncompressed"],
    "strips-deflate": STRIPED["strips-deflate"],
    "strips-jpeg2000": STRIPED["strips-jpeg2000"],
}


def turned_by_pillow(pixels: RgbArray, orientation: int) -> RgbArray:
    """Upright px: the outside judge of every test here."""
    image = Image.fromarray(pixels)
    image.getexif()[TAG] = orientation
    return np.asarray(ImageOps.exif_transpose(image))


def check_pixels(slide: Slide, levels: list[RgbArray]) -> None:
    """Every level, whole and in parts, one by one and together, equals the upright arrays."""
    assert [level.size for level in slide.levels] == [p.shape[1::-1] for p in levels]
    for level, truth in zip(slide.levels, levels, strict=True):
        down = level.downsample
        whole = slide.read_region((0, 0), level.index, level.size)
        np.testing.assert_array_equal(whole, truth)
        for origin, size in [*regions(slide.size), *((o, (64, 40)) for o in ORIGINS)]:
            expected = crop_on_white(truth, origin, down, size)
            found = slide.read_region(origin, level.index, size)
            np.testing.assert_array_equal(found, expected)
        several = np.empty((len(ORIGINS), 40, 24, 3), np.uint8)
        slide.read_regions(np.array(ORIGINS), level.index, out=several)
        for origin, found in zip(ORIGINS, several, strict=True):
            expected = crop_on_white(truth, origin, down, (24, 40))
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("orientation", TURNED)
def test_a_turned_tiff_is_upright_in_every_layout(
    tmp_path: Path, orientation: int, layout: str
) -> None:
    path = tmp_path / "a.tif"
    kind = replace(LAYOUTS[layout], mpp=(0.25, 0.5), orientation=orientation)
    stored = write_pyramid(path, SIZE, kind)
    upright = [turned_by_pillow(pixels, orientation) for pixels in stored]
    for reader in ("auto", "tiff", *["image"] * (len(stored) == 1)):
        with open_slide(path, reader=reader) as slide:
            assert slide.reader == ("image" if reader == "image" else "tiff")
            assert f"the file's orientation is {orientation}" in " ".join(slide.notes)
            check_pixels(slide, upright)
            if kind.aperio:
                continue  # an Aperio description has one resolution
            swapped: Mpp = (0.5, 0.25) if orientation in SWAPPED else (0.25, 0.5)
            assert slide.slide_mpp == pytest.approx(swapped)
    with pytest.raises(
        SlideOpenError, match=rf"page 0 has orientation {orientation}|not a f"
    ):
        open_slide(path, reader="openslide")


@pytest.mark.parametrize("orientation", TURNED)
def test_jpeg_tiles_are_openslides_of_the_same_file_without_the_tag(
    tmp_path: Path, orientation: int
) -> None:
    kind = PyramidKind(tile=(64, 64))
    write_pyramid(tmp_path / "plain.tif", SIZE, kind)
    write_pyramid(tmp_path / "a.tif", SIZE, replace(kind, orientation=orientation))
    with open_slide(tmp_path / "plain.tif", reader="openslide") as plain:
        stored = plain.read_region((0, 0), 0, SIZE)
    with open_slide(tmp_path / "a.tif") as slide:
        found = slide.read_region((0, 0), 0, slide.size)
        assert slide.choice.startswith("tiff: openslide: left to reader 'tiff'")
        assert not slide.reduced
        assert slide.coarse(0, 8) is None
        assert slide.stored_jpeg(0, 0, 0) is None
    np.testing.assert_array_equal(found, turned_by_pillow(stored, orientation))


@pytest.mark.parametrize("layout", ("tiles-lzw", "strips-deflate"))
@pytest.mark.parametrize("orientation", TURNED)
def test_a_thumbnail_is_pillows_of_the_upright_picture(
    tmp_path: Path,
    orientation: int,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resize, "_STRIP_BYTES", 40_000)  # several strips
    path = tmp_path / "a.tif"
    kind = replace(LAYOUTS[layout], orientation=orientation)
    upright = turned_by_pillow(write_pyramid(path, SIZE, kind)[0], orientation)
    size = (128, 200) if orientation in SWAPPED else (200, 128)
    expected = Image.fromarray(upright).resize(size, Image.Resampling.LANCZOS)
    with open_slide(path) as slide:
        for segments_bytes in (1 << 20, 60_000):  # of a row of segments; both ways
            monkeypatch.setattr(resize, "_SEGMENTS_BYTES", segments_bytes)
            np.testing.assert_array_equal(read_resized(slide, size), expected)
        small = slide.thumbnail((90, 90))
        assert max(small.shape[:2]) == 90
        assert (small.shape[0] > small.shape[1]) == (orientation in SWAPPED)
    with pytest.raises(SlideReadError, match="slide must be open"):
        slide.thumbnail((90, 90))


@pytest.mark.parametrize("orientation", (3, 6))
def test_streamed_tiles_of_a_turned_slide_are_crops_of_the_upright_one(
    tmp_path: Path, orientation: int
) -> None:
    path = tmp_path / "a.tif"
    kind = PyramidKind(compression="lzw", tile=(64, 64), orientation=orientation)
    upright = turned_by_pillow(write_pyramid(path, SIZE, kind)[0], orientation)
    with open_slide(path) as slide:
        places = [(x, y) for y in range(0, 170, 40) for x in range(0, 170, 40)]
        coords_l0 = np.array(places, dtype=np.int64)
        plan = plan_read(slide.levels, slide.slide_mpp, tile_px=40, tile_mpp=0.5)
        slide.expect(coords_l0, plan)
        tiles = np.empty((len(coords_l0), 40, 40, 3), np.uint8)
        slide.read_regions(coords_l0, plan.level, out=tiles)
        cached = slide.stored
        assert isinstance(cached, TiffSlide)
        assert len(cached._cache) == 0  # every segment went with its last use
    for (x, y), tile in zip(places, tiles, strict=True):
        np.testing.assert_array_equal(tile, upright[y : y + 40, x : x + 40])


def test_a_resolution_that_a_person_gives_is_of_the_upright_picture(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.tif"
    write_pyramid(path, SIZE, PyramidKind(compression="lzw", orientation=6))
    with open_slide(path, slide_mpp=(0.25, 0.5)) as slide:
        assert slide.slide_mpp == (0.25, 0.5)
        assert slide.stored.slide_mpp == (0.5, 0.25)


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_exif_turns_a_plain_image(
    tmp_path: Path, suffix: str, orientation: int
) -> None:
    path = tmp_path / f"a.{suffix}"
    exif = Image.Exif()
    exif[TAG] = orientation
    Image.fromarray(position_pixels(SIZE)).save(path, exif=exif)
    with Image.open(path) as image:
        upright = np.asarray(ImageOps.exif_transpose(image))
    with open_slide(path) as slide:
        check_pixels(slide, [upright])


@pytest.mark.parametrize("orientation", (4, 8))
def test_an_associated_image_is_turned_by_its_own_tag(
    tmp_path: Path, orientation: int
) -> None:
    path, label = tmp_path / "a.svs", position_pixels((90, 70))
    write_pyramid(path, SIZE, KINDS["jpeg-tables-aperio"])
    for name in ("thumbnail", "label"):
        tifffile.imwrite(
            path,
            label,
            append=True,
            photometric="rgb",
            rowsperstrip=16,
            description=f"Aperio Image Library v12.0.0\r\n{name} 90x70",
            extratags=[(TAG, "H", 1, orientation, True)],
            metadata=None,
        )
    with open_slide(path) as slide:
        found = slide.associated_image("label")
        assert slide.size == SIZE
    np.testing.assert_array_equal(found, turned_by_pillow(label, orientation))


@pytest.mark.parametrize("orientation", (2, 7))
def test_channels_of_a_turned_file_are_upright(
    tmp_path: Path, orientation: int
) -> None:
    path, plain = tmp_path / "a.tif", tmp_path / "plain.tif"
    stored = position_pixels(SIZE)[..., 2].astype(np.uint16) * 100
    turned = [(TAG, "H", 1, orientation, True)]
    how = {"tile": (64, 64), "photometric": "minisblack", "metadata": None}
    tifffile.imwrite(path, stored, extratags=turned, **how)
    tifffile.imwrite(plain, stored, **how)
    look = Look(channels=("0",))
    with open_slide(plain, look=look) as slide:
        expected = turned_by_pillow(slide.read_region((0, 0), 0, SIZE), orientation)
    with open_slide(path, look=look) as slide:
        check_pixels(slide, [expected])
        assert slide.rendering.startswith("channels channel 0")


def test_a_colour_profile_is_applied_once_to_a_turned_slide(tmp_path: Path) -> None:
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain = PyramidKind(compression="lzw", downsamples=(1,))
    path = tmp_path / "a.tif"
    (stored,) = write_pyramid(path, SIZE, plain)
    turned = [(TAG, "H", 1, 6, True)]
    tifffile.imwrite(
        path, stored, photometric="rgb", iccprofile=profile, extratags=turned
    )
    with open_slide(path, look=Look(icc=True)) as slide:
        calls = list[Size]()
        apply = slide.stored.recolor

        def counted(pixels: RgbArray) -> None:
            calls.append(pixels.shape[1::-1])
            apply(pixels)

        slide.stored.recolor = counted
        found = slide.read_region((0, 0), 0, slide.size)
        assert len(calls) == 1
        slide.thumbnail((100, 100))
        assert sum(height for _, height in calls[1:]) == SIZE[1]  # every row once
    upright = turned_by_pillow(stored, 6)
    assert np.abs(found.astype(int) - upright).max() <= 1


def test_a_turned_slide_is_streamed_by_url(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    kind = PyramidKind(compression="deflate", tile=(64, 64), orientation=8)
    stored = write_pyramid(path, SIZE, kind)
    fsspec.filesystem("memory").pipe("/turned/a.tif", path.read_bytes())
    with open_slide("memory://turned/a.tif") as slide:
        check_pixels(slide, [turned_by_pillow(pixels, 8) for pixels in stored])


def test_levels_that_are_turned_in_different_ways_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    write_pyramid(path, SIZE, PyramidKind(compression="lzw", orientation=3))
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[1].tags[TAG].overwrite(1)
    for reader in ("auto", "tiff", "openslide"):
        with pytest.raises(SlideOpenError, match="orientation"):
            open_slide(path, reader=reader)


@pytest.mark.parametrize("orientation", (4, 6))
def test_a_tag_in_the_first_page_alone_is_that_of_all_levels(
    tmp_path: Path, orientation: int
) -> None:
    path, out = tmp_path / "a.tif", tmp_path / "a.ome.tif"
    finest = position_pixels(SIZE)
    stored = [finest, reduced_pixels(finest, (SIZE[0] // 2, SIZE[1] // 2), 2)]
    turned = [(TAG, "H", 1, orientation, True)]
    with tifffile.TiffWriter(path) as writer:
        for index, pixels in enumerate(stored):
            writer.write(
                pixels,
                tile=(64, 64),
                photometric="rgb",
                subfiletype=int(index > 0),
                extratags=[] if index else turned,
                metadata=None,
            )
    convert(path, out)
    for written in (path, out):
        with open_slide(written) as slide:
            check_pixels(slide, [turned_by_pillow(p, orientation) for p in stored])


@pytest.mark.parametrize("value", (0, 9, 65_535))
def test_a_number_that_no_standard_knows_turns_nothing(
    tmp_path: Path, value: int
) -> None:
    path = tmp_path / "a.tif"
    kind = PyramidKind(compression="lzw", orientation=value)
    stored = write_pyramid(path, SIZE, kind)
    with open_slide(path) as slide:
        check_pixels(slide, stored)


@pytest.mark.parametrize("layout", ("tiles-deflate", "strips-none", "no-levels"))
@pytest.mark.parametrize("orientation", (2, 6))
def test_convert_keeps_the_orientation_and_the_stored_bytes(
    tmp_path: Path, orientation: int, layout: str
) -> None:
    path, out = tmp_path / "a.tif", tmp_path / "a.ome.tif"
    size = (1331, 1112)
    kind = (LAYOUTS | KINDS)[layout]
    kind = replace(kind, mpp=(0.25, 0.5), orientation=orientation)
    stored = write_pyramid(path, size, kind)
    convert(path, out)
    with open_slide(out) as slide, open_slide(path) as source:
        assert slide.size == source.size
        assert slide.slide_mpp == pytest.approx(source.slide_mpp)
        upright = [turned_by_pillow(pixels, orientation) for pixels in stored]
        assert max(slide.levels[-1].size) <= 1024
        for level in slide.levels:
            found = slide.read_region((0, 0), level.index, level.size)
            if level.index < len(upright):
                np.testing.assert_array_equal(found, upright[level.index])
                continue
            made = Image.fromarray(upright[0])
            made = made.resize(level.size, Image.Resampling.BOX)
            assert np.abs(found.astype(int) - np.asarray(made)).mean() < 12


def test_convert_writes_a_turned_photograph_upright(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jpg", tmp_path / "a.ome.tif"
    exif = Image.Exif()
    exif[TAG] = 6
    smooth = np.asarray(Image.fromarray(position_pixels((9, 7))).resize(SIZE))
    Image.fromarray(smooth).save(path, exif=exif, quality=95)
    convert(path, out)
    with open_slide(path) as source, open_slide(out) as slide:
        assert slide.size == source.size == SIZE[::-1]
        assert slide.stored is slide
        a, b = (s.read_region((0, 0), 0, s.size).astype(int) for s in (source, slide))
        assert np.abs(a - b).mean() < 3
