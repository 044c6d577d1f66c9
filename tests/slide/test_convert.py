"""Slides written anew: image data equal in bytes, levels and resolution kept, nothing told."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image

import thinsection
from thinsection import open_slide
from thinsection.errors import InvalidInputError, OutputError
from thinsection.slide.convert import COARSEST_PX, convert, deidentify, identifying
from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import PyramidKind, position_pixels, write_pyramid
from thinsection.types import MIB

APERIO = (
    "Aperio Image Library v11.2.1\r\n{size} [0,0 {size}] (256x256) JPEG/RGB Q=70"
    "|AppMag = 20|MPP = 0.4990|Date = 12/29/09|User = somebody|Filename = P-1234|ImageID = 77"
)
SECRETS = (b"somebody", b"P-1234", b"12/29/09", b"hospital", b"2009:12:29", b"LABEL")


def write_scan(path: Path, size: tuple[int, int] = (1400, 900)) -> None:
    """As a scanner writes it: levels 1 and 4, thumbnail, label and macro; names in many places."""
    levels = [position_pixels(size), position_pixels((size[0] // 4, size[1] // 4))]
    words = APERIO.format(size=f"{size[0]}x{size[1]}")
    tile: dict[str, Any] = {"tile": (256, 256), "compression": "jpeg", "photometric": "rgb"}
    # DocumentName and ImageUniqueID, as many programs write them
    told = [(269, 2, 0, "P-1234 hospital", True), (42016, 2, 0, "hospital-7", True)]
    with tifffile.TiffWriter(path) as file:
        common: dict[str, Any] = {"metadata": None, "software": "hospital scanner"}
        file.write(levels[0], description=words, datetime="2009:12:29 10:00:00", **tile,
                   extratags=told, **common)  # fmt: skip
        file.write(levels[1][::2, ::2], description=words, rowsperstrip=16, **common)
        file.write(levels[1], description=words, **tile, **common)
        for name, kind in (("label", 1), ("macro", 9)):
            image = np.full((64, 96, 3), 200, np.uint8)
            image[0, 0] = list(b"LAB")
            text = f"{words.splitlines()[0]}\r\n{name} 96x64|LABEL = P-1234"
            file.write(image, description=text, subfiletype=kind, rowsperstrip=64, **common)


def segments(page: Any) -> list[bytes]:
    handle, found = page.parent.filehandle, []
    for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
        handle.seek(offset)
        found.append(handle.read(count))
    return found


KINDS = {
    "jpeg": PyramidKind(),
    "jpeg tables": PyramidKind(jpeg_tables=True, tile=(240, 240)),
    "jpeg rgb": PyramidKind(ycbcr=False),
    "lzw": PyramidKind(compression="lzw", differences=True),
    "zstd": PyramidKind(compression="zstd"),
    "aperio 2000": PyramidKind(compression="jpeg2000", aperio=True),
    "aperio 33003": PyramidKind(compression="jpeg2000", ycbcr_2000=True, aperio=True),
    "strips": PyramidKind(compression="deflate", tile=None, downsamples=(1,)),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_segments_are_copied_and_every_px_and_the_resolution_stay(
    kind: PyramidKind, tmp_path: Path
) -> None:
    write_pyramid(tmp_path / "a.tif", (2300, 1500), kind)
    convert(tmp_path / "a.tif", tmp_path / "a.ome.tif")
    with tifffile.TiffFile(tmp_path / "a.tif") as a, tifffile.TiffFile(tmp_path / "a.ome.tif") as b:
        assert b.is_ome and len(b.pages) == 1
        copies = [b.pages[0], *b.pages[0].pages]
        for old, new in zip(a.pages, copies, strict=False):
            assert segments(old) == segments(new)
    with open_slide(tmp_path / "a.tif") as old, open_slide(tmp_path / "a.ome.tif") as new:
        assert new.slide_mpp == pytest.approx(old.slide_mpp, rel=1e-6)
        kept = [level.size for level in new.levels][: len(old.levels)]
        assert kept == [level.size for level in old.levels]
        assert max(new.levels[-1].size) <= COARSEST_PX
        for level in old.levels:
            theirs = old.read_region((0, 0), level.index, level.size)
            assert np.array_equal(theirs, new.read_region((0, 0), level.index, level.size))


def test_missing_levels_are_halves_of_the_one_above(tmp_path: Path) -> None:
    write_pyramid(tmp_path / "a.tif", (2301, 1500), PyramidKind(compression=None, downsamples=(1,)))
    convert(tmp_path / "a.tif", tmp_path / "a.ome.tif", quality=100)
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert [level.size for level in slide.levels] == [(2301, 1500), (1150, 750), (575, 375)]
        # a smooth part of it: JPEG's colours are halved across
        whole = slide.read_region((0, 0), 0, (2300, 1500))
        half = np.asarray(Image.fromarray(whole).reduce(2)).astype(int)
        got = slide.read_region((0, 0), 1, (1150, 750)).astype(int)
        assert abs(got.mean(axis=2) - half.mean(axis=2)).mean() < 3


def test_a_grey_slide_stays_grey_in_every_level(tmp_path: Path) -> None:
    pixels = position_pixels((1500, 1100))[..., 0]
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(256, 256), compression="zstd")
    convert(tmp_path / "a.tif", tmp_path / "a.ome.tif")
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as file:
        shapes = [page.shape for page in (file.pages[0], *file.pages[0].pages)]
        assert shapes == [(1100, 1500), (550, 750)]
        assert np.array_equal(file.pages[0].asarray(), pixels)


def test_other_formats_are_encoded(tmp_path: Path) -> None:
    Image.fromarray(position_pixels((700, 500))).save(tmp_path / "a.png")
    convert(tmp_path / "a.png", tmp_path / "a.ome.tif", slide_mpp=(0.5, 0.25), quality=95)
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert slide.slide_mpp == (0.5, 0.25) and slide.levels[0].size == (700, 500)
        got = slide.read_region((0, 0), 0, (700, 500)).astype(int)
        assert abs(got - position_pixels((700, 500))).mean() < 30


def test_memory_does_not_grow_with_the_slide(tmp_path: Path) -> None:
    kind = PyramidKind(compression="jpeg", downsamples=(1,))
    growth = []
    for name, size in (("a", (3000, 3000)), ("b", (6000, 6000))):
        write_pyramid(tmp_path / f"{name}.tif", size, kind)
        how = {
            "slide_path": str(tmp_path / f"{name}.tif"),
            "out": str(tmp_path / f"{name}.ome.tif"),
        }
        found = run_and_measure("tests.slide.measured_convert", "write", setup="warm_up", **how)
        growth.append(found.growth_bytes)
    assert growth[1] < growth[0] + 48 * MIB


def test_nothing_is_replaced_unasked_and_bad_names_are_refused(tmp_path: Path) -> None:
    write_pyramid(tmp_path / "a.tif", (300, 200))
    out = tmp_path / "a.ome.tif"
    out.write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"out must not exist, got .*a\.ome\.tif"):
        convert(tmp_path / "a.tif", out)
    assert out.read_bytes() == b"mine"
    convert(tmp_path / "a.tif", out, overwrite=True)
    with pytest.raises(InvalidInputError, match=r"out must end in '\.ome\.tif'"):
        convert(tmp_path / "a.tif", tmp_path / "b.tif")
    with pytest.raises(InvalidInputError, match=r"quality must be in \[1, 100\], got 0"):
        convert(tmp_path / "a.tif", tmp_path / "b.ome.tif", quality=0)


def test_what_identifies_is_listed_and_left_out_and_image_data_stays(tmp_path: Path) -> None:
    write_scan(tmp_path / "a.svs")
    told = identifying(tmp_path / "a.svs")
    assert {"label image", "macro image", "User in Aperio's description"} <= set(told)
    assert any("306 (DateTime)" in line for line in told) and any("42016" in line for line in told)
    assert deidentify(tmp_path / "a.svs", tmp_path / "b.svs") == told
    assert identifying(tmp_path / "b.svs") == []
    data = (tmp_path / "b.svs").read_bytes()
    assert not [secret for secret in SECRETS if secret in data]
    with tifffile.TiffFile(tmp_path / "a.svs") as a, tifffile.TiffFile(tmp_path / "b.svs") as b:
        assert len(a.pages) == 5 and len(b.pages) == 3
        for old, new in zip(a.pages, b.pages, strict=False):
            assert segments(old) == segments(new)


def test_a_copy_is_still_an_aperio_slide_for_openslide_and_for_us(tmp_path: Path) -> None:
    write_scan(tmp_path / "a.svs")
    deidentify(tmp_path / "a.svs", tmp_path / "b.svs")
    with openslide.OpenSlide(tmp_path / "a.svs") as a, openslide.OpenSlide(tmp_path / "b.svs") as b:
        assert b.properties["openslide.vendor"] == "aperio"
        assert b.level_dimensions == a.level_dimensions
        assert b.properties["openslide.mpp-x"] == a.properties["openslide.mpp-x"]
        assert set(a.associated_images) == {"thumbnail", "label", "macro"}
        assert set(b.associated_images) == {"thumbnail"}
        assert a.read_region((0, 0), 0, (300, 200)) == b.read_region((0, 0), 0, (300, 200))
    with open_slide(tmp_path / "b.svs") as slide:
        assert slide.objective_power == 20 and slide.slide_mpp == (0.499, 0.499)


def test_what_cannot_be_copied_is_refused_with_the_way_out(tmp_path: Path) -> None:
    Image.fromarray(position_pixels((90, 60))).save(tmp_path / "a.png")
    with pytest.raises(InvalidInputError, match=r"'a\.png' is not a TIFF .*`thinsection convert`"):
        deidentify(tmp_path / "a.png", tmp_path / "b.png")
    write_pyramid(tmp_path / "a.tif", (300, 200))
    convert(tmp_path / "a.tif", tmp_path / "a.ome.tif")
    with pytest.raises(InvalidInputError, match="must not be an OME-TIFF"):
        deidentify(tmp_path / "a.ome.tif", tmp_path / "b.tif")
    assert not (tmp_path / "b.tif").exists()


def thin(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinsection", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(thinsection.__file__).parent.parent)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def test_from_the_shell_a_bad_slide_does_not_stop_the_others(tmp_path: Path) -> None:
    write_scan(tmp_path / "a.svs")
    (tmp_path / "bad.svs").write_bytes(b"II*\0")
    slides = (tmp_path / "bad.svs", tmp_path / "a.svs")
    done = thin("convert", *slides, "--to", "ome-tiff", "--out", tmp_path / "c")
    assert done.returncode == 3 and "bad.svs" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["a.ome.tif"]
    checked = thin("deid", "--check", tmp_path / "a.svs")
    assert checked.returncode == 3 and "label image" in checked.stdout
    assert thin("deid", tmp_path / "a.svs", "--out", tmp_path / "d").returncode == 0
    assert thin("deid", "--check", tmp_path / "d" / "a.svs").returncode == 0
    assert "error: out must be a folder" in thin("deid", tmp_path / "a.svs").stderr
