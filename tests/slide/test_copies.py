"""A slide that is copied or pickled opens its own file again, never shows another one's pixels."""

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import tifffile
from PIL import Image, ImageCms
from pydicom.uid import generate_uid
from tests.support.dicom_slides import DicomKind, write_dicom
from tests.support.range_server import RangeServer, serving
from tests.support.zarr_slides import ZarrKind, write_ome

from thinsection.errors import CopyError, SlideOpenError, SlideReadError
from thinsection.files.lock import FileLock
from thinsection.files.sources import FileSource
from thinsection.slide import Slide, open_slide
from thinsection.slide.formats.dicom_frames import DicomFrames, FrameFormat
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.slide.look import Look
from thinsection.testing.synthetic import (
    ArraySlide,
    PyramidKind,
    position_pixels,
    write_levels,
)
from thinsection.types import RgbArray, Size

SIZE: Size = (331, 212)  # not square, no multiple of a tile
PLAIN = PyramidKind(compression="deflate", tile=(64, 48), downsamples=(1,))


def unpickled(slide: Any) -> Any:
    return pickle.loads(pickle.dumps(slide))  # noqa: S301


def unpickled_by_cloudpickle(slide: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(slide))  # noqa: S301


WAYS = [unpickled, unpickled_by_cloudpickle, copy.copy, copy.deepcopy]


def pictures() -> tuple[RgbArray, RgbArray]:
    """Two pictures that differ at every pixel."""
    first = position_pixels(SIZE)
    return first, 255 - first


def write_two(folder: Path, suffix: str, write: Callable[..., object]) -> list[Path]:
    """Writes two slides of one size, whose names have a space and a colon."""
    paths = [folder / f"first slide{suffix}", folder / f"second:slide{suffix}"]
    for path, pixels in zip(paths, pictures(), strict=True):
        write(path, pixels)
    return paths


def write_png(path: Path, pixels: RgbArray) -> None:
    Image.fromarray(pixels).save(path)


def write_pyramid(path: Path, pixels: RgbArray) -> None:
    kind = replace(PLAIN, downsamples=(1, 4), mpp=(0.25, 0.5))
    write_levels(path, [pixels, np.ascontiguousarray(pixels[::4, ::4])], kind)


def write_turned(path: Path, pixels: RgbArray) -> None:
    write_levels(path, [pixels], replace(PLAIN, orientation=6))


def write_channels(path: Path, pixels: RgbArray) -> None:
    planes = np.moveaxis(pixels, -1, 0).astype(np.uint16)
    five = np.concatenate([planes, planes[:2]])
    tifffile.imwrite(path, five, tile=(64, 48), photometric="minisblack")


def write_with_profile(path: Path, pixels: RgbArray) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    tifffile.imwrite(path, pixels, tile=(64, 48), iccprofile=profile)


def write_dicom_folder(path: Path, pixels: RgbArray) -> None:
    kind = DicomKind(parts=1)
    series = generate_uid()
    path.parent.mkdir(exist_ok=True)
    write_dicom(path, [[pixels]], kind, series=series)
    label = np.full((40, 60, 3), 9, np.uint8)
    write_dicom(
        path.with_name(f"label of {path.name}"),
        [[label]],
        kind,
        series=series,
        flavor="LABEL",
    )


def write_zarr(path: Path, pixels: RgbArray) -> None:
    write_ome(path, [pixels], ZarrKind(tile=(64, 48), downsamples=(1,)))


# kind -> (suffix, writer, arguments of open_slide)
KINDS: dict[str, tuple[str, Callable[..., object], dict[str, Any]]] = {
    "tiff": (".tiff", write_pyramid, {}),
    "openslide": (".tiff", write_pyramid, {"reader": "openslide"}),
    "given µm/px": (".tiff", write_pyramid, {"slide_mpp": (0.7, 0.9)}),
    "image": (".tiff", write_pyramid, {"image": 1}),
    "png": (".png", write_png, {}),
    "turned": (".tiff", write_turned, {"slide_mpp": (0.3, 0.6)}),
    "channels": (".tiff", write_channels, {"look": Look(channels=("2", "0"))}),
    "profile": (".tiff", write_with_profile, {"look": Look(icc=True)}),
    "dicom": (".dcm", write_dicom_folder, {}),
    "dicom by our reader": (".dcm", write_dicom_folder, {"reader": "dicom"}),
    "zarr": (".zarr", write_zarr, {}),
}


def whole(slide: Slide) -> RgbArray:
    return slide.read_region((0, 0), 0, slide.size)


@pytest.fixture(params=KINDS)
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Two open slides of one kind."""
    suffix, write, arguments = KINDS[request.param]
    paths = write_two(tmp_path, suffix, write)
    with (
        open_slide(paths[0], **arguments) as first,
        open_slide(str(paths[1]), **arguments) as second,
    ):
        yield first, second


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_two_slides_show_the_pixels_and_facts_of_their_own(
    two: tuple[Slide, Slide], way: Callable[[Any], Any]
) -> None:
    truths = [whole(slide) for slide in two]
    assert (truths[0] != truths[1]).any()
    copies = way(list(two)) if way is not copy.copy else list(map(way, two))
    for slide, copied, truth in zip(two, copies, truths, strict=True):
        assert copied is not slide
        assert type(copied) is type(slide)
        np.testing.assert_array_equal(whole(copied), truth)
        small = copied.thumbnail((64, 64))
        np.testing.assert_array_equal(small, slide.thumbnail((64, 64)))
        for name in (
            "reader", "levels", "size", "slide_mpp", "mpp_source", "objective_power", "vendor",
            "properties", "associated_names", "choice", "notes", "pictures", "picture",
            "rendering", "orientation", "slide_path",
        ):  # fmt: skip
            assert getattr(copied, name) == getattr(slide, name), name
        copied.close()
        # the original does not notice
        np.testing.assert_array_equal(whole(slide), truth)


def test_a_copy_of_a_copy_is_still_the_slide(two: tuple[Slide, Slide]) -> None:
    truth = whole(two[1])
    with unpickled(two[1]) as first, unpickled(first) as second:
        first.close()
        np.testing.assert_array_equal(whole(second), truth)
        assert second.choice == two[1].choice


def test_a_pickle_is_small_and_holds_no_pixels(two: tuple[Slide, Slide]) -> None:
    whole(two[0])
    assert len(pickle.dumps(two[0])) < 8192


@pytest.mark.parametrize("way", WAYS)
def test_the_stored_slide_of_a_turned_one_is_copied_too(
    tmp_path: Path, way: Callable[[Any], Any]
) -> None:
    for path in write_two(tmp_path, ".tiff", write_turned):
        with open_slide(path) as slide:
            stored = way(slide.stored)
            assert stored.size == slide.size[::-1] == slide.stored.size
            np.testing.assert_array_equal(whole(stored), whole(slide.stored))
            stored.close()


def test_a_copy_keeps_what_its_user_has_set(tmp_path: Path) -> None:
    path, _ = write_two(tmp_path, ".tiff", write_pyramid)
    with open_slide(path) as slide:
        slide.slide_mpp = (0.11, 0.22)
        slide.notes = (*slide.notes, "mine")
        slide.recolor = darken
        with unpickled(slide) as copied:
            assert copied.slide_mpp == (0.11, 0.22)
            assert copied.notes[-1] == "mine"
            np.testing.assert_array_equal(whole(copied), whole(slide))
            with unpickled(copied) as again:
                np.testing.assert_array_equal(whole(again), whole(slide))
        assert whole(slide).max() < 128


def test_a_colour_rule_of_the_stored_slide_is_not_lost_in_silence(
    tmp_path: Path,
) -> None:
    for path in write_two(tmp_path, ".tiff", write_turned):
        with open_slide(path) as slide:
            slide.stored.recolor = darken
            with pytest.raises(CopyError, match="recolor must be set on the upright"):
                pickle.dumps(slide)
            with unpickled(slide.stored) as copied:
                np.testing.assert_array_equal(whole(copied), whole(slide.stored))


def darken(pixels: RgbArray) -> None:
    pixels //= 2


# another file, no file


@pytest.mark.parametrize("kind", ["tiff", "png", "dicom", "zarr", "turned"])
def test_another_file_at_the_path_is_refused(kind: str, tmp_path: Path) -> None:
    suffix, write, arguments = KINDS[kind]
    first, second = write_two(tmp_path, suffix, write)
    with open_slide(first, **arguments) as slide:
        data = pickle.dumps(slide)
        first.rename(tmp_path / "elsewhere")
        second.rename(first)
        with pytest.raises(SlideOpenError, match="must be the file that was opened"):
            pickle.loads(data)  # noqa: S301
        with pytest.raises(SlideOpenError, match="open it again by open_slide"):
            copy.deepcopy(slide)


def test_a_file_of_the_same_size_that_was_written_again_is_refused(
    tmp_path: Path,
) -> None:
    kind = replace(PLAIN, compression=None)
    path, other = tmp_path / "a.tiff", tmp_path / "b.tiff"
    for each, pixels in zip((path, other), pictures(), strict=True):
        write_levels(each, [pixels], kind)
    assert path.stat().st_size == other.stat().st_size
    with open_slide(path) as slide:
        data = pickle.dumps(slide)
        path.write_bytes(other.read_bytes())
        with pytest.raises(SlideOpenError, match="got another or a changed one"):
            pickle.loads(data)  # noqa: S301


def test_a_file_that_no_reader_opens_is_called_another_one(tmp_path: Path) -> None:
    for path in write_two(tmp_path, ".tiff", write_pyramid):
        with open_slide(path) as slide:
            data = pickle.dumps(slide)
        path.write_text("no slide")
        with pytest.raises(SlideOpenError, match="must be the file that was opened"):
            pickle.loads(data)  # noqa: S301


def test_a_changed_part_of_a_dicom_slide_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "series" / "a.dcm"
    write_dicom_folder(path, pictures()[0])
    with open_slide(path, reader="dicom") as slide:
        data = pickle.dumps(slide)
        os.utime(path.with_name("label of a.dcm"), ns=(1, 1))
        with pytest.raises(SlideOpenError, match="got another or a changed one"):
            pickle.loads(data)  # noqa: S301


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path, _ = write_two(tmp_path, ".tiff", write_pyramid)
    with open_slide(path) as slide:
        data = pickle.dumps(slide)
    path.unlink()
    with pytest.raises(SlideOpenError, match=r"existing file, got .*first slide\.tiff"):
        pickle.loads(data)  # noqa: S301


def test_a_slide_by_a_relative_path_arrives_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write_two(tmp_path, ".tiff", write_pyramid)
    monkeypatch.chdir(tmp_path)
    with open_slide(path.name) as slide:
        truth = whole(slide)
        monkeypatch.chdir("/")
        with unpickled(slide) as copied:
            np.testing.assert_array_equal(whole(copied), truth)


class TwoSlides(RangeServer):
    """Serves bytes by path, each with its version."""

    files: dict[str, bytes]

    def answer(self) -> tuple[int, bytes, dict[str, str]]:
        body = self.files[self.path.split("?")[0]]
        return 200, body, {"ETag": f'"{hash(body)}"'}


def test_slides_by_url_travel_by_their_url_and_not_by_another_version(
    tmp_path: Path,
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    paths = write_two(tmp_path, ".tiff", write_pyramid)
    TwoSlides.files = {f"/{n}.tiff": path.read_bytes() for n, path in enumerate(paths)}
    with serving(TwoSlides) as port:
        urls = [f"http://127.0.0.1:{port}/{number}.tiff" for number in range(2)]
        slides = [open_slide(url) for url in urls]
        for slide, copied, path in zip(slides, unpickled(slides), paths, strict=True):
            assert copied.slide_path == slide.slide_path
            with open_slide(path) as local:
                np.testing.assert_array_equal(whole(copied), whole(local))
            copied.close()
        data = pickle.dumps(slides[0])
        TwoSlides.files["/0.tiff"] = TwoSlides.files["/1.tiff"]
        fsspec.filesystem("http").invalidate_cache()
        with pytest.raises(SlideOpenError, match="must be the file that was opened"):
            pickle.loads(data)  # noqa: S301
        for slide in slides:
            slide.close()


def test_the_secret_of_a_url_is_in_no_pickle(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    paths = write_two(tmp_path, ".tiff", write_pyramid)
    TwoSlides.files = {f"/{n}.tiff": path.read_bytes() for n, path in enumerate(paths)}
    secret = "s3cr3t-of-a-signature-0123456789"
    with serving(TwoSlides) as port:
        url = f"http://127.0.0.1:{port}/1.tiff?token={secret}"
        with open_slide(url) as slide:
            data = pickle.dumps(slide)
            assert secret.encode() not in data
            with pickle.loads(data) as copied:  # noqa: S301 - this process knows it
                np.testing.assert_array_equal(whole(copied), whole(slide))


# what refuses


@pytest.mark.parametrize("way", WAYS)
def test_a_closed_slide_refuses(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    for path in write_two(tmp_path, ".tiff", write_turned):
        with open_slide(path) as slide:
            pass
        with pytest.raises(CopyError, match="must be open to be copied or pickled"):
            way(slide)


@pytest.mark.parametrize("way", WAYS)
def test_a_slide_that_open_slide_has_not_opened_refuses(
    tmp_path: Path, way: Callable[[Any], Any]
) -> None:
    path, _ = write_two(tmp_path, ".tiff", write_pyramid)
    with (
        TiffSlide(str(path)) as slide,
        pytest.raises(CopyError, match=r"open it by thinsection.open_slide\(path\)"),
    ):
        way(slide)


@pytest.mark.parametrize("way", WAYS)
def test_what_owns_an_open_file_refuses_and_goes_on_reading(
    tmp_path: Path, way: Callable[[Any], Any]
) -> None:
    """A copy of the descriptor closed that of the original, and the next file took its number."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"a" * 100)
    second.write_bytes(b"b" * 100)
    source = FileSource(str(first))
    form = FrameFormat.__new__(FrameFormat)
    frames = DicomFrames(first, form, 1)
    owners = [source, source._descriptor, frames, FileLock(tmp_path / "lock")]
    for owner in owners:
        with pytest.raises(CopyError, match="must stay in the process that made it"):
            way(owner)
        with pytest.raises(TypeError, match="; "):
            way([owner, 1] if way is not copy.copy else owner)
    gc.collect()
    other = FileSource(str(second))
    assert source.read_at(0, 3) == b"aaa"
    assert other.read_at(0, 3) == b"bbb"
    source.close()
    source.close()
    assert other.read_at(0, 3) == b"bbb"
    other.close()


def test_a_dicom_file_that_is_closed_while_it_is_read_is_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may belong to another file as soon as it is closed."""
    first, second = write_two(tmp_path, ".dcm", write_dicom_folder)
    with open_slide(first, reader="dicom") as slide:
        truth = whole(slide)
    slide = open_slide(first, reader="dicom")
    slide.read_region((0, 0), 0, (8, 8))
    real_pread = os.pread
    others: list[int] = []

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        monkeypatch.setattr(os, "pread", real_pread)
        closing = threading.Thread(target=slide.close)
        closing.start()
        closing.join()
        others.extend(os.open(second, os.O_RDONLY) for _ in range(20))
        return real_pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    region = slide.read_region((300, 193), 0, (20, 10))
    np.testing.assert_array_equal(region, truth[193:203, 300:320])
    assert others
    for other in others:
        os.close(other)
    with pytest.raises(SlideReadError, match="slide must be open"):
        slide.read_region((0, 0), 0, (8, 8))


# a slide without a file


@pytest.mark.parametrize("way", WAYS)
def test_a_slide_of_arrays_travels_with_its_arrays(way: Callable[[Any], Any]) -> None:
    slides = []
    for number, pixels in enumerate(pictures()):
        levels = [pixels, np.ascontiguousarray(pixels[::2, ::2])]
        slides.append(ArraySlide(levels, slide_mpp=(0.5, 0.6), name=f"{number}.svs"))
    for slide, truth in zip(slides, pictures(), strict=True):
        copied = way(slide)
        assert (copied.slide_mpp, copied.slide_path) == ((0.5, 0.6), slide.slide_path)
        np.testing.assert_array_equal(whole(copied), truth)
        copied.close()
        np.testing.assert_array_equal(whole(slide), truth)
        with pytest.raises(CopyError, match="must be open"):
            way(copied)
