"""Choice of a reader by 'auto', and safe opening of unknown files.

Our own parser reads a file first. If it finds the file sound, C libraries may open it in this
process; any other file is first tried in a child process.
"""

from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinsection.errors import (
    ChannelsError,
    DamagedTiffError,
    ImageError,
    InvalidInputError,
    MissingDependencyError,
    ProvedDamageError,
    SlideOpenError,
    SlideReadError,
)
from thinsection.slide.base import Slide
from thinsection.slide.dicom_series import (
    check_one_slide,
    files_of_slide,
    is_dicom_path,
)
from thinsection.slide.geometry import corner_l0
from thinsection.slide.level_check import (
    cache_agreement,
    is_cached_agreement,
    slide_stamps,
)
from thinsection.slide.look import Look
from thinsection.slide.readers import (
    LEFT_TO_TIFF,
    OWN_PARSERS,
    READERS,
    TRIED_ON_ANY_FILE,
    UNKNOWN_FORMAT,
    is_folder_slide,
    load_slide,
)
from thinsection.types import Mpp, PointL0, Size

# the reader that 'auto' prefers to OpenSlide
FASTEST = "tiff"
_DICOM = "dicom"  # the reader that lists all pictures of a DICOM slide
_AGREES = f"{FASTEST}: fastest reader that agrees with OpenSlide"
_OWN_METADATA = (
    f"{FASTEST}: uses the OME metadata of the file, for which OpenSlide knows no vendor"
)
_NO_VENDOR = (
    None,
    "generic-tiff",
)  # vendors of a slide that OpenSlide opens as a plain TIFF
_PLAIN_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
)  # suffixes of files that OpenSlide never opens
# places where pixels are compared, as shares of a level's width and height; with its borders
_PROBES = (
    (0.5, 0.5),
    (0.31, 0.23),
    (0.23, 0.71),
    (0.77, 0.42),
    (0.62, 0.83),
    (0.0, 0.0),
    (1.0, 1.0),
)
_PROBE_PX = 48
# Largest allowed absolute differences of lower levels, of 255: maximum and mean. Lower levels are
# interpolated as in OpenSlide, whose arithmetic has 8 bits. White noise, the worst case, gave 3.4
# and .35; a shift by 1 px gives differences of tens wherever there is texture.
_LEVEL_MAX = 4.0
_LEVEL_MEAN = 0.75


def open_auto(path: str, slide_mpp: Mpp | None, image: str | None = None) -> Slide:
    """Opens a slide by the fastest reader that agrees with OpenSlide.

    `Slide.choice` states the reader and the reason. A file that agreed before and has the same
    stamps (size, times, inode) is not compared again.

    Args:
        path: the file or folder.
        slide_mpp: (x, y) µm per level-0 px, in place of the resolution that the file states.
        image: name or number of the picture that is the slide.

    Raises:
        ImageError: the file has no such picture.
        ProvedDamageError: the structure of a TIFF proves that parts of it are missing; no other
            reader is tried.
        SlideOpenError: no reader opens the file; the message has the answer of each reader.
    """
    attempts = _Attempts(path, slide_mpp)
    if is_folder_slide(path):
        slide = attempts.open_by_others(image)
        slide.choice = f"{slide.reader}: chosen by the suffix of the folder"
        return slide
    if is_dicom_path(path):
        return _open_dicom(attempts, image)
    stamps = slide_stamps(path)
    fast = attempts.open(FASTEST, image)
    if fast is not None and is_cached_agreement(stamps, slide_mpp):
        fast.choice = _AGREES
        return fast
    plain = None
    if attempts.suffix in _PLAIN_SUFFIXES:
        plain = attempts.open("image", image)
    checked = fast is not None and fast.checked
    reference = None
    if plain is None:
        try:
            reference = attempts.open("openslide", image, checked=checked)
        except ImageError as error:  # a picture that only our reader can find
            if fast is None:
                raise
            attempts.answers.append(f"{LEFT_TO_TIFF}: {error}")
    if reference is None:
        slide = fast or plain or attempts.open_by_others(image)
        answers = attempts.answers
        left = [answer for answer in answers if answer.startswith(LEFT_TO_TIFF)]
        is_unknown = checked or plain is not None
        if left:
            why = left[0]
        elif is_unknown or any(each.startswith(UNKNOWN_FORMAT) for each in answers):
            why = "OpenSlide does not know the format"
        else:
            why = "; ".join(answers)
        slide.choice = f"{slide.reader}: {why}"
        return slide
    if fast is None:
        reference.choice = "openslide: " + "; ".join(attempts.answers)
        return reference
    slide = _choose(fast, reference, attempts.answers)
    if slide.choice == _AGREES:
        cache_agreement(stamps, slide_mpp)
    return slide


class _Attempts:
    """Attempts to open a slide by one reader after the other.

    Attributes:
        suffix: suffix of the file, lower case.
        answers: reasons why readers did not open the file, or were not used.
    """

    def __init__(self, path: str, slide_mpp: Mpp | None) -> None:
        self._path = path
        self._slide_mpp = slide_mpp
        self.suffix = Path(path).suffix.lower()
        self.answers: list[str] = []

    def open(
        self, name: str, image: str | None, *, checked: bool = False
    ) -> Slide | None:
        """Opens the slide, or adds the reader's answer to `answers` and returns None.

        A reader outside `TRIED_ON_ANY_FILE` is tried only on files with its suffixes.
        """
        path = self._path
        try:
            suffixes = READERS.entry(name).suffixes
            if name not in TRIED_ON_ANY_FILE and self.suffix not in suffixes:
                return None
            return load_safely(
                name, path, self._slide_mpp, checked=checked, image=image
            )
        # no other reader may show one channel of many, or another picture
        except (ChannelsError, ImageError):
            raise
        except (
            ProvedDamageError
        ) as error:  # other readers would show missing parts as white
            raise ProvedDamageError(
                f"no reader opens {Path(path).name!r}: {error}"
            ) from error
        except (SlideOpenError, InvalidInputError) as error:  # or a broken package
            self.answers.append(str(error))
        except MissingDependencyError:
            self.answers.append(f"{name}: not installed")
        return None

    def open_by_others(self, image: str | None) -> Slide:
        """Opens the slide by the readers that are tried last.

        Raises SlideOpenError: no reader opens it; the message has all answers.
        """
        names = [name for name in READERS.names() if name not in TRIED_ON_ANY_FILE]
        if Path(self._path).is_file() and self.suffix not in _PLAIN_SUFFIXES:
            names.insert(0, "image")
        for name in names:
            slide = self.open(name, image)
            if slide is not None:
                slide.reader = slide.reader or name
                return slide
        remedy = (
            "check that the file is complete and that all files that belong to it are in the same "
            "folder"
        )
        reasons = "; ".join([*dict.fromkeys(self.answers), remedy])
        raise SlideOpenError(f"no reader opens {Path(self._path).name!r}: {reasons}")


def _open_dicom(attempts: _Attempts, image: str | None) -> Slide:
    """Opens a DICOM slide by OpenSlide if its levels are those of our own inventory."""
    own = attempts.open(_DICOM, image)
    reference = None
    if own is None or own.picture is own.pictures[0]:
        reference = attempts.open("openslide", None)
    if own is None:
        if reference is None:
            return attempts.open_by_others(image)
        reference.choice = "openslide: " + "; ".join(attempts.answers)
        return reference
    own.choice = f"{_DICOM}: "
    if reference is None:
        why = "; ".join(attempts.answers)
        own.choice += why or "OpenSlide shows the first picture only"
        return own
    sizes = [level.size for level in own.levels]
    if sizes != [level.size for level in reference.levels]:
        own.choice += "levels of OpenSlide are of other sizes"
        reference.close()
        return own
    reference.choice = "openslide: its levels are those of the files"
    reference.notes = (*reference.notes, *own.notes)
    reference.pictures = own.pictures
    reference.picture = own.picture
    own.close()
    return reference


def _choose(fast: Slide, reference: Slide, answers: list[str]) -> Slide:
    """Returns the faster reader's slide if it agrees with OpenSlide's, else OpenSlide's.

    Closes the other slide.
    """
    # the OME metadata state levels, channels and units, of which OpenSlide reads only a part
    is_ome = any(name.startswith("ome.") for name in fast.properties)
    if is_ome and reference.vendor in _NO_VENDOR:
        difference = ""
        choice = _OWN_METADATA
    else:
        choice = _AGREES
        try:
            difference = find_difference(fast, reference)
        except UnreadReference as error:
            difference = ""
            choice = f"{FASTEST}: OpenSlide does not read all of it: {error}"
        fast.drop_decoded()
    if not difference:
        reference.close()
        fast.choice = choice
        return fast
    fast.close()
    reference.choice = "openslide: " + "; ".join([*answers, f"{FASTEST}: {difference}"])
    return reference


def load_safely(
    name: str,
    path: str,
    slide_mpp: Mpp | None,
    *,
    checked: bool = False,
    look: Look | None = None,
    image: str | None = None,
) -> Slide:
    """Opens a slide by one reader; a file that is not known to be sound is first tried in a child.

    Args:
        name: the reader.
        path: the file or folder.
        slide_mpp: (x, y) µm per level-0 px, in place of the resolution that the file states.
        checked: True if our own parser has found the file sound.
        look: channels to show, for a reader that picks channels.
        image: name or number of the picture that is the slide.

    Raises:
        ImageError: the file has no such picture.
        SlideOpenError: the reader does not open the file, or dies or hangs over it.
    """
    READERS.load(name)  # a missing package is reported here, not by the child
    if is_dicom_path(path):
        check_one_slide(files_of_slide(path))
    if checked or name in OWN_PARSERS:
        return load_slide(name, path, slide_mpp, look=look, image=image)
    # True if our own parser finds nothing that harms a C library; and the error if it refuses
    is_sound = False
    refusal = None
    if not is_folder_slide(path):
        try:
            with load_slide(FASTEST, path, image=image) as slide:
                is_sound = slide.checked
        except SlideOpenError as error:
            refusal = error
    if isinstance(refusal, ImageError | ProvedDamageError | ChannelsError):
        raise refusal
    if not is_sound:
        from thinsection.slide.child import try_in_child

        # if the structure of a TIFF is impossible, the child reads all of its pixels
        is_tiff = path.lower().endswith(READERS.entry(FASTEST).suffixes)
        try_in_child(
            path,
            name,
            whole=is_tiff and isinstance(refusal, DamagedTiffError),
            channels=look.channels if look else (),
            image=image,
        )
    return load_slide(name, path, slide_mpp, look=look, image=image)


class UnreadReference(Exception):
    """OpenSlide cannot read a place that the other reader can; at all other places they agree."""


def find_difference(slide: Slide, reference: Slide) -> str:
    """Returns the first difference between a slide and OpenSlide's view of it; '' if they agree.

    Levels that OpenSlide leaves out, because their pages are not flagged as levels, are not
    compared.

    Raises:
        UnreadReference: OpenSlide cannot decode some place, so nothing can be compared there; the
            other places agree.
    """
    own_levels = {level.size: level for level in slide.levels}
    sizes = list(own_levels)
    reference_sizes = [level.size for level in reference.levels]
    is_part = set(reference_sizes) <= set(sizes) and reference_sizes[0] == sizes[0]
    if not is_part:
        return f"its levels are {sizes}, which differ from those of OpenSlide"
    own_mpp = slide.slide_mpp or (0.0, 0.0)
    reference_mpp = reference.slide_mpp or (0.0, 0.0)
    if not np.allclose(own_mpp, reference_mpp, rtol=1e-6):
        return f"its resolution is {slide.slide_mpp}, but OpenSlide reads {reference.slide_mpp}"
    unread = ""
    for level, (x_share, y_share) in product(reference.levels, _PROBES):
        own = own_levels[level.size]
        width, height = level.size
        x = max(0, min(int(x_share * width), width - _PROBE_PX))
        y = max(0, min(int(y_share * height), height - _PROBE_PX))
        origin_l0 = corner_l0(own, x, y)
        size = (min(_PROBE_PX, width), min(_PROBE_PX, height))
        try:
            own_pixels = interpolated(slide, origin_l0, own.index, size)
        except SlideReadError as error:
            return str(error)
        try:
            reference_pixels = reference.read_region(origin_l0, level.index, size)
        except SlideReadError as error:
            unread = unread or str(error)
            continue
        difference = np.abs(own_pixels - reference_pixels)
        if own.index == 0 and difference.any():
            return f"its pixels at {origin_l0} differ by up to {difference.max():g}"
        if difference.max() > _LEVEL_MAX or difference.mean() > _LEVEL_MEAN:
            return (
                f"its pixels of level {own.index} at {origin_l0} differ by up to "
                f"{difference.max():.1f}, on average {difference.mean():.2f}"
            )
    if unread:
        raise UnreadReference(unread)
    return ""


def interpolated(
    slide: Slide, origin_l0: PointL0, level: int, size: Size
) -> NDArray[np.float64]:
    """Reads a region with the interpolation of OpenSlide, float (height, width, 3).

    OpenSlide places pixel (0, 0) at origin_l0 / downsample of the level without rounding, and cairo
    interpolates linearly between pixels. `Slide.read_region` rounds.
    Source: openslide-vendor-aperio.c `paint_region`, openslide-grid.c `read_tiles`.
    """
    source = slide.levels[level]
    x, right = divmod(origin_l0[0] / source.downsample, 1)
    y, below = divmod(origin_l0[1] / source.downsample, 1)
    corner = corner_l0(source, x, y)
    region = slide.read_region(corner, level, (size[0] + 1, size[1] + 1))
    pixels = region.astype(np.float64)
    rows = pixels[:-1] * (1 - below) + pixels[1:] * below
    columns = rows[:, :-1] * (1 - right) + rows[:, 1:] * right
    return np.asarray(columns)
