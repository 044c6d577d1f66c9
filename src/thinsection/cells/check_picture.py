"""Picture of the cells that a check names: each in red, with those around it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinsection.cells.check import Example
from thinsection.cells.outlines import Outlines
from thinsection.files.atomic import atomic_path
from thinsection.types import Floats

if TYPE_CHECKING:
    from PIL import Image

    from thinsection.slide import Slide

_PANEL_PX = 180
_CAPTION_PX = 28
_NUM_COLUMNS = 5
_WHITE = (255, 255, 255)
_BLACK = (0, 0, 0)
_RED = (210, 0, 0)
_GREY = (120, 120, 120)
# bounds of the distance from the middle of a panel to its edge, level-0 px
_MIN_REACH_PX = 24.0
_MAX_REACH_PX = 1024.0


def save_examples(
    path: Path, around: Mapping[Example, Sequence[Outlines]], slide: "Slide | None"
) -> None:
    """Writes a PNG with a panel for each example, in rows of five.

    Args:
        path: the picture.
        around: outlines of each example, its own first.
        slide: the slide behind the outlines; None for white.

    Memory: one panel of the slide at level 0, and 4 bytes per px of the picture.
    """
    from PIL import Image

    num_rows = -(-len(around) // _NUM_COLUMNS)
    height = _PANEL_PX + _CAPTION_PX
    sheet = Image.new(
        "RGB", (_NUM_COLUMNS * _PANEL_PX, max(1, num_rows) * height), _WHITE
    )
    for number, (example, outlines) in enumerate(around.items()):
        row, column = divmod(number, _NUM_COLUMNS)
        panel = _panel(example, outlines, slide)
        sheet.paste(panel, (column * _PANEL_PX, row * height))
    with atomic_path(path) as tmp:
        sheet.save(tmp, format="PNG")


def _panel(
    example: Example, outlines: Sequence[Outlines], slide: "Slide | None"
) -> "Image.Image":
    """One example with its caption."""
    from PIL import Image, ImageDraw

    panel = Image.new("RGB", (_PANEL_PX, _PANEL_PX + _CAPTION_PX), _WHITE)
    reach = float(np.clip(1.2 * example.size_px, _MIN_REACH_PX, _MAX_REACH_PX))
    corner = np.array([example.x_l0 - reach, example.y_l0 - reach])
    scale = _PANEL_PX / (2 * reach)
    if slide is not None:
        edge = round(2 * reach)
        origin = (round(corner[0]), round(corner[1]))
        pixels = slide.read_region(origin, 0, (edge, edge))
        background = Image.fromarray(pixels).resize((_PANEL_PX, _PANEL_PX))
        panel.paste(background, (0, 0))
    draw = ImageDraw.Draw(panel)
    for number, outline in reversed(list(enumerate(outlines))):
        points: Floats = (outline.points - corner) * scale
        ring = [(float(x), float(y)) for x, y in points]
        if len(ring) > 1:
            color = _GREY if number else _RED
            draw.line([*ring, ring[0]], fill=color, width=1 if number else 2)
    draw.rectangle((0, _PANEL_PX, _PANEL_PX, _PANEL_PX + _CAPTION_PX), fill=_WHITE)
    caption = f"{example.kind}: {example.cell_id}"[:28]
    place = f"x {example.x_l0:.0f}, y {example.y_l0:.0f}"
    draw.text((3, _PANEL_PX + 1), caption, fill=_BLACK)
    draw.text((3, _PANEL_PX + 14), place, fill=_BLACK)
    return panel
