"""Pictures of a file: the role of each picture, the choice of the slide, and notes on the others.

Pure: a reader makes the inventory of its container; these rules are the same for all readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.errors import ImageError
from thinsection.types import Mpp, Size

# 'plane': a further focal plane or time of a slide. 'path': a further optical path. 'other': a
# picture that its file calls something else (a mask), or a level that does not show the same tissue
# as level 0.
Role = Literal["slide", "plane", "path", "macro", "label", "thumbnail", "other"]
# pictures that most slides have besides the slide, so that no note mentions them
ACCOMPANYING: tuple[Role, ...] = ("macro", "label", "thumbnail")
# roles of pictures that may be the slide if the user chooses none, in the order of preference
SLIDES: tuple[Role, ...] = ("slide", "plane", "path")
_MAX_LISTED = 6  # pictures that a note names
# words by which programs name the pictures that accompany a slide
_WORDS: dict[str, Role] = {
    "label": "label",
    "barcode": "label",
    "macro": "macro",
    "overview": "macro",
    "thumbnail": "thumbnail",
    "preview": "thumbnail",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureLevel:
    """One level of a picture, as its file states it.

    Attributes:
        size: (width, height), px.
        downsample: px of the picture per px of this level; None if the file does not state it.
        mpp: (x, y) µm/px; None if the file does not state it.
    """

    size: Size
    downsample: float | None = None
    mpp: Mpp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture of a file.

    Attributes:
        number: position in the file's inventory, from 1, as for `--image`.
        name: name of the picture in the file; '' if it has none.
        role: role of the picture.
        rule: reason for the role, in words.
        size: (width, height) of the finest level, px.
        mpp: (x, y) µm/px of the picture; None if the file does not state it.
        levels: levels of the picture, finest first.
    """

    number: int
    name: str = ""
    role: Role
    rule: str
    size: Size
    mpp: Mpp | None = None
    levels: tuple[PictureLevel, ...] = ()

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"{self.number}{name} ({self.role}, {_px(self.size)})"


def role_of_name(name: str) -> Role | None:
    """Returns the role that the first or last word of a picture's name means; None if none does.

    'Macro image' is a macro and 'slide1_label' a label; 'labelled' and 'label-free slide' are not.
    """
    words = name.lower().replace("_", " ").split()
    ends = [word.strip("[](){}:;,.#'\"") for word in (*words[:1], *words[-1:])]
    for word in ends:
        if word in _WORDS:
            return _WORDS[word]
    return None


def choose_picture(
    pictures: Sequence[Picture], image: str | int | None, *, slide_path: str
) -> Picture:
    """Returns the picture to show: the picture that `image` names, or the largest slide.

    Without `image`: the largest picture with the role 'slide', else the largest plane, else the
    largest path; the first of equally large ones.

    Args:
        pictures: inventory of the file.
        image: name or number of a picture; None leaves the choice to the rule.
        slide_path: the file, for messages.

    Raises:
        ImageError: the file has no picture of this name or number, or no picture that could be a
            slide.
    """
    if image is not None:
        return _named_picture(pictures, str(image), slide_path)
    for role in SLIDES:
        candidates = [picture for picture in pictures if picture.role == role]
        if candidates:
            return max(candidates, key=_area)
    raise ImageError(
        f"slide must have a picture that is no macro, label or thumbnail, got "
        f"{_listed(pictures)} in {Path(slide_path).name!r}; choose one: image=NUMBER"
    )


def _named_picture(pictures: Sequence[Picture], image: str, slide_path: str) -> Picture:
    """Returns the picture with a name (exact, else in any capitals), or with a number."""
    wanted = image.strip()
    named = [picture for picture in pictures if picture.name == wanted]
    if not named and wanted:
        named = [p for p in pictures if p.name.casefold() == wanted.casefold()]
    if not named:
        named = [picture for picture in pictures if str(picture.number) == wanted]
    if len(named) == 1:
        return named[0]
    rule = "name one picture" if named else "be a picture of the file"
    raise ImageError(
        f"image must {rule}, got {image!r} in {Path(slide_path).name!r}; choose a number or name "
        f"of: {_listed(pictures)}"
    )


def picture_notes(
    pictures: Sequence[Picture], chosen: Picture, image: str | int | None = None
) -> tuple[str, ...]:
    """Returns notes on the choice; none if only label, macro and thumbnail are not shown.

    Args:
        pictures: inventory of the file.
        chosen: the picture that is shown.
        image: name or number that the user asked for; None if the rule has chosen.
    """
    left_out = [picture for picture in pictures if picture.number != chosen.number]
    is_usual = all(picture.role in ACCOMPANYING for picture in left_out)
    is_first = chosen.number == min(picture.number for picture in pictures)
    if is_usual and (is_first or image is not None):
        return ()
    name = f"{chosen.name!r}, " if chosen.name else ""
    return (
        f"image {chosen.number} of {len(pictures)} is shown ({name}{_px(chosen.size)}, "
        f"{_why(pictures, chosen, image)}); not shown: {_listed(left_out)}; --image chooses",
    )


def only_picture(image: str | int | None, reader: str, slide_path: str) -> None:
    """Refuses any picture but the first, for a reader that sees only the first picture.

    Raises:
        ImageError: the user asks for another picture.
    """
    if image is not None and str(image).strip() != "1":
        raise ImageError(
            f"image must be 1, got {str(image)!r} in {Path(slide_path).name!r}: reader "
            f"{reader!r} shows the first picture only; leave out image=..."
        )


def _why(pictures: Sequence[Picture], chosen: Picture, image: str | int | None) -> str:
    """Returns the reason why a picture is shown, in words."""
    if image is not None:
        return "asked for"
    rivals = [picture for picture in pictures if picture.role == chosen.role]
    if len(rivals) == 1:
        others = {picture.role for picture in pictures} - {chosen.role}
        return "the largest" if others <= {"other"} else "the only slide"
    equal = [picture for picture in rivals if _area(picture) == _area(chosen)]
    return "the largest" if len(equal) == 1 else "the first of the largest"


def _listed(pictures: Sequence[Picture]) -> str:
    """Returns the pictures in words; after the first few only the number of the others."""
    listed = [str(picture) for picture in pictures[:_MAX_LISTED]]
    if len(pictures) > _MAX_LISTED:
        listed.append(f"and {len(pictures) - _MAX_LISTED} more")
    return ", ".join(listed) or "none"


def _area(picture: Picture) -> int:
    return picture.size[0] * picture.size[1]


def _px(size: Size) -> str:
    return f"{size[0]} x {size[1]} px"
