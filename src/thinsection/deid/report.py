"""What a person reads of a de-identified copy: the report of one slide, and the contact sheet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from thinsection.deid.likeness import StoredImage
from thinsection.files.atomic import atomic_path
from thinsection.slide.clean_streams import Cleaned

# no program of this kind sees these; a person has to
NEVER_LOOKED_AT = (
    "text or faces within the pixels, such as a marker's writing on the glass",
    "pixels of border tiles that lie outside the image",
    "digits of numbers that can be what their field says, such as a resolution",
    "the name of the file",
)


@dataclass(kw_only=True)
class Report:
    """Four lists of sentences about one slide, each in the order of the file.

    Attributes:
        looked_at: places that were read, with counts.
        removed: what is in the slide and not in the copy; empty where all that was read is clean.
        kept: images and values that are in the copy.
        not_looked_at: places that nobody read, so that they may still identify somebody.
    """

    looked_at: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=lambda: list(NEVER_LOOKED_AT))

    def remove(self, what: str) -> None:
        """Adds to `removed` what is not there yet."""
        if what not in self.removed:
            self.removed.append(what)

    def note(self, cleaned: Cleaned, where: str = "") -> bytes:
        """Adds what a stream had besides the picture, and returns its clean bytes."""
        for kind in sorted(cleaned.removed):
            self.remove(f"{kind}{where}")
        for kind in sorted(cleaned.unread):
            if kind not in self.not_looked_at:
                self.not_looked_at.append(kind)
        return cleaned.data

    def lines(self) -> Iterator[str]:
        """Yields the report as text."""
        yield f"inspected: {'; '.join(self.looked_at)}"
        for line in self.removed:
            yield f"removed: {line}"
        if not self.removed:
            yield "removed: nothing, in the places that were inspected"
        for line in self.kept:
            yield f"kept: {line}"
        yield f"not inspected: {'; '.join(self.not_looked_at)}"


_EDGE_PX = 640  # of a picture
_MARGIN_PX = 16
_LINE_PX = 20
_COLUMNS = 2


def write_sheet(path: Path, title: str, images: Sequence[StoredImage]) -> None:
    """Writes a PNG with each image in small, and what it is.

    Memory: the sheet (2 MB for each image) and one segment of the copy.
    """
    font = ImageFont.load_default(size=14)
    pictures = [image.picture(_EDGE_PX) for image in images]
    cell = _EDGE_PX + _MARGIN_PX
    rows = -(-len(pictures) // _COLUMNS)
    heights = [
        max(p.height for p in pictures[row * _COLUMNS : (row + 1) * _COLUMNS])
        + 2 * _LINE_PX
        + _MARGIN_PX
        for row in range(rows)
    ]
    size = (_COLUMNS * cell + _MARGIN_PX, sum(heights) + 3 * _LINE_PX)
    sheet = Image.new("RGB", size, (232, 232, 232))
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN_PX, _LINE_PX // 2), _printable(title), fill=(0, 0, 0), font=font)
    question = "Look at every picture: no label, no writing, no face?"
    draw.text((_MARGIN_PX, 3 * _LINE_PX // 2), question, fill=(0, 0, 0), font=font)
    top = 3 * _LINE_PX
    for index, (image, picture) in enumerate(zip(images, pictures)):
        row, column = divmod(index, _COLUMNS)
        left = _MARGIN_PX + column * cell
        y = top + sum(heights[:row])
        draw.text((left, y), _printable(image.name), fill=(0, 0, 0), font=font)
        step = image.picture_step
        shown = "whole image"
        if step > 1:
            shown = f"1 of every {step * step} tiles, drawn larger: look at the other levels too"
        draw.text((left, y + _LINE_PX), shown, fill=(96, 96, 96), font=font)
        sheet.paste(picture, (left, y + 2 * _LINE_PX))
    with atomic_path(path) as unfinished:
        sheet.save(unfinished, format="PNG")


def _printable(text: str) -> str:
    """Text for the default font."""
    return text.encode("latin-1", "replace").decode("latin-1")
