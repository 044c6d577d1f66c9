"""Damaged files are refused by name, harm no process and cost no sound slide beside them."""

import io
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import imagecodecs
import numpy as np
import psutil
import pytest
import tifffile
from PIL import Image

from thinsection.errors import ProvedDamageError, SlideOpenError, SlideReadError
from thinsection.slide import child, open_slide
from thinsection.slide.child import try_in_child
from thinsection.slide.formats.tiff_decoder import check_jpeg2000_size
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.slide.geometry import plausible_mpp
from thinsection.testing import run_and_measure
from thinsection.testing.slide_contract import KINDS, SIZE
from thinsection.testing.synthetic import write_pyramid

HUGE = 2**31 - 1
WIDTH, LENGTH, ROWS, TILE_WIDTH, TILE_LENGTH = 256, 257, 278, 322, 323
OFFSETS, COUNTS = 324, 325


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.tif"
    write_pyramid(path, SIZE, KINDS["jpeg-420"])
    return path


def set_tag(path: Path, page: int, code: int, value: int) -> None:
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[page].tags[code].overwrite(value)


def add_thumbnail(path: Path) -> None:
    """A page of strips, as Aperio's thumbnail."""
    pixels = np.zeros((50, 70, 3), np.uint8)
    tifffile.imwrite(
        path, pixels, append=True, photometric="rgb", rowsperstrip=16, metadata=None
    )


@pytest.mark.parametrize("code", [TILE_WIDTH, TILE_LENGTH])
def test_a_tile_size_over_which_openslide_aborts_is_only_that_files_error(
    path: Path, code: int
) -> None:
    set_tag(path, 0, code, HUGE)
    for reader in ("auto", "openslide"):
        with pytest.raises(
            SlideOpenError, match="openslide: its separate process died"
        ):
            open_slide(path, reader=reader)


@pytest.mark.parametrize("value", [0, HUGE])
@pytest.mark.parametrize("code", [WIDTH, LENGTH, TILE_WIDTH, TILE_LENGTH])
def test_a_size_of_nothing_is_refused_by_every_reader_with_the_page(
    path: Path, code: int, value: int
) -> None:
    set_tag(path, 0, code, value)
    with pytest.raises(
        SlideOpenError, match=r"no reader opens 'a\.tif': tiff: page 0 (has|lists)"
    ):
        open_slide(path)


@pytest.mark.parametrize("value", [0, HUGE])
@pytest.mark.parametrize("code", [WIDTH, LENGTH, ROWS])
def test_a_damaged_thumbnail_page_loses_no_sound_slide(
    path: Path, code: int, value: int
) -> None:
    add_thumbnail(path)
    with open_slide(path) as slide:
        assert (slide.checked, slide.associated_names) == (True, ("thumbnail",))
        expected = slide.read_region((0, 0), 0, SIZE)
    set_tag(path, 2, code, value)
    with open_slide(path) as slide:
        assert slide.reader == "tiff"
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), expected)


def test_whatever_a_parser_or_decoder_raises_is_a_slide_error_with_the_cause(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("deep inside")

    with open_slide(path, reader="tiff") as slide:
        monkeypatch.setattr(TiffSlide, "_fill", fail)
        with pytest.raises(
            SlideReadError, match=r"deep inside.* in 'a\.tif'"
        ) as refused:
            slide.read_region((0, 0), 0, (10, 10))
        assert isinstance(refused.value.__cause__, ZeroDivisionError)
    monkeypatch.setattr(TiffSlide, "__init__", fail)
    with pytest.raises(SlideOpenError, match=r"tiff: .*deep inside") as opened:
        open_slide(path, reader="tiff")
    assert isinstance(opened.value.__cause__, ZeroDivisionError)
    with open_slide(path) as slide:
        assert slide.reader == "openslide"


def test_the_child_stays_warm_and_is_started_again_after_a_death(path: Path) -> None:
    def child() -> int:
        living = (
            p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE
        )
        (ours,) = (p for p in living if "child.serve()" in " ".join(p.cmdline()))
        return int(ours.pid)

    try_in_child(str(path), "openslide")
    first = child()
    try_in_child(str(path), "openslide")
    assert child() == first
    os.kill(first, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first)], timeout=30)
    try_in_child(str(path), "openslide")
    assert child() != first


@pytest.mark.check
@pytest.mark.parametrize("samples", [1, 3])
def test_a_jpeg_larger_than_its_tile_is_refused_before_it_is_decoded(
    tmp_path: Path, samples: int
) -> None:
    path = tmp_path / "a.tif"
    shape = (256, 256, samples)[: 2 + (samples > 1)]
    stored = io.BytesIO()
    Image.new("RGB" if samples > 1 else "L", (9000, 9000)).save(stored, "JPEG")
    tifffile.imwrite(
        path,
        (data for data in [stored.getvalue()] * 4),
        shape=shape,
        dtype=np.uint8,
        tile=(128, 128),
        compression="jpeg",
        photometric="ycbcr" if samples > 1 else "minisblack",
        metadata=None,
    )
    measured = run_and_measure(
        "tests.slide.measured_reading", "read_refused", path=str(path)
    )
    assert "9000" in measured.result
    assert measured.growth_bytes < 24e6  # the JPEG has 81 or 243 MB of px


def relist(path: Path, page: int, code: int, values: tuple[int, ...]) -> None:
    """Writes other values into a list of a page."""
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[page].tags[code].overwrite(values)


def link_pages(path: Path, page: int, offset: int) -> None:
    """Makes a page say that the page after it lies at an offset."""
    with tifffile.TiffFile(path) as file:
        form = file.tiff
        start = file.pages[page].offset
        count = len(file.pages[page].tags)
        place = start + form.tagnosize + count * form.tagsize
        data = struct.pack(form.offsetformat, offset)
    with path.open("r+b") as out:
        out.seek(place)
        out.write(data)


def loses_segments(path: Path) -> None:
    with tifffile.TiffFile(path) as file:
        offsets = file.pages[0].dataoffsets
    relist(path, 0, OFFSETS, offsets[:2])


def loses_segments_of_a_level(path: Path) -> None:
    with tifffile.TiffFile(path) as file:
        counts = file.pages[1].databytecounts
    assert len(counts) > 1
    relist(path, 1, COUNTS, counts[:1])


def ends_early(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 20_000)


def ends_early_within_pixels(path: Path) -> None:
    write_pyramid(path, SIZE, replace(KINDS["jpeg-420"], downsamples=(1,)))
    os.truncate(path, path.stat().st_size - 20_000)


def is_a_loop(path: Path) -> None:
    with tifffile.TiffFile(path) as file:
        first = file.pages[0].offset
    link_pages(path, 1, first)


def is_a_loop_of_one(path: Path) -> None:
    with tifffile.TiffFile(path) as file:
        first = file.pages[0].offset
    link_pages(path, 0, first)


def goes_on_beyond_the_end(path: Path) -> None:
    link_pages(path, 1, path.stat().st_size + 1000)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (loses_segments, r"page 0 lists 2 of \d+ segments"),
        (loses_segments_of_a_level, r"page 1 lists 1 of \d+ segments"),
        (ends_early, "beyond the end"),
        (ends_early_within_pixels, r"page 0 has \d of \d+ segments beyond the end"),
        (is_a_loop, "a loop, from page 1 to page 0"),
        (is_a_loop_of_one, "a loop, from page 0 to page 0"),
        (goes_on_beyond_the_end, "continues beyond the end"),
    ],
)
def test_proved_damage_ends_the_opening_at_once_and_asks_nobody_else(
    path: Path,
    harm: Callable[[Path], None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a child was asked")

    monkeypatch.setattr(child, "try_in_child", forbidden)
    write_pyramid(path, SIZE, replace(KINDS["jpeg-420"], downsamples=(1, 2)))
    harm(path)
    for reader in ("auto", "openslide", "tiff"):
        began_s = time.process_time()
        with pytest.raises(ProvedDamageError, match=words) as refused:
            open_slide(path, reader=reader)
        assert (
            time.process_time() - began_s < 0.5
        )  # .1 without other work on the machine
        assert "a.tif" in str(refused.value)
    with pytest.raises(ProvedDamageError, match=words):
        open_slide(f"file://{path}")


def test_empty_blocks_and_impossible_resolutions_are_notes(path: Path) -> None:
    write_pyramid(path, SIZE, replace(KINDS["jpeg-420"], downsamples=(1,)))
    with tifffile.TiffFile(path) as file:
        counts = list(file.pages[0].databytecounts)
    counts[1] = counts[4] = 0
    relist(path, 0, COUNTS, tuple(counts))
    with open_slide(path, reader="tiff") as slide:
        assert slide.notes == (
            f"blocks without bytes, which are shown white: 2 of {len(counts)} on level 0",
        )
    for mpp in ((0.499, 0.00116), (0.5, 2.5), (0.002, 0.002), (300.0, 300.0)):
        believed, note = plausible_mpp(mpp)
        assert believed is None
        assert "not possible for a slide, so its resolution counts as missing" in note
    for good in ((0.25, 0.5), (0.05, 0.05), (16.0, 16.0)):
        assert plausible_mpp(good) == (good, "")


@pytest.mark.parametrize(("place", "bit"), [(9, 64), (13, 64), (11, 1)])
@pytest.mark.parametrize("codec", ["j2k", "jp2"])
def test_a_jpeg_2000_that_claims_more_than_its_tile_is_not_decoded(
    place: int, bit: int, codec: str
) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (48, 64, 3)).astype(np.uint8)
    data = bytearray(imagecodecs.jpeg2k_encode(pixels, codecformat=codec))
    out = np.empty_like(pixels)
    check_jpeg2000_size(data, out)
    start = data.index(b"\xff\x4f\xff\x51")
    data[start + place] |= bit
    with pytest.raises(ValueError, match=r"JPEG 2000 of .* px, expected 64 x 48"):
        check_jpeg2000_size(data, out)
