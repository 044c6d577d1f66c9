"""Opening slides: by a named reader, or by the fastest that agrees with OpenSlide."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from thinsection.config import nearest
from thinsection.errors import (
    ConfigError,
    InvalidInputError,
    MissingDependencyError,
    SlideOpenError,
    SlideReadError,
)
from thinsection.slide.base import BaseSlide
from thinsection.slide.remote import is_url, open_remote
from thinsection.types import Mpp

# reader -> (module, function or class, package whose version is shown)
READERS = {
    "tiff": ("thinsection.slide.tiff_reader", "TiffSlide", "tifffile"),
    "cucim": ("thinsection.slide.cucim_reader", "CucimSlide", "cucim-cu12"),
    "openslide": ("thinsection.slide.openslide_reader", "OpenSlideSlide", "openslide-python"),
    "image": ("thinsection.slide.image_reader", "open_image", "imagecodecs"),
}
# What 'auto' tries before OpenSlide, fastest first. Not cuCIM: of a tile that it cannot decode it
# returns memory that nobody wrote, without an error, and no probe can find every such tile.
_AUTO = ("tiff",)
_PROBE_PX = 48
# On lower levels OpenSlide interpolates where a downsample is no whole number, so a reader that
# takes the px as they are may differ there a little: allowed mean absolute difference, of 255.
_LOWER_LEVEL_TOLERANCE = 2.0


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """Whether a reader can be used here.

    Attributes:
        name: of the reader.
        available: whether it imports.
        detail: its library's version, or what is missing and how to install it.
    """

    name: str
    available: bool
    detail: str


def open_slide(
    path: str | Path, *, reader: str = "auto", slide_mpp: Mpp | None = None
) -> BaseSlide:
    """Opens a slide.

    'auto' opens the file with OpenSlide and with the faster reader, compares levels, resolution
    and a few probe regions of each level, and keeps the faster one if it agrees (level 0 to the
    bit; lower levels to a mean difference of 2 of 255). `slide.choice` says which it took and why.

    Args:
        path: file, or a URL that fsspec knows (a TIFF is streamed, others are staged).
        reader: 'auto', 'tiff', 'cucim', 'openslide' or 'image'.
        slide_mpp: (x, y) µm per level-0 px, in place of what the file says.

    Raises:
        SlideOpenError: no reader opens it; says what each answered.
        MissingDependencyError: the named reader's package is not installed.
        ConfigError: no such reader.
        InvalidInputError: slide_mpp is not positive.
    """
    name = str(path)
    if slide_mpp is not None and not all(0 < mpp < float("inf") for mpp in slide_mpp):
        raise InvalidInputError(f"slide_mpp must be > 0 and finite, got {slide_mpp} for {name!r}")
    if is_url(name):
        remote: BaseSlide = open_remote(name, reader=reader, slide_mpp=slide_mpp)
        return remote
    if not Path(name).is_file():
        raise SlideOpenError(f"slide must be an existing file, got {name!r}")
    if Path(name).stat().st_size == 0:
        raise SlideOpenError(f"slide must not be empty, got 0 bytes in {name!r}; copy it again")
    if reader == "auto":
        return _open_auto(name, slide_mpp)
    if reader not in READERS:
        hint = nearest(reader, ["auto", *READERS])
        raise ConfigError(f"reader must be a known name, got {reader!r}{hint}")
    slide = _open_with(reader, name, slide_mpp)
    slide.choice = f"{reader}: asked for"
    return slide


def available_readers() -> list[ReaderStatus]:
    """Every reader, with its library's version or what it lacks."""
    found = []
    for name, (module, _, package) in READERS.items():
        try:
            importlib.import_module(module)
            found.append(ReaderStatus(name, True, f"{package} {version(package)}"))
        except (ImportError, PackageNotFoundError) as error:
            remedy = f"pip install 'thinsection[{name}]'" if name == "cucim" else str(error)
            found.append(ReaderStatus(name, False, f"{package} is missing; {remedy}"))
    return found


def _open_with(reader: str, path: str, slide_mpp: Mpp | None) -> BaseSlide:
    module, attribute, _ = READERS[reader]
    opener: Callable[..., BaseSlide] = getattr(importlib.import_module(module), attribute)
    try:
        return opener(path, slide_mpp=slide_mpp)
    except SlideOpenError as error:
        raise SlideOpenError(f"{error} in {path!r}") from None


def _open_auto(path: str, slide_mpp: Mpp | None) -> BaseSlide:
    answers: list[str] = []
    reference = _try(path, "openslide", slide_mpp, answers)
    if reference is None:  # nothing to agree with: the readers that need no reference
        for name in ("tiff", "image"):
            slide = _try(path, name, slide_mpp, answers)
            if slide is not None:
                slide.choice = f"{name}: OpenSlide does not know the format"
                return slide
        raise SlideOpenError(
            f"no reader opens {Path(path).name!r}: {'; '.join(answers)}; check that the file is "
            "complete and that files which belong to it lie beside it"
        )
    for name in _AUTO:
        slide = _try(path, name, slide_mpp, answers)
        if slide is None:
            continue
        difference = compare(slide, reference)
        if not difference:
            reference.close()
            slide.choice = f"{name}: fastest that agrees with OpenSlide"
            return slide
        answers.append(f"{name}: {difference}")
        slide.close()
    reference.choice = "openslide: " + "; ".join(answers)
    return reference


def _try(path: str, name: str, slide_mpp: Mpp | None, answers: list[str]) -> BaseSlide | None:
    module, attribute, _ = READERS[name]
    try:
        opener: Callable[..., BaseSlide] = getattr(importlib.import_module(module), attribute)
        return opener(path, slide_mpp=slide_mpp)
    except SlideOpenError as error:
        answers.append(str(error))
    except MissingDependencyError:
        answers.append(f"{name}: not installed")
    return None


def compare(slide: BaseSlide, reference: BaseSlide) -> str:
    """In what a slide differs from OpenSlide's view of it; '' where they agree."""
    sizes = [level.size for level in slide.levels]
    if sizes != [level.size for level in reference.levels]:
        return f"levels {sizes} are not OpenSlide's"
    if not _same_mpp(slide.slide_mpp, reference.slide_mpp):
        return f"mpp {slide.slide_mpp} is not OpenSlide's {reference.slide_mpp}"
    try:
        for level in slide.levels:
            for origin in _probe_origins(level.size, level.downsample):
                size = (min(_PROBE_PX, level.size[0]), min(_PROBE_PX, level.size[1]))
                ours = slide.read_region(origin, level.index, size).astype(np.int16)
                theirs = reference.read_region(origin, level.index, size)
                difference = np.abs(ours - theirs)
                if level.index == 0 and difference.any():
                    return f"px at {origin} differ by up to {difference.max()}"
                if difference.mean() > _LOWER_LEVEL_TOLERANCE:
                    return f"px of level {level.index} at {origin} differ"
    except SlideReadError as error:
        return str(error)
    return ""


def _same_mpp(ours: Mpp | None, theirs: Mpp | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return bool(np.allclose(ours, theirs, rtol=1e-6))


def _probe_origins(size: tuple[int, int], downsample: float) -> list[tuple[int, int]]:
    """Places over a level, its border included, as level-0 px that fall on px of it."""
    places = [(0.5, 0.5), (0.31, 0.23), (0.23, 0.71), (0.77, 0.42), (0.62, 0.83)]
    places += [(0.0, 0.0), (1.0, 1.0)]
    origins = []
    for fx, fy in places:
        x = max(0, min(int(fx * size[0]), size[0] - _PROBE_PX))
        y = max(0, min(int(fy * size[1]), size[1] - _PROBE_PX))
        origins.append((round(x * downsample), round(y * downsample)))
    return origins
