"""Registry of readers.

Everything that lists readers derives from `READERS`: `--reader`, `thinsection doctor`, the suffixes
of slides in a folder, the readers that 'auto' tries, and every error that names readers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from thinsection.errors import (
    InvalidInputError,
    SlideOpenError,
    ThinsectionError,
    naming_part,
)
from thinsection.extras import Need, check_needs, needs_of_path
from thinsection.files.urls import is_url
from thinsection.registry import Entry, Registry
from thinsection.slide.base import Slide
from thinsection.slide.look import Look
from thinsection.slide.pictures import only_picture
from thinsection.types import Mpp

AUTO = "auto"
_FORMATS = "thinsection.slide.formats"
_OPENSLIDE_ONLY = (
    ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".czi", ".dcm",
)  # fmt: skip
_BUILT_IN = (
    Entry(
        name="tiff",
        help="Tiled and striped TIFF, BigTIFF and SVS, decoded straight into place.",
        target=f"{_FORMATS}.tiff_reader:TiffSlide",
        suffixes=(".tif", ".tiff", ".svs"),
        needs=("tifffile", "imagecodecs", "simplejpeg"),
    ),
    Entry(
        name="openslide",
        help="Every format of OpenSlide, DICOM included.",
        target=f"{_FORMATS}.openslide_reader:OpenSlideSlide",
        suffixes=(".tif", ".tiff", ".svs", *_OPENSLIDE_ONLY),
        needs=("openslide",),
    ),
    Entry(
        name="image",
        help="PNG, JPEG, and TIFF of one level.",
        target=f"{_FORMATS}.image_reader:open_image",
        suffixes=(".png", ".jpg", ".jpeg", ".tif", ".tiff"),
        needs=("imagecodecs", "simplejpeg"),
    ),
    Entry(
        name="zarr",
        help="OME-Zarr 0.4 and 0.5: a folder of chunks, or its URL.",
        target=f"{_FORMATS}.zarr_reader:ZarrSlide",
        suffixes=(".zarr",),
        needs=("zarr",),
        folders=True,
    ),
    Entry(
        name="dicom",
        help="DICOM slides with focal planes, optical paths and newer compressions.",
        target=f"{_FORMATS}.dicom_reader:DicomSlide",
        suffixes=(".dcm",),
        needs=("pydicom", "imagecodecs"),
    ),
)
# A reader is a class or function that is called with the path and `slide_mpp`. It raises
# SlideOpenError for a file that it does not support.
READERS: Registry[Callable[..., Slide]] = Registry(
    "reader", "thinsection.readers", _BUILT_IN
)
# readers that are tried on any file; others are tried only on files with their suffixes
TRIED_ON_ANY_FILE = ("tiff", "openslide", "image")
PICKS_CHANNELS = ("zarr",)  # readers that are called with a `Look`
# readers that list all pictures of a file, and are called with the image that the user asks for
CHOOSES_IMAGE = ("tiff", "openslide", "image", "zarr", "dicom")
# readers whose parser is our own code, which checks sizes before a C library opens the file
OWN_PARSERS = ("tiff", "image")
# beginning of OpenSlide's answer for a format that it does not know
UNKNOWN_FORMAT = "openslide: it does not know this format"
# beginning of its answer if its library would show other pixels than the TIFF describes
LEFT_TO_TIFF = "openslide: left to reader 'tiff'"


def reader_choices() -> tuple[str, ...]:
    """Returns the values of `--reader`."""
    return (AUTO, *READERS.names())


def slide_suffixes() -> tuple[str, ...]:
    """Returns the suffixes of files that some reader opens, sorted, lower case, with the dot."""
    suffixes: set[str] = set()
    for entry in READERS.importable():
        suffixes.update(entry.suffixes)
    return tuple(sorted(suffixes))


def is_folder_slide(path: str | Path) -> bool:
    """Tells by the suffix of a folder or URL whether it is a slide that consists of many files."""
    if not is_url(str(path)) and not Path(path).is_dir():
        return False
    suffix = Path(path).suffix.lower()
    return any(
        entry.folders and suffix in entry.suffixes for entry in READERS.importable()
    )


def check_packages_for(paths: Iterable[str | Path]) -> None:
    """Asks for the packages that it takes to open files, folders and URLs, by their names.

    Raises MissingDependencyError: no reader that opens such a name can be used, or a URL.
    """
    suffixes: set[str] = set()
    needs: dict[Need, None] = {}
    for path in paths:
        needs |= dict.fromkeys(needs_of_path(str(path)))
        suffixes.add(Path(path).suffix.lower())
    for suffix in sorted(suffixes):
        entries = [entry for entry in READERS.importable() if suffix in entry.suffixes]
        if entries and all(entry.missing for entry in entries):
            needs[f"slides named *{suffix}", entries[0].needs] = None
    check_needs(needs)


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """Whether a reader can be used on this machine."""

    name: str
    available: bool
    detail: (
        str  # versions of its packages, or the missing package and how to install it
    )


def available_readers() -> list[ReaderStatus]:
    """Returns every reader, with the versions of its packages or the missing package."""
    statuses = []
    for name in READERS.names():
        try:
            entry = READERS.entry(name)
            entry.load()
            packages = [import_module(package) for package in entry.needs]
        except (ImportError, InvalidInputError) as error:
            statuses.append(ReaderStatus(name, False, str(error)))
            continue
        versions = []
        for package in packages:
            version = getattr(package, "__version__", "")
            versions.append(f"{package.__name__} {version}".strip())
        detail = ", ".join(versions) or entry.help
        statuses.append(ReaderStatus(name, True, detail))
    return statuses


def load_slide(
    name: str,
    path: str,
    slide_mpp: Mpp | None = None,
    *,
    look: Look | None = None,
    image: str | None = None,
) -> Slide:
    """Opens a slide by one reader, in this process.

    Args:
        name: the reader.
        path: file, or URL of a folder.
        slide_mpp: (x, y) µm per level-0 px, in place of the resolution that the file states.
        look: channels to show; only for readers of `PICKS_CHANNELS`.
        image: name or number of the picture that is the slide; None for the reader's choice.

    Raises:
        ImageError: the file has no such picture, or the reader sees only the first picture.
        SlideOpenError: the reader does not open the file; every error of its parser becomes this.
    """
    reader = READERS.load(name)
    arguments: dict[str, Any] = {}
    if look is not None:
        arguments["look"] = look
    if name in CHOOSES_IMAGE:
        arguments["image"] = image
    else:
        only_picture(image, name, path)
    with naming_part("reader", name, reader):
        with parsing(name):
            slide = reader(path, slide_mpp=slide_mpp, **arguments)
        # a reader of another package need not be a subclass of `Slide`
        if not hasattr(slide, "read_region"):
            raise InvalidInputError(
                f"reader {name!r} must return a Slide, got {type(slide).__name__}; subclass "
                "thinsection.slide.Slide"
            )
    return slide


@contextmanager
def parsing(name: str) -> Iterator[None]:
    """Turns every error of a reader's parser into SlideOpenError: the boundary of every parser."""
    try:
        yield
    except (ThinsectionError, MemoryError):
        raise
    except Exception as error:
        raise SlideOpenError(
            f"{name}: the file must be readable, got {error!r}"
        ) from error
