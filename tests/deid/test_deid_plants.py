"""What may identify a patient, planted in one place of a slide at a time: none is in the copy.

Each plant is judged by the bytes of the copy, as they are stored and as they are decoded by
tifffile, pydicom, zlib and LZW. Every slide has two levels, and of DICOM two files.
"""

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageDraw, ImageFont
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate, generate_frames
from tests.slide import planted
from tests.slide.planted import segment
from tests.support.dicom_slides import DicomKind, write_dicom

from thinsection.deid import deidentify, deidentify_dicom, examine
from thinsection.errors import InvalidInputError
from thinsection.slide.convert import convert
from thinsection.types import RgbArray

TEXT = "QZXDOESMITHS"
WORD = TEXT.encode()
NUMBER = 7395123
DIGITS = str(NUMBER)
DATE = "19750412"
TILE = 64
SIZE = (190, 150)
Tag = tuple[int, int, int, Any, bool]


@cache
def slide_pixels() -> RgbArray:
    """Level 0 of every slide here."""
    return planted.tissue(SIZE, seed=2)


def forms(secret: str | int | bytes) -> list[bytes]:
    """Bytes by which a planted text or number can be stored."""
    if isinstance(secret, bytes):
        return [secret]
    if isinstance(secret, str):
        return [
            secret.encode(),
            secret.encode("utf-16-le"),
            secret.encode("utf-16-be"),
        ]
    numbers = [struct.pack(order + form, secret) for order in "<>" for form in "IQfd"]
    return [str(secret).encode(), *numbers]


def decoded(path: Path) -> bytes:
    """What programs of others read in a file: values of tags and elements, unpacked segments."""
    parts = [planted.everything(path)]
    if path.suffix == ".dcm":
        dataset = dcmread(path)
        parts += [str(element.value).encode() for element in dataset.iterall()]
        parts.append(str(dataset.file_meta).encode())
    else:
        with tifffile.TiffFile(path) as file:
            pages = [p for page in file.pages for p in (page, *(page.pages or ()))]
            for page in pages:
                parts += [str(tag.value).encode() for tag in page.tags]
    return b"\n".join(parts)


def left(path: Path, secret: str | int | bytes) -> bool:
    """Tells whether a file still holds what was planted."""
    data = decoded(path)
    return any(form in data for form in forms(secret))


# TIFF


@dataclass(frozen=True)
class TiffForm:
    """What a slide of two levels has besides its pixels; each a place for a plant."""

    pairs: str = ""  # of Aperio's description, behind its own
    first_line: str = "Aperio Image Library v11.2.1"
    sizes: str = "190x150 [0,0 190x150] (64x64) JPEG/RGB Q=70"
    description: str | None = None  # in place of Aperio's
    below: str = ""  # words of the second level
    tags: Sequence[Tag] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    on_tile: Callable[[bytes], bytes] = bytes  # of a compressed tile
    on_pixels: Callable[[bytes], bytes] = bytes  # before deflate
    on_level: Callable[[RgbArray], RgbArray] = np.asarray
    on_file: Callable[[bytes], bytes] = bytes
    tables: bytes = b""
    extra_tiles: int = 0
    pages: Sequence[tuple[RgbArray, str]] = ()
    is_jpeg: bool = True


def write_tiff(path: Path, form: TiffForm) -> None:
    """Writes an Aperio slide or a plain TIFF of two levels."""
    pixels = slide_pixels()
    words = form.description
    if words is None:
        words = (
            f"{form.first_line}\r\n{form.sizes}|AppMag = 20|MPP = 0.4990{form.pairs}"
        )

    def encode(square: RgbArray, index: int) -> bytes:
        is_planted = index == 1
        if form.is_jpeg:
            data = planted.jpeg(square)
            if form.tables:
                data = without_tables(data)
            return form.on_tile(data) if is_planted else data
        raw = square.tobytes()
        packed = zlib.compress(form.on_pixels(raw) if is_planted else raw)
        return form.on_tile(packed) if is_planted else packed

    common: dict[str, Any] = {
        "tile": (TILE, TILE),
        "dtype": np.uint8,
        "metadata": None,
        "compression": "jpeg" if form.is_jpeg else 8,
        "photometric": "ycbcr" if form.is_jpeg else "rgb",
    }
    if form.is_jpeg:
        common["subsampling"] = (2, 2)
    if form.tables:
        common["jpegtables"] = form.tables
    first = {"software": False, "extratags": form.tags, **form.options}
    below = form.on_level(planted.smaller(pixels, 2))
    with tifffile.TiffWriter(path) as file:
        file.write(
            iter(planted.tiles(pixels, encode, TILE)),
            shape=pixels.shape,
            description=words,
            **common,
            **first,
        )
        file.write(
            iter(planted.tiles(below, encode, TILE)),
            shape=below.shape,
            description=form.below,
            software=False,
            subfiletype=1,
            **common,
        )
        for page, name in form.pages:
            file.write(page, description=name, metadata=None, software=False)
    path.write_bytes(form.on_file(path.read_bytes()))


def without_tables(data: bytes) -> bytes:
    """A JPEG of a tile whose tables stand elsewhere."""
    frame = data.index(b"\xff\xc0")
    huffman = data.index(b"\xff\xc4")
    scan = data.index(b"\xff\xda")
    return data[:2] + data[frame:huffman] + data[scan:]


def shared_tables(plant: bytes) -> bytes:
    """The tables of such tiles, and a segment of somebody."""
    data = planted.jpeg(planted.tissue((TILE, TILE)))
    start = data.index(b"\xff\xdb")
    frame = data.index(b"\xff\xc0")
    huffman = data.index(b"\xff\xc4")
    scan = data.index(b"\xff\xda")
    return data[:2] + plant + data[start:frame] + data[huffman:scan] + b"\xff\xd9"


def text_tag(code: int, text: str = TEXT) -> Tag:
    """A tag of text."""
    return (code, 2, len(text) + 1, text.encode() + b"\0", True)


def bytes_tag(code: int, data: bytes) -> Tag:
    """A tag of bytes of no kind."""
    return (code, 7, len(data), data, True)


def after_start(*plants: bytes) -> Callable[[bytes], bytes]:
    """Puts segments at the head of a JPEG."""
    return lambda data: data[:2] + b"".join(plants) + data[2:]


def before_scan(plant: bytes) -> Callable[[bytes], bytes]:
    """Puts bytes before the scan of a JPEG."""

    def change(data: bytes) -> bytes:
        scan = data.index(b"\xff\xda")
        return data[:scan] + plant + data[scan:]

    return change


def named(pixels: RgbArray) -> RgbArray:
    """A level with a name on it."""
    image = Image.fromarray(pixels)
    font = ImageFont.load_default(14)
    ImageDraw.Draw(image).text((8, 40), "J. DOE", fill=(0, 0, 0), font=font)
    return np.asarray(image)


def with_directory_nobody_reads(data: bytes) -> bytes:
    """Adds a directory with a tag of text that no other directory leads to."""
    place = len(data) + len(data) % 2
    entry = struct.pack("<HHHII", 1, 315, 2, len(WORD), place + 18)
    return data.ljust(place, b"\0") + entry + bytes(4) + WORD


def one_more_tile(data: bytes) -> bytes:
    """Lists one more tile in the first directory, which holds a text."""
    (start,) = struct.unpack("<I", data[4:8])
    out = bytearray(data)
    (count,) = struct.unpack("<H", data[start : start + 2])
    for index in range(count):
        at = start + 2 + 12 * index
        code, _, length, place = struct.unpack("<HHII", data[at : at + 12])
        if code in (324, 325):
            numbers = out[place : place + 4 * length]
            more = len(out) if code == 324 else len(WORD)
            if code == 324:
                out += planted.jpeg(planted.label((TILE, TILE)), (WORD,) * 4)
                size = len(out) - more
            new = len(out)
            out += numbers + struct.pack("<I", more if code == 324 else size)
            out[at + 2 : at + 12] = struct.pack("<HII", 4, length + 1, new)
    return bytes(out)


JSON = json.dumps({"patient": {"name": TEXT, "born": DATE}})
EXIF = (
    b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHII", 1, 37500, 7, 12, 26) + bytes(4)
)
XMP = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta>" + WORD
SHARED = "shared tables"
# a frame of more components than there are, each of three bytes
FRAME_OF_WORDS = struct.pack(">BHHB", 8, 64, 64, 4) + WORD

# place: what a slide has there, and what must not be in its copy
APERIO: dict[str, tuple[TiffForm, str | int | bytes]] = {
    **{
        f"description: {key}": (TiffForm(pairs=f"|{key} = {DIGITS}"), DIGITS)
        for key in (
            "Exposure Time", "Exposure Scale", "OriginalWidth", "OriginalHeight",
            "Originalheight", "Left", "Top", "SeriesNumber", "StripeWidth", "ImageID",
            "LineCameraSkew", "LineAreaXOffset", "Focus Offset", "SessionID", "Barcode",
            "AppMag", "MPP", "Gamma", "Filtered", "DisplayColor",
        )
    },
    **{
        f"description: {key}": (TiffForm(pairs=f"|{key} = {TEXT}"), TEXT)
        for key in (
            "Filename", "User", "Title", "ScanScope ID", "Parmset", "ICC Profile",
            "Time Zone", "DSR ID", "Rack", "Slide", TEXT,
        )
    },
    "description: Date": (TiffForm(pairs="|Date = 04/12/75"), "04/12/75"),
    "description: Time": (TiffForm(pairs="|Time = 19:75:04"), "19:75:04"),
    "description: a pair without a key": (TiffForm(pairs=f"|{TEXT}"), TEXT),
    "description: a second MPP": (TiffForm(pairs="|MPP = 0.1975"), "0.1975"),
    "description: version": (TiffForm(first_line="Aperio Image Library v197.504.12"), "197"),
    "description: version of dates": (
        TiffForm(first_line="Aperio Image Library v19.75.04.12"), "75.04",
    ),
    "description: first line": (TiffForm(first_line=f"Aperio {TEXT}"), TEXT),
    "description: sizes": (TiffForm(sizes=f"{DIGITS}x256 (64x64)"), DIGITS),
    "description: place": (TiffForm(sizes=f"190x150 [{DIGITS},4 190x150]"), DIGITS),
    "description: tile": (TiffForm(sizes="190x150 (1975x412)"), "1975x412"),
    "description: reduced": (TiffForm(sizes=f"190x150 -> {DIGITS}x9"), DIGITS),
    "description: quality": (TiffForm(sizes="190x150 JPEG/RGB Q=751"), "Q=751"),
    "description: codec": (TiffForm(sizes=f"190x150 {TEXT}"), TEXT),
    "description of a level": (TiffForm(below=f"Aperio\r\n190x150|Who = {TEXT}"), TEXT),
    "description of JSON": (TiffForm(below=JSON), TEXT),
    "JPEG comment": (TiffForm(on_tile=after_start(segment(0xFE, WORD))), TEXT),
    "JPEG APP0 thumbnail": (
        TiffForm(on_tile=after_start(segment(0xE0, b"JFXX\0\x10" + WORD))), TEXT,
    ),
    "JPEG EXIF": (TiffForm(on_tile=after_start(segment(0xE1, EXIF + WORD))), TEXT),
    "JPEG XMP": (TiffForm(on_tile=after_start(segment(0xE1, XMP))), TEXT),
    "JPEG IPTC": (
        TiffForm(on_tile=after_start(segment(0xED, b"Photoshop 3.0\x008BIM" + WORD))), TEXT,
    ),
    "JPEG profile": (
        TiffForm(on_tile=after_start(segment(0xE2, b"ICC_PROFILE\0\1\1" + WORD))), TEXT,
    ),
    **{
        f"JPEG APP{n}": (TiffForm(on_tile=after_start(segment(0xE0 + n, WORD))), TEXT)
        for n in (3, 7, 11, 14, 15)
    },
    "JPEG Adobe": (
        TiffForm(on_tile=after_start(segment(0xEE, b"Adobe\0\x64DOES\1"))), b"\x64DOES",
    ),
    "JPEG Adobe, longer": (
        TiffForm(on_tile=after_start(segment(0xEE, b"Adobe\0\x64\0\0\0\0\1" + WORD))), TEXT,
    ),
    "JPEG quantisation table": (
        TiffForm(on_tile=after_start(segment(0xDB, b"\3" + WORD.ljust(64, b"\1")))), TEXT,
    ),
    "JPEG Huffman table": (
        TiffForm(on_tile=after_start(segment(0xC4, b"\3" + bytes(15) + b"\x0c" + WORD))), TEXT,
    ),
    "JPEG arithmetic conditioning": (TiffForm(on_tile=after_start(segment(0xCC, WORD))), TEXT),
    "JPEG restart interval": (
        TiffForm(on_tile=before_scan(segment(0xDD, b"QZ"))), b"\xff\xdd\0\4QZ",
    ),
    "JPEG number of lines": (
        TiffForm(on_tile=before_scan(segment(0xDC, b"QZ"))), b"\xff\xdc\0\4QZ",
    ),
    "JPEG, a second frame": (TiffForm(on_tile=after_start(segment(0xC1, FRAME_OF_WORDS))), TEXT),
    "JPEG between segments": (TiffForm(on_tile=before_scan(WORD)), TEXT),
    "JPEG before its end": (TiffForm(on_tile=lambda d: d[:-2] + WORD * 2 + d[-2:]), TEXT),
    "JPEG after its end": (TiffForm(on_tile=lambda d: d + WORD), TEXT),
    "JPEG after its end, a second one": (
        TiffForm(on_tile=lambda d: d + planted.jpeg(planted.label((64, 64)), (WORD,) * 4)), TEXT,
    ),
    f"{SHARED}: comment": (TiffForm(tables=shared_tables(segment(0xFE, WORD))), TEXT),
    f"{SHARED}: quantisation": (
        TiffForm(tables=shared_tables(segment(0xDB, b"\3" + WORD.ljust(64, b"\1")))), TEXT,
    ),
    f"{SHARED}: Huffman": (
        TiffForm(tables=shared_tables(segment(0xC4, b"\3" + bytes(15) + b"\x0c" + WORD))), TEXT,
    ),
    f"{SHARED}: conditioning": (TiffForm(tables=shared_tables(segment(0xCC, WORD))), TEXT),
    f"{SHARED}: frame": (TiffForm(tables=shared_tables(segment(0xC0, FRAME_OF_WORDS))), TEXT),
    f"{SHARED}: restart interval": (
        TiffForm(tables=shared_tables(segment(0xDD, b"QZ"))), b"\xff\xdd\0\4QZ",
    ),
    f"{SHARED}: after the end": (TiffForm(tables=shared_tables(b"") + WORD), TEXT),
    "one more tile": (TiffForm(on_file=one_more_tile), TEXT),
    "a page called label": (
        TiffForm(pages=[(planted.label((96, 64)), f"Aperio\nlabel {TEXT}")]), TEXT,
    ),
    "a page called macro": (
        TiffForm(pages=[(planted.label((200, 60)), f"Aperio\nmacro {TEXT}")]), TEXT,
    ),
    "the words of a thumbnail": (
        TiffForm(pages=[(planted.smaller(slide_pixels(), 4), TEXT)]), TEXT,
    ),
}  # fmt: skip

TEXT_TAGS = {
    269: "DocumentName", 271: "Make", 272: "Model", 285: "PageName", 305: "Software",
    306: "DateTime", 315: "Artist", 316: "HostComputer", 333: "InkNames", 337: "TargetPrinter",
    32781: "ImageID", 33432: "Copyright", 36867: "DateTimeOriginal", 34737: "GeoASCII",
    42112: "GDAL", 42016: "ImageUniqueID", 50708: "UniqueCameraModel", 51123: "MicroManager",
    65001: "private", 65535: "private, the last",
}  # fmt: skip
BYTE_TAGS = {
    700: "XMP", 33723: "IPTC", 34377: "Photoshop", 37500: "MakerNote", 37510: "UserComment",
    40092: "XPComment", 40093: "XPAuthor", 37724: "ImageSourceData", 34118: "SEM",
    64999: "private",
}  # fmt: skip
NUMBER_TAGS = {
    297: "PageNumber", 263: "Threshholding", 280: "MinSampleValue", 40001: "private",
    65100: "private", 37397: "ImageNumber", 292: "T4Options",
}  # fmt: skip


def plain(**more: Any) -> TiffForm:
    """A generic TIFF with a few words of its own."""
    words = more.pop("description", "")
    return TiffForm(description=words, is_jpeg=False, **more)


PLAIN: dict[str, tuple[TiffForm, str | int | bytes]] = {
    **{f"tag {name}": (plain(tags=[text_tag(code)]), TEXT) for code, name in TEXT_TAGS.items()
       if code not in (305, 306)},  # by options below
    **{f"tag {name}": (plain(tags=[bytes_tag(code, WORD)]), TEXT)
       for code, name in BYTE_TAGS.items()},
    **{f"tag {name} {code}": (plain(tags=[(code, 4, 1, NUMBER, True)]), NUMBER)
       for code, name in NUMBER_TAGS.items()},
    "tag Software": (plain(options={"software": TEXT}), TEXT),
    "tag DateTime": (plain(options={"datetime": "1975:04:12 10:00:00"}), "1975:04:12"),
    "tag XPosition": (plain(tags=[(286, 5, 1, (NUMBER, 1), True)]), NUMBER),
    "tag double": (plain(tags=[(65200, 12, 1, float(NUMBER), True)]), NUMBER),
    "tag reference black and white": (
        plain(tags=[(532, 5, 6, (0, 1, NUMBER, 1, 128, 1, 255, 1, 128, 1, 255, 1), True)]), NUMBER,
    ),
    "resolution": (plain(options={"resolution": (NUMBER, 20000), "resolutionunit": 3}), NUMBER),
    "description: free text": (plain(description=f"patient {TEXT}"), TEXT),
    "description: JSON": (plain(description=JSON), TEXT),
    "description: number": (plain(description=DIGITS), DIGITS),
    "description: XML": (plain(description=f"<?xml version='1.0'?><a>{TEXT}</a>"), TEXT),
    "description of a level": (plain(below=TEXT), TEXT),
    "deflate: after the last pixel": (plain(on_pixels=lambda d: d + WORD), TEXT),
    "deflate: after the stream": (plain(on_tile=lambda d: d + WORD), TEXT),
    "profile: description": (plain(options={"iccprofile": planted.profile(WORD, b"")}), TEXT),
    "profile: after its end": (plain(options={"iccprofile": planted.profile(b"a", WORD)}), TEXT),
    "tail bytes": (plain(on_file=lambda d: d + WORD), TEXT),
    "a directory nobody reads": (plain(on_file=with_directory_nobody_reads), TEXT),
}  # fmt: skip


PLAIN_FORM = plain()


def places(table: Mapping[str, object]) -> list[Any]:
    """Parameters with readable names."""
    return [pytest.param(place, id=place.replace(" ", "-")) for place in table]


def check_tiff(
    place: str, form: TiffForm, secret: str | int | bytes, folder: Path
) -> None:
    slide = folder / "a.tif"
    copy = folder / "b.tif"
    write_tiff(slide, form)
    assert left(slide, secret), "nothing was planted"
    try:
        report = deidentify(slide, copy)
    except InvalidInputError:  # a stream that nobody can read has no copy
        assert not copy.exists()
        return
    assert examine(slide).removed == report.removed
    assert report.removed
    assert not left(copy, secret)
    assert examine(copy).removed == []
    plain_slide = folder / "c.tif"
    write_tiff(plain_slide, PLAIN_FORM if not form.is_jpeg else TiffForm())
    with tifffile.TiffFile(plain_slide) as old, tifffile.TiffFile(copy) as new:
        # a level that no program can decode, because of what was planted, has no copy
        assert new.pages and (len(new.pages) > 1 or place.startswith(SHARED))
        for there, here in zip(old.pages, new.pages):
            assert np.array_equal(there.asarray(), here.asarray())


def test_slides_without_plants_lose_nothing(tmp_path: Path) -> None:
    for name, form in (("a", TiffForm()), ("b", plain())):
        write_tiff(tmp_path / f"{name}.tif", form)
        assert examine(tmp_path / f"{name}.tif").removed == []


@pytest.mark.parametrize("place", places(APERIO))
def test_an_aperio_slide_loses_what_was_planted(place: str, tmp_path: Path) -> None:
    check_tiff(place, *APERIO[place], tmp_path)


@pytest.mark.parametrize("place", places(PLAIN))
def test_a_plain_tiff_loses_what_was_planted(place: str, tmp_path: Path) -> None:
    check_tiff(place, *PLAIN[place], tmp_path)


def test_a_level_with_a_name_on_it_goes(tmp_path: Path) -> None:
    write_tiff(tmp_path / "a.tif", plain(on_level=named))
    report = deidentify(tmp_path / "a.tif", tmp_path / "b.tif")
    assert any("(page 1)" in line for line in report.removed)
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        assert len(file.pages) == 1


# OME-TIFF: convert writes one anew


OME = """<?xml version="1.0" encoding="UTF-8"?>
<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" Creator="{w[0]}">
<Experimenter ID="Experimenter:0" FirstName="{w[1]}" LastName="{w[2]}" Email="{w[3]}"/>
<Instrument ID="Instrument:0"><Microscope Manufacturer="{w[4]}" SerialNumber="{w[5]}"/></Instrument>
<Image ID="Image:0" Name="{w[6]}"><AcquisitionDate>1975-04-12T00:00:00</AcquisitionDate>
<Description>{w[7]}</Description><ExperimenterRef ID="Experimenter:0"/>
<StageLabel Name="{w[8]}" X="7395123.0"/>
<Pixels ID="Pixels:0" Type="uint8" DimensionOrder="XYCZT" SizeX="190" SizeY="150" SizeC="3"
 SizeZ="1" SizeT="1" PhysicalSizeX="0.5" PhysicalSizeY="0.5">
<Channel ID="Channel:0:0" Name="{w[9]}" Fluor="{w[10]}" SamplesPerPixel="3"/><TiffData IFD="0"/>
<Plane TheC="0" TheT="0" TheZ="0" ExposureTime="7395123.0"/></Pixels></Image>
<StructuredAnnotations><XMLAnnotation ID="Annotation:0" Namespace="{w[11]}"><Value><a>{w[12]}</a>
</Value></XMLAnnotation><CommentAnnotation ID="Annotation:1"><Value>{w[13]}</Value>
</CommentAnnotation><MapAnnotation ID="Annotation:2"><Value><M K="{w[14]}">{w[15]}</M></Value>
</MapAnnotation></StructuredAnnotations></OME>"""


def test_a_converted_ome_tiff_has_none_of_the_words_of_its_source(
    tmp_path: Path,
) -> None:
    words = [f"QZX{number:02d}SMITH" for number in range(16)]
    pixels = slide_pixels()
    source = tmp_path / "a.ome.tif"
    tifffile.imwrite(
        source,
        pixels,
        tile=(TILE, TILE),
        photometric="rgb",
        metadata=None,
        description=OME.format(w=words),
        software=TEXT,
        extratags=[text_tag(315), text_tag(65001), bytes_tag(700, WORD)],
    )
    source.write_bytes(source.read_bytes() + WORD)
    secrets: list[str | int] = [*words, TEXT, "1975-04-12", DIGITS]
    assert all(left(source, secret) for secret in secrets)
    with pytest.raises(InvalidInputError, match="must not be an OME-TIFF"):
        deidentify(source, tmp_path / "b.tif")
    for number in range(2):  # copied tiles, and tiles that are encoded again
        copy = tmp_path / f"b{number}.ome.tif"
        convert(source, copy, reader="tiff", **({"quality": 80} if number else {}))
        assert [secret for secret in secrets if left(copy, secret)] == []


# DICOM


def sequence_of(dataset: Dataset, *keywords: str) -> Dataset:
    """Returns the first item below so many sequences, which are made where they lack."""
    for keyword in keywords:
        if keyword not in dataset:
            setattr(dataset, keyword, [Dataset()])
        dataset = dataset[keyword].value[0]
    return dataset


def element(keyword: str, value: Any, *below: str) -> Callable[[Dataset], None]:
    """Sets an element, in an item of sequences."""

    def change(dataset: Dataset) -> None:
        setattr(sequence_of(dataset, *below), keyword, value)

    return change


def private(
    group: int, value: Any, kind: str, *below: str
) -> Callable[[Dataset], None]:
    """Sets a private element with its creator."""

    def change(dataset: Dataset) -> None:
        item = sequence_of(dataset, *below)
        item.add_new((group, 0x0010), "LO", "SOMEBODY")
        item.add_new((group, 0x1001), kind, value)

    return change


def code(
    sequence: str, value: str, meaning: str, *below: str
) -> Callable[[Dataset], None]:
    """Sets a code that no table has, or one with another meaning."""

    def change(dataset: Dataset) -> None:
        item = sequence_of(dataset, *below, sequence)
        item.CodeValue = value
        item.CodingSchemeDesignator = "SCT"
        item.CodeMeaning = meaning

    return change


def head(keyword: str, value: Any) -> Callable[[Dataset], None]:
    """Sets an element of the file's head."""

    def change(dataset: Dataset) -> None:
        setattr(dataset.file_meta, keyword, value)

    return change


def frames(change_frame: Callable[[bytes], bytes]) -> Callable[[Dataset], None]:
    """Changes the second frame."""

    def change(dataset: Dataset) -> None:
        count = dataset.NumberOfFrames
        encoded = list(generate_frames(dataset.PixelData, number_of_frames=count))
        encoded[1] = change_frame(encoded[1])
        dataset.PixelData = encapsulate(encoded)

    return change


def preamble(dataset: Dataset) -> None:
    """Writes into the bytes before the head."""
    dataset.preamble = WORD.ljust(128, b"\0")


def trailing(dataset: Dataset) -> None:
    """Adds the element that pads a file."""
    dataset.add_new((0xFFFC, 0xFFFC), "OB", WORD)


def one_more_frame(dataset: Dataset) -> None:
    """Adds a frame that has no place in the image."""
    count = dataset.NumberOfFrames
    encoded = list(generate_frames(dataset.PixelData, number_of_frames=count))
    encoded.append(planted.jpeg(planted.label((TILE, TILE)), (WORD,) * 4))
    dataset.NumberOfFrames = count + 1
    dataset.PixelData = encapsulate(encoded)


def frame_group(keyword: str, value: Any, *below: str) -> Callable[[Dataset], None]:
    """Sets an element of the frames' own groups."""
    return element(keyword, value, "PerFrameFunctionalGroupsSequence", *below)


SPECIMEN = "SpecimenDescriptionSequence"
OPTICAL = "OpticalPathSequence"
SHARED_GROUPS = "SharedFunctionalGroupsSequence"
UID_UNDER_ROOT = f"1.2.840.10008.{DIGITS}.1"
UID = f"1.2.826.0.1.{DIGITS}"
DICOM: dict[str, tuple[Callable[[Dataset], None], str | int | bytes]] = {
    **{
        keyword: (element(keyword, TEXT), TEXT)
        for keyword in (
            "PatientName", "PatientID", "OtherPatientNames", "PatientAddress", "AccessionNumber",
            "StudyID", "ImageComments", "ContainerIdentifier", "BarcodeValue", "LabelText",
            "ManufacturerModelName", "Manufacturer", "DeviceSerialNumber", "InstitutionName",
            "InstitutionAddress", "StationName", "OperatorsName", "ReferringPhysicianName",
            "StudyDescription", "SeriesDescription", "SoftwareVersions", "ProtocolName",
            "ContainerDescription", "PositionReferenceIndicator", "AcquisitionComments",
            "DerivationDescription", "ClinicalTrialSubjectID", "DeidentificationMethod",
        )
    },
    **{
        keyword: (element(keyword, DATE), DATE)
        for keyword in (
            "PatientBirthDate", "StudyDate", "SeriesDate", "ContentDate", "AcquisitionDateTime",
            "InstanceCreationDate", "DateOfSecondaryCapture",
        )
    },
    "PatientAge": (element("PatientAge", "097Y"), "097Y"),
    "SpecificCharacterSet": (element("SpecificCharacterSet", "ISO_IR 100"), "ISO_IR 100"),
    "ImageType, a fifth word": (
        element("ImageType", ["ORIGINAL", "PRIMARY", "VOLUME", "NONE", TEXT]), TEXT,
    ),
    "FocusMethod": (element("FocusMethod", TEXT), TEXT),
    **{
        keyword: (element(keyword, NUMBER), NUMBER)
        for keyword in (
            "SeriesNumber", "InstanceNumber", "AcquisitionNumber", "ExposureTime",
            "ImagedVolumeWidth", "ImagedVolumeDepth", "LossyImageCompressionRatio",
            "ConcatenationFrameOffsetNumber", "RescaleSlope",
        )
    },
    **{
        keyword: (element(keyword, 64123), "64123")
        for keyword in (
            "InConcatenationNumber", "InConcatenationTotalNumber", "RepresentativeFrameNumber",
            "NumberOfFocalPlanes",
        )
    },
    "row of a frame": (
        frame_group("RowPositionInTotalImagePixelMatrix", NUMBER, "PlanePositionSlideSequence"),
        NUMBER,
    ),
    "depth of a frame": (
        frame_group("ZOffsetInSlideCoordinateSystem", NUMBER, "PlanePositionSlideSequence"),
        DIGITS,
    ),
    "index of a frame": (
        frame_group("DimensionIndexValues", [1, NUMBER], "FrameContentSequence"), NUMBER,
    ),
    "stack of a frame": (frame_group("StackID", DIGITS, "FrameContentSequence"), DIGITS),
    "words of a frame": (frame_group("FrameComments", TEXT, "FrameContentSequence"), TEXT),
    "label of a frame": (frame_group("FrameLabel", TEXT, "FrameContentSequence"), TEXT),
    "offset on the glass": (
        element("XOffsetInSlideCoordinateSystem", DIGITS, "TotalPixelMatrixOriginSequence"),
        DIGITS,
    ),
    "pixel spacing": (
        element("PixelSpacing", [DIGITS, "0.0005"], SHARED_GROUPS, "PixelMeasuresSequence"),
        DIGITS,
    ),
    "name of a dimension": (
        element("DimensionDescriptionLabel", TEXT, "DimensionIndexSequence"), TEXT,
    ),
    "pointer of a dimension": (
        element("DimensionIndexPointer", 0x515A4453, "DimensionIndexSequence"), b"ZQSD",
    ),
    "specimen": (element("SpecimenIdentifier", TEXT, SPECIMEN), TEXT),
    "specimen, described": (element("SpecimenDetailedDescription", TEXT, SPECIMEN), TEXT),
    "specimen, in short": (element("SpecimenShortDescription", TEXT, SPECIMEN), TEXT),
    "specimen's preparation": (
        element("TextValue", TEXT, SPECIMEN, "SpecimenPreparationSequence",
                "SpecimenPreparationStepContentItemSequence"), TEXT,
    ),
    "specimen's UID": (element("SpecimenUID", UID, SPECIMEN), UID),
    "specimen's UID under the standard's root": (
        element("SpecimenUID", UID_UNDER_ROOT, SPECIMEN), DIGITS,
    ),
    "specimen's type": (
        code("SpecimenTypeCodeSequence", DIGITS, TEXT, SPECIMEN), TEXT,
    ),
    "anatomy": (
        code("PrimaryAnatomicStructureSequence", "39607008", TEXT, SPECIMEN), TEXT,
    ),
    "issuer": (
        element("LocalNamespaceEntityID", TEXT, "IssuerOfTheContainerIdentifierSequence"), TEXT,
    ),
    "optical path": (element("OpticalPathIdentifier", TEXT, OPTICAL), TEXT),
    "optical path, described": (element("OpticalPathDescription", TEXT, OPTICAL), TEXT),
    "wavelength": (element("IlluminationWaveLength", NUMBER, OPTICAL), NUMBER),
    "objective": (element("ObjectiveLensPower", DIGITS, OPTICAL), DIGITS),
    "illumination": (code("IlluminationTypeCodeSequence", "111744", TEXT, OPTICAL), TEXT),
    "colour space": (element("ColorSpace", TEXT, OPTICAL), TEXT),
    "profile": (
        element("ICCProfile", planted.profile(WORD + b"AB", WORD), OPTICAL), TEXT,
    ),
    "no profile": (element("ICCProfile", WORD, OPTICAL), TEXT),
    "frame of reference": (element("FrameOfReferenceUID", UID, ), UID),
    "a UID of another study": (
        element("ReferencedSOPInstanceUID", UID, "ReferencedImageSequence"), UID,
    ),
    "request": (
        element("RequestedProcedureDescription", TEXT, "RequestAttributesSequence"), TEXT,
    ),
    "private text": (private(0x0011, TEXT, "LO"), TEXT),
    "private number": (private(0x0013, NUMBER, "UL"), NUMBER),
    "private, of unknown kind": (private(0x0015, WORD, "UN"), TEXT),
    "private, in shared groups": (private(0x0017, TEXT, "LO", SHARED_GROUPS), TEXT),
    "private, in the optical path": (private(0x0019, TEXT, "LT", OPTICAL), TEXT),
    "head: title": (head("SourceApplicationEntityTitle", TEXT), TEXT),
    "head: version": (head("ImplementationVersionName", TEXT), TEXT),
    "head: private": (head("PrivateInformation", WORD), TEXT),
    "before the head": (preamble, TEXT),
    "after the pixels": (trailing, TEXT),
    "frame: comment": (frames(after_start(segment(0xFE, WORD))), TEXT),
    "frame: EXIF": (frames(after_start(segment(0xE1, EXIF + WORD))), TEXT),
    "frame: conditioning": (frames(after_start(segment(0xCC, WORD))), TEXT),
    "frame: after its end": (frames(lambda data: data + WORD), TEXT),
}  # fmt: skip


def write_pair(
    folder: Path, change: Callable[[Dataset], None] | None = None
) -> list[Path]:
    """Writes two levels of a slide, with a plant in the smaller one."""
    pixels = slide_pixels()
    kind = DicomKind(syntax="jpeg", tile=(TILE, TILE), sparse=True)
    large = write_dicom(folder / "a.dcm", [[pixels]], kind, series="1.2.3.4")
    small = write_dicom(
        folder / "b.dcm",
        [[planted.smaller(pixels, 2)]],
        kind,
        series="1.2.3.4",
        mpp=1.0,
    )
    if change is not None:
        dataset = dcmread(small[0])
        change(dataset)
        dataset.save_as(small[0])
    return [*large, *small]


@pytest.mark.parametrize("place", places(DICOM))
def test_a_dicom_file_loses_what_was_planted(place: str, tmp_path: Path) -> None:
    change, secret = DICOM[place]
    files = write_pair(tmp_path / "in", change)
    out = tmp_path / "out"
    assert left(files[1], secret), "nothing was planted"
    try:
        deidentify_dicom(files, out)
    except InvalidInputError:
        assert not (out / "b.dcm").exists()
        return
    assert not any(left(copy, secret) for copy in out.iterdir())
    old, new = (dcmread(path).pixel_array for path in (files[0], out / "a.dcm"))
    assert np.array_equal(old, new)
    assert (out / "b.dcm").exists()


def test_a_level_of_dicom_with_a_name_on_it_has_no_copy(tmp_path: Path) -> None:
    def change(dataset: Dataset) -> None:
        square = named(planted.smaller(slide_pixels(), 2))[:TILE, :TILE]
        frames(lambda _: planted.jpeg(square))(dataset)

    files = write_pair(tmp_path / "in", change)
    reports = deidentify_dicom(files, tmp_path / "out")
    assert "the whole file" in reports[files[1]].removed[0]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.dcm"]


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_frame_without_a_place_is_refused(is_sparse: bool, tmp_path: Path) -> None:
    pixels = slide_pixels()
    kind = DicomKind(syntax="jpeg", tile=(TILE, TILE), sparse=is_sparse)
    (slide,) = write_dicom(tmp_path / "a.dcm", [[pixels]], kind, series="1.2.3.4")
    dataset = dcmread(slide)
    one_more_frame(dataset)
    dataset.save_as(slide)
    with pytest.raises(InvalidInputError, match="frames must"):
        deidentify_dicom([slide], tmp_path / "out")


def test_frames_behind_others_are_named_as_not_inspected(tmp_path: Path) -> None:
    pixels = slide_pixels()
    kind = DicomKind(syntax="jpeg", tile=(TILE, TILE), sparse=True)
    (slide,) = write_dicom(
        tmp_path / "a.dcm", [[pixels, pixels]], kind, series="1.2.3.4"
    )
    report = examine(slide)
    assert any("9 frames at the place of another" in line for line in report.lines())
