"""DICOM: the files of a slide, its planes and paths, and every syntax that is read.

Judged by the pixels that were put in, and by OpenSlide where it opens the files.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydicom.uid import generate_uid
from tests.slide.planted import smaller, tissue
from tests.support.dicom_slides import LOSSY, SYNTAXES, DicomKind, write_dicom

from thinsection import open_slide
from thinsection.errors import ImageError, SlideOpenError, SlideReadError
from thinsection.slide.cohort import load_cohort
from thinsection.slide.dicom_series import files_of_slide
from thinsection.store.identity import fingerprint
from thinsection.types import RgbArray

SIZE = (230, 170)
USUAL = DicomKind()


@pytest.fixture
def pixels() -> RgbArray:
    return tissue(SIZE, 3)


def write_slide(
    folder: Path, name: str, pixels: RgbArray, kind: DicomKind = USUAL, **more: Any
) -> list[Path]:
    """Writes a slide of two levels and a label; returns its files."""
    series = more.pop("series", generate_uid())
    files = write_dicom(
        folder / f"{name}_1.dcm", [[pixels]], kind, series=series, **more
    )
    files += write_dicom(
        folder / f"{name}_0.dcm",
        [[smaller(pixels, 2)]],
        kind,
        series=series,
        mpp=1.0,
        **more,
    )
    files += write_dicom(
        folder / f"{name}_2.dcm",
        [[tissue((40, 30), 9)]],
        DicomKind(tile=(40, 30)),
        series=series,
        flavor="LABEL",
        **more,
    )
    return files


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_every_syntax_gives_the_pixels_that_were_put_in(
    tmp_path: Path, pixels: RgbArray, syntax: str
) -> None:
    write_slide(tmp_path, "a", pixels, DicomKind(syntax=syntax))
    for reader in ("auto", "dicom"):
        with open_slide(tmp_path / "a_0.dcm", reader=reader) as slide:
            assert slide.size == SIZE
            assert slide.slide_mpp == pytest.approx((0.5, 0.5))
            assert [level.downsample for level in slide.levels] == [1, 2]
            assert slide.associated_names == ("label",)
            shown = slide.read_region((0, 0), 0, SIZE)
            difference = np.abs(shown.astype(int) - pixels)
            assert difference.max() <= (30 if syntax in LOSSY else 0)
            coarse = slide.read_region((0, 0), 1, slide.levels[1].size)
            difference = np.abs(coarse.astype(int) - smaller(pixels, 2))
            assert difference.mean() < (2 if syntax in LOSSY else 1e-9)
            label = slide.associated_image("label")
            np.testing.assert_array_equal(label, tissue((40, 30), 9))
            assert slide.notes == ()


KINDS = {
    "sparse": DicomKind(sparse=True),
    "planar": DicomKind(planar=True),
    "concatenated": DicomKind(parts=3),
    "sparse-concatenated": DicomKind(parts=2, sparse=True, syntax="jpeg-ls"),
    "no-offsets": DicomKind(syntax="jpeg-ls", offsets="none"),
    "extended-offsets": DicomKind(syntax="rle", offsets="extended"),
    "fragments": DicomKind(syntax="jpeg-xl", fragments=2),
    "ycbcr": DicomKind(syntax="jpeg", photometric="YBR_FULL_422"),
}


@pytest.mark.parametrize("name", KINDS)
def test_frames_are_found_however_they_are_stored(
    tmp_path: Path, pixels: RgbArray, name: str
) -> None:
    kind = KINDS[name]
    write_dicom(tmp_path / "a.dcm", [[pixels]], kind, series=generate_uid())
    first = sorted(tmp_path.iterdir())[0]
    with open_slide(first, reader="dicom") as slide:
        shown = slide.read_region((0, 0), 0, SIZE)
        difference = np.abs(shown.astype(int) - pixels)
        assert difference.max() <= (30 if kind.syntax in LOSSY else 0)
        part = slide.read_region((60, 40), 0, (20, 20))
        np.testing.assert_array_equal(part, shown[40:60, 60:80])


def test_a_flat_folder_of_three_slides_is_three_slides(
    tmp_path: Path, pixels: RgbArray
) -> None:
    for number, name in enumerate("cab"):
        write_slide(tmp_path, name, np.roll(pixels, 9 * number, axis=1), container=name)
    (tmp_path / "z.dcm").write_bytes(b"no DICOM")
    lines: list[str] = []
    entries = load_cohort([tmp_path], on_message=lines.append)
    assert [entry.slide_id for entry in entries] == ["a_0", "b_0", "c_0", "z"]
    assert "10 .dcm files are 3 slides of 3 + 3 + 3 files" in lines[0]
    assert "not readable: z.dcm" in lines[0]
    for number, name in enumerate("cab"):
        with open_slide(tmp_path / f"{name}_0.dcm") as slide:
            expected = np.roll(pixels, 9 * number, axis=1)
            np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), expected)
    # the files of one slide, named one by one, are one slide
    named = load_cohort(sorted(tmp_path.glob("[ab]_*.dcm")), on_message=lines.append)
    assert [entry.slide_id for entry in named] == ["a_0", "b_0"]
    assert lines[-1].startswith("4 .dcm files left out of the list")
    before = fingerprint(tmp_path / "a_0.dcm")
    for path in tmp_path.glob("b_*.dcm"):
        path.unlink()
    assert fingerprint(tmp_path / "a_0.dcm") == before
    assert len(files_of_slide(tmp_path / "a_0.dcm")) == 3


@pytest.mark.parametrize("sparse", [False, True])
def test_planes_and_paths_are_said_and_chosen(tmp_path: Path, sparse: bool) -> None:
    layers = [
        [tissue(SIZE, seed) for seed in (1, 2, 3)],
        [tissue(SIZE, s) for s in (4, 5, 6)],
    ]
    kind = replace(USUAL, sparse=sparse)
    write_dicom(tmp_path / "a.dcm", layers, kind, series=generate_uid())
    with open_slide(tmp_path / "a.dcm") as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), layers[0][0])
        assert slide.notes[0].startswith("image 1 of 6 is shown")
        pictures = slide.pictures
    expected = [
        layers[0][0],
        layers[0][1],
        layers[0][2],
        layers[1][0],
        layers[1][1],
        layers[1][2],
    ]
    assert [picture.role for picture in pictures] == [
        "slide",
        "plane",
        "plane",
        "path",
        "plane",
        "plane",
    ]
    for picture, pixels in zip(pictures, expected):
        with open_slide(tmp_path / "a.dcm", image=picture.number) as slide:
            np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), pixels)
    with pytest.raises(ImageError, match="choose a number or name"):
        open_slide(tmp_path / "a.dcm", image=7)


def test_by_url_one_file_is_opened_and_a_note_says_so(
    tmp_path: Path, pixels: RgbArray
) -> None:
    write_slide(tmp_path, "a", pixels)
    with open_slide(f"file://{tmp_path}/a_1.dcm") as slide:
        assert (slide.size, len(slide.levels)) == (SIZE, 1)
        assert "without the other files of its series" in slide.notes[-1]


def test_two_patients_or_glasses_under_one_series_are_refused(
    tmp_path: Path, pixels: RgbArray
) -> None:
    for number, (patients, glasses) in enumerate([("AB", "GG"), ("AA", "GH")]):
        folder = tmp_path / str(number)
        series = generate_uid()
        for name, patient, glass in zip("xy", patients, glasses):
            write_dicom(
                folder / f"{name}.dcm",
                [[pixels]],
                USUAL,
                series=series,
                patient=patient,
                container=glass,
            )
        word = ("patient", "glass")[number]
        for reader in ("auto", "openslide", "dicom"):
            with pytest.raises(
                SlideOpenError, match=f"one {word}.*'x.dcm' and 'y.dcm'"
            ):
                open_slide(folder / "x.dcm", reader=reader)


def test_what_is_left_out_is_counted_with_its_reason(
    tmp_path: Path, pixels: RgbArray
) -> None:
    series = generate_uid()
    write_slide(tmp_path, "a", pixels, series=series)
    write_dicom(
        tmp_path / "b.dcm", [[pixels]], USUAL, series=series, flavor="LOCALIZER"
    )
    write_dicom(tmp_path / "c.dcm", [[pixels]], USUAL, series=series, BitsAllocated=16)
    with open_slide(tmp_path / "a_0.dcm") as slide:
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), pixels)
        assert slide.notes == (
            "2 of 5 files of the series are left out: c.dcm (16 bits is not supported), "
            "b.dcm (image type LOCALIZER)",
        )


@pytest.mark.parametrize("reader", ["auto", "dicom"])
def test_a_copy_of_a_file_is_no_further_plane(
    tmp_path: Path, pixels: RgbArray, reader: str
) -> None:
    """A second download of a level and of a label stands beside the first one."""
    write_slide(tmp_path, "a", pixels)
    for name in ("a_1", "a_2"):
        data = (tmp_path / f"{name}.dcm").read_bytes()
        (tmp_path / f"{name} (1).dcm").write_bytes(data)
    (tmp_path / "a_1 (2).dcm").write_bytes((tmp_path / "a_1.dcm").read_bytes())
    for name, left_out in (("a_1", "a_1 (1)"), ("a_1 (1)", "a_1"), ("a_0", "a_1")):
        with open_slide(tmp_path / f"{name}.dcm", reader=reader) as slide:
            assert [picture.role for picture in slide.pictures] == ["slide", "label"]
            assert len(slide.levels) == 2
            np.testing.assert_array_equal(slide.read_region((0, 0), 0, SIZE), pixels)
            (note,) = slide.notes
            assert note.startswith("3 of 6 files of the series are left out")
            assert f"{left_out}.dcm (has the SOPInstanceUID of a_1" in note


@pytest.mark.parametrize(
    "width", [180, 240]
)  # the wider one has a column more of frames
def test_a_padded_level_lies_where_its_spacing_puts_it(
    tmp_path: Path, width: int
) -> None:
    pixels = tissue((600, 400), 5)
    series = generate_uid()
    write_dicom(tmp_path / "a.dcm", [[pixels]], USUAL, series=series)
    level = np.full((110, width, 3), 255, np.uint8)
    level[:100, :150] = smaller(pixels, 4)
    write_dicom(tmp_path / "b.dcm", [[level]], USUAL, series=series, mpp=2.0)
    with open_slide(tmp_path / "a.dcm") as slide:
        assert [each.downsample for each in slide.levels] == [1, 4]
        assert slide.levels[1].size == (150, 100)
        shown = slide.read_region((400, 200), 1, (50, 50))
        np.testing.assert_array_equal(shown, level[50:100, 100:150])
        assert any("padding" in note for note in slide.notes)


def test_missing_frames_are_white_and_cut_ones_an_error(
    tmp_path: Path, pixels: RgbArray
) -> None:
    kind = DicomKind(syntax="rle", offsets="none")
    write_dicom(tmp_path / "a.dcm", [[pixels]], kind, series=generate_uid())
    data = (tmp_path / "a.dcm").read_bytes()
    (tmp_path / "a.dcm").write_bytes(data[: len(data) * 2 // 3])
    with (
        open_slide(tmp_path / "a.dcm", reader="dicom") as slide,
        pytest.raises(SlideReadError, match="truncated"),
    ):
        slide.read_region((0, 0), 0, SIZE)


def test_ycbcr_that_no_codec_converts_becomes_rgb(tmp_path: Path) -> None:
    """Judged by Pillow's YCbCr."""
    pixels = tissue(SIZE, 3)
    stored = np.asarray(Image.fromarray(pixels).convert("YCbCr"))
    expected = np.asarray(Image.fromarray(stored, "YCbCr").convert("RGB"))
    for syntax in ("explicit", "jpeg-ls"):
        kind = DicomKind(syntax=syntax, photometric="YBR_FULL")
        path = tmp_path / f"{syntax}.dcm"
        write_dicom(path, [[stored]], kind, series=generate_uid())
        with open_slide(path, reader="dicom") as slide:
            shown = slide.read_region((0, 0), 0, SIZE)
            assert np.abs(shown.astype(int) - expected).max() <= 1
