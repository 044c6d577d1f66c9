"""A contact sheet: every image that a copy holds, for a person to look at."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from thinsection.files.atomic import atomic_path
from thinsection.slide.deid.likeness import StoredImage

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
        draw.text((left, y + _LINE_PX), _how_drawn(image), fill=(96, 96, 96), font=font)
        sheet.paste(picture, (left, y + 2 * _LINE_PX))
    with atomic_path(path) as unfinished:
        sheet.save(unfinished, format="PNG")


def _how_drawn(image: StoredImage) -> str:
    """Describes whether the picture shows all of the image."""
    step = image.picture_step
    if step == 1:
        return "whole image"
    return f"1 of every {step * step} tiles, drawn larger: look at the other levels too"


def _printable(text: str) -> str:
    """Text for the default font."""
    return text.encode("latin-1", "replace").decode("latin-1")
