"""Colours and sizes of JPEG blocks are those of the TIFF around them, as libtiff has it."""

import io
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image
from tests.slide.planted import tissue

from thinsection import open_slide
from thinsection.errors import SlideOpenError, SlideReadError
from thinsection.slide.formats.jpeg_streams import (
    END,
    PIXELS,
    START_OF_SCAN,
    walk_segments,
)
from thinsection.slide.formats.tiff_decoder import JpegStreams
from thinsection.types import RgbArray

SIZE = (300, 200)
EDGE = 128
JFIF = bytes.fromhex("ffe000104a46494600010100000100010000")
ADOBE = "ffee000e41646f62650064000000000{}"
MARKERS = {
    "none": b"",
    "jfif": JFIF,
    "adobe-rgb": bytes.fromhex(ADOBE.format(0)),
    "adobe-ycc": bytes.fromhex(ADOBE.format(1)),
    "both": bytes.fromhex(ADOBE.format(0)) + JFIF,
    "exif": b"\xff\xe1\x00\x08Exif\0\0",
}
NAMES = {"numbers": (1, 2, 3), "letters": (82, 71, 66), "zero": (0, 1, 2)}
RGB, YCBCR = 2, 6


@dataclass(frozen=True)
class Stream:
    """How the JPEGs of a file are made."""

    is_rgb: bool = False
    marker: str = "none"
    names: str = "numbers"
    sampling: str = "444"
    in_tables: bool = False  # the marker, and the tables of the streams
    cropped: bool = False  # at the right and lower border


def parts(data: bytes, stream: Stream) -> tuple[bytes, bytes]:
    """Returns the tables and the rest of a JPEG, with the marker and the names."""
    tables, rest = b"", b""
    at = 2
    while True:
        marker = data[at + 1]
        length = struct.unpack(">H", data[at + 2 : at + 4])[0] + 2
        end = len(data) if marker == 0xDA else at + length
        segment = bytearray(data[at:end])
        names = NAMES[stream.names]
        step, first = (3, 10) if 0xC0 <= marker <= 0xC2 else (2, 5)
        if 0xC0 <= marker <= 0xC2 or marker == 0xDA:
            for place, name in enumerate(names):
                segment[first + step * place] = name
        if marker in (0xDB, 0xC4):
            tables += bytes(segment)
        elif not 0xE0 <= marker <= 0xEF:
            rest += bytes(segment)
        at = end
        if marker == 0xDA:
            return tables, rest


def write(
    path: Path, pixels: RgbArray, stream: Stream, tag: int, *, tiled: bool = True
) -> None:
    """Writes a TIFF of JPEGs that are made as `stream` says, with tag 262 as it is."""
    height, width = pixels.shape[:2]
    columns = range(0, width, EDGE) if tiled else range(1)
    edge_x = EDGE if tiled else width
    blocks = []
    tables = b""
    for y in range(0, height, EDGE):
        for x in columns:
            block = pixels[y : y + EDGE, x : x + edge_x]
            right, below = edge_x - block.shape[1], EDGE - block.shape[0]
            if tiled and not stream.cropped:
                block = np.pad(block, ((0, below), (0, right), (0, 0)), mode="edge")
            encoded = imagecodecs.jpeg8_encode(
                np.ascontiguousarray(block),
                level=92,
                colorspace="RGB",
                outcolorspace="RGB" if stream.is_rgb else "YCbCr",
                subsampling=stream.sampling,
            )
            own_tables, rest = parts(encoded, stream)
            marker = MARKERS[stream.marker]
            if stream.in_tables:
                tables = b"\xff\xd8" + marker + own_tables + b"\xff\xd9"
                blocks.append(b"\xff\xd8" + rest)
            else:
                blocks.append(b"\xff\xd8" + marker + own_tables + rest)
    subsampling = {"444": (1, 1), "422": (2, 1), "420": (2, 2)}[stream.sampling]
    with tifffile.TiffWriter(path) as file:
        file.write(
            iter(blocks),
            shape=pixels.shape,
            dtype=np.uint8,
            photometric="ycbcr",
            compression="jpeg",
            metadata=None,
            subsampling=subsampling,
            jpegtables=tables or None,
            tile=(EDGE, EDGE) if tiled else None,
            rowsperstrip=None if tiled else EDGE,
        )
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[0].tags[262].overwrite(tag)


def by_libtiff(path: Path) -> np.ndarray:
    with Image.open(path) as image:  # Pillow decodes JPEGs in TIFFs by libtiff
        return np.asarray(image.convert("RGB"))


def read(address: str) -> tuple[np.ndarray, tuple[str, ...]]:
    with open_slide(address) as slide:
        return slide.read_region((0, 0), 0, SIZE), slide.notes


@pytest.fixture
def pixels() -> RgbArray:
    return tissue(SIZE, 3)


@pytest.mark.parametrize("tag", [RGB, YCBCR])
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("marker", MARKERS)
def test_tag_262_decides_whatever_the_streams_say(
    tmp_path: Path, pixels: RgbArray, marker: str, names: str, tag: int
) -> None:
    for number, (tiled, in_tables) in enumerate(
        [(True, False), (True, True), (False, False)]
    ):
        stream = Stream(tag == RGB, marker, names, in_tables=in_tables)
        path = tmp_path / f"{number}.tif"
        write(path, pixels, stream, tag, tiled=tiled)
        by_path, notes = read(str(path))
        by_url, _ = read(f"file://{path}")
        assert np.abs(by_path.astype(int) - pixels).mean() < 3
        np.testing.assert_array_equal(by_url, by_path)
        judged = by_libtiff(path)
        assert np.abs(by_path.astype(int) - judged).max() <= 1
        own = {"jfif": YCBCR, "both": YCBCR, "adobe-rgb": RGB, "adobe-ycc": YCBCR}
        letters = RGB if names == "letters" else tag
        is_contradicted = own.get(marker, letters) != tag
        assert any("JPEG blocks hold" in note for note in notes) == is_contradicted


@pytest.mark.parametrize("sampling", ["422", "420"])
@pytest.mark.parametrize("tiled", [True, False])
def test_colours_at_half_the_size_are_read_as_libtiff_reads_them(
    tmp_path: Path, pixels: RgbArray, sampling: str, tiled: bool
) -> None:
    path = tmp_path / "a.tif"
    write(
        path,
        pixels,
        Stream(False, "adobe-rgb", "letters", sampling),
        YCBCR,
        tiled=tiled,
    )
    ours, _ = read(str(path))
    assert np.abs(ours.astype(int) - by_libtiff(path)).max() <= 1


def test_rgb_in_a_file_of_ycbcr_is_shown_as_the_file_says(
    tmp_path: Path, pixels: RgbArray
) -> None:
    path = tmp_path / "a.tif"
    write(path, pixels, Stream(True, "adobe-rgb"), YCBCR)
    ours, notes = read(str(path))
    assert np.abs(ours.astype(int) - by_libtiff(path)).max() <= 1
    assert notes[0].startswith(
        "the file says that its JPEG blocks hold YCbCr, the blocks say RGB"
    )


@pytest.mark.parametrize("in_tables", [True, False])
@pytest.mark.parametrize("sampling", ["444", "420"])
def test_blocks_may_end_where_the_picture_ends(
    tmp_path: Path, pixels: RgbArray, sampling: str, in_tables: bool
) -> None:
    whole, cropped = tmp_path / "whole.tif", tmp_path / "cropped.tif"
    write(whole, pixels, Stream(sampling=sampling), YCBCR)
    write(
        cropped,
        pixels,
        Stream(sampling=sampling, in_tables=in_tables, cropped=True),
        YCBCR,
    )
    ours, _ = read(str(cropped))
    assert np.abs(ours.astype(int) - pixels).mean() < 3
    expected, _ = read(str(whole))
    inside = (slice(0, EDGE), slice(0, 2 * EDGE))
    np.testing.assert_array_equal(ours[inside], expected[inside])
    with (
        open_slide(cropped, reader="tiff") as slide,
        open_slide(whole, reader="tiff") as other,
    ):
        for factor in (2, 4, 8):
            level = slide.coarse(0, factor)
            same = other.coarse(0, factor)
            assert level is not None
            assert same is not None
            a = slide.read_region((0, 0), level.index, level.size)
            b = other.read_region((0, 0), same.index, same.size)
            assert a.shape == b.shape
            assert np.abs(a.astype(int) - b).mean() < 1


def test_a_block_that_is_smaller_than_its_part_of_the_picture_is_an_error(
    tmp_path: Path, pixels: RgbArray
) -> None:
    path = tmp_path / "a.tif"
    write(path, pixels, Stream(cropped=True), YCBCR)
    with tifffile.TiffFile(path, mode="r+b") as file:
        tags = file.pages[0].tags
        offsets, counts = list(tags[324].value), list(tags[325].value)
        # the block of the corner in the place of the first one
        offsets[0], counts[0] = offsets[-1], counts[-1]
        tags[324].overwrite(offsets)
        tags[325].overwrite(counts)
    with (
        open_slide(path, reader="tiff") as slide,
        pytest.raises(
            SlideReadError, match=r"44 x 72 of \(128, 128\) px at column 0, row 0"
        ),
    ):
        slide.read_region((0, 0), 0, SIZE)


def test_cmyk_and_separate_ycbcr_are_refused(tmp_path: Path, pixels: RgbArray) -> None:
    path = tmp_path / "a.tif"
    write(path, pixels, Stream(), 5)
    with pytest.raises(SlideOpenError, match="photometric interpretation 5"):
        open_slide(path, reader="tiff")
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    tifffile.imwrite(
        path,
        planes,
        photometric="rgb",
        planarconfig="separate",
        compression="jpeg",
        tile=(64, 64),
    )
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[0].tags[262].overwrite(YCBCR)
    with pytest.raises(SlideOpenError, match="YCbCr in separate planes"):
        open_slide(path, reader="tiff")


@pytest.mark.parametrize(
    ("settings", "scans", "restarts"),
    [
        ({"quality": 70}, 1, False),
        ({"quality": 70, "progressive": True}, 10, False),  # libjpeg's script for YCbCr
        ({"quality": 70, "restart_marker_rows": 1}, 1, True),
        (
            {
                "quality": 70,
                "exif": b"Exif\0\0MM\0*\0\0\0\x08" + bytes(6),
                "comment": "x",
            },
            1,
            False,
        ),
    ],
)
def test_the_parts_of_a_stream_are_all_of_it(
    settings: dict[str, Any], scans: int, restarts: bool
) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (75, 52, 3), dtype=np.uint8)
    stored = io.BytesIO()
    Image.fromarray(pixels).save(stored, "JPEG", **settings)
    data = stored.getvalue()
    parts = list(walk_segments(data))
    assert b"".join(data[begin:end] for _, begin, end in parts) == data[2:]
    markers = [part.marker for part in parts]
    assert markers.count(START_OF_SCAN) == markers.count(PIXELS) == scans
    assert markers[-1] == END
    pixel_parts = [data[p.begin : p.end] for p in parts if p.marker == PIXELS]
    assert (b"\xff\xd0" in pixel_parts[0]) is restarts
    # Pillow's own reading of the same segments
    with Image.open(stored) as image:
        names = [f"APP{m - 0xE0}" for m in markers if 0xE0 <= m < 0xF0]
        names += ["COM" for m in markers if m == 0xFE]
        assert sorted(name for name, _ in image.applist) == sorted(names)  # type: ignore[attr-defined]


def test_stray_bytes_belong_to_no_part_and_a_cut_segment_is_refused() -> None:
    quantizer = b"\xff\xdb\x00\x43\0" + bytes(range(1, 65))
    data = b"\xff\xd8" + b"name\xff\xff" + quantizer + b"\xff\x00\xff\xd9rest"
    parts = [(part.marker, data[part.begin : part.end]) for part in walk_segments(data)]
    assert parts == [(0xDB, quantizer), (END, b"\xff\xd9")]
    assert list(walk_segments(data, max_stray_bytes=4)) == []
    with pytest.raises(ValueError, match="ends within one of its segments"):
        list(walk_segments(data[:20]))


def test_segments_that_begin_unalike_are_completed_as_if_each_were_the_first(
    tmp_path: Path, pixels: RgbArray
) -> None:
    """Sizes, markers, qualities and damage of two kinds take turns, and repeat."""
    write(tmp_path / "a.tif", pixels, Stream(), YCBCR)
    stored = []
    for quality, size, extra in (
        (50, (64, 64), {}),
        (50, (64, 48), {}),
        (90, (64, 64), {"exif": b"Exif\0\0" + bytes(8)}),
        (50, (64, 64), {"progressive": True}),
    ):
        file = io.BytesIO()
        picture = Image.fromarray(pixels).resize(size)
        picture.save(file, "JPEG", quality=quality, **extra)
        data = file.getvalue()
        middle = data.index(b"\xff\xc2" if extra.get("progressive") else b"\xff\xc0")
        damaged = data[: middle + 7] + b"\x20" + data[middle + 8 :]
        stored += [data, data[:-40], damaged, data[:60]]
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        page = file.pages[0]
        streams = JpegStreams(page)
        order = np.random.default_rng(0).integers(len(stored), size=200)
        for number in [*range(len(stored)), *order.tolist()]:
            data = memoryview(stored[number])
            try:
                alone = JpegStreams(page).whole(data)
            except ValueError as error:
                with pytest.raises(ValueError, match=str(error)):
                    streams.whole(data)
            else:
                assert streams.whole(data) == alone
