"""DICOM files of a folder: which belong to one slide, and what each of them is.

A slide is a series: its levels, label and overview are files with one SeriesInstanceUID. A folder
may hold the files of several slides.

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
_MOST_NAMED = 3  # files that a message names
SHARED_GROUPS = 0x52009229  # tag; the elements before it are few
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
        series: SeriesInstanceUID; '' where it has none.
        sop_class: what kind of object it is.
        flavor: third word of its image type: VOLUME, LABEL, OVERVIEW, THUMBNAIL, ...
        patient: the patient's number and name.
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
        slides: the files of each slide, in the order of their first file.
        no_slides: files that are no whole-slide images.
        unreadable: files that cannot be read as DICOM.
    """

    slides: tuple[tuple[DicomFile, ...], ...]
    no_slides: tuple[Path, ...]
    unreadable: tuple[Path, ...]

    @property
    def first_files(self) -> list[Path]:
        """One file of each slide; unreadable files count as one, so that they are missed."""
        firsts = [files[0].path for files in self.slides]
        return firsts + list(self.unreadable[:1])

    def note(self) -> str:
        """Returns how many slides the files are, where that is more than one or some are none."""
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
    """Tells whether a path is by its suffix a DICOM file."""
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
    """Refuses a series whose files are of two patients or of two glasses.

    Raises:
        SlideOpenError: they are; the message names files, not the patients.
    """
    _check_same("patient", [" ".join(file.patient).strip() for file in files], files)
    containers = [file.container for file in files]
    _check_same("glass (ContainerIdentifier)", containers, files)


def _check_same(what: str, values: Sequence[str], files: Sequence[DicomFile]) -> None:
    """Refuses files whose values differ; files without one count for nothing."""
    known = [value for value in values if value]
    others = [value for value in known if value != known[0]]
    if not others:
        return
    one = files[values.index(known[0])].path.name
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


# a cohort, its fingerprints and the reader ask for the same files
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
    """Elements of a file up to some tag.

    Attributes:
        dataset: pydicom's data set.
        syntax: UID of the transfer syntax.
        end: where the first element lies that was not read; in `inflated` if there is any.
        inflated: the whole data set of a deflated file, b"" of others.
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
        keywords: which elements are kept; None for all.
        before: tag at which reading ends.

    Memory: the elements; of a deflated file all of it, at most 1 GiB.

    Raises:
        SlideOpenError: it is no DICOM file, or is damaged.
    """
    import pydicom  # takes .1 s, and most slides do without it

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
    except Exception as error:  # whatever a parser makes of damage
        raise SlideOpenError(
            f"dicom: not a readable DICOM file: {error or repr(error)}"
        ) from error


def _names(paths: Sequence[Path]) -> str:
    named = [path.name for path in paths[:_MOST_NAMED]]
    if len(paths) > _MOST_NAMED:
        named.append(f"and {len(paths) - _MOST_NAMED} more")
    return ", ".join(named)
