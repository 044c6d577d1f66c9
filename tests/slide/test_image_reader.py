"""Plain images: PNG and JPEG in one piece within a bound, flat TIFFs in bounded memory."""

import io
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from tests.slide.measured_reading import write_flat

from thinsection.errors import SlideOpenError, SlideReadError
from thinsection.slide import open_slide
from thinsection.slide.formats import image_reader
from thinsection.slide.formats.image_reader import read_header
from thinsection.testing import run_and_measure
from thinsection.testing.slide_contract import SIZE, crop_on_white, regions
from thinsection.testing.synthetic import position_pixels


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_an_image_is_a_slide_of_one_level_without_mpp(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(position_pixels(SIZE)).save(path)
    truth = np.asarray(Image.open(path))
    with open_slide(path) as slide:
        assert (slide.reader, slide.size, slide.slide_mpp) == ("image", SIZE, None)
        assert slide.choice == "image: OpenSlide does not know the format"
        for origin, size in regions(slide.size):
            expected = crop_on_white(truth, origin, 1.0, size)
            np.testing.assert_array_equal(slide.read_region(origin, 0, size), expected)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "I;16", "P", "1"])
def test_other_pngs_become_rgb_on_white(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    gray = position_pixels((60, 40))[..., 0]
    if mode == "I;16":
        image = Image.fromarray(gray.astype(np.uint16) * 257)
        expected = np.stack([gray] * 3, axis=2)
    else:
        image = Image.fromarray(position_pixels((60, 40))).convert(
            "RGBA" if "A" in mode else "RGB"
        )
        image = image.convert(mode)
        if "A" in mode:
            image.putalpha(Image.fromarray(gray))
        rgba = np.asarray(image.convert("RGBA")).astype(float)
        alpha = rgba[..., 3:] / 255
        expected = np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
    image.save(path)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, (60, 40)), expected)


def test_a_gray_tiff_becomes_rgb(tmp_path: Path) -> None:
    gray = position_pixels((60, 40))[..., 0]
    tifffile.imwrite(tmp_path / "a.tif", gray, photometric="minisblack", metadata=None)
    with open_slide(tmp_path / "a.tif", reader="image") as slide:
        pixels = slide.read_region((0, 0), 0, (60, 40))
    np.testing.assert_array_equal(pixels, np.stack([gray] * 3, axis=2))


def test_an_image_beyond_the_bound_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(position_pixels(SIZE)).save(tmp_path / "a.png")
    monkeypatch.setattr(image_reader, "MAX_DECODED_BYTES", SIZE[0] * SIZE[1] * 3 - 1)
    with pytest.raises(
        SlideOpenError, match="600 x 436 px of PNG cannot be read in parts; convert"
    ):
        open_slide(tmp_path / "a.png")


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_more_px_than_the_file_has_room_for_are_refused_before_they_are_made(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (3000, 2000), "white").save(
        path, quality=1, progressive=True, optimize=True
    )
    with open_slide(path) as slide:  # nothing is smaller than a blank image
        assert slide.size == (3000, 2000)
    data = bytearray(path.read_bytes())
    at = data.find(b"IHDR") + 4 if suffix == "png" else data.find(b"\xff\xc2") + 5
    size = 4 if suffix == "png" else 2
    data[at : at + 2 * size] = (20_000).to_bytes(size, "big") * 2
    path.write_bytes(data)
    with pytest.raises(
        SlideOpenError, match=r"20000 x 20000 px of (PNG|JPEG) cannot fit in so small"
    ):
        open_slide(path)


@pytest.mark.check
@pytest.mark.parametrize(
    ("mode", "px_bytes"), [("L", 4), ("P", 3), ("LA", 5), ("RGBA", 4)]
)
def test_an_image_takes_the_bytes_that_it_says(
    tmp_path: Path, mode: str, px_bytes: int
) -> None:
    path, pixels = tmp_path / "a.png", position_pixels((3000, 3100))
    Image.fromarray(pixels).convert(mode).save(path, compress_level=1)
    measured = run_and_measure(
        "tests.slide.measured_reading", "read_corner", path=str(path)
    )
    with open_slide(path) as slide:
        assert slide.held_bytes == 3000 * 3100 * px_bytes
    assert measured.growth_bytes < 3000 * 3100 * px_bytes + 24e6


@pytest.mark.check
@pytest.mark.parametrize(
    ("subsampling", "px_bytes"), [("4:2:0", 6), ("4:2:2", 7), ("4:4:4", 9)]
)
def test_a_progressive_jpeg_takes_the_bytes_that_it_says(
    tmp_path: Path, subsampling: str, px_bytes: int
) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(position_pixels((3000, 3100))).save(
        path, progressive=True, subsampling=subsampling
    )
    measured = run_and_measure(
        "tests.slide.measured_reading", "read_corner", path=str(path)
    )
    with open_slide(path) as slide:
        assert slide.held_bytes == pytest.approx(3000 * 3100 * px_bytes, rel=0.01)
        assert 0.95 * slide.held_bytes < measured.growth_bytes
        assert measured.growth_bytes < slide.held_bytes + 24e6


def test_a_small_progressive_jpeg_that_would_take_gigabytes_is_refused_on_opening(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jpg"
    Image.new("RGB", (300, 200)).save(path, progressive=True, subsampling="4:4:4")
    data = bytearray(path.read_bytes())
    at = data.find(b"\xff\xc2") + 5
    data[at : at + 4] = (26_000).to_bytes(2, "big") * 2
    path.write_bytes(data + bytes(376_000 - len(data)))
    with pytest.raises(
        SlideOpenError, match=r"26000 x 26000 px of JPEG cannot be read"
    ):
        open_slide(path)


def jpeg_head(marker: int, factors: tuple[int, ...], in_scan: int) -> bytes:
    """The segments before the data of a JPEG of 101 x 50 px."""
    count = len(factors)
    frame = bytes([8, 0, 50, 0, 101, count])
    frame += b"".join(bytes([n, factor, 0]) for n, factor in enumerate(factors))
    scan = bytes([in_scan]) + bytes(2 * in_scan + 3)
    both = ((marker, frame), (0xDA, scan))
    parts = (
        bytes([0xFF, 0xFF, code]) + (len(part) + 2).to_bytes(2, "big") + part
        for code, part in both
    )
    return b"\xff\xd8" + b"".join(parts)


@pytest.mark.parametrize(
    ("marker", "factors", "in_scan", "blocks"),
    [
        (0xC0, (0x22, 0x11, 0x11), 3, 0),  # baseline, in one scan
        (0xC0, (0x22, 0x11, 0x11), 1, 14 * 8 + 2 * 7 * 4),  # in three scans
        (0xC2, (0x22, 0x11, 0x11), 3, 14 * 8 + 2 * 7 * 4),  # progressive, 4:2:0
        (0xCA, (0x11, 0x11, 0x11), 3, 3 * 13 * 7),  # arithmetic, progressive, 4:4:4
        (0xC2, (0x21, 0x11, 0x11), 3, 14 * 7 + 2 * 7 * 7),  # 4:2:2
        (0xC2, (0x11,), 1, 13 * 7),  # gray
    ],
)
def test_the_coefficients_of_several_scans_are_counted(
    marker: int, factors: tuple[int, ...], in_scan: int, blocks: int
) -> None:
    data = jpeg_head(marker, factors, in_scan)
    header = read_header(io.BytesIO(data), len(data))
    assert header.size == (101, 50)
    assert header.peak_bytes == 101 * 50 * 3 + blocks * 128


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_truncated_image_fails_when_it_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cut.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:-3000])
    with (
        open_slide(path) as slide,
        pytest.raises(SlideReadError, match=rf"cut\.{suffix}"),
    ):
        slide.read_region((0, 0), 0, (10, 10))


def test_a_closed_image_is_not_decoded_again(tmp_path: Path) -> None:
    Image.fromarray(position_pixels(SIZE)).save(tmp_path / "a.png")
    slide = open_slide(tmp_path / "a.png")
    slide.close()
    with pytest.raises(SlideReadError, match="slide must be open"):
        slide.read_region((0, 0), 0, (10, 10))


@pytest.mark.check
@pytest.mark.parametrize("compression", [None, "lzw"])
def test_a_flat_tiff_takes_memory_that_does_not_grow_with_its_height(
    tmp_path: Path, compression: str | None
) -> None:
    growth = []
    for height in (12_000, 24_000):
        path = tmp_path / f"{height}.tif"
        write_flat(path, 4000, height, compression)
        measured = run_and_measure(
            "tests.slide.measured_reading", "read_flat", path=str(path)
        )
        growth.append(measured.growth_bytes)
    assert growth[1] < growth[0] + 12e6  # 144 MB more px were read
