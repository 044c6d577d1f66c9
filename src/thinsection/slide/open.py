"""Opening a slide: by a reader's name, by 'auto', or by URL."""

from __future__ import annotations

import io
import math
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms

from thinsection.config import nearest
from thinsection.errors import (
    ChannelsError,
    ConfigError,
    DiskSpaceError,
    ImageError,
    InvalidInputError,
    ProvedDamageError,
    SlideOpenError,
)
from thinsection.extras import check_slides
from thinsection.files.lock import scratch_bytes, scratch_folder
from thinsection.files.sources import FsspecSource, metadata_file
from thinsection.files.urls import hide_secret, is_url
from thinsection.slide.auto_reader import load_safely, open_auto
from thinsection.slide.base import Slide, mpp_xy
from thinsection.slide.dicom_series import is_dicom_path
from thinsection.slide.geometry import plausible_mpp
from thinsection.slide.ids import slide_stem
from thinsection.slide.look import Look
from thinsection.slide.opening import FileState, Opening, Statements, file_states
from thinsection.slide.orientation import UPRIGHT, UprightSlide, turn_mpp
from thinsection.slide.readers import (
    AUTO,
    PICKS_CHANNELS,
    READERS,
    check_packages_for,
    is_folder_slide,
    parsing,
    reader_choices,
)
from thinsection.types import Level, Mpp, RgbArray, format_bytes, parse_bytes

# environment variable with the disk space that staged slides may use
CACHE_VARIABLE = "THINSECTION_STAGING_BYTES"
_DEFAULT_CACHE = "20GiB"
_DICOM_BY_URL = (
    "by URL this one file of the DICOM slide is opened, without the other files of its series; "
    "download their folder"
)
_STREAMING = "tiff"  # name of the reader that uses range requests


def open_slide(
    path: str | Path,
    *,
    reader: str = AUTO,
    slide_mpp: Mpp | float | None = None,
    look: Look | None = None,
    image: str | int | None = None,
) -> Slide:
    """Opens a slide.

    'auto' opens the file with OpenSlide and with the faster reader. It compares levels, resolution
    and a few probe regions of each level, and uses the faster reader if it agrees: level 0 to the
    bit, lower levels within OpenSlide's interpolation. `slide.choice` states the reader and the
    reason. A file that agreed is not compared again while its size, times and inode are the same.

    A TIFF by URL is streamed by range requests: segments are fetched when tiles need them, so that
    levels that a run does not read are never fetched. The chunks of a folder by URL are fetched in
    the same way. Other files are copied to the staging folder while they are open; so is a TIFF
    with one level, once pixels are read.

    A slide that is stored mirrored or turned (TIFF's tag 274, EXIF) is shown upright;
    `slide.stored` is the slide as it is stored.

    A slide can be copied and pickled, so that functions of other processes take it as an argument:
    there the same file is opened again by its absolute path or URL.

    Args:
        path: path, or a URL that fsspec supports.
        reader: 'auto', or a name of `available_readers()`.
        slide_mpp: µm per level-0 px, one number or (x, y), in place of what the file states.
        look: channels to show, and whether the colour profile is applied; None changes nothing.
        image: name of a picture of the file, or its number from 1, to use as the slide. None takes
            the largest picture that is no macro, label or thumbnail. `slide.notes` name the
            pictures that are not shown.

    Raises:
        ImageError: the file has no such picture, or no picture that could be a slide.
        ChannelsError: the file is no RGB or gray picture of 8 bits, and `look` picks no channels.
        SlideOpenError: no reader opens the file, with the error of each reader; or the URL cannot
            be reached.
        MissingDependencyError: a package of the extra `slides`, of the named reader or of the URL
            is missing or too old.
        ConfigError: there is no reader of this name.
        InvalidInputError: slide_mpp is no number, or not positive.
        DiskSpaceError: the staging folder has no room for it.
    """
    check_slides()
    name = hide_secret(str(path))
    look = look or Look()
    picture = None if image is None else str(image)
    slide_mpp = mpp_xy(slide_mpp, name)
    if slide_mpp is not None and not all(0 < mpp < math.inf for mpp in slide_mpp):
        raise InvalidInputError(
            f"slide_mpp must be > 0 and finite, got {slide_mpp} for {name!r}"
        )
    choices = reader_choices()
    if reader not in choices:
        hint = nearest(reader, choices)
        raise ConfigError(f"reader must be a known name, got {reader!r}{hint}")
    if reader == AUTO:
        check_packages_for([name])
    # read before the file is opened, so that a file that replaces it is never taken for it
    files = file_states(name)
    if is_url(name) and not is_folder_slide(name):
        slide = _open_url(name, reader, slide_mpp, look, picture)
    else:
        slide = _open_file(name, reader, slide_mpp, look, picture)
    if look.icc:
        apply_icc_profile(slide)
    if slide_mpp is None:
        slide.slide_mpp, doubt = plausible_mpp(slide.slide_mpp)
        if slide.slide_mpp is None:
            slide.mpp_source = ""
        if doubt:
            slide.notes = (*slide.notes, doubt)
    else:  # the user states the resolution of the upright picture
        slide.slide_mpp = turn_mpp(slide_mpp, slide.orientation)
        slide.mpp_source = "given"
    # a reader of another package need not be a subclass of `Slide`
    if not hasattr(slide, "can_reopen"):
        return slide
    if slide.source is not None:
        # by URL the argument also decides whether the file is streamed
        source = slide.source
        files = (FileState(Path(source.name).name, source.size, source.version),)
    elif slide.reader in choices:
        # the reader that was chosen need not be compared with others again; a name such as
        # 'channels' is no choice
        reader = slide.reader
    opening = Opening(
        path=name if is_url(name) else str(Path(name).absolute()),
        reader=reader,
        slide_mpp=slide_mpp,
        look=look,
        image=picture,
        files=files,
    )
    slide.slide_name = slide_stem(name, picture)
    slide.can_reopen(partial(_reopen, opening))
    if slide.orientation == UPRIGHT:
        return slide
    upright = UprightSlide(slide)
    slide.can_reopen(partial(_reopen, replace(opening, is_stored=True)))
    upright.can_reopen(partial(_reopen, opening))
    return upright


def _reopen(
    opening: Opening, levels: tuple[Level, ...], statements: Statements
) -> Slide:
    """Opens a slide that was copied or pickled.

    Args:
        opening: how the original was opened.
        levels: its levels.
        statements: values of its attributes.

    Raises:
        SlideOpenError: another file lies at the path, or the file cannot be opened here.
    """
    opening.check_files()
    slide = open_slide(
        opening.path,
        reader=opening.reader,
        slide_mpp=opening.slide_mpp,
        look=opening.look,
        image=opening.image,
    )
    if opening.is_stored:
        slide = slide.stored
    try:
        assert isinstance(slide.reopen, partial)
        opening.check_same(slide.reopen.args[0].files)
        if slide.levels != levels:
            raise SlideOpenError(
                f"slide must have the levels of the original, got others by reader "
                f"{slide.reader!r} in {slide.slide_path!r}; install the same versions of readers "
                "in both environments"
            )
    except SlideOpenError:
        slide.close()
        raise
    for name, value in statements.items():
        setattr(slide, name, value)
    return slide


def _open_file(
    name: str, reader: str, slide_mpp: Mpp | None, look: Look, image: str | None
) -> Slide:
    """Opens a local file, or a folder (local or by URL) that is a slide."""
    path = Path(name)
    if not is_folder_slide(name):
        if not path.is_file():
            raise SlideOpenError(f"slide must be an existing file, got {name!r}")
        if path.stat().st_size == 0:
            raise SlideOpenError(
                f"slide must not be empty, got 0 bytes in {name!r}; copy it again"
            )
    if look.channels:
        for picking in PICKS_CHANNELS:
            if path.suffix.lower() in READERS.entry(picking).suffixes:
                return load_safely(picking, name, slide_mpp, look=look, image=image)
        # imported here, because it is slow to import
        from thinsection.slide.formats.tiff_reader import ChannelSlide

        return ChannelSlide(name, look, slide_mpp=slide_mpp, image=image)
    if reader == AUTO:
        return open_auto(name, slide_mpp, image)
    try:
        slide = load_safely(reader, name, slide_mpp, image=image)
    except (ChannelsError, ImageError):
        raise
    except SlideOpenError as error:
        # the class of the error decides whether other readers are tried
        raise type(error)(f"{error} in {name!r}") from error.__cause__
    slide.reader = slide.reader or reader
    slide.choice = f"{reader}: asked for"
    return slide


# by URL


def _open_url(
    url: str, reader: str, slide_mpp: Mpp | None, look: Look, image: str | None
) -> Slide:
    """Streams a TIFF that our own reader opens, and stages other files. Memory: 8 MiB."""
    source = FsspecSource(url)
    if reader in (AUTO, _STREAMING) and not look.channels:
        try:
            return _open_streamed(source, slide_mpp, image)
        except (ChannelsError, ImageError, ProvedDamageError):
            raise
        except SlideOpenError:
            if reader == _STREAMING:
                raise
    with ExitStack() as stack:
        local = _stage(source, stack)
        slide = _open_file(str(local), reader, slide_mpp, look, image)
        slide.slide_path = source.name
        if is_dicom_path(local):
            slide.notes = (*slide.notes, _DICOM_BY_URL)
        slide.source = source
        slide.on_close.push(
            stack.pop_all()
        )  # the copy is deleted when the slide is closed
    return slide


def _open_streamed(
    source: FsspecSource, slide_mpp: Mpp | None, image: str | None
) -> Slide:
    """Opens a TIFF by URL; its bytes are fetched when they are needed."""
    open_tiff = READERS.load(_STREAMING)
    handle = metadata_file(source)
    with parsing(_STREAMING):
        slide = open_tiff(
            source.name,
            slide_mpp=slide_mpp,
            source=source,
            handle=handle,
            image=image,
        )
    slide.choice = f"{_STREAMING}: streamed by range requests"
    slide.source = source
    if len(slide.levels) == 1:
        # the thumbnail for the tissue mask reads the whole level, and tiles read most of it again
        def stage_if_room() -> Path | None:
            """Copies the slide until it is closed; None if there is no room."""
            if shutil.disk_usage(tempfile.gettempdir()).free >= source.size:
                with suppress(DiskSpaceError):
                    return _stage(source, slide.on_close)
            return None

        source.keep_copy(stage_if_room)
        slide.choice += "; of one level, so copied once pixels are read"
    return slide


def _stage(source: FsspecSource, stack: ExitStack) -> Path:
    """Copies a file by URL into a folder that `stack` deletes. Memory: 8 MiB.

    Raises:
        DiskSpaceError: all copies of slides together would exceed the limit.
    """
    limit = parse_bytes(
        os.environ.get(CACHE_VARIABLE, _DEFAULT_CACHE), name=CACHE_VARIABLE
    )
    held = scratch_bytes("staged")
    if held + source.size > limit:
        raise DiskSpaceError(
            f"staged slides must fit into {format_bytes(limit)}, got {format_bytes(held)} and "
            f"{format_bytes(source.size)} of {source.name!r}; set {CACHE_VARIABLE} to another "
            "folder, or pass prefetch_slides=1"
        )
    folder = stack.enter_context(scratch_folder("staged", source.size))
    local = folder / Path(source.name.split("?", 1)[0]).name
    source.copy_to(local)
    return local


def apply_icc_profile(slide: Slide) -> None:
    """Sets the slide to convert pixels to sRGB by its ICC profile; without a profile adds a note.

    Memory: one more region while a region is read.
    """
    profile_bytes = slide.icc_profile()
    if profile_bytes is None:
        note = f"no ICC profile found by reader {slide.reader!r}: colours are as they are stored"
        slide.notes = (*slide.notes, note)
        return
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(profile_bytes))
        name = ImageCms.getProfileDescription(profile).strip()
        transform = ImageCms.buildTransform(
            profile,
            ImageCms.createProfile("sRGB"),
            "RGB",
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
        )
    except (ImageCms.PyCMSError, OSError) as error:
        raise SlideOpenError(
            f"icc profile must be a readable profile for RGB, got {error} in "
            f"{slide.slide_path!r}; leave out icc=True"
        ) from None

    def convert(pixels: RgbArray) -> None:
        image = Image.fromarray(np.ascontiguousarray(pixels))
        ImageCms.applyTransform(image, transform, inPlace=True)
        pixels[:] = np.asarray(image)

    slide.recolor = convert
    slide.rendering = f"ICC profile {name!r} to sRGB, relative colorimetric"
