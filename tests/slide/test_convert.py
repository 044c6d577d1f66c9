"""Slides written anew: pixels, levels and resolution are kept."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image
from tests.slide import planted

import thinsection
from thinsection import open_slide
from thinsection.errors import ImageError, InvalidInputError, OutputError
from thinsection.slide.clean_streams import clean_page_segment
from thinsection.slide.convert import COARSEST_PX, convert
from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import PyramidKind, position_pixels, write_pyramid
from thinsection.types import MIB, RgbArray


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
    with (
        tifffile.TiffFile(tmp_path / "a.tif") as a,
        tifffile.TiffFile(tmp_path / "a.ome.tif") as b,
    ):
        assert b.is_ome and len(b.pages) == 1
        copies = [b.pages[0], *b.pages[0].pages]
        for old, new in zip(a.pages, copies, strict=False):
            cleaned = [
                clean_page_segment(old, index, data).data
                for index, data in enumerate(segments(old))
            ]
            assert cleaned == segments(new)
    with (
        open_slide(tmp_path / "a.tif") as old,
        open_slide(tmp_path / "a.ome.tif") as new,
    ):
        assert new.slide_mpp == pytest.approx(old.slide_mpp, rel=1e-6)
        kept = [level.size for level in new.levels][: len(old.levels)]
        assert kept == [level.size for level in old.levels]
        assert max(new.levels[-1].size) <= COARSEST_PX
        for level in old.levels:
            theirs = old.read_region((0, 0), level.index, level.size)
            assert np.array_equal(
                theirs, new.read_region((0, 0), level.index, level.size)
            )


def test_missing_levels_are_halves_of_the_one_above(tmp_path: Path) -> None:
    write_pyramid(
        tmp_path / "a.tif",
        (2301, 1500),
        PyramidKind(compression=None, downsamples=(1,)),
    )
    convert(tmp_path / "a.tif", tmp_path / "a.ome.tif", quality=100)
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert [level.size for level in slide.levels] == [
            (2301, 1500),
            (1150, 750),
            (575, 375),
        ]
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
    convert(
        tmp_path / "a.png", tmp_path / "a.ome.tif", slide_mpp=(0.5, 0.25), quality=95
    )
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert slide.slide_mpp == (0.5, 0.25) and slide.levels[0].size == (700, 500)
        got = slide.read_region((0, 0), 0, (700, 500)).astype(int)
        assert abs(got - position_pixels((700, 500))).mean() < 30


def write_two_areas(path: Path, names: tuple[str, str]) -> list[RgbArray]:
    """Writes an OME-TIFF of two areas, the first one larger, each with a resolution of its own."""
    areas = [position_pixels((1400, 1100)), position_pixels((1200, 700))[:, ::-1]]
    with tifffile.TiffWriter(path, ome=True) as file:
        for number, (name, pixels) in enumerate(zip(names, areas)):
            metadata = {"axes": "YXS", "Name": name}
            metadata |= {"PhysicalSizeX": 0.5 + number, "PhysicalSizeY": 0.5 + number}
            file.write(
                pixels,
                tile=(256, 256),
                compression="zstd",
                photometric="rgb",
                metadata=metadata,
            )
    return areas


@pytest.mark.parametrize("reader", ["tiff", "auto"])
@pytest.mark.parametrize("names", [("a", "b"), ("2", "1")])
def test_the_picture_that_is_asked_for_is_copied(
    names: tuple[str, str], reader: str, tmp_path: Path
) -> None:
    areas = write_two_areas(tmp_path / "a.ome.tif", names)
    told: list[str] = []
    convert(
        tmp_path / "a.ome.tif",
        tmp_path / "slide.ome.tif",
        reader=reader,
        on_message=told.append,
    )
    assert len(told) == 1 and "image 1 of 2 is shown" in told[0]
    for name, pixels, um in zip(names, areas, (0.5, 1.5)):
        out = tmp_path / f"area {name}.ome.tif"
        convert(tmp_path / "a.ome.tif", out, image=name, reader=reader)
        with open_slide(out) as copy:
            assert copy.slide_mpp == pytest.approx((um, um))
            assert len(copy.pictures) == 1 and len(copy.levels) == 2
            shown = copy.read_region((0, 0), 0, pixels.shape[1::-1])
            assert np.array_equal(shown, pixels)
    with open_slide(tmp_path / "slide.ome.tif") as copy:
        assert copy.size == areas[0].shape[1::-1]
    with pytest.raises(
        ImageError, match="image must be a picture of the file, got '3'"
    ):
        convert(tmp_path / "a.ome.tif", tmp_path / "c.ome.tif", image=3)
    assert not (tmp_path / "c.ome.tif").exists()


@pytest.mark.check
def test_memory_does_not_grow_with_the_slide(tmp_path: Path) -> None:
    kind = PyramidKind(compression="jpeg", downsamples=(1,))
    growth = []
    for name, size in (("a", (3000, 3000)), ("b", (6000, 6000))):
        write_pyramid(tmp_path / f"{name}.tif", size, kind)
        how = {
            "slide_path": str(tmp_path / f"{name}.tif"),
            "out": str(tmp_path / f"{name}.ome.tif"),
        }
        found = run_and_measure(
            "tests.slide.measured_convert", "write", setup="warm_up", **how
        )
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
    copy = out.read_bytes()
    with pytest.raises(OutputError, match="out must not be the slide itself"):
        convert(out, out, overwrite=True)
    assert out.read_bytes() == copy
    with pytest.raises(InvalidInputError, match=r"out must end in '\.ome\.tif'"):
        convert(tmp_path / "a.tif", tmp_path / "b.tif")
    with pytest.raises(
        InvalidInputError, match=r"quality must be in \[1, 100\], got 0"
    ):
        convert(tmp_path / "a.tif", tmp_path / "b.ome.tif", quality=0)


def thin(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinsection", *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(thinsection.__file__).parent.parent),
    }
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


def test_from_the_shell_a_bad_slide_does_not_stop_the_others(tmp_path: Path) -> None:
    planted.write_aperio(tmp_path / "a.svs", [planted.mark(n) for n in range(20)])
    (tmp_path / "bad.svs").write_bytes(b"II*\0")
    slides = (tmp_path / "bad.svs", tmp_path / "a.svs")
    done = thin("convert", *slides, "--to", "ome-tiff", "--out", tmp_path / "c")
    assert done.returncode == 3 and "bad.svs" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["a.ome.tif"]
    checked = thin("deid", "--check", tmp_path / "a.svs")
    assert checked.returncode == 3 and "label image" in checked.stdout
    assert "removed: label image" in checked.stdout
    written = thin("deid", *slides, "--out", tmp_path / "d")
    assert written.returncode == 3 and "bad.svs" in written.stderr
    assert "Traceback" not in written.stderr
    assert (tmp_path / "d/contact-sheets/a.svs.png").is_file()
    again = thin("deid", "--check", tmp_path / "d" / "a.svs")
    assert again.returncode == 0
    assert "removed: nothing, in the places that were inspected" in again.stdout
    assert "not inspected: text or faces within the pixels" in again.stdout
    assert "error: out must be a folder" in thin("deid", tmp_path / "a.svs").stderr


def test_from_the_shell_another_picture_has_a_name_of_its_own(tmp_path: Path) -> None:
    areas = write_two_areas(tmp_path / "a.ome.tif", ("left", "../right"))
    slide, out = tmp_path / "a.ome.tif", tmp_path / "c"
    done = thin("convert", slide, "--out", out)
    assert done.returncode == 0 and "not shown: 2 '../right'" in done.stderr
    assert thin("convert", slide, "--out", out, "--image", "2").returncode == 0
    refused = thin("convert", slide, "--out", out, "--image", "../right")
    assert refused.returncode == 2, refused.stderr
    assert "choose the picture by its number" in refused.stderr
    written = {path.name: path for path in out.iterdir()}
    assert sorted(written) == ["a-2.ome.tif", "a.ome.tif"]
    for name, pixels in zip(("a.ome.tif", "a-2.ome.tif"), areas):
        with open_slide(written[name]) as copy:
            assert copy.size == pixels.shape[1::-1]
