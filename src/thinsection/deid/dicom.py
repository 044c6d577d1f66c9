"""Copies of DICOM slides without identifying data; frames are not encoded again.

Each file is written from the elements that `dicom_elements` keeps. Frames are copied one by one,
and each is inspected.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import imagecodecs
import numpy as np
import pydicom
from pydicom.dataset import Dataset, FileMetaDataset

from thinsection.deid.dicom_elements import (
    WRITER,
    KeptElements,
    UidMap,
    count_frames,
    count_places,
    image_size,
    rules,
)
from thinsection.deid.likeness import Segment, StoredImage
from thinsection.deid.report import Report
from thinsection.errors import InvalidInputError, ThinsectionError
from thinsection.slide.clean_streams import (
    Cleaned,
    StreamError,
    clean_jpeg,
    clean_jpeg2000,
)
from thinsection.slide.dicom_series import IMPLICIT, SLIDE_CLASS
from thinsection.slide.formats.dicom_frames import (
    HTJ2K,
    ITEM,
    JPEG_2000,
    PIXEL_TAG,
    SEQUENCE_END,
    UNDEFINED,
    PixelHeader,
    read_pixel_header,
    walk_items,
)
from thinsection.types import MIB, Size, counted

_NATIVE = (IMPLICIT, f"{IMPLICIT}.1")  # little endian: implicit and explicit
_JPEG_SYNTAXES = (f"{IMPLICIT}.4.50", f"{IMPLICIT}.4.51")
_JPEG2000_SYNTAXES = (*JPEG_2000, *HTJ2K)
_MAX_FRAME_BYTES = 128 * MIB
Write = Callable[[bytes], object]


@dataclass(frozen=True, kw_only=True)
class DicomInstance:
    """A file of a DICOM slide.

    Attributes:
        path: path of the file.
        dataset: pydicom's data set, without the pixel data.
        pixel_place: offset of the pixel data element in the file; -1 if there is none.
    """

    path: Path
    dataset: Dataset
    pixel_place: int
    report: Report = field(default_factory=Report)

    @property
    def syntax(self) -> str:
        """UID of the transfer syntax."""
        return str(self.dataset.file_meta.TransferSyntaxUID)

    @property
    def is_native(self) -> bool:
        """True if frames are stored uncompressed."""
        return self.syntax in _NATIVE

    @property
    def series(self) -> str:
        """SeriesInstanceUID, which all files of a slide share."""
        return str(self.dataset.get("SeriesInstanceUID", ""))

    @property
    def num_pixels(self) -> int:
        """Number of pixels of the whole image."""
        width, height = image_size(self.dataset)
        return width * height

    @property
    def is_volume(self) -> bool:
        """True if the image type calls the file a level of the slide."""
        return "VOLUME" in self.dataset.get("ImageType", [])

    def why_dropped(self) -> str:
        """Returns why the file is left out by its headers; '' if its pixels decide."""
        kinds = [str(kind).upper() for kind in self.dataset.get("ImageType", [])]
        flavor = kinds[2] if len(kinds) > 2 else "unknown"
        if flavor not in ("VOLUME", "THUMBNAIL"):
            return f"its image type is {flavor}"
        for keyword in ("SpecimenLabelInImage", "BurnedInAnnotation"):
            if str(self.dataset.get(keyword, "NO")).upper() != "NO":
                return f"its {keyword} is not NO"
        return ""


def is_dicom(path: str | Path) -> bool:
    """Tells whether a file begins as a DICOM file."""
    with Path(path).open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def read_instance(path: str | Path) -> DicomInstance:
    """Reads the file without its pixels.

    Raises:
        InvalidInputError: not a whole-slide image, or an unknown transfer syntax.
    """
    name = Path(path).name
    try:
        with Path(path).open("rb") as file:
            dataset = pydicom.dcmread(file, stop_before_pixels=True)
            # pydicom parses an element when its value is read; only then does it find damage
            dataset.walk(lambda _, element: element.value)
            place = file.tell()
            has_pixels = file.read(4) == PIXEL_TAG
    except Exception as error:
        raise InvalidInputError(
            f"DICOM file must be readable, got {error!r} in {name!r}; the file is damaged"
        ) from error
    sop_class = str(dataset.get("SOPClassUID", ""))
    if sop_class != SLIDE_CLASS:
        raise InvalidInputError(
            f"SOP class must be VL Whole Slide Microscopy Image Storage, got {sop_class!r} in "
            f"{name!r}; thinsection does not de-identify other DICOM objects"
        )
    instance = DicomInstance(
        path=Path(path), dataset=dataset, pixel_place=place if has_pixels else -1
    )
    known = (*_NATIVE, *_JPEG_SYNTAXES, *_JPEG2000_SYNTAXES)
    if instance.syntax not in known or not has_pixels:
        raise InvalidInputError(
            "transfer syntax must be native, JPEG or JPEG 2000, with pixels, got "
            f"{instance.syntax!r} in {name!r}; thinsection cannot inspect other frames"
        )
    return instance


def split_by_kind(slides: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Separates slides that are one file from DICOM files; the first also has damaged files."""
    others: list[Path] = []
    dicom: list[Path] = []
    for slide in slides:
        kind = others
        with suppress(ThinsectionError, OSError):
            if is_dicom(slide):
                read_instance(slide)
                kind = dicom
        kind.append(slide)
    return others, dicom


# pixels


def stored_image(instance: DicomInstance, file: BinaryIO) -> StoredImage:
    """Returns the image of a file; frames are decoded one by one from the opened file."""
    dataset = instance.dataset
    size = image_size(dataset)
    tile = (int(dataset.Columns), int(dataset.Rows))
    if min(*size, *tile) < 1 or tile[0] * tile[1] * 8 > _MAX_FRAME_BYTES:
        raise InvalidInputError(
            f"frames must have 1 px or more a side, and at most {_MAX_FRAME_BYTES // 8} pixels, "
            f"got {tile[0]} x {tile[1]} px in {instance.path.name!r}; the file is damaged"
        )
    places = list(_frame_places(instance, file))
    frames = _frame_numbers(instance, size, tile)

    def decode(index: int) -> Segment | None:
        frame = index if frames is None else frames.get(index)
        if frame is None or frame >= len(places):
            return None
        start, count = places[frame]
        file.seek(start)
        return _decoded(instance, file.read(count))

    kinds = dataset.get("ImageType", [])
    flavor = str(kinds[2]).lower() if len(kinds) > 2 else "image"
    return StoredImage(
        name=f"{flavor} of {size[0]} x {size[1]} px",
        size=size,
        segment=tile,
        decode=decode,
    )


def _frame_numbers(
    instance: DicomInstance, size: Size, tile: Size
) -> dict[int, int] | None:
    """Returns the frame at each position of the grid; None if frames are in the grid's order.

    Raises:
        InvalidInputError: a frame has no position in the image, so that no reader shows it.
    """
    dataset = instance.dataset
    num_frames = count_frames(dataset)
    positions = [
        group.get("PlanePositionSlideSequence")
        for group in dataset.get("PerFrameFunctionalGroupsSequence") or ()
    ]
    if not positions or not all(positions):
        if num_frames > count_places(dataset):
            raise InvalidInputError(
                f"frames must be at most {count_places(dataset)}, as many as the image has places, "
                f"got {num_frames} in {instance.path.name!r}; the file is damaged"
            )
        return None
    if len(positions) != num_frames:
        raise InvalidInputError(
            f"each of {num_frames} frames must have a position, got {len(positions)} in "
            f"{instance.path.name!r}; the file is damaged"
        )
    columns = -(-size[0] // tile[0])
    numbers: dict[int, int] = {}
    for frame, (position, *_) in enumerate(positions):
        x = int(position.ColumnPositionInTotalImagePixelMatrix) - 1
        y = int(position.RowPositionInTotalImagePixelMatrix) - 1
        if not (-tile[0] < x < size[0] and -tile[1] < y < size[1]):
            raise InvalidInputError(
                f"frames must lie in the image of {size[0]} x {size[1]} px, got ({x}, {y}) in "
                f"{instance.path.name!r}; the file is damaged"
            )
        numbers.setdefault(y // tile[1] * columns + x // tile[0], frame)
    num_behind = num_frames - len(numbers)
    if num_behind:
        instance.report.not_looked_at.append(
            f"{counted(num_behind, 'frame')} at the place of another, such as other focal planes"
        )
    return numbers


def _frame_places(instance: DicomInstance, file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yields (offset, byte count) in the file of each frame; a frame must be one fragment."""
    name = instance.path.name
    header = read_pixel_header(file, instance.pixel_place, instance.syntax, name)
    if instance.is_native:
        dataset = instance.dataset
        samples = int(dataset.SamplesPerPixel) * int(dataset.BitsAllocated) // 8
        num_bytes = int(dataset.Rows) * int(dataset.Columns) * samples
        for frame in range(count_frames(dataset)):
            yield header.end + frame * num_bytes, num_bytes
        return
    for index, (start, count) in enumerate(_items(instance, header, file)):
        if index:  # the first item is the offset table
            yield start, count


def _items(
    instance: DicomInstance, header: PixelHeader, file: BinaryIO
) -> Iterator[tuple[int, int]]:
    """Yields (offset, byte count) of the items of encapsulated pixel data."""
    name = instance.path.name
    for start, count in walk_items(file, header.end, name, error=InvalidInputError):
        if count > _MAX_FRAME_BYTES:
            raise InvalidInputError(
                f"frames must have at most {_MAX_FRAME_BYTES >> 20} MiB, got {count} bytes in "
                f"{name!r}; the file is damaged"
            )
        yield start, count


def _decoded(instance: DicomInstance, data: bytes) -> Segment:
    """Decodes a frame to pixels."""
    dataset = instance.dataset
    try:
        if instance.syntax in _JPEG_SYNTAXES:
            is_rgb = str(dataset.PhotometricInterpretation) == "RGB"
            space = "RGB" if is_rgb else None
            return np.asarray(
                imagecodecs.jpeg_decode(data, colorspace=space, outcolorspace=space)
            )
        if instance.syntax in _JPEG2000_SYNTAXES:
            return np.asarray(imagecodecs.jpeg2k_decode(data))
        samples = int(dataset.SamplesPerPixel)
        kind = np.uint8 if int(dataset.BitsAllocated) == 8 else np.uint16
        pixels = np.frombuffer(data, kind)
        rows = int(dataset.Rows)
        columns = int(dataset.Columns)
        if samples > 1 and int(dataset.get("PlanarConfiguration", 0)):
            return pixels.reshape(samples, rows, columns).transpose(1, 2, 0)
        return pixels.reshape(rows, columns, samples)
    except Exception as error:
        raise StreamError(
            f"a frame must be decodable, got {error!r} in {instance.path.name!r}; "
            "the file is damaged"
        ) from error


# the copy


def write_copy(
    instance: DicomInstance, uids: UidMap, source: BinaryIO, out: BinaryIO | None
) -> Report:
    """Writes the copy without identifying data; only inspects it if `out` is None.

    Memory: one frame, and the elements before the pixels.
    """
    report = instance.report
    kept = KeptElements(instance.dataset, uids, report).kept(instance.dataset)
    for keyword in rules()["empty"]:
        setattr(kept, keyword, "")
    for keyword, value in rules()["dummies"].items():
        setattr(kept, keyword, value)
    _keep_extended_offsets(instance, source, kept)
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SLIDE_CLASS
    meta.MediaStorageSOPInstanceUID = kept.SOPInstanceUID
    meta.TransferSyntaxUID = instance.syntax
    meta.ImplementationVersionName = WRITER
    kept.file_meta = meta
    report.looked_at.append(f"{sum(1 for _ in instance.dataset.iterall())} elements")
    for keyword in (
        "SourceApplicationEntityTitle",
        "PrivateInformation",
        "ImplementationVersionName",
    ):
        if instance.dataset.file_meta.get(keyword, WRITER) != WRITER:
            report.remove(f"{keyword} of the file's head")
    if (instance.dataset.preamble or b"").strip(b"\0"):
        report.remove("the 128 bytes before the file's head")
    if out is not None:
        pydicom.dcmwrite(out, kept, enforce_file_format=True)
    _copy_pixels(instance, source, out)
    return report


def _keep_extended_offsets(
    instance: DicomInstance, source: BinaryIO, kept: Dataset
) -> None:
    """Keeps the extended offset table if it has the right offsets and lengths of the frames."""
    stored = instance.dataset.get("ExtendedOffsetTable")
    if stored is None or instance.is_native:
        return
    places = list(_frame_places(instance, source))
    first = places[0][0] if places else 0
    offsets = struct.pack(f"<{len(places)}Q", *(start - first for start, _ in places))
    lengths = struct.pack(f"<{len(places)}Q", *(count for _, count in places))
    stored_lengths = instance.dataset.get("ExtendedOffsetTableLengths")
    if stored == offsets and stored_lengths == lengths:
        kept.ExtendedOffsetTable = offsets
        kept.ExtendedOffsetTableLengths = lengths


def _copy_pixels(
    instance: DicomInstance, source: BinaryIO, out: BinaryIO | None
) -> None:
    """Copies and cleans the frames; anything after the pixel data is left out."""
    name = instance.path.name
    header = read_pixel_header(source, instance.pixel_place, instance.syntax, name)

    def write(data: bytes) -> None:
        if out is not None:
            out.write(data)

    if instance.is_native:
        end = _copy_native(instance, header, source, write)
    else:
        end = _copy_items(instance, header, source, write)
    source.seek(end)
    has_more = any(block.strip(b"\0") for block in iter(partial(source.read, MIB), b""))
    instance.report.looked_at.append("the bytes after the pixels")
    if has_more:
        instance.report.remove("elements and bytes after the pixels")


def _copy_native(
    instance: DicomInstance,
    header: PixelHeader,
    source: BinaryIO,
    write: Write,
) -> int:
    """Copies uncompressed frames; returns the end of the pixel data in the source."""
    frames = list(_frame_places(instance, source))
    num_bytes = sum(count for _, count in frames)
    if num_bytes > header.length:
        raise InvalidInputError(
            f"pixel data must have {num_bytes} bytes, got {header.length} in "
            f"{instance.path.name!r}; the file is damaged"
        )
    padded = num_bytes + num_bytes % 2
    vr = header.vr + b"\0\0" if header.vr else b""
    write(PIXEL_TAG + vr + struct.pack("<I", padded))
    for start, count in frames:
        source.seek(start)
        write(source.read(count))
    write(b"\0" * (padded - num_bytes))
    source.seek(header.end + num_bytes)
    if source.read(header.length - num_bytes).strip(b"\0"):
        instance.report.remove("bytes after the last frame")
    instance.report.looked_at.append(f"the ends of {len(frames)} frames")
    return header.end + header.length


def _copy_items(
    instance: DicomInstance,
    header: PixelHeader,
    source: BinaryIO,
    write: Write,
) -> int:
    """Copies compressed frames, cleaned at equal length; returns the end of the pixel data."""
    name = instance.path.name
    items = list(_items(instance, header, source))
    table, *frames = items
    num_frames = count_frames(instance.dataset)
    if len(frames) != num_frames:
        raise InvalidInputError(
            f"each of {num_frames} frames must be one fragment, got {len(frames)} in {name!r}; "
            "thinsection cannot inspect frames in several fragments"
        )
    write(PIXEL_TAG + b"OB\0\0" + struct.pack("<I", UNDEFINED))
    offsets = _sound_offsets(source, table, frames)
    if offsets is None:
        instance.report.remove("a table of offsets that are none")
    _write_item(write, offsets or b"")
    clean = clean_jpeg if instance.syntax in _JPEG_SYNTAXES else clean_jpeg2000
    for start, count in frames:
        source.seek(start)
        try:
            cleaned: Cleaned = clean(source.read(count))
        except StreamError as error:
            raise StreamError(
                f"{error} in {name!r}; such a file is not copied"
            ) from error
        data = instance.report.note(cleaned, ", in frames")
        _write_item(write, data.ljust(count, b"\0"))
    write(struct.pack("<HHI", SEQUENCE_END >> 16, SEQUENCE_END & 0xFFFF, 0))
    instance.report.looked_at.append(f"{len(frames)} frames")
    return items[-1][0] + items[-1][1] + 8


def _write_item(write: Write, data: bytes) -> None:
    write(struct.pack("<HHI", ITEM >> 16, ITEM & 0xFFFF, len(data)) + data)


def _sound_offsets(
    source: BinaryIO, table: tuple[int, int], frames: list[tuple[int, int]]
) -> bytes | None:
    """Returns the offset table, b'' if it is empty; None if it does not fit the frames."""
    source.seek(table[0])
    data = source.read(table[1])
    if not data:
        return b""
    expected = [start - 8 - (table[0] + table[1]) for start, _ in frames]
    stored = struct.unpack(f"<{len(data) // 4}I", data) if len(data) % 4 == 0 else ()
    return data if [n % 2**32 for n in expected] == list(stored) else None
