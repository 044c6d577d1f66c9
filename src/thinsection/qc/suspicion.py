"""Slides that brightfield checks were not made for: said in words, before a strange row puzzles."""

import numpy as np

from thinsection.types import RgbArray

_DARK_MEDIAN = 40  # of 255: glass of a brightfield slide is above 200
_ONE_COLOUR_RANGE = 6  # of 255
_BROWN_SHARE = 0.25  # of the coloured px


def suspicions(rgb: RgbArray) -> list[str]:
    """Sentences about the work image, uint8 (H, W, 3); none for a usual H&E slide."""
    darkest, brightest = (rgb.reshape(-1, 3).min(axis=0), rgb.reshape(-1, 3).max(axis=0))
    if int((brightest.astype(int) - darkest).max()) <= _ONE_COLOUR_RANGE:
        return ["the slide is of one colour: empty glass, or a failed scan"]
    if float(np.median(rgb)) < _DARK_MEDIAN:
        return ["the background is dark: fluorescence? These checks are made for brightfield"]
    red, green, blue = (rgb[..., c].astype(np.int16) for c in range(3))
    spread = rgb.max(axis=2).astype(np.int16) - rgb.min(axis=2)
    coloured = spread > 30
    brown = coloured & (red > green + 15) & (green > blue + 10)
    if coloured.sum() > 100 and brown.sum() > _BROWN_SHARE * coloured.sum():
        return ["much of the tissue is brown: IHC? The preset 'ihc' is made for it"]
    if coloured.sum() < 0.0005 * coloured.size:
        return ["almost nothing is stained: empty glass, or an unstained slide"]
    return []
