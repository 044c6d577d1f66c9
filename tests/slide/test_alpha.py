"""Transparent pixels show white in every layout and by every reader, to the nearest value."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from thinsection.errors import SlideOpenError
from thinsection.slide import open_slide
from thinsection.slide.base import on_white
from thinsection.slide.convert import convert
from thinsection.slide.formats.openslide_reader import premultiply_again
from thinsection.testing.slide_contract import crop_on_white
from thinsection.testing.synthetic import position_pixels
from thinsection.types import RgbArray, Size

SIZE: Size = (301, 187)
ASSOCIATED, UNASSOCIATED, UNSPECIFIED = 1, 2, 0  # TIFF's ExtraSamples
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "lzw": {"compression": "lzw"},
    "deflate": {"compression": "deflate"},
    "deflate-predictor": {"compression": "deflate", "predictor": True},
    "zstd": {"compression": "zstd"},
    "jpeg2000": {"compression": "jpeg2000", "compressionargs": {"level": 0}},
    "webp": {
        "compression": "webp",
        "compressionargs": {"lossless": True},
    },
    "jpegxl": {"compression": "jpegxl", "compressionargs": {"lossless": True}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tiled": {"tile": (64, 48)},
    "striped": {"rowsperstrip": 24},
    "planes": {"tile": (64, 48), "planarconfig": "separate"},
}
OPENSLIDES = ("none", "lzw", "deflate", "deflate-predictor", "zstd")


def rgba_pixels() -> RgbArray:
    """Every alpha, from clear to opaque, beside colours that are a function of (x, y)."""
    width, height = SIZE
    y, x = np.mgrid[0:height, 0:width]
    alpha = (3 * x + 5 * y) % 256
    alpha[:20] = 0
    alpha[20:60] = 255
    return np.dstack([position_pixels(SIZE), alpha.astype(np.uint8)])


def composite(pixels: RgbArray) -> RgbArray:
    """The plain reference: real numbers, rounded once."""
    stored = pixels.astype(np.float64)
    alpha = stored[..., 3:] / 255
    return np.rint(stored[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def premultiplied(pixels: RgbArray) -> RgbArray:
    stored = pixels.astype(np.float64)
    colour = np.rint(stored[..., :3] * stored[..., 3:] / 255).astype(np.uint8)
    return np.dstack([colour, pixels[..., 3]])


def write(path: Path, pixels: RgbArray, layout: str, codec: str, kind: int) -> None:
    """A level, and in tiled files one of half the size."""
    tifffile_options = {**LAYOUTS[layout], **CODECS[codec]}
    with tifffile.TiffWriter(path) as writer:
        for step in (1, 2)[: 1 + (layout == "tiled")]:
            level = pixels[::step, ::step]
            if layout == "planes":
                level = np.moveaxis(level, 2, 0)
            writer.write(
                np.ascontiguousarray(level),
                photometric="rgb",
                extrasamples=[kind],
                subfiletype=int(step > 1),
                metadata=None,
                **tifffile_options,
            )


def readers_of(layout: str, codec: str) -> list[str]:
    """Readers that open such a file."""
    readers = ["auto"]
    if layout != "planes":
        readers.append("tiff")
    if layout == "striped":
        readers.append("image")
    elif codec in OPENSLIDES:
        readers.append("openslide")
    return readers


@pytest.mark.parametrize("kind", (ASSOCIATED, UNASSOCIATED))
@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        *product(("tiled", "striped"), CODECS),
        ("planes", "none"),
        ("planes", "deflate"),
    ],
)
def test_a_transparent_tiff_is_on_white(
    tmp_path: Path, layout: str, codec: str, kind: int
) -> None:
    path, straight = tmp_path / "a.tif", rgba_pixels()
    expected = composite(straight)
    stored = premultiplied(straight) if kind == ASSOCIATED else straight
    write(path, stored, layout, codec, kind)
    found = {}
    for reader in readers_of(layout, codec):
        with open_slide(path, reader=reader) as slide:
            found[reader] = slide.reader
            whole = slide.read_region((0, 0), 0, SIZE)
            np.testing.assert_array_equal(whole, expected)
            for origin in ((0, 0), (31, 45), (-7, -3), (250, 150)):
                part = slide.read_region(origin, 0, (70, 61))
                crop = crop_on_white(expected, origin, 1.0, (70, 61))
                np.testing.assert_array_equal(part, crop)
            for level in slide.levels[1:]:
                half = slide.read_region((0, 0), 1, level.size)
                if slide.reader == "tiff":  # OpenSlide interpolates there
                    np.testing.assert_array_equal(half, composite(straight[::2, ::2]))
    assert found["auto"] == ("openslide" if layout == "planes" else "tiff")


@pytest.mark.parametrize("codec", ("none", "deflate"))
@pytest.mark.parametrize("layout", ("tiled", "striped"))
def test_a_fourth_sample_that_is_no_alpha_is_not_shown_and_hides_nothing(
    tmp_path: Path, layout: str, codec: str
) -> None:
    path, stored = tmp_path / "a.tif", rgba_pixels()
    write(path, stored, layout, codec, UNSPECIFIED)
    for reader in ("auto", "tiff"):
        with open_slide(path, reader=reader) as slide:
            assert slide.reader == "tiff"
            whole = slide.read_region((0, 0), 0, SIZE)
        np.testing.assert_array_equal(whole, stored[..., :3])
    with pytest.raises(SlideOpenError, match="left to reader 'tiff': page 0 has a f"):
        open_slide(path, reader="openslide")


def test_without_a_word_on_its_fourth_sample_a_tiff_is_as_pillow_shows_it(
    tmp_path: Path,
) -> None:
    path, stored = tmp_path / "a.tif", rgba_pixels()
    write(path, stored, "tiled", "none", UNASSOCIATED)
    with tifffile.TiffFile(path) as file:
        tag = file.pages[0].tags[338]
        place = tag.offset
    data = bytearray(path.read_bytes())
    data[place : place + 2] = (65_000).to_bytes(2, "little")  # a tag of nobody's
    path.write_bytes(data)
    with Image.open(path) as image:
        assert image.mode == "RGBA"
        pillows = np.asarray(image)
    with open_slide(path) as slide:
        whole = slide.read_region((0, 0), 0, SIZE)
        assert slide.reader == "tiff"
    np.testing.assert_array_equal(whole, composite(pillows))


@pytest.mark.parametrize("mode", ("RGBA", "LA", "P"))
def test_a_transparent_png_is_on_white(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    straight = rgba_pixels()
    image = Image.fromarray(straight)
    if mode == "LA":
        image = image.convert("LA")
    if mode == "P":  # a palette of which one colour is clear: chunk tRNS
        image = image.convert("RGB").quantize(64)
        image.info["transparency"] = 7
    image.save(path)
    with Image.open(path) as stored:
        expected = composite(np.asarray(stored.convert("RGBA")))
    with open_slide(path) as slide:
        whole = slide.read_region((0, 0), 0, SIZE)
        assert slide.held_bytes >= SIZE[0] * SIZE[1] * {"P": 4, "LA": 5}.get(mode, 4)
    np.testing.assert_array_equal(whole, expected)
    assert (expected == 255).all(axis=2).any()


def test_every_colour_and_alpha_is_rounded_to_the_nearest_value() -> None:
    colour, alpha = np.meshgrid(np.arange(256), np.arange(256))
    pixels = np.dstack([colour, colour, colour, alpha]).astype(np.uint8)
    np.testing.assert_array_equal(on_white(pixels), composite(pixels))
    stored = premultiplied(pixels)
    np.testing.assert_array_equal(
        on_white(stored, premultiplied=True), composite(pixels)
    )
    # as openslide-python divides: 255 * colour / alpha, rounded down
    divided = stored.astype(np.uint32)
    divided[..., :3] = 255 * divided[..., :3] // np.maximum(divided[..., 3:], 1)
    again = premultiply_again(divided.astype(np.uint8))
    np.testing.assert_array_equal(again, stored)


def test_a_converted_transparent_slide_keeps_its_levels_and_is_on_white(
    tmp_path: Path,
) -> None:
    path, out = tmp_path / "a.tif", tmp_path / "a.ome.tif"
    y, x = np.mgrid[0:1200, 0:1500]
    colour = np.dstack([x // 8, y // 8, (x + y) // 16]).astype(np.uint8)
    pixels = np.dstack([colour, np.where(x < 700, 0, 255).astype(np.uint8)])
    tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", metadata=None)
    convert(path, out)
    with open_slide(out) as slide:
        assert len(slide.levels) == 2
        for level in slide.levels:
            found = slide.read_region((0, 0), level.index, level.size)
            edge = round(700 / level.downsample)
            assert found[:, : edge - 16].min() >= 250
            assert found[:, edge + 16 :].mean() < 150
