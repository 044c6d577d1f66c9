"""Elements of a DICOM slide that are kept in its copy; `dicom_elements.toml` lists them.

The copy keeps numbers that are needed to read the pixels, defined terms of the standard, codes from
the standard's tables, and UIDs, which are replaced. Every other element is left out, also private
ones. Source: DICOM PS3.15, annex E (Basic Profile), lists what to remove; this list is what stays.
"""

import re
import secrets
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

from pydicom.datadict import DicomDictionary
from pydicom.dataelem import DataElement
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence
from pydicom.uid import UID_dictionary

from thinsection.config import read_toml
from thinsection.deid.report import Report
from thinsection.slide.clean_profile import clean_profile
from thinsection.types import Document, Size

# pydicom's value of an element: text, numbers, bytes, sequences; None: the element is left out
Value: TypeAlias = Any
_MAX_VALUES = 9  # largest number of values of a numeric element
_TEXT_NUMBER = re.compile(r"[+-]?\d{0,12}(\.\d{0,12})?([eE][+-]?\d{1,3})?")
_CODE_WORDS = {"CodeValue", "CodingSchemeDesignator", "CodeMeaning"}
_SPECIMEN = "specimen"  # replaces the identifier of the specimen
WRITER = "THINSECTION"  # name of the writer in the header of each file
_OFFSET_TABLES = ("ExtendedOffsetTable", "ExtendedOffsetTableLengths")
_PATH_NAMES = "OpticalPathIdentifier"


@cache
def rules() -> Document:
    """Returns the content of `dicom_elements.toml`."""
    return read_toml(Path(__file__).with_suffix(".toml"))


class UidMap:
    """New UIDs for old ones: always the same one, but not computable without the secret.

    Use one map for all files of a study, so that references between them remain valid.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def new(self, uid: str) -> str:
        """Returns the UID that replaces another. Source: PS3.5, B.2 (UUIDs under 2.25)."""
        digest = sha256(self._secret + uid.encode()).digest()
        return f"2.25.{UUID(bytes=digest[:16], version=4).int}"


def image_size(dataset: Dataset) -> Size:
    """(width, height) of the whole image of a file, px."""
    width = int(dataset.get("TotalPixelMatrixColumns", dataset.Columns))
    height = int(dataset.get("TotalPixelMatrixRows", dataset.Rows))
    return width, height


def count_frames(dataset: Dataset) -> int:
    """Number of frames that an image states."""
    return int(dataset.get("NumberOfFrames", 1) or 1)


def count_places(dataset: Dataset) -> int:
    """Number of positions for frames in an image: all grids of its focal planes and paths."""
    width, height = image_size(dataset)
    grid = -(-width // int(dataset.Columns)) * -(-height // int(dataset.Rows))
    planes = int(dataset.get("TotalPixelMatrixFocalPlanes", 1) or 1)
    paths = int(dataset.get("NumberOfOpticalPaths", 1) or 1)
    return grid * max(1, planes) * max(1, paths)


class KeptElements:
    """Rules that decide which elements of one file are kept."""

    def __init__(self, image: Dataset, uids: UidMap, report: Report) -> None:
        width, height = image_size(image)
        places = count_places(image)
        frames = count_frames(image)
        self._rules = rules()
        # limits of numeric elements; some limits depend on the number of frames or the image's size
        self._limits = {
            **self._rules["numbers"],
            "ColumnPositionInTotalImagePixelMatrix": (-width, width),
            "RowPositionInTotalImagePixelMatrix": (-height, height),
            # some writers store positions instead of indices
            "DimensionIndexValues": (0, max(places, frames, width, height)),
            "ConcatenationFrameOffsetNumber": (0, max(places, frames)),
            "RepresentativeFrameNumber": (0, frames),
        }
        self._uids = uids
        self._report = report
        # new names of the optical paths, in the order of their first use
        self._path_names: dict[str, str] = {}

    def kept(self, dataset: Dataset) -> Dataset:
        """Returns a new data set with the elements that are kept."""
        out = Dataset()
        for element in dataset:
            value = self._kept_value(element)
            if value is not None:
                out.add_new(element.tag, element.VR, value)
                continue
            dummy = self._rules["dummies"].get(element.keyword)
            is_dummy = str(element.value) in (str(dummy), _SPECIMEN)
            is_blank = not element.value
            if element.VR != "SQ":
                is_blank = not str(element.value or "").strip("\0 ^")
            if not is_blank and not is_dummy and element.keyword not in _OFFSET_TABLES:
                name = element.keyword or "private or unknown element"
                self._report.remove(f"{name} {element.tag}")
        return out

    def _kept_value(self, element: DataElement) -> Value:
        """Returns the value in the copy; None if the element is left out."""
        keyword = element.keyword
        value = element.value
        if keyword in self._rules["sequences"] and element.VR == "SQ":
            items = [self.kept(item) for item in value]
            if keyword == "SpecimenDescriptionSequence":
                for item in items:
                    item.SpecimenIdentifier = _SPECIMEN
            return Sequence(items)
        if keyword in self._rules["codes"] and element.VR == "SQ":
            return self._codes(keyword, value)
        if keyword in self._limits:
            return self._number(element)
        if keyword in self._rules["words"]:
            words = [value] if isinstance(value, str) else list(value or [])
            return (
                value
                if set(map(str, words)) <= set(self._rules["words"][keyword])
                else None
            )
        if keyword in self._rules["uids"]:
            is_registered = str(value) in UID_dictionary
            return value if is_registered else self._uids.new(str(value))
        if keyword == _PATH_NAMES:
            names = self._path_names
            return names.setdefault(str(value), str(len(names) + 1))
        if keyword == "ICCProfile":
            cleaned = clean_profile(bytes(value))
            if cleaned is None:
                return None
            for kind in sorted(cleaned.removed):
                self._report.remove(kind)
            return cleaned.data + b"\0" * (len(cleaned.data) % 2)
        return None

    def _number(self, element: DataElement) -> Value:
        """Returns a number, or a few; None if it is not numeric or outside the keyword's limits."""
        if element.VM > _MAX_VALUES:
            return None
        value = element.value
        values = [value] if element.VM <= 1 else list(value)
        if element.VR == "AT":
            is_public = all(int(tag) in DicomDictionary for tag in values)
            return value if is_public else None
        if element.VR in ("IS", "DS", "SH", "LO"):
            texts = [
                "" if v is None else str(getattr(v, "original_string", v)).strip(" \0")
                for v in values
            ]
            if not all(_TEXT_NUMBER.fullmatch(text) for text in texts):
                return None
            numbers = [float(text) for text in texts if text]
        elif element.VR in ("US", "UL", "SS", "SL", "FL", "FD", "SV", "UV"):
            numbers = [float(number) for number in values if number is not None]
        else:
            return None
        least, most = self._limits[element.keyword]
        return value if all(least <= number <= most for number in numbers) else None

    def _codes(self, keyword: str, items: Sequence) -> Sequence | None:
        """Returns the codes that the standard's tables have, with the meanings in these tables."""
        kept = []
        for item in items:
            scheme = str(item.get("CodingSchemeDesignator", ""))
            code = str(item.get("CodeValue", ""))
            meaning = _meanings().get((scheme, code))
            if meaning is None:
                self._report.remove(
                    f"a code in {keyword} that no table of the standard has"
                )
                continue
            clean = Dataset()
            clean.CodeValue = code
            clean.CodingSchemeDesignator = scheme
            clean.CodeMeaning = meaning
            if {element.keyword for element in item} - _CODE_WORDS:
                self._report.remove(f"words beside a code in {keyword}")
            elif str(item.get("CodeMeaning", "")) != meaning:
                self._report.remove(
                    f"the meaning of a code in {keyword}, which has the table's now"
                )
            kept.append(clean)
        return Sequence(kept) if kept else None


@cache
def _meanings() -> Mapping[tuple[str, str], str]:
    """(coding scheme, code) -> meaning, from pydicom's copy of PS3.16."""
    from pydicom.sr import _concepts_dict, _snomed_dict  # slow to import

    old_codes = _snomed_dict.mapping["SCT"]
    meanings: dict[tuple[str, str], str] = {}
    for scheme, names in _concepts_dict.concepts.items():
        for codes in names.values():
            for code, (meaning, *_) in codes.items():
                meanings[scheme, code] = meaning
                if scheme == "SCT" and code in old_codes:
                    meanings["SRT", old_codes[code]] = meaning
    return meanings
