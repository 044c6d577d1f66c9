"""De-identified copies: none of the planted identifiers is left, and every pixel is."""

import io
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import openslide
import pytest
import simplejpeg
import tifffile
from PIL import Image, ImageCms, ImageDraw, ImageFont
from tests.slide import planted
from tests.slide.planted import mark

from thinsection import open_slide
from thinsection.deid import deidentify, deidentify_dicom, examine
from thinsection.deid.likeness import StoredImage, find_unlikeness
from thinsection.deid.words import KnownSizes, kept_description
from thinsection.errors import InvalidInputError, OutputError
from thinsection.slide.clean_profile import clean_profile
from thinsection.slide.clean_streams import StreamError, clean_jpeg, clean_segment
from thinsection.slide.convert import convert


def left(path: Path, marks: Sequence[bytes]) -> list[bytes]:
    """Which identifiers somebody finds who looks at the bytes, also unpacked ones."""
    data = planted.everything(path)
    wide = [m.decode().encode("utf-16-le") for m in marks]
    return [m for m, w in zip(marks, wide) if m in data or w in data]


def kept_pages(path: Path) -> list[Any]:
    """Pixels of every page, also of SubIFDs, by tifffile."""
    with tifffile.TiffFile(path) as file:
        pages = [p for page in file.pages for p in (page, *(page.pages or ()))]
        return [page.asarray() for page in pages]


def same_for_openslide(a: Path, b: Path, max_px: int = 3000) -> None:
    """Levels, resolution and pixels of every level, as OpenSlide reads them."""
    with openslide.OpenSlide(a) as old, openslide.OpenSlide(b) as new:
        assert new.level_dimensions == old.level_dimensions
        for name in (
            "openslide.mpp-x",
            "openslide.objective-power",
            "openslide.vendor",
        ):
            assert new.properties.get(name) == old.properties.get(name)
        for level, size in enumerate(old.level_dimensions):
            theirs = np.asarray(old.read_region((0, 0), level, size))
            assert np.array_equal(
                theirs, np.asarray(new.read_region((0, 0), level, size))
            )


def test_an_aperio_slide_with_20_identifiers_loses_them_all_and_no_pixel(
    tmp_path: Path,
) -> None:
    marks = [mark(n) for n in range(20)]
    slide, copy = tmp_path / "a.svs", tmp_path / "b.svs"
    planted.write_aperio(slide, marks)
    assert left(slide, marks) == marks
    report = deidentify(slide, copy, sheet=tmp_path / "sheet.png")
    assert left(copy, marks) == []
    same_for_openslide(slide, copy)
    before, after = kept_pages(slide), kept_pages(copy)
    assert len(after) == 3  # level 0, thumbnail, level 1
    for old, new in zip((before[0], before[2], before[3]), after, strict=True):
        assert np.array_equal(old, new)
    said = "\n".join(report.removed)
    for place in ("COM", "EXIF", "after the last pixel", "after the end", "declared length",
                  "first lines", "another form", "450 x 350", "700 (XMP)", "33723"):  # fmt: skip
        assert place in said, place
    assert examine(copy).removed == []
    with open_slide(copy) as opened:
        assert opened.objective_power == 20 and opened.slide_mpp == (0.499, 0.499)


@pytest.mark.parametrize("compression", [8, 5, 50000], ids=["deflate", "lzw", "zstd"])
@pytest.mark.parametrize("big", [False, True], ids=["classic", "big"])
def test_a_generic_tiff_with_19_identifiers_loses_them_all_and_no_pixel(
    tmp_path: Path, big: bool, compression: int
) -> None:
    marks = [mark(20 + n) for n in range(19)]
    slide, copy = tmp_path / "a.tif", tmp_path / "b.tif"
    levels = planted.write_generic(slide, marks, big=big, compression=compression)
    assert left(slide, marks) == marks
    report = deidentify(slide, copy)
    assert left(copy, marks) == []
    # of three pages one was a label
    for old, new in zip(levels, kept_pages(copy), strict=True):
        assert np.array_equal(old, new)
    with tifffile.TiffFile(copy) as file:
        assert file.is_bigtiff == big
        assert file.pages.first.tags[274].value == 3
        assert file.pages.first.tags[282].value == (20000, 1)
    said = "\n".join(report.removed)
    assert "belong to no structure" in said and "34665" in said
    assert examine(copy).removed == []


def test_shared_jpeg_tables_lose_their_comment(tmp_path: Path) -> None:
    pixels = planted.tissue((256, 256))
    whole = [
        planted.jpeg(tile) for tile in planted.tiles(pixels, lambda tile, _: tile, 128)
    ]
    # T.81: tables stand between the start of the image and its frame header
    frame = whole[0].index(b"\xff\xc0")
    tables = (
        whole[0][:2] + planted.segment(0xFE, mark(1)) + whole[0][20:frame] + b"\xff\xd9"
    )
    slide, copy = tmp_path / "a.tif", tmp_path / "b.tif"
    with tifffile.TiffWriter(slide) as file:
        file.write(iter(whole), shape=pixels.shape, dtype=np.uint8, tile=(128, 128),
                   compression="jpeg", photometric="ycbcr", subsampling=(2, 2),
                   jpegtables=tables, metadata=None, software=False)  # fmt: skip
    assert left(slide, [mark(1)])
    # each tile has tables of its own
    unused = "JPEG tables that no pixel uses"
    assert deidentify(slide, copy).removed == ["JPEG comment (COM)", unused]
    assert not left(copy, [mark(1)])
    assert np.array_equal(*(kept_pages(path)[0] for path in (slide, copy)))


NDPI = "other/fluorescence-dapi.ndpi"


def plant_in_ndpi(source: Path, path: Path, marks: Sequence[bytes]) -> None:
    """Writes over words, macro, JPEG comments and unused bytes of a real NDPI, and adds a label."""
    data = bytearray(source.read_bytes())

    def over(offset: int, text: bytes) -> None:
        data[offset : offset + len(text)] = text

    with tifffile.TiffFile(source) as file:
        first, macro = file.pages.first, file.pages[4]
        for tag, text in zip((65449, 305, 306), marks, strict=False):
            over(first.tags[tag].valueoffset, text)
        over(first.tags[65449].valueoffset + 100, marks[3])
        over(first.tags[65434].valueoffset, marks[4][:10])
        over(macro.dataoffsets[0] + 5000, marks[5])
        strip = first.tags[273].value[0]
        comment = bytes(data).index(b"\xff\xfe", strip, strip + 660)
        (length,) = struct.unpack(">H", data[comment + 2 : comment + 4])
        assert length >= 12
        over(comment + 4, marks[6])
    path.write_bytes(bytes(data) + marks[7])


def test_a_real_ndpi_loses_its_identifiers_and_no_pixel(
    real_slide: Path, tmp_path: Path
) -> None:
    marks = [mark(40 + n) for n in range(8)]
    slide, copy = tmp_path / "a.ndpi", tmp_path / "b.ndpi"
    plant_in_ndpi(real_slide.parent / NDPI, slide, marks)
    there = [m for m in marks if m[:10] in slide.read_bytes()]
    assert there == marks
    report = deidentify(slide, copy, sheet=tmp_path / "sheet.png")
    data = copy.read_bytes()
    assert [m for m in marks if m[:10] in data] == []
    # what the scanner itself wrote: serial numbers, dates, the filter's name
    for words in (b"950291", b"2017/01/27", b"Created", b"Objective.Lens"):
        assert words in (real_slide.parent / NDPI).read_bytes()
        assert words not in data
    same_for_openslide(slide, copy, max_px=1500)
    with openslide.OpenSlide(copy) as opened:
        assert not opened.associated_images
    assert sum("macro or a map" in line for line in report.removed) == 2
    assert len(kept_pages(copy)) == 4


def test_a_real_aperio_slide_keeps_every_pixel_and_loses_label_macro_and_names(
    real_slide: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.svs"
    deidentify(real_slide, copy)
    same_for_openslide(real_slide, copy)
    data = copy.read_bytes()
    for words in (b"b414003d", b"CPAPERIOCS", b"12/29/09", b"Filename"):
        assert words in real_slide.read_bytes()
        assert words not in data
    with openslide.OpenSlide(copy) as opened:
        assert set(opened.associated_images) == {"thumbnail"}


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_big_endian_tiff_keeps_its_order_and_orientation(
    tmp_path: Path, orientation: int
) -> None:
    pixels = planted.tissue((300, 200))
    slide, copy = tmp_path / "a.tif", tmp_path / "b.tif"
    extra = [(274, 3, 1, orientation, True), (315, 2, 11, mark(1) + b"\0", True)]
    with tifffile.TiffWriter(slide, byteorder=">") as file:
        file.write(pixels, tile=(128, 128), photometric="rgb", metadata=None,
                   software=False, extratags=extra, compression=8)  # fmt: skip
    assert left(slide, [mark(1)])
    assert deidentify(slide, copy).removed == ["tag 315 (Artist)"]
    assert not left(copy, [mark(1)])
    with tifffile.TiffFile(copy) as file:
        assert file.byteorder == ">"
        assert file.pages.first.tags[274].value == orientation
        assert np.array_equal(file.pages.first.asarray(), pixels)


def plant_in_dicom(source: Path, path: Path, marks: Sequence[bytes]) -> None:
    """Identifiers in 20 places of a real DICOM file of one JPEG frame."""
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed")
    text = [m.decode() for m in marks]
    dataset = pydicom.dcmread(source)
    dataset.PatientName = text[0]
    dataset.PatientID = text[1]
    dataset.AccessionNumber = text[2]
    dataset.ImageComments = text[3]
    dataset.ContainerIdentifier = text[4]
    dataset.BarcodeValue = text[5]
    dataset.ManufacturerModelName = text[6]
    specimen = dataset.SpecimenDescriptionSequence[0]
    specimen.SpecimenIdentifier = text[7]
    specimen.SpecimenDetailedDescription = text[8]
    optical = dataset.OpticalPathSequence[0]
    optical.OpticalPathIdentifier = text[9]
    optical.OpticalPathDescription = text[10]
    optical.IlluminationTypeCodeSequence[0].CodeMeaning = text[11]
    optical.ICCProfile = planted.profile(marks[12], marks[13] + b"\0")
    shared = dataset.SharedFunctionalGroupsSequence[0]
    shared.add_new((0x0009, 0x0010), "LO", text[14])
    dataset.add_new((0x0011, 0x0010), "LO", "SOMEBODY")
    dataset.add_new((0x0011, 0x1001), "LO", text[15])
    dataset.DimensionIndexSequence[0].DimensionDescriptionLabel = text[16]
    dataset.preamble = marks[17].ljust(128, b"\0")
    dataset.file_meta.SourceApplicationEntityTitle = text[18]
    frame = pydicom.encaps.get_frame(dataset.PixelData, 0)
    frame = frame[:2] + planted.segment(0xFE, marks[19]) + frame[2:] + marks[20]
    frame += b"\0" * (len(frame) % 2)
    dataset.PixelData = pydicom.encaps.encapsulate([frame])
    dataset.add_new((0xFFFC, 0xFFFC), "OB", marks[21] + b"\0" * (len(marks[21]) % 2))
    dataset.save_as(path)


def test_real_dicom_files_lose_their_identifiers_and_no_pixel(
    real_slide: Path, tmp_path: Path
) -> None:
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed")
    marks = [mark(50 + n) for n in range(22)]
    source = real_slide.parent / "other/boxes"
    folder = tmp_path / "in"
    folder.mkdir()
    plant_in_dicom(source / "boxes_0.dcm", folder / "a.dcm", marks)
    shutil.copy(source / "boxes_1.dcm", folder / "b.dcm")
    label = pydicom.dcmread(source / "boxes_1.dcm")
    label.ImageType = ["DERIVED", "PRIMARY", "LABEL", "NONE"]
    label.save_as(folder / "c.dcm")
    planted_bytes = (folder / "a.dcm").read_bytes()
    assert [m for m in marks if m not in planted_bytes] == []
    files = sorted(folder.iterdir())
    out = tmp_path / "out"
    reports = deidentify_dicom(files, out, sheet=tmp_path / "sheet.png")
    assert sorted(path.name for path in out.iterdir()) == ["a.dcm", "b.dcm"]
    assert reports[folder / "c.dcm"].removed == [
        "the whole file: its image type is LABEL"
    ]
    old_uids = uids_of(pydicom, folder / "a.dcm")
    for name in ("a.dcm", "b.dcm"):
        data = planted.everything(out / name)
        assert [m for m in marks if m in data] == []
        assert not [uid for uid in old_uids if uid.encode() in data]
        assert b"PIXELMED" not in data.upper() and b"20091229" not in data
        old, new = pydicom.dcmread(folder / name), pydicom.dcmread(out / name)
        assert np.array_equal(old.pixel_array, new.pixel_array)
        assert new.PatientIdentityRemoved == "YES" and not new.PatientName
        assert new.OpticalPathSequence[0].ObjectiveLensPower == 20
    a, b = (pydicom.dcmread(out / name) for name in ("a.dcm", "b.dcm"))
    assert a.SeriesInstanceUID == b.SeriesInstanceUID
    assert a.SOPInstanceUID != b.SOPInstanceUID
    assert a.file_meta.MediaStorageSOPInstanceUID == a.SOPInstanceUID
    same_for_openslide(folder / "a.dcm", out / "a.dcm")


def uids_of(pydicom: Any, path: Path) -> set[str]:
    """All UIDs of a file that the standard does not define."""
    found = {str(e.value) for e in pydicom.dcmread(path).iterall() if e.VR == "UI"}
    return {uid for uid in found if not uid.startswith(("1.2.840.10008.", "2.16.840"))}


def test_a_dicom_thumbnail_that_shows_something_else_is_left_out(
    real_slide: Path, tmp_path: Path
) -> None:
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed")
    source = real_slide.parent / "other/boxes"
    other = pydicom.dcmread(source / "boxes_1.dcm")
    pixels = np.frombuffer(other.PixelData, np.uint8).reshape(
        other.Rows, other.Columns, 3
    )
    other.PixelData = np.ascontiguousarray(255 - pixels).tobytes()
    other.save_as(tmp_path / "b.dcm")
    shutil.copy(source / "boxes_0.dcm", tmp_path / "a.dcm")
    reports = deidentify_dicom(
        [tmp_path / "a.dcm", tmp_path / "b.dcm"], tmp_path / "out"
    )
    assert "the whole file" in reports[tmp_path / "b.dcm"].removed[0]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.dcm"]


# streams, profiles and words by themselves


def test_a_cleaned_jpeg_has_its_length_and_its_pixels() -> None:
    pixels = planted.tissue((96, 80))
    marks = [mark(n) for n in range(4)]
    data = planted.jpeg(pixels, marks)
    cleaned = clean_jpeg(data)
    assert len(cleaned.data) == len(data) - len(marks[3])
    assert not [m for m in marks if m in cleaned.data]
    decoded = [np.asarray(Image.open(io.BytesIO(d))) for d in (data, cleaned.data)]
    assert np.array_equal(*decoded)
    again = clean_jpeg(cleaned.data)
    assert again.data == cleaned.data and not again.removed


def test_a_jpeg_thumbnail_and_a_progressive_jpeg_s_comments_go() -> None:
    pixels = Image.fromarray(planted.tissue((96, 80)))
    buffer = io.BytesIO()
    pixels.save(buffer, "JPEG", progressive=True, quality=80)
    data = buffer.getvalue()
    jfif = planted.segment(
        0xE0, b"JFIF\0\1\1\0\0\1\0\1" + bytes([2, 2]) + mark(1) + b"\0\0"
    )
    last_scan = data.rindex(b"\xff\xda")
    dirty = (
        data[:2]
        + jfif
        + data[20:last_scan]
        + planted.segment(0xFE, mark(2))
        + data[last_scan:]
    )
    cleaned = clean_jpeg(dirty)
    assert mark(1) not in cleaned.data and mark(2) not in cleaned.data
    assert np.array_equal(
        *[np.asarray(Image.open(io.BytesIO(d))) for d in (dirty, cleaned.data)]
    )


@pytest.mark.parametrize("kind", ["j2k", "jp2"])
def test_a_jpeg_2000_loses_comments_boxes_and_trailing_bytes(kind: str) -> None:
    pixels = Image.fromarray(planted.tissue((96, 80)))
    buffer = io.BytesIO()
    pixels.save(buffer, "JPEG2000", no_jp2=kind == "j2k", comment=mark(1))
    dirty = buffer.getvalue()
    if kind == "jp2":
        dirty += struct.pack(">I4s", 8 + len(mark(2)), b"xml ") + mark(2)
    else:
        dirty += mark(2)
    assert mark(1) in dirty
    cleaned = clean_segment(dirty, 34712, 0)
    assert mark(1) not in cleaned.data and mark(2) not in cleaned.data
    assert np.array_equal(
        *[np.asarray(Image.open(io.BytesIO(d))) for d in (dirty, cleaned.data)]
    )
    assert clean_segment(cleaned.data, 34712, 0).removed == frozenset()


def test_a_webp_loses_exif_and_trailing_bytes() -> None:
    pixels = Image.fromarray(planted.tissue((96, 80)))
    buffer = io.BytesIO()
    pixels.save(buffer, "WEBP", lossless=True, exif=b"Exif\0\0" + mark(1), xmp=mark(2))
    dirty = buffer.getvalue() + mark(3)
    cleaned = clean_segment(dirty, 50001, 0)
    assert not [n for n in (1, 2, 3) if mark(n) in cleaned.data]
    assert np.array_equal(
        *[np.asarray(Image.open(io.BytesIO(d))) for d in (dirty, cleaned.data)]
    )


def test_damaged_streams_are_refused() -> None:
    good = planted.jpeg(planted.tissue((32, 32)))
    for bad in (
        b"text",
        good[:2] + b"\xff\xe1\xff\xff",
        good[:2] + planted.segment(0xDB, b"\0" * 70),
    ):
        with pytest.raises(StreamError, match="JPEG"):
            clean_jpeg(bad)
    with pytest.raises(StreamError, match="compression"):
        clean_segment(b"x", 4, 1)


def test_a_cleaned_profile_converts_colours_as_before() -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    colours = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    )
    for data in (planted.profile(mark(1), mark(2)), srgb.tobytes()):
        cleaned = clean_profile(data)
        assert cleaned is not None
        assert mark(1) not in cleaned.data and mark(2) not in cleaned.data
        lab = ImageCms.createProfile("LAB")
        both = [
            ImageCms.profileToProfile(
                colours, ImageCms.ImageCmsProfile(io.BytesIO(d)), lab, outputMode="LAB"
            )
            for d in (data, cleaned.data)
        ]
        assert np.array_equal(*map(np.asarray, both))
        again = clean_profile(cleaned.data)
        assert again is not None and again.data == cleaned.data and not again.removed
    assert clean_profile(b"no profile" * 20) is None


SIZES = KnownSizes(slide=(46000, 32914), page=(46000, 32914), tile=(256, 256))


def test_values_are_kept_only_in_the_form_of_their_key() -> None:
    text = (
        "Aperio Image Library v11.2.1\r\n46000x32914 (256x256) JPEG/RGB Q=30 P-77"
        "|AppMag = 20|MPP = 0,4990|Left = 1975-04-12|Gamma = 2.2|Gamma = 2.4|Who = me"
    )
    kept, removed = kept_description(text, SIZES)
    assert kept == "Aperio Image Library v11.2.1|AppMag = 20|MPP = 0,4990|Gamma = 2.2"
    assert len(removed) == 4
    assert kept_description(kept, SIZES) == (kept, [])
    assert kept_description("a name", SIZES)[0] == ""


@pytest.mark.parametrize(
    "pair",
    ["OriginalWidth = 7395123", "Originalheight = 19750412", "Left = 7395123",
     "Exposure Time = 7395123", "StripeWidth = 7395123", "AppMag = 751",
     "Focus Offset = 7395123", "ImageID = 7395123", "MPP = 73.95123", "DisplayColor = 73"],
)  # fmt: skip
def test_a_number_that_cannot_be_what_its_key_says_is_left_out(pair: str) -> None:
    text = f"Aperio Image Library v11.2.1\r\n46000x32914 (256x256)|MPP = 0.25|{pair}"
    kept, removed = kept_description(text, SIZES)
    assert kept.endswith("46000x32914 (256x256)|MPP = 0.25")
    assert len(removed) == 1 and pair.split(" =", maxsplit=1)[0] in removed[0]


def test_the_first_lines_name_only_sizes_that_the_image_has() -> None:
    sizes = KnownSizes(slide=(2220, 2967), page=(574, 768), tile=(240, 240))
    text = (
        "Aperio Image Library v11.2.1 \n7395123x2967 [19,75 2220x2967] (240x240) -> 574x768 - "
        ";Aperio Image Library v10.0.51\r\n1975x412 JPEG/RGB Q=30"
        "|OriginalWidth = 2220|OriginalHeight = 2967"
    )
    kept, removed = kept_description(text, sizes)
    assert kept == (
        "Aperio Image Library v11.2.1\r\n2220x2967 (240x240) -> 574x768"
        "|OriginalWidth = 2220|OriginalHeight = 2967"
    )
    assert any("sizes" in line for line in removed)
    assert kept_description(kept, sizes) == (kept, [])


def image_of(pixels: Any, name: str = "image") -> StoredImage:
    """A picture of one segment."""
    size = (pixels.shape[1], pixels.shape[0])
    return StoredImage(name=name, size=size, segment=size, decode=lambda _: pixels)


def test_what_shows_the_slide_is_known_from_what_does_not() -> None:
    slide = planted.tissue((960, 640))
    whole = image_of(slide)
    small = planted.smaller(slide, 4)
    assert find_unlikeness(image_of(small), whole) == ""
    assert "shape" in find_unlikeness(image_of(small[:, :150]), whole)
    assert find_unlikeness(image_of(planted.label((240, 160))), whole)
    assert find_unlikeness(image_of(small[::-1]), whole)
    other = planted.tissue((240, 160), seed=7)
    assert find_unlikeness(image_of(other), whole)
    with_label = small.copy()
    with_label[10:70, 20:100] = planted.label((80, 60))
    assert find_unlikeness(image_of(with_label), whole)
    bright = np.full((160, 240, 3), 243, np.uint8)
    assert find_unlikeness(image_of(bright), whole)
    assert (
        find_unlikeness(
            image_of(bright), image_of(np.full((640, 960, 3), 245, np.uint8))
        )
        == ""
    )


def written_on(pixels: Any, text: str, place: tuple[int, int], px: int) -> Any:
    """A picture with a word in black on it."""
    image = Image.fromarray(pixels)
    font = ImageFont.load_default(px)
    ImageDraw.Draw(image).text(place, text, fill=(0, 0, 0), font=font)
    return np.asarray(image)


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("place", [(12, 8), (60, 50)])
def test_a_name_on_a_small_level_is_more_than_the_slide_shows(
    factor: int, place: tuple[int, int]
) -> None:
    slide = planted.tissue((1600, 1200))
    level = planted.smaller(slide, factor)
    assert find_unlikeness(image_of(level), image_of(slide)) == ""
    with_name = written_on(level, "J. DOE 1975", place, 14)
    assert find_unlikeness(image_of(with_name), image_of(slide))


@pytest.mark.parametrize("tile", [(64, 64), (97, 33), (400, 16)])
def test_levels_in_tiles_and_strips_are_compared_whole(tile: tuple[int, int]) -> None:
    slide = planted.tissue((1610, 1203))
    level = planted.smaller(slide, 4)
    with_name = written_on(level, "J. DOE 1975", (250, 270), 14)
    tiled_slide = image_in_tiles(slide, (128, 96))
    assert find_unlikeness(image_in_tiles(level, tile), tiled_slide) == ""
    found = find_unlikeness(image_in_tiles(with_name, tile), tiled_slide)
    assert "shows something at" in found


def image_in_tiles(pixels: Any, tile: tuple[int, int]) -> StoredImage:
    """A picture in segments, those of the border with white beyond it."""
    height, width = pixels.shape[:2]
    columns = -(-width // tile[0])

    def decode(index: int) -> Any:
        row, column = divmod(index, columns)
        part = pixels[row * tile[1] :, column * tile[0] :][: tile[1], : tile[0]]
        whole = np.full((tile[1], tile[0], 3), 255, np.uint8)
        whole[: part.shape[0], : part.shape[1]] = part
        return whole

    return StoredImage(name="tiles", size=(width, height), segment=tile, decode=decode)


def quantizer(number: int, text: bytes, *, wide: bool = False) -> bytes:
    """A segment with a JPEG quantisation table that holds a text."""
    head = bytes([number | (0x10 if wide else 0)])
    return planted.segment(0xDB, head + text.ljust(128 if wide else 64, b"\1"))


def huffman(number: int, text: bytes) -> bytes:
    """A segment with a Huffman table that holds a text."""
    counts = bytes(15) + bytes([len(text)])
    return planted.segment(0xC4, bytes([number]) + counts + text)


def test_jpeg_tables_that_no_pixel_uses_are_filled() -> None:
    pixels = planted.tissue((64, 48))
    plain = planted.jpeg(pixels)
    plants = (
        quantizer(3, mark(1)),
        quantizer(2, mark(2), wide=True),
        huffman(0x03, mark(3)),
        huffman(0x12, mark(4)),
        quantizer(0, mark(5)),  # replaced before a scan uses it
    )
    stream = plain[:2] + b"".join(plants) + plain[2:]
    cleaned = clean_jpeg(stream)
    assert len(cleaned.data) == len(stream)
    assert [n for n in range(1, 6) if mark(n) in cleaned.data] == []
    assert "JPEG tables that no pixel uses" in cleaned.removed
    decoded = [simplejpeg.decode_jpeg(data) for data in (plain, cleaned.data)]
    assert np.array_equal(*decoded)
    again = clean_jpeg(cleaned.data)
    assert again.data == cleaned.data and not again.removed


def test_shared_jpeg_tables_that_no_tile_uses_are_filled(tmp_path: Path) -> None:
    pixels = planted.tissue((256, 256))
    slide = tmp_path / "a.tif"
    copy = tmp_path / "b.tif"
    with tifffile.TiffWriter(slide) as file:
        for level in (pixels, planted.smaller(pixels, 2)):
            plain = [
                planted.jpeg(tile)
                for tile in planted.tiles(level, lambda tile, _: tile, 128)
            ]
            frame = plain[0].index(b"\xff\xc0")
            scan = plain[0].index(b"\xff\xda")
            huffman_start = plain[0].index(b"\xff\xc4")
            shared = plain[0][20:frame] + plain[0][huffman_start:scan]
            tables = (
                b"\xff\xd8" + quantizer(3, mark(1)) + shared + huffman(0x03, mark(2))
            )
            tiles = [
                data[:2] + data[frame:huffman_start] + data[scan:] for data in plain
            ]
            file.write(iter(tiles), shape=level.shape, dtype=np.uint8, tile=(128, 128),
                       compression="jpeg", photometric="ycbcr", subsampling=(2, 2),
                       jpegtables=tables + b"\xff\xd9", metadata=None, software=False,
                       subfiletype=int(level is not pixels))  # fmt: skip
    assert left(slide, [mark(1), mark(2)])
    report = deidentify(slide, copy)
    assert report.removed == ["JPEG tables that no pixel uses"]
    assert left(copy, [mark(1), mark(2)]) == []
    for old, new in zip(kept_pages(slide), kept_pages(copy), strict=True):
        assert np.array_equal(old, new)


def look_up_profile(kind: bytes) -> bytes:
    """A profile whose look-up table is followed by a text, which the tag's size includes."""
    head = bytes([3, 3, 2, 0])
    if kind == b"mft1":
        matrix = np.eye(3).ravel() * 65536
        body = struct.pack(">9i", *map(int, matrix)) + bytes(256 * 3 + 8 * 3 + 256 * 3)
        table = kind + bytes(4) + head + body
    else:
        curve = b"curv" + bytes(4) + struct.pack(">I", 0)
        offsets = struct.pack(">5I", 32, 0, 0, 0, 0)
        table = kind + bytes(4) + head[:2] + bytes(2) + offsets + curve * 3
    table += mark(1) + bytes(-len(mark(1)) % 4)
    header = bytearray(128)
    header[8:10] = b"\4\0"
    header[12:24] = b"mntrRGB Lab "
    header[36:40] = b"acsp"
    header[48:52] = mark(2)[:4]
    tags = struct.pack(">I4sII", 1, b"A2B0", 144, len(table))
    whole = bytes(header) + tags + table
    return struct.pack(">I", len(whole)) + whole[4:]


@pytest.mark.parametrize("kind", [b"mft1", b"mAB ", b"mBA "])
def test_bytes_after_a_look_up_table_of_a_profile_go(kind: bytes) -> None:
    profile = look_up_profile(kind)
    assert mark(1) in profile
    cleaned = clean_profile(profile)
    assert cleaned is not None and mark(1) not in cleaned.data
    assert mark(2)[:4] not in cleaned.data
    assert kind in cleaned.data
    assert any("tables of ICC" in line for line in cleaned.unread)


def test_numbers_of_dicom_that_their_keyword_cannot_mean_go(
    real_slide: Path, tmp_path: Path
) -> None:
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed")
    source = real_slide.parent / "other/boxes/boxes_0.dcm"
    dataset = pydicom.dcmread(source)
    dataset.SeriesNumber = 7395123
    dataset.InstanceNumber = 7395123
    dataset.ImagedVolumeWidth = 7395123.0
    dataset.OpticalPathSequence[0].IlluminationWaveLength = 7395123.0
    dataset.add_new((0x0018, 0x1150), "IS", 7395123)  # exposure time
    specimen = dataset.SpecimenDescriptionSequence[0]
    specimen.SpecimenUID = "1.2.840.10008.7395123.19750412"
    slide = tmp_path / "a.dcm"
    dataset.save_as(slide)
    deidentify_dicom([slide], tmp_path / "out")
    copy = pydicom.dcmread(tmp_path / "out/a.dcm")
    values = [str(element.value) for element in copy.iterall() if element.VR != "SQ"]
    assert [value for value in values if "7395123" in value] == []
    assert copy.SeriesNumber == 1
    assert str(copy.SpecimenDescriptionSequence[0].SpecimenUID).startswith("2.25.")
    assert copy.SOPClassUID == dataset.SOPClassUID
    assert np.array_equal(copy.pixel_array, dataset.pixel_array)


def test_numbers_of_tags_that_their_tag_cannot_mean_go(tmp_path: Path) -> None:
    pixels = planted.tissue((300, 200))
    slide = tmp_path / "a.tif"
    copy = tmp_path / "b.tif"
    tifffile.imwrite(
        slide,
        pixels,
        photometric="rgb",
        rowsperstrip=200,
        metadata=None,
        software=False,
        resolution=((7395123, 3), (20000, 1)),
        resolutionunit="CENTIMETER",
    )
    with tifffile.TiffFile(slide, mode="r+b") as file:
        file.pages.first.tags[278].overwrite(7395123, dtype="I")
        file.pages.first.tags[282].overwrite((7395123 * 100, 1))
    report = deidentify(slide, copy)
    with tifffile.TiffFile(copy) as file:
        tags = file.pages.first.tags
        assert 282 not in tags and tags[283].value == (20000, 1)
        assert tags[278].value != 7395123
        assert np.array_equal(file.pages.first.asarray(), pixels)
    assert any("rows in a strip" in line for line in report.removed)
    assert examine(copy).removed == []


def test_pointers_of_jpeg_2000_are_comments_of_zeros() -> None:
    pixels = planted.tissue((64, 64))
    stream = bytes(imagecodecs.jpeg2k_encode(pixels, codecformat="j2k", level=0))
    start_of_tile = stream.index(b"\xff\x90")
    plant = planted.segment(0x63, mark(1))
    planted_stream = stream[:start_of_tile] + plant + stream[start_of_tile:]
    cleaned = clean_segment(planted_stream, 34712, 0)
    assert mark(1) not in cleaned.data and len(cleaned.data) == len(planted_stream)
    assert "JPEG 2000 pointers (CRG)" in cleaned.removed
    assert any("tile parts" in line for line in cleaned.unread)
    assert np.array_equal(imagecodecs.jpeg2k_decode(cleaned.data), pixels)


def test_the_contact_sheet_shows_every_image_that_is_kept(tmp_path: Path) -> None:
    planted.write_aperio(tmp_path / "a.svs", [mark(n) for n in range(20)])
    deidentify(tmp_path / "a.svs", tmp_path / "b.svs", sheet=tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        shown = np.asarray(sheet.convert("RGB")).astype(int)
    pixels = planted.tissue((900, 700))
    expected = np.asarray(
        Image.fromarray(pixels).resize((640, 498), Image.Resampling.BOX)
    )
    cell = shown[100 : 100 + 498, 16 : 16 + 640]
    assert abs(cell - expected).mean() < 6  # JPEG, and tiles that are rounded to pixels
    assert shown.shape[0] > 800  # two rows: three images


# files as wholes


def test_what_cannot_be_copied_is_refused_with_the_reason(tmp_path: Path) -> None:
    pixels = planted.tissue((300, 200))
    Image.fromarray(pixels).save(tmp_path / "a.png")
    with pytest.raises(InvalidInputError, match=r"'a\.png' is not a TIFF"):
        deidentify(tmp_path / "a.png", tmp_path / "b.png")
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(128, 128), metadata=None)
    convert(tmp_path / "a.tif", tmp_path / "a.ome.tif")
    with pytest.raises(InvalidInputError, match="must not be an OME-TIFF"):
        deidentify(tmp_path / "a.ome.tif", tmp_path / "b.tif")
    ndpi_format = (65420, 2, 9, b"no NDPI!\0", True)
    tifffile.imwrite(tmp_path / "n.tif", pixels, tile=(128, 128), metadata=None,
                     extratags=[ndpi_format])  # fmt: skip
    with pytest.raises(InvalidInputError, match=r"'n\.tif' is not a TIFF that can"):
        deidentify(tmp_path / "n.tif", tmp_path / "b.tif")
    philips = '<?xml version="1.0"?><DataObject ObjectType="DPUfsImport"></DataObject>'
    tifffile.imwrite(tmp_path / "p.tiff", pixels, tile=(128, 128), metadata=None,
                     description=philips, software="Philips DP v1.0")  # fmt: skip
    with pytest.raises(InvalidInputError, match=r"philips .*barcode, label and macro"):
        deidentify(tmp_path / "p.tiff", tmp_path / "b.tiff")
    assert not (tmp_path / "b.tif").exists() and not (tmp_path / "b.tiff").exists()
    (tmp_path / "b.tif").write_bytes(b"mine")
    with pytest.raises(OutputError, match="out must not exist"):
        deidentify(tmp_path / "a.tif", tmp_path / "b.tif")
    assert (tmp_path / "b.tif").read_bytes() == b"mine"


def test_structures_that_overlap_are_refused(tmp_path: Path) -> None:
    pixels = planted.tissue((300, 200))
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels, tile=(128, 128), metadata=None, compression=8)
    with tifffile.TiffFile(path) as file:
        tag = file.pages.first.tags[324]
        offsets = list(tag.value)
        place = tag.valueoffset
    offsets[1] = offsets[0] + 3
    data = bytearray(path.read_bytes())
    data[place : place + 4 * len(offsets)] = struct.pack(f"<{len(offsets)}I", *offsets)
    path.write_bytes(bytes(data))
    with pytest.raises(InvalidInputError):
        deidentify(path, tmp_path / "b.tif")


def test_a_report_never_says_nothing_was_found(tmp_path: Path) -> None:
    pixels = planted.tissue((300, 200))
    tifffile.imwrite(
        tmp_path / "a.tif", pixels, tile=(128, 128), metadata=None, software=False
    )
    report = examine(tmp_path / "a.tif")
    said = "\n".join(report.lines())
    assert report.removed == [] and "nothing was found" not in said
    assert "segments of page 0" in said and "text or faces within the pixels" in said


def test_convert_leaves_out_what_its_streams_held(tmp_path: Path) -> None:
    marks = [mark(n) for n in range(20)]
    planted.write_aperio(tmp_path / "a.svs", marks)
    convert(tmp_path / "a.svs", tmp_path / "a.ome.tif", reader="tiff")
    assert left(tmp_path / "a.ome.tif", marks) == []
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as copy:
        assert np.array_equal(
            copy.pages.first.asarray(), kept_pages(tmp_path / "a.svs")[0]
        )


def test_the_former_name_of_the_room_hands_on_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"use thinsection\.deid\.examine"):
        from thinsection.slide.deid import examine as former
    assert former is examine
