"""Opening a slide: by a reader's name, by 'auto', or by URL."""

import io
import os
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms

from thinsection import errors
from thinsection.config import nearest
from thinsection.errors import ChannelsError, SlideOpenError, require
from thinsection.files.lock import scratch_bytes, scratch_folder
from thinsection.files.sources import FsspecSource, is_url, metadata_file
from thinsection.slide import readers
from thinsection.slide.base import Slide
from thinsection.slide.child import try_in_child
from thinsection.slide.geometry import believed_mpp, corner_l0
from thinsection.slide.look import Look
from thinsection.slide.orientation import turn_mpp
from thinsection.slide.readers import (
    AUTO,
    READERS,
    is_folder_slide,
    load_slide,
    reader_choices,
)
from thinsection.slide.upright import upright
from thinsection.types import (
    MIB,
    Mpp,
    PointL0,
    RgbArray,
    Size,
    format_bytes,
    parse_bytes,
)

CACHE_VARIABLE = (
    "THINSECTION_STAGING_BYTES"  # how much staged slides may take, by default 20GiB
)
_CHUNK = 8 * MIB  # that staging copies at once
# What 'auto' prefers to OpenSlide. Not cuCIM: of a tile that it cannot decode it returns memory
# that nobody wrote, without an error, and no probe can find every such tile.
_FASTEST = "tiff"
_NO_VENDOR = (None, "generic-tiff")  # of a slide that OpenSlide opens as any TIFF
_PLAIN = (".png", ".jpg", ".jpeg")  # what OpenSlide never opens
# where 'auto' compares px: shares of a level's width and height, its border included
_PROBES = (
    (0.5, 0.5),
    (0.31, 0.23),
    (0.23, 0.71),
    (0.77, 0.42),
    (0.62, 0.83),
    (0, 0),
    (1, 1),
)
_PROBE_PX = 48
# Lower levels are interpolated as OpenSlide does it; its arithmetic has 8 bits. Allowed absolute
# difference, of 255: largest and mean. White noise, the worst case, gave 3.4 and .35; levels that
# are 1 px apart differ by tens wherever there is texture.
_LEVEL_MAX, _LEVEL_MEAN = 4.0, 0.75


def open_slide(
    path: str | Path,
    *,
    reader: str = AUTO,
    slide_mpp: Mpp | None = None,
    look: Look | None = None,
) -> Slide:
    """Opens a slide.

    'auto' opens the file with OpenSlide and with the faster reader, compares levels, resolution
    and a few probe regions of each level, and keeps the faster one if it agrees (level 0 to the
    bit; lower levels to OpenSlide's interpolation). `slide.choice` says which it took and why.
    By URL a TIFF is streamed by range requests, its segments as tiles need them, so that of a
    pyramid only the levels which a run reads are fetched; so are the chunks of a folder by URL.
    Other files are staged while in use. What is stored mirrored or turned (TIFF's tag 274, EXIF) is
    shown upright; `slide.stored` is the slide as its file has it.

    Args:
        path: file, or a URL that fsspec knows.
        reader: 'auto', or a name of `available_readers()`.
        slide_mpp: (x, y) µm per level-0 px, in place of what the file says.
        look: which channels are shown, whether the colour profile is applied; None as it is.

    Raises:
        ChannelsError: the file is no RGB or gray picture of 8 bits, and `look` picks no channels.
        SlideOpenError: no reader opens it, or the URL is not reachable; says what each answered.
        MissingDependencyError: the named reader's package is not installed, or the URL's.
        ConfigError: no such reader.
        InvalidInputError: slide_mpp is not positive.
        DiskSpaceError: the staging folder has no room for it.
    """
    name = str(path)
    known = slide_mpp is None or all(0 < mpp < float("inf") for mpp in slide_mpp)
    require(known, "slide_mpp must be > 0 and finite", f"{slide_mpp} for {name!r}")
    if reader not in (choices := reader_choices()):
        hint = nearest(reader, choices)
        raise errors.ConfigError(f"reader must be a known name, got {reader!r}{hint}")
    streamed, look = is_url(name) and not is_folder_slide(name), look or Look()
    slide = (_open_url if streamed else _open_file)(name, reader, slide_mpp, look)
    if look.icc:
        _in_srgb(slide)
    if slide_mpp is None:
        slide.slide_mpp, doubt = believed_mpp(slide.slide_mpp)
        slide.notes = (*slide.notes, *[doubt] * bool(doubt))
    else:  # a person says it of the upright picture
        slide.slide_mpp = turn_mpp(slide_mpp, slide.orientation)
    return upright(slide)


def _in_srgb(slide: Slide) -> None:
    """Has px converted from the file's ICC profile, if any. Memory: one region more while read."""
    if (profile := slide.icc_profile()) is None:
        missing = f"no ICC profile found by reader {slide.reader!r}: colours are as they are stored"
        slide.notes = (*slide.notes, missing)
        return
    try:
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        name, intent = (
            ImageCms.getProfileDescription(own),
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
        )
        srgb = ImageCms.createProfile("sRGB")
        slide.recolor = partial(
            _convert, ImageCms.buildTransform(own, srgb, "RGB", "RGB", intent)
        )
    except (ImageCms.PyCMSError, OSError) as error:
        what = f"icc profile must be of RGB and readable, got {error} in {slide.slide_path!r}"
        raise SlideOpenError(f"{what}; leave --icc out") from None
    slide.rendering = f"ICC profile {name.strip()!r} to sRGB, relative colorimetric"


def _convert(transform: ImageCms.ImageCmsTransform, pixels: RgbArray) -> None:
    image = Image.fromarray(np.ascontiguousarray(pixels))
    ImageCms.applyTransform(image, transform, inPlace=True)
    pixels[:] = np.asarray(image)


def _open_file(name: str, reader: str, slide_mpp: Mpp | None, look: Look) -> Slide:
    folder, path = is_folder_slide(name), Path(name)
    there = folder or path.is_file()
    require(there, "slide must be an existing file", repr(name), error=SlideOpenError)
    if not folder and path.stat().st_size == 0:
        raise SlideOpenError(
            f"slide must not be empty, got 0 bytes in {name!r}; copy it again"
        )
    own = [
        n for n in readers.WITH_LOOK if path.suffix.lower() in READERS.entry(n).suffixes
    ]
    if look.channels and own:
        return _load(own[0], name, slide_mpp, checked=False, look=look)
    if look.channels:
        from thinsection.slide.formats.channels import (
            ChannelSlide,
        )  # parses TIFFs: slow to import

        return ChannelSlide(name, look, slide_mpp=slide_mpp)
    if reader == AUTO:
        return _open_auto(name, slide_mpp)
    try:
        slide = _load(reader, name, slide_mpp, checked=False)
    except SlideOpenError as error:
        if isinstance(error, ChannelsError):
            raise
        raise SlideOpenError(f"{error} in {name!r}") from error.__cause__
    slide.reader, slide.choice = slide.reader or reader, f"{reader}: asked for"
    return slide


def _open_auto(path: str, slide_mpp: Mpp | None) -> Slide:
    """Our own parser sees the file first: what it finds sound may be opened by C libraries."""
    answers: list[str] = []
    if is_folder_slide(path):
        folder = _try_others(path, slide_mpp, answers)
        folder.choice = f"{folder.reader}: the folder's suffix"
        return folder
    ours = _try(path, _FASTEST, slide_mpp, answers)
    plain = Path(path).suffix.lower() in _PLAIN and _try(
        path, "image", slide_mpp, answers
    )
    checked = bool(ours and ours.checked)
    reference = (
        None if plain else _try(path, "openslide", slide_mpp, answers, checked=checked)
    )
    if reference is None:
        slide = ours or plain or _try_others(path, slide_mpp, answers)
        unknown = (
            plain
            or checked
            or any(answer.startswith(readers.UNKNOWN) for answer in answers)
        )
        why = "OpenSlide does not know the format" if unknown else "; ".join(answers)
        left = [answer for answer in answers if answer.startswith(readers.LEFT)]
        why = left[0] if left else why
        slide.choice = f"{slide.reader}: {why}"
        return slide
    if ours is not None:
        # levels, channels and units are then the file's own, of which OpenSlide sees a part
        ome = any(name.startswith("ome.") for name in ours.properties)
        if own := ome and reference.vendor in _NO_VENDOR:
            why = "the file's own OME metadata; OpenSlide knows no vendor of it"
        else:
            why = "fastest that agrees with OpenSlide"
        if own or not (difference := compare(ours, reference)):
            reference.close()
            ours.choice = f"{_FASTEST}: {why}"
            return ours
        answers.append(f"{_FASTEST}: {difference}")
        ours.close()
    reference.choice = "openslide: " + "; ".join(answers)
    return reference


def _try_others(path: str, slide_mpp: Mpp | None, answers: list[str]) -> Slide:
    """By what is tried last; SlideOpenError with every answer."""
    # where it is no file, or plain, that has been tried
    more = Path(path).is_file() and Path(path).suffix.lower() not in _PLAIN
    for name in (
        *["image"] * more,
        *(n for n in READERS.names() if n not in readers.OURS),
    ):
        if slide := _try(path, name, slide_mpp, answers):
            slide.reader = slide.reader or name
            return slide
    remedy = "check that the file is complete and that files which belong to it lie beside it"
    why = "; ".join([*dict.fromkeys(answers), remedy])
    raise SlideOpenError(f"no reader opens {Path(path).name!r}: {why}")


def _try(
    path: str,
    name: str,
    slide_mpp: Mpp | None,
    answers: list[str],
    *,
    checked: bool = False,
) -> Slide | None:
    """The slide; else None, and what the reader answered. Others say which suffixes they open."""
    try:
        if (
            name in readers.OURS
            or Path(path).suffix.lower() in READERS.entry(name).suffixes
        ):
            return _load(name, path, slide_mpp, checked=checked)
    except ChannelsError:  # no other reader may show one channel of many
        raise
    except (SlideOpenError, errors.InvalidInputError) as error:  # or a broken package
        answers.append(str(error))
    except errors.MissingDependencyError:
        answers.append(f"{name}: not installed")
    return None


def _load(
    name: str,
    path: str,
    slide_mpp: Mpp | None,
    *,
    checked: bool,
    look: Look | None = None,
) -> Slide:
    """The slide by one reader, which another process tries first where nobody checked the file."""
    READERS.load(name)  # what is missing is said here, not by the child
    found = True if checked or name in readers.OWN_PARSERS else _is_sound(path)
    if isinstance(found, ChannelsError) and name not in readers.NEVER_TRUSTED:
        raise found
    if name in readers.NEVER_TRUSTED or found is not True:
        # where a TIFF's structure is impossible all its px are doubted
        is_tiff = path.lower().endswith(READERS.entry(_FASTEST).suffixes)
        whole = isinstance(found, errors.DamagedTiffError) and is_tiff
        try_in_child(path, name, whole=whole, channels=look.channels if look else ())
    return load_slide(name, path, slide_mpp, **({"look": look} if look else {}))


def _is_sound(path: str) -> bool | SlideOpenError:
    """Whether our own parser finds nothing that would harm a library; or why it reads it not."""
    try:
        with load_slide(_FASTEST, path) as slide:
            return slide.checked
    except SlideOpenError as error:
        return error


def compare(slide: Slide, reference: Slide) -> str:
    """In what a slide differs from OpenSlide's view of it; '' where they agree."""
    sizes = [level.size for level in slide.levels]
    if sizes != [level.size for level in reference.levels]:
        return f"levels {sizes} are not OpenSlide's"
    ours_mpp, theirs_mpp = (s.slide_mpp or (0.0, 0.0) for s in (slide, reference))
    if not np.allclose(ours_mpp, theirs_mpp, rtol=1e-6):
        return f"mpp {slide.slide_mpp} is not OpenSlide's {reference.slide_mpp}"
    try:
        for level, (fx, fy) in product(slide.levels, _PROBES):
            width, height = level.size
            x = max(0, min(int(fx * width), width - _PROBE_PX))
            y = max(0, min(int(fy * height), height - _PROBE_PX))
            origin = corner_l0(level, x, y)
            size = (min(_PROBE_PX, width), min(_PROBE_PX, height))
            theirs = reference.read_region(origin, level.index, size)
            difference = np.abs(interpolated(slide, origin, level.index, size) - theirs)
            if level.index == 0 and difference.any():
                return f"px at {origin} differ by up to {difference.max():g}"
            if difference.max() > _LEVEL_MAX or difference.mean() > _LEVEL_MEAN:
                by = f"{difference.max():.1f}, on average {difference.mean():.2f}"
                return f"px of level {level.index} at {origin} differ by up to {by}"
    except errors.SlideReadError as error:
        return str(error)
    return ""


def interpolated(
    slide: Slide, origin_l0: PointL0, level: int, size: Size
) -> np.ndarray:
    """A region as OpenSlide paints it, float (height, width, 3).

    OpenSlide puts px (0, 0) at origin_l0 / downsample of the level, not rounded, and cairo
    interpolates linearly between px; `Slide.read_region` rounds.
    Source: openslide-vendor-aperio.c `paint_region`, openslide-grid.c `read_tiles`.
    """
    found = slide.levels[level]
    (x, right), (y, below) = (divmod(px / found.downsample, 1) for px in origin_l0)
    corner = corner_l0(found, x, y)
    pixels = slide.read_region(corner, level, (size[0] + 1, size[1] + 1)).astype(
        np.float64
    )
    rows = pixels[:-1] * (1 - below) + pixels[1:] * below
    return np.asarray(rows[:, :-1] * (1 - right) + rows[:, 1:] * right)


def _open_url(url: str, reader: str, slide_mpp: Mpp | None, look: Look) -> Slide:
    """Streamed where it is a TIFF that our own reader opens, else staged."""
    source = FsspecSource(url)
    if reader in (AUTO, "tiff") and not look.channels:
        try:
            handle = metadata_file(source)
            slide = load_slide("tiff", url, slide_mpp, source=source, handle=handle)
            slide.choice, slide.source = "tiff: streamed by range requests", source
            return slide
        except SlideOpenError as error:
            if reader == "tiff" or isinstance(error, ChannelsError):
                raise
    return _open_copy(source, reader, slide_mpp, look)


def _open_copy(
    source: FsspecSource, reader: str, slide_mpp: Mpp | None, look: Look
) -> Slide:
    """A local copy, gone when it is closed. Memory: 8 MiB. DiskSpaceError: too many of them."""
    limit = parse_bytes(os.environ.get(CACHE_VARIABLE, "20GiB"), name=CACHE_VARIABLE)
    fits = (held := scratch_bytes("staged")) + source.size <= limit
    got = f"{format_bytes(held)} and {format_bytes(source.size)} of {source.name!r}"
    remedy = f"set {CACHE_VARIABLE} or --prefetch-slides 1"
    rule = f"staged slides must fit into {format_bytes(limit)}"
    require(fits, rule, f"{got}; {remedy}", error=errors.DiskSpaceError)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("staged", source.size))
        local = folder / Path(source.name.split("?", 1)[0]).name
        with local.open("wb") as file:
            for start in range(0, source.size, _CHUNK):
                file.write(source.read_at(start, min(_CHUNK, source.size - start)))
        slide = _open_file(str(local), reader, slide_mpp, look)
        slide.slide_path, slide.source = source.name, source
        slide.on_close.push(stack.pop_all())
    return slide
