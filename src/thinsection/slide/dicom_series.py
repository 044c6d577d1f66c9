"""DICOM files of a folder: the files of each slide, and the kind of each file.

A slide is a series: its levels, label and overview are files with the same SeriesInstanceUID. A
folder may contain the files of several slides.

Source: DICOM PS3.3, A.32.8 (VL Whole Slide Microscopy Image), C.7.6.16 and C.8.12.
"""

import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from thinsection.errors import SlideOpenError
from thinsection.types import GIB, counted

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

SUFFIX = ".dcm"
SLIDE_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6"  # VL Whole Slide Microscopy
_MAX_NAMED = 3  # files that a message names
SHARED_GROUPS = 0x52009229  # tag; the elements before it are small
IMPLICIT = "1.2.840.10008.1.2"  # transfer syntaxes
DEFLATED_FILE = f"{IMPLICIT}.1.99"
_BIG_ENDIAN = f"{IMPLICIT}.2"
_PREAMBLE_BYTES = 132
_META_BEGIN = (
    _PREAMBLE_BYTES + 12
)  # after the element that has the length of the others
_MAX_INFLATED_BYTES = GIB
_GROUPING = (
    "SOPClassUID",
    "SeriesInstanceUID",
    "PatientID",
    "PatientName",
    "ContainerIdentifier",
    "ImageType",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DicomFile:
    """Head of one DICOM file.

    Attributes:
        path: the file.
        series: SeriesInstanceUID; '' if the file has none.
        sop_class: SOPClassUID, the kind of DICOM object.
        flavor: third word of the image type: VOLUME, LABEL, OVERVIEW, THUMBNAIL, ...
        patient: number and name of the patient.
        container: identifier of the glass.
    """

    path: Path
    series: str
    sop_class: str
    flavor: str
    patient: tuple[str, str]
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DicomFolder:
    """DICOM files of one folder.

    Attributes:
        slides: the files of each slide, in the order of the first files.
        no_slides: DICOM files that are no whole-slide images.
        unreadable: files that cannot be read as DICOM.
    """

    slides: tuple[tuple[DicomFile, ...], ...]
    no_slides: tuple[Path, ...]
    unreadable: tuple[Path, ...]

    @property
    def first_files(self) -> list[Path]:
        """The first file of each slide, and one unreadable file, so that the run reports it."""
        firsts = [files[0].path for files in self.slides]
        return firsts + list(self.unreadable[:1])

    def note(self) -> str:
        """Returns a note on the number of slides; '' if all files belong to one slide."""
        others = []
        if self.no_slides:
            others.append(f"no whole-slide images: {_names(self.no_slides)}")
        if self.unreadable:
            others.append(f"not readable: {_names(self.unreadable)}")
        if len(self.slides) <= 1 and not others:
            return ""
        sizes = [len(files) for files in self.slides]
        num_files = sum(sizes) + len(self.no_slides) + len(self.unreadable)
        text = f"{num_files} .dcm files are {counted(len(sizes), 'slide')}"
        if sizes:
            text += (
                f" of {' + '.join(map(str, sizes))} files, by their SeriesInstanceUID"
            )
        return "; ".join([text, *others])


def is_dicom_path(path: str | Path) -> bool:
    """Tells whether a path has the suffix of DICOM files."""
    return Path(path).suffix.lower() == SUFFIX


def group_files(paths: Iterable[Path]) -> DicomFolder:
    """Returns the files of one folder by slide. Memory: a few hundred bytes a file."""
    by_series: dict[str, list[DicomFile]] = {}
    no_slides = []
    unreadable = []
    for path in sorted(paths):
        file = read_head(path)
        if file is None:
            unreadable.append(path)
        elif file.sop_class != SLIDE_CLASS:
            no_slides.append(path)
        else:
            by_series.setdefault(file.series, []).append(file)
    return DicomFolder(
        slides=tuple(tuple(files) for files in by_series.values()),
        no_slides=tuple(no_slides),
        unreadable=tuple(unreadable),
    )


def files_of_slide(path: str | Path) -> tuple[DicomFile, ...]:
    """Returns the files of the slide that a file belongs to; () if it cannot be read."""
    head = read_head(Path(path))
    if head is None:
        return ()
    beside = sorted(each for each in Path(path).parent.iterdir() if is_dicom_path(each))
    files = filter(None, map(read_head, beside))
    kind = (head.series, head.sop_class)
    return tuple(file for file in files if (file.series, file.sop_class) == kind)


def check_one_slide(files: Sequence[DicomFile]) -> None:
    """Refuses a series whose files belong to two patients or two glass slides.

    Raises:
        SlideOpenError: they do; the message names two files, not the patients.
    """
    _check_same("patient", [" ".join(file.patient).strip() for file in files], files)
    containers = [file.container for file in files]
    _check_same("glass (ContainerIdentifier)", containers, files)


def _check_same(what: str, values: Sequence[str], files: Sequence[DicomFile]) -> None:
    """Refuses files whose values differ; files without a value are ignored."""
    stated = [value for value in values if value]
    others = [value for value in stated if value != stated[0]]
    if not others:
        return
    one = files[values.index(stated[0])].path.name
    another = files[values.index(others[0])].path.name
    raise SlideOpenError(
        f"dicom: files with one SeriesInstanceUID must be of one {what}, got different ones in "
        f"{one!r} and {another!r}; put the files of each into a folder of its own"
    )


def read_head(path: Path) -> DicomFile | None:
    """Returns the head of a file; None if it cannot be read as DICOM."""
    try:
        state = path.stat()
    except OSError:
        return None
    return _read_head(path, state.st_mtime_ns, state.st_size)


# cached, because the cohort, its fingerprints and the reader read the heads of the same files
@lru_cache(maxsize=1 << 14)
def _read_head(path: Path, _mtime_ns: int, _size: int) -> DicomFile | None:
    try:
        dataset = read_elements(path, _GROUPING, before=SHARED_GROUPS).dataset
        kinds = [str(kind).upper() for kind in dataset.get("ImageType") or ()]
        return DicomFile(
            path=path,
            series=str(dataset.get("SeriesInstanceUID", "")),
            sop_class=str(dataset.get("SOPClassUID", "")),
            flavor=kinds[2] if len(kinds) > 2 else "",
            patient=(
                str(dataset.get("PatientID") or ""),
                str(dataset.get("PatientName") or ""),
            ),
            container=str(dataset.get("ContainerIdentifier") or ""),
        )
    except SlideOpenError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Elements of a file up to a tag.

    Attributes:
        dataset: pydicom's data set.
        syntax: UID of the transfer syntax.
        end: byte offset of the first element that was not read; in a deflated file its offset in
            `inflated`.
        inflated: the whole data set of a deflated file; b"" for other files.
    """

    dataset: "Dataset"
    syntax: str
    end: int
    inflated: bytes


def read_elements(
    path: Path, keywords: Sequence[str] | None = None, *, before: int
) -> Elements:
    """Reads a file's elements up to a tag.

    Args:
        path: the file.
        keywords: keywords of the elements to return; None for all.
        before: tag at which reading ends.

    Memory: the elements; for a deflated file its whole data set, at most 1 GiB.

    Raises:
        SlideOpenError: the file is no DICOM file, or is damaged.
    """
    import pydicom  # takes .1 s, and most slides do not need it

    tags = None
    if keywords is not None:
        tags = [pydicom.tag.Tag(keyword) for keyword in keywords]
    inflated = b""
    try:
        with path.open("rb") as opened:
            if opened.read(_PREAMBLE_BYTES)[-4:] != b"DICM":
                raise SlideOpenError("dicom: not a DICOM file")
            file: BinaryIO = opened
            meta = pydicom.filereader.read_file_meta_info(path)
            syntax = str(meta.TransferSyntaxUID)
            begin = _META_BEGIN + int(meta.FileMetaInformationGroupLength)
            file.seek(begin)
            if syntax == DEFLATED_FILE:
                inflater = zlib.decompressobj(-zlib.MAX_WBITS)
                inflated = inflater.decompress(file.read(), _MAX_INFLATED_BYTES)
                if inflater.unconsumed_tail:
                    raise SlideOpenError(
                        "dicom: a deflated file must unpack to <= "
                        f"{_MAX_INFLATED_BYTES >> 30} GiB, got more"
                    )
                file = io.BytesIO(inflated)
            dataset = pydicom.filereader.read_dataset(
                file,
                is_implicit_VR=syntax == IMPLICIT,
                is_little_endian=syntax != _BIG_ENDIAN,
                stop_when=lambda tag, vr, length: tag >= before,
                specific_tags=tags,
            )
            return Elements(
                dataset=dataset, syntax=syntax, end=file.tell(), inflated=inflated
            )
    except (SlideOpenError, MemoryError):
        raise
    except Exception as error:  # pydicom raises many kinds of errors for damaged files
        raise SlideOpenError(
            f"dicom: not a readable DICOM file: {error or repr(error)}"
        ) from error


def _names(paths: Sequence[Path]) -> str:
    named = [path.name for path in paths[:_MAX_NAMED]]
    if len(paths) > _MAX_NAMED:
        named.append(f"and {len(paths) - _MAX_NAMED} more")
    return ", ".join(named)
