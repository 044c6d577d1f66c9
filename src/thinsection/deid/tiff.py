"""Copies of TIFF slides without identifying data: Aperio, generic TIFF, BigTIFF and NDPI.

The copy begins as an empty file of zeros. It gets only structures that were read and have the
expected form, each at its old offset: directories with known tags, cleaned image data, and colour
profiles of numbers. Therefore unknown content is never copied, whatever it is. Image data that
becomes larger by cleaning is written at the end of the file.
"""

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import openslide
import tifffile
from tifffile import TiffPage, TiffTag

from thinsection.deid.likeness import Segment, StoredImage, find_unlikeness
from thinsection.deid.report import Report
from thinsection.deid.words import KnownSizes, kept_description
from thinsection.errors import InvalidInputError, OutputError
from thinsection.slide.clean_profile import clean_profile
from thinsection.slide.clean_streams import (
    Cleaned,
    JpegTable,
    StreamError,
    clean_entropy,
    clean_jpeg,
    clean_page_segment,
)
from thinsection.slide.formats.segments import MAX_SEGMENT_BYTES
from thinsection.slide.formats.tiff_layout import read_layout
from thinsection.slide.formats.tiff_pages import JPEG, PICTURE_CODECS, segment_size
from thinsection.types import MIB, Size, counted

_GAP_BYTES = 4 * MIB  # bytes read at once between structures
# tags
_DESCRIPTION = 270
_STRIP_OFFSETS = 273
_STRIP_COUNTS = 279
_TILE_OFFSETS = 324
_TILE_COUNTS = 325
_SUB_IFDS = 330
_JPEG_TABLES = 347
_ICC = 34675
_NDPI_FORMAT = 65420
_NDPI_LENS = 65421  # magnification; negative for macro and map
_NDPI_MCU_STARTS = 65426
_NDPI_MCU_STARTS_HIGH = 65432
_OFFSETS = (_STRIP_OFFSETS, _TILE_OFFSETS)
_COUNTS = (_STRIP_COUNTS, _TILE_COUNTS)
# Tags whose whole numbers describe the layout of the pixels: (most numbers, largest value). Every
# other tag is left out, unless it is listed below.
_ANY = 2**32 - 1
_NUMBERS = {
    254: (1, 15), 255: (1, 3), 256: (1, 2**31), 257: (1, 2**31), 258: (8, 64), 259: (1, 2**16),
    262: (1, 2**16), 266: (1, 2), 274: (1, 8), 277: (1, 8), 278: (1, _ANY), 284: (1, 2),
    296: (1, 3), 317: (1, 2**16), 322: (1, 2**31), 323: (1, 2**31), 338: (8, 2), 339: (8, 6),
    530: (2, 4), 531: (1, 2), 532: (6, 2**16), 32997: (1, 2**16), 32998: (1, 2**16),
}  # fmt: skip
_WHOLE_TYPES = (3, 4, 16)
# Tags with fractions: (most numbers, least value, largest value). These are pixels per inch or
# centimetre, down to 10 nm per pixel, and the reference black and white.
_FRACTIONS = {282: (1, 0, 10**6), 283: (1, 0, 10**6), 532: (6, 0, 2**16)}
_FRACTION_TYPE = 5
_ROWS_PER_STRIP = 278
# NDPI tags: (least value, largest value). Only the numbers that readers need to find and scale
# pixels are kept.
_NDPI_NUMBERS = {
    65420: (0, 1),  # format
    65421: (-2, 200),  # lens; negative for macro and map
    65422: (-40_000_000, 40_000_000),  # offset from the centre of the glass in x, nm
    65423: (-15_000_000, 15_000_000),  # the same in y, nm
    65424: (-1_000_000, 1_000_000),  # focal plane, nm
    65441: (0, 20),  # capture mode
    65451: (0, 2000),  # wavelength, nm
}
_NDPI_NUMBER_FORMS = {3: "H", 4: "I", 9: "i", 11: "f"}
_TEXT_RUN = re.compile(rb"[ -~]{5,}")  # numbers that could be read as text are left out
_NDPI_MAKE = (271, b"Hamamatsu")  # OpenSlide and tifffile recognise the format by it
_NAMED = ("label", "macro", "thumbnail")
# vendors whose readers find tiles by texts that are removed here
_READ_BY_WORDS = {
    "philips": "its XML mixes barcode, label and macro with the positions of its "
        "tiles, and no rule here separates them",
    "leica": "the XML in its description mixes names with the positions of its images",
    "ventana": "its XMP mixes names and barcode with the positions of its tiles",
    "trestle": "its description contains the overlaps of its tiles",
    "mirax": "it is a folder of files",
    "zeiss": "it is not a TIFF",
}  # fmt: skip


@dataclass
class _Copy:
    """Copy of a slide while it is written; without a file, its content is only counted.

    Attributes:
        file: the copy; None to count only.
        end: end of the slide's data, after which data can be appended.
        pieces: (start, end) of each part of the slide that the copy has too.
    """

    file: BinaryIO | None
    end: int
    max_offset: int
    pieces: list[tuple[int, int]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        """Writes at the offset of a structure of the slide."""
        if data:
            self.pieces.append((offset, offset + len(data)))
        if self.file is not None:
            self.file.seek(offset)
            self.file.write(data)

    def place(self, data: bytes, offset: int, room: int) -> int:
        """Writes at the slide's offset if there is room, else at the end; returns the offset."""
        if len(data) <= room:
            self.write(offset, data)
            return offset
        start = self.end + self.end % 2
        self.end = start + len(data)
        if self.end > self.max_offset:
            raise OutputError(
                f"a copy of a TIFF must stay below {self.max_offset} bytes, got {self.end}; "
                "convert the slide to BigTIFF first"
            )
        self.write(start, data)
        return start


@dataclass(frozen=True)
class _Entry:
    """A tag in the form in which it is written."""

    code: int
    dtype: int
    value: bytes
    old_place: int
    high_word: int = 0  # upper 32 bits of an NDPI offset or count


@dataclass(frozen=True, kw_only=True)
class _Page:
    """A page of the slide that is kept, with its kept SubIFDs."""

    page: TiffPage
    below: tuple["_Page", ...] = ()


class TiffSlide:
    """A TIFF slide that is inspected, and copied without identifying data.

    Raises InvalidInputError: not a kind of TIFF that can be copied in this way.
    """

    def __init__(self, slide_path: str | Path, handle: BinaryIO) -> None:
        self.slide_path = Path(slide_path)
        self.report = Report()
        self._handle = handle
        self._file = _opened(self.slide_path, handle)
        self.is_ndpi = bool(self._file.is_ndpi)
        self._size = self._file.filehandle.size
        self._dropped: list[tuple[int, int]] = []
        self.images: list[StoredImage] = []  # images that are kept, in file order
        # JPEG tables that segments use, by the offset of the tag JPEGTables that holds them
        self._needed_tables: defaultdict[int, set[JpegTable]] = defaultdict(set)
        self._pages = self._judged_pages()

    def copy(self, out: BinaryIO | None) -> Report:
        """Writes the copy, or only inspects the slide, and reports what was found.

        Memory: one segment, and the file's lists of segments.
        """
        max_offset = 2**63 if self._file.is_bigtiff or self.is_ndpi else 2**32 - 1
        copy = _Copy(out, self._size, max_offset)
        start = self._write_directories(copy, self._pages)
        order = self._file.byteorder
        header = b"II" if order == "<" else b"MM"
        if self._file.is_bigtiff:
            header += struct.pack(f"{order}HHHQ", 43, 8, 0, start)
        else:
            form = "Q" if self.is_ndpi else "I"
            header += struct.pack(f"{order}H{form}", 42, start)
        copy.write(0, header)
        self._check_pieces(copy)
        self._count_rest(copy)
        pages = sum(1 + len(page.below) for page in self._pages)
        self.report.looked_at.insert(
            0, f"{pages + self._num_dropped} directories and their tags"
        )
        return self.report

    # selection of images

    def _judged_pages(self) -> list[_Page]:
        """Returns the pages that show the slide, in file order; reports the others."""
        self._num_dropped = 0
        chain = list(self._file.pages)
        candidates: list[TiffPage] = []
        for page in chain:
            candidates += [page, *(page.pages or ())]
        images = {id(page): self._image(page) for page in candidates}
        by_size = sorted(
            candidates, key=lambda page: -page.imagewidth * page.imagelength
        )
        slide_page = by_size[0]
        shown = [images[id(slide_page)]]  # images that show the slide, finest first
        self._slide_size = shown[0].size
        kept: set[int] = {id(slide_page)}
        for page in by_size[1:]:
            image = images[id(page)]
            why = self._why_dropped(page, image, shown[-1])
            if why:
                self._num_dropped += 1
                self.report.remove(f"{image.name}: {why}")
                self._dropped.extend(self._extents(page))
            else:
                kept.add(id(page))
                shown.append(image)
        self.images = [images[id(page)] for page in candidates if id(page) in kept]
        for image in self.images:
            why = "it shows what the largest shows"
            if image is shown[0]:
                why = "it is the largest"
            self.report.kept.append(f"{image.name}: {why}")
        return self._tree(chain, kept)

    def _tree(self, chain: Sequence[TiffPage], kept: set[int]) -> list[_Page]:
        """Returns the kept pages of the chain, each with its kept SubIFDs."""
        tree: list[_Page] = []
        for page in chain:
            below = tuple(
                _Page(page=sub) for sub in page.pages or () if id(sub) in kept
            )
            if id(page) in kept:
                tree.append(_Page(page=page, below=below))
            elif below:
                raise InvalidInputError(
                    f"page {page.index} must show the slide, because pages below it do, in "
                    f"{self.slide_path.name!r}; convert the slide first"
                )
        return tree

    def _why_dropped(
        self, page: TiffPage, image: StoredImage, slide: StoredImage
    ) -> str:
        """Returns why an image is left out, by its name or its pixels; '' if it is kept."""
        name = _own_name(page)
        if name in ("label", "macro"):
            return f"it is named a {name}"
        if self.is_ndpi and float(page.tags.valueof(_NDPI_LENS) or 0) < 0:
            return "it is a macro or a map"
        try:
            return find_unlikeness(image, slide)
        except StreamError as error:
            return f"it cannot be compared with the slide ({error})"

    def _extents(self, page: TiffPage) -> Iterator[tuple[int, int]]:
        """Yields (start, end) of all bytes of a page that is left out."""
        yield page.offset, page.offset + self._directory_bytes(page)
        for tag in page.tags:
            yield tag.valueoffset, tag.valueoffset + tag.valuebytecount
        for offset, count in zip(page.dataoffsets, page.databytecounts):
            yield int(offset), int(offset + count)

    def _directory_bytes(self, page: TiffPage) -> int:
        form = self._file.tiff
        self._handle.seek(page.offset)
        count = struct.unpack(form.tagnoformat, self._handle.read(form.tagnosize))[0]
        high_words = 4 * count if self.is_ndpi else 0
        return int(form.tagnosize + count * form.tagsize + form.offsetsize + high_words)

    def _image(self, page: TiffPage) -> StoredImage:
        """Returns the image of a page, whose segments can be decoded one by one."""
        segment = segment_size(page)
        num_bytes = segment[0] * segment[1] * int(page.samplesperpixel)
        if num_bytes > MAX_SEGMENT_BYTES:
            raise InvalidInputError(
                f"a strip or tile must have at most {MAX_SEGMENT_BYTES >> 20} MiB, got "
                f"{num_bytes >> 20} in {self.slide_path.name!r}; convert it to a tiled TIFF"
            )
        own_name = _own_name(page)
        what = f"{own_name} image" if own_name else "image"
        size: Size = (int(page.imagewidth), int(page.imagelength))
        place = _place_of(page)

        def decode(index: int) -> Segment | None:
            data = self._read(page.dataoffsets[index], page.databytecounts[index])
            if not data:
                return None
            try:
                # otherwise the segment is a restart interval
                if page.jpegheader is None:
                    data = clean_page_segment(page, index, data).data
                pixels: Segment | None
                pixels, *_ = page.decode(
                    data,
                    index,
                    jpegtables=page.jpegtables,
                    jpegheader=page.jpegheader,
                )
                return pixels
            except Exception as error:
                raise StreamError(
                    f"segment {index} of page {place} must be decodable, got {error!r} in "
                    f"{self.slide_path.name!r}; the file is damaged"
                ) from error

        return StoredImage(
            name=f"{what} of {size[0]} x {size[1]} px (page {place})",
            size=size,
            segment=segment,
            decode=decode,
        )

    def _read(self, offset: int, count: int) -> bytes:
        if count > self._size:
            raise InvalidInputError(
                f"a structure must be inside the file, got {count} bytes in "
                f"{self.slide_path.name!r}; the file is damaged"
            )
        self._handle.seek(offset)
        return self._handle.read(count)

    # directories

    def _write_directories(self, copy: _Copy, pages: Sequence[_Page]) -> int:
        """Writes the chain of pages; returns the offset of the first."""
        places: dict[int, tuple[list[int], list[int]]] = {}
        for page in pages:
            for each in (*page.below, page):
                # image data come first, because they show which of the shared JPEG tables are
                # needed
                is_split = self.is_ndpi and len(each.page.dataoffsets) > 1
                write = self._write_restarts if is_split else self._write_segments
                try:
                    places[each.page.offset] = write(copy, each.page)
                except StreamError as error:
                    raise StreamError(
                        f"{error} in page {_place_of(each.page)} of {self.slide_path.name!r}; "
                        "a slide whose streams cannot be read is not copied"
                    ) from error
        following = [*(page.page.offset for page in pages[1:]), 0]
        for page, next_offset in zip(pages, following):
            for below in page.below:
                self._write_page(copy, below, places[below.page.offset], 0)
            self._write_page(copy, page, places[page.page.offset], next_offset)
        return int(pages[0].page.offset)

    def _write_page(
        self,
        copy: _Copy,
        kept: _Page,
        places: tuple[list[int], list[int]],
        next_offset: int,
    ) -> None:
        """Writes tag values and directory of a page; `places`: offsets and byte counts."""
        page = kept.page
        offsets, counts = places
        entries: list[_Entry] = []
        seen: set[int] = set()
        for tag in page.tags:
            if tag.code in seen:
                self.report.remove(f"tag {tag.code} ({tag.name}), which occurs twice")
                continue
            seen.add(tag.code)
            dtype = int(tag.dtype)
            high_word = 0
            if tag.code in _OFFSETS or tag.code in _COUNTS:
                numbers = offsets if tag.code in _OFFSETS else counts
                value = _packed(self._file, dtype, numbers)
                high_word = numbers[0] >> 32 if self.is_ndpi else 0
            elif tag.code == _SUB_IFDS:
                dtype = 16 if self._file.is_bigtiff else 4
                value = _packed(self._file, dtype, [p.page.offset for p in kept.below])
            else:
                value = self._kept_value(page, tag) or b""
            if value:
                entries.append(
                    _Entry(tag.code, dtype, value, tag.valueoffset, high_word)
                )
            elif tag.code not in (_SUB_IFDS, _DESCRIPTION):
                self.report.remove(f"tag {tag.code} ({tag.name})")
        entries.sort(key=lambda entry: entry.code)
        self._write_directory(copy, page, entries, next_offset)

    def _raw(self, tag: TiffTag) -> bytes:
        """Returns the stored bytes of a tag's value."""
        return self._read(tag.valueoffset, tag.valuebytecount)

    def _kept_value(self, page: TiffPage, tag: TiffTag) -> bytes | None:
        """Returns the bytes of a tag's value in the copy; None if the tag is left out."""
        dtype = int(tag.dtype)
        if tag.code in _NUMBERS or tag.code in _FRACTIONS:
            return self._kept_numbers(page, tag)
        if tag.code == _DESCRIPTION and dtype == 2:
            return self._description(page, tag)
        if tag.code == _JPEG_TABLES and int(page.compression) in JPEG:
            needed = frozenset(self._needed_tables[tag.valueoffset])
            return self.report.note(clean_jpeg(self._raw(tag), needed=needed))
        if tag.code == _ICC:
            cleaned = clean_profile(self._raw(tag))
            return None if cleaned is None else self.report.note(cleaned)
        if not self.is_ndpi:
            return None
        make_code, make = _NDPI_MAKE
        if tag.code == make_code and self._raw(tag).rstrip(b"\0 ") == make:
            return make + b"\0"
        if tag.code in _NDPI_NUMBERS:
            form = _NDPI_NUMBER_FORMS.get(dtype)
            if form is None or tag.count != 1:
                return None
            raw = self._raw(tag)
            (number,) = struct.unpack(f"{self._file.byteorder}{form}", raw)
            least, most = _NDPI_NUMBERS[tag.code]
            if form == "I" and number >= 2**31:
                number -= 2**32  # the value is signed, whatever the type says
            return raw if least <= number <= most else None
        if tag.code in (_NDPI_MCU_STARTS, _NDPI_MCU_STARTS_HIGH):
            fits = dtype == 4 and tag.count == len(page.dataoffsets)
            return self._raw(tag) if fits else None
        return None

    def _kept_numbers(self, page: TiffPage, tag: TiffTag) -> bytes | None:
        """Returns the bytes of whole numbers or fractions; None if their form is not allowed."""
        dtype = int(tag.dtype)
        raw = self._raw(tag)
        order = self._file.byteorder
        if tag.code in _FRACTIONS and dtype == _FRACTION_TYPE:
            count, least, most = _FRACTIONS[tag.code]
            if tag.count != count or _TEXT_RUN.search(raw):
                return None
            words = struct.unpack(f"{order}{2 * count}I", raw)
            pairs = zip(words[::2], words[1::2])
            fits = all(least * below <= above <= most * below for above, below in pairs)
            return raw if fits else None
        if tag.code not in _NUMBERS:
            return None
        max_count, top = _NUMBERS[tag.code]
        if dtype not in _WHOLE_TYPES or not 1 <= tag.count <= max_count:
            return None
        form = {3: "H", 4: "I", 16: "Q"}[dtype]
        numbers = struct.unpack(f"{order}{tag.count}{form}", raw)
        if tag.code == _ROWS_PER_STRIP and numbers[0] > page.imagelength:
            # any larger number also means one strip, so it could carry hidden data
            whole = _ANY if dtype == 4 else int(page.imagelength)
            if numbers[0] != whole:
                self.report.remove("a number of rows in a strip that the image lacks")
            return struct.pack(f"{order}{form}", whole)
        return raw if max(numbers) <= top else None

    def _description(self, page: TiffPage, tag: TiffTag) -> bytes:
        text = self._raw(tag).decode("latin-1")
        if not self._file.is_ndpi:
            sizes = KnownSizes(
                slide=self._slide_size,
                page=(int(page.imagewidth), int(page.imagelength)),
                tile=segment_size(page),
            )
            kept, removed = kept_description(text, sizes)
        else:
            kept = ""
            removed = ["ImageDescription: free text"] if text.strip("\0 ") else []
        for line in removed:
            self.report.remove(line)
        if kept:
            values = kept.replace("\r\n", " ").replace("|", "; ")
            self.report.kept.append(f"of Aperio's description: {values}")
        return kept.encode("ascii") + b"\0" if kept else b""

    def _write_directory(
        self, copy: _Copy, page: TiffPage, entries: Sequence[_Entry], next_offset: int
    ) -> None:
        """Writes the directory at its old offset, with fewer entries; unused bytes are 0."""
        form = self._file.tiff
        order = self._file.byteorder
        word = "Q" if self._file.is_bigtiff else "I"
        word_bytes = struct.calcsize(word)
        directory_end = page.offset + self._directory_bytes(page)
        whole = struct.pack(form.tagnoformat, len(entries))
        high_words = b""
        for entry in entries:
            high_word = entry.high_word
            stored = entry.value.ljust(word_bytes, b"\0")
            if len(entry.value) > word_bytes:
                was_inline = page.offset <= entry.old_place < directory_end
                room = 0 if was_inline else page.tags[entry.code].valuebytecount
                place = copy.place(entry.value, entry.old_place, room)
                high_word = place >> 32
                stored = struct.pack(f"{order}{word}", place % 2 ** (8 * word_bytes))
            type_bytes = struct.calcsize(tifffile.TIFF.DATA_FORMATS[entry.dtype])
            count = len(entry.value) // type_bytes
            head = struct.pack(f"{order}HH{word}", entry.code, entry.dtype, count)
            whole += head + stored
            high_words += struct.pack(f"{order}I", high_word if self.is_ndpi else 0)
        whole += struct.pack(form.offsetformat, next_offset)
        copy.write(page.offset, whole + (high_words if self.is_ndpi else b""))

    # image data

    def _write_segments(
        self, copy: _Copy, page: TiffPage
    ) -> tuple[list[int], list[int]]:
        """Cleans and writes tiles or strips, each of which is a separate stream.

        Returns their offsets and byte counts.
        """
        codec = PICTURE_CODECS.get(int(page.compression))
        offsets: list[int] = []
        counts: list[int] = []
        kinds: Counter[str] = Counter()
        needed: set[JpegTable] = set()
        for index, (offset, count) in enumerate(
            zip(page.dataoffsets, page.databytecounts)
        ):
            cleaned = clean_page_segment(page, index, self._read(offset, count))
            if codec == "jpegxl" and cleaned.unread:
                raise StreamError("the end of a JPEG XL stream cannot be found")
            kinds.update(cleaned.removed)
            needed |= cleaned.lacks
            self.report.note(Cleaned(b"", unread=cleaned.unread))
            # the offset of an empty segment is not used, so it could carry hidden data
            place = copy.place(cleaned.data, offset, count) if cleaned.data else 0
            offsets.append(place)
            counts.append(len(cleaned.data))
        if _JPEG_TABLES in page.tags:
            self._needed_tables[page.tags[_JPEG_TABLES].valueoffset] |= needed
        self._note_streams(page, len(offsets), kinds)
        return offsets, counts

    def _write_restarts(
        self, copy: _Copy, page: TiffPage
    ) -> tuple[list[int], list[int]]:
        """Cleans and writes an NDPI level: one JPEG, which tifffile splits at restart markers."""
        start = int(page.tags[_STRIP_OFFSETS].value[0])
        length = int(page.tags[_STRIP_COUNTS].value[0])
        kinds: Counter[str] = Counter()
        head = clean_jpeg(self._read(start, int(page.dataoffsets[0]) - start))
        kinds.update(head.removed)
        copy.write(start, head.data)
        place = int(page.dataoffsets[0])
        for offset, count in zip(page.dataoffsets, page.databytecounts):
            if offset != place or offset + count > start + length:
                raise StreamError("restart intervals must follow each other")
            place = offset + count
            cleaned = clean_entropy(self._read(offset, count), page.jpegheader or b"")
            kinds.update(cleaned.removed)
            self.report.note(Cleaned(b"", unread=cleaned.unread))
            copy.write(offset, cleaned.data)
        self._note_streams(page, len(page.dataoffsets), kinds)
        return [start], [length]

    def _note_streams(self, page: TiffPage, count: int, kinds: Counter[str]) -> None:
        place = _place_of(page)
        self.report.looked_at.append(f"{counted(count, 'segment')} of page {place}")
        for kind, times in sorted(kinds.items()):
            self.report.remove(
                f"{kind}, in {times} of {counted(count, 'segment')} of page {place}"
            )

    # data outside of all structures

    def _check_pieces(self, copy: _Copy) -> None:
        """Refuses a file whose structures overlap, since one could hide bytes of another."""
        end = 0
        previous = (0, 0)
        for piece in sorted(set(copy.pieces)):
            if piece[0] < end:
                raise InvalidInputError(
                    f"parts of a TIFF must not overlap, got bytes {previous} and {piece} in "
                    f"{self.slide_path.name!r}; the file is damaged"
                )
            previous = piece
            end = piece[1]

    def _count_rest(self, copy: _Copy) -> None:
        """Reports non-zero bytes that belong to no structure."""
        known = [*copy.pieces, *self._dropped]
        for kept in self._pages:
            for page in (kept.page, *(below.page for below in kept.below)):
                known += self._extents(page)
        count = 0
        place = 0
        for start, end in [*sorted(known), (self._size, self._size)]:
            while place < min(start, self._size):
                num_bytes = min(_GAP_BYTES, min(start, self._size) - place)
                data = self._read(place, num_bytes)
                count += len(data) - data.count(0)
                place += num_bytes
            place = max(place, end)
        self.report.looked_at.append("the bytes between and after all structures")
        if count:
            self.report.remove(f"{count} bytes that belong to no structure of the file")


def _opened(slide_path: Path, handle: BinaryIO) -> tifffile.TiffFile:
    """Opens the file with tifffile. Raises InvalidInputError: not a TIFF, or a refused kind."""
    name = slide_path.name
    vendor = None
    with suppress(openslide.OpenSlideError):
        vendor = openslide.OpenSlide.detect_format(slide_path)
    if vendor in _READ_BY_WORDS:
        raise InvalidInputError(
            f"slide must be an Aperio, generic TIFF, NDPI or DICOM file, got {vendor} in "
            f"{name!r}: {_READ_BY_WORDS[vendor]}; use the software of its vendor, or `thinsection "
            "convert`, which omits label, macro and metadata but encodes the pixels again as "
            "JPEG, with some loss"
        )
    try:
        file = tifffile.TiffFile(handle, name=name)
        is_ndpi = _NDPI_FORMAT in file.pages.first.tags
        handle.seek(0)
        if is_ndpi:
            file = tifffile.TiffFile(handle, name=name, is_ndpi=True)
            if len(file.pages) == 0:
                raise tifffile.TiffFileError("the offsets of an NDPI lead to no page")
        elif not file.is_ome:
            read_layout(str(slide_path), None, handle)
    except Exception as error:
        raise InvalidInputError(
            f"slide {name!r} is not a TIFF that can be copied: {error}; `thinsection convert` "
            "encodes its pixels again, without metadata"
        ) from error
    if file.is_ome and not is_ndpi:
        raise InvalidInputError(
            f"slide must not be an OME-TIFF, got {name!r}; `thinsection convert` writes one "
            "without other metadata, and copies its tiles without encoding them"
        )
    return file


def _place_of(page: TiffPage) -> str:
    """Returns '3' for a page, or '3.1' for a page below it."""
    index = page.index
    return ".".join(map(str, index if isinstance(index, tuple) else (index,)))


def _own_name(page: TiffPage) -> str:
    """Returns 'label', 'macro' or 'thumbnail' if a page's description says so, else ''."""
    for line in str(page.description or "").splitlines()[:2]:
        word = line.strip().split(" ", 1)[0].lower()
        if word in _NAMED:
            return word
    return ""


def _packed(file: tifffile.TiffFile, dtype: int, numbers: Sequence[int]) -> bytes:
    """Packs numbers as a tag value; NDPI stores the high words of 64-bit numbers apart."""
    form = {3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}.get(dtype)
    if form is None:
        raise InvalidInputError(
            f"offsets must be of TIFF's type 3, 4 or 16, got {dtype}"
        )
    top = 256 ** struct.calcsize(form)
    if any(number >= top for number in numbers) and not file.is_ndpi:
        raise OutputError(
            f"offsets must be below {top}; convert the slide to BigTIFF first"
        )
    return struct.pack(
        f"{file.byteorder}{len(numbers)}{form}", *(n % top for n in numbers)
    )
