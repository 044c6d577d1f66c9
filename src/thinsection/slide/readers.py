"""The readers that are known.

Everything that lists readers derives from `READERS`: `--reader`, `thinsection doctor`, which files
of a folder are slides, what 'auto' tries, and every error that names them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from thinsection.errors import InvalidInputError, SlideOpenError, ThinsectionError
from thinsection.files.sources import is_url
from thinsection.registry import Entry, Registry
from thinsection.slide.base import Slide
from thinsection.types import Mpp

AUTO = "auto"
_OPENSLIDE = ".ndpi .mrxs .scn .bif .vms .vmu .svslide .czi .dcm"
_HELP = {
    "tiff": "Tiled and striped TIFF, BigTIFF and SVS, decoded straight into place.",
    "cucim": "Tiled TIFF and SVS by cuCIM, on the CPU or a GPU.",
    "openslide": "Every format of OpenSlide, DICOM included.",
    "image": "PNG, JPEG, and TIFF of one level.",
    "zarr": "OME-Zarr 0.4 and 0.5: a folder of chunks, or its URL.",
}
_TARGETS = {  # what of which module, its suffixes, the packages that it needs
    "tiff": (
        "tiff_reader:TiffSlide",
        ".tif .tiff .svs",
        "tifffile imagecodecs simplejpeg",
    ),
    "cucim": ("cucim_reader:CucimSlide", ".tif .tiff .svs", "cucim"),
    "openslide": (
        "openslide_reader:OpenSlideSlide",
        f".tif .tiff .svs {_OPENSLIDE}",
        "openslide",
    ),
    "image": (
        "image_reader:open_image",
        ".png .jpg .jpeg .tif .tiff",
        "imagecodecs simplejpeg",
    ),
    "zarr": ("zarr_reader:ZarrSlide", ".zarr", "zarr"),
}
ALL = tuple(_HELP)
OURS = ALL[
    :-1
]  # any file may be one of these; others are tried where the suffix is theirs
_OPTIONAL = ("cucim", "zarr")  # extras of their own name
WITH_LOOK = ("zarr",)  # which pick channels themselves, and are told which


def _entry(name: str) -> Entry:
    target, *lists = _TARGETS[name]
    target, extra = (
        f"thinsection.slide.formats.{target}",
        name if name in _OPTIONAL else None,
    )
    suffixes, needs = (tuple(words.split()) for words in lists)
    opens: dict[str, Any] = {"suffixes": suffixes, "folders": name == "zarr"}
    return Entry(
        name=name, help=_HELP[name], target=target, needs=needs, extra=extra, **opens
    )


# a class or function called with the path and `slide_mpp`; SlideOpenError where a file is not its
_OWN = [_entry(name) for name in ALL]
READERS: Registry[Callable[..., Slide]] = Registry(
    "reader", "thinsection.readers", _OWN
)
UNKNOWN = "openslide: not a format that it knows"
# begins the answer where OpenSlide's library would show other px than a TIFF describes
LEFT = "openslide: left to reader 'tiff'"
# parsed by our own code, which checks sizes before a C library sees the file
OWN_PARSERS = ("tiff", "image")
NEVER_TRUSTED = ("cucim",)  # ends the process over damage that no check of sizes finds


def reader_choices() -> tuple[str, ...]:
    """What `--reader` takes."""
    return (AUTO, *READERS.names())


def slide_suffixes() -> tuple[str, ...]:
    """Suffixes of the files that some reader says it opens, sorted, lower case, with the dot."""
    return tuple(sorted({suffix for entry in READERS for suffix in entry.suffixes}))


def is_folder_slide(path: str | Path) -> bool:
    """Whether a folder, or a URL, is by its name a slide of many files."""
    found, suffix = is_url(str(path)) or Path(path).is_dir(), Path(path).suffix.lower()
    return found and any(
        entry.folders and suffix in entry.suffixes for entry in READERS
    )


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """Whether a reader can be used here."""

    name: str
    available: bool
    detail: str  # versions of its packages, or what is missing and how to install it


def available_readers() -> list[ReaderStatus]:
    """Every reader, with its packages' versions or what it lacks."""
    return [_status(name) for name in READERS.names()]


def _status(name: str) -> ReaderStatus:
    try:
        entry = READERS.entry(name)
        entry.load()
        packages = [import_module(package) for package in entry.needs]
    except (ImportError, InvalidInputError) as error:
        return ReaderStatus(name, False, str(error))
    versions = [
        f"{p.__name__} {getattr(p, '__version__', '')}".strip() for p in packages
    ]
    return ReaderStatus(name, True, ", ".join(versions) or entry.help)


def load_slide(
    name: str, path: str, slide_mpp: Mpp | None = None, **more: Any
) -> Slide:
    """The slide by one reader, in this process: the boundary of every reader's parser.

    SlideOpenError also for whatever else its parser raises, as the cause.
    """
    reader = READERS.load(name)
    try:
        return reader(path, slide_mpp=slide_mpp, **more)
    except (ThinsectionError, MemoryError):
        raise
    except Exception as error:
        raise SlideOpenError(
            f"{name}: the file must be sound, got {error!r}"
        ) from error
