"""Kind of a file by its first bytes, for messages about a file that is not a table."""

import re
import zipfile
from pathlib import Path

HEAD_BYTES = 4096
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xd0\xcf\x11\xe0", "an old Office file (.xls, .doc)"),
    (b"\x89PNG", "a picture (PNG)"),
    (b"\xff\xd8\xff", "a picture (JPEG)"),
    (b"GIF8", "a picture (GIF)"),
    (b"BM", "a picture (BMP)"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"II+\0", "a BigTIFF"),
    (b"MM\0+", "a BigTIFF"),
    (b"%PDF", "a PDF"),
    (b"{\\rtf", "a text document (RTF)"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"FEA1", "a Feather file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"SQLite format 3", "a SQLite database"),
    (b"$FL2", "an SPSS file (.sav)"),
    (b"$FL3", "an SPSS file (.zsav)"),
    (b"<stata_dta>", "a Stata file (.dta)"),
    (b"RDX", "an R data file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x80\x04\x95", "a Python pickle"),
    (b"\x80\x05\x95", "a Python pickle"),
    (b"version https://git-lfs", "a pointer of Git LFS, whose file was not downloaded"),
)
# a member of a zip archive -> what the archive is
_MEMBERS = (
    ("xl/workbook.xml", "a workbook (.xlsx)"),
    ("xl/workbook.bin", "a binary workbook (.xlsb)"),
    ("word/document.xml", "a Word document (.docx)"),
    ("ppt/presentation.xml", "a presentation (.pptx)"),
    ("Index/Document.iwa", "a Numbers or Pages document"),
)
_TEXTS = (
    (re.compile(r"<(!doctype html|html|head|body|table)\b", re.I), "a web page (HTML)"),
    (re.compile(r"<\?xml|<[A-Za-z]\w*[^>]*>"), "an XML file"),
    (re.compile(r'[\[{]\s*(["\[{\]}]|-?\d|true|false|null)'), "a JSON file"),
)
WORKBOOK = "a workbook (.xlsx)"
PARQUET = "a Parquet file"


def binary_kind(path: Path, head: bytes) -> str:
    """Returns the kind of a file that is not text, such as 'a picture (PNG)'; '' if it may be text.

    Args:
        path: the file; an archive is opened.
        head: its first bytes.
    """
    if head.startswith(b"PK\x03\x04"):
        return _archive_kind(path)
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            # a text may begin with the letters BM, too
            is_text = magic == b"BM" and b"\0" not in head
            return "" if is_text else kind
    return ""


def _archive_kind(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = frozenset(archive.namelist())
            if "mimetype" in names:
                stated = archive.read("mimetype")[:100].decode("ascii", "replace")
                return f"an OpenDocument file ({stated})"
    except (OSError, zipfile.BadZipFile):
        return "a damaged workbook or zip archive"
    for member, kind in _MEMBERS:
        if member in names:
            return kind
    return "a zip archive"


def text_kind(text: str) -> str:
    """Returns the kind of a text that is not a table: a web page, XML or JSON; else ''."""
    start = text.lstrip()[:HEAD_BYTES]
    for pattern, kind in _TEXTS:
        if pattern.match(start):
            return kind
    return ""
