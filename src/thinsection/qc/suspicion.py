"""Slides that brightfield checks were not made for: said in words, before a strange row puzzles."""

from functools import reduce

import numpy as np

from thinsection.types import RgbArray

_DARK_MEDIAN = 40  # of 255: glass of a brightfield slide is above 200
_ONE_COLOUR_RANGE = 6  # of 255
_BROWN_SHARE = 0.25  # of the coloured px


def suspicions(rgb: RgbArray) -> list[str]:
    """Sentences about the work image, uint8 (H, W, 3); none for a usual H&E slide."""
    channels = [np.ascontiguousarray(rgb[..., c]) for c in range(3)]
    if max(int(c.max()) - int(c.min()) for c in channels) <= _ONE_COLOUR_RANGE:
        return ["the slide is of one colour: empty glass, or a failed scan"]
    if float(np.median(rgb)) < _DARK_MEDIAN:
        return ["the background is dark: fluorescence? These checks are made for brightfield"]
    highest, lowest = reduce(np.maximum, channels), reduce(np.minimum, channels)
    coloured = highest - lowest > 30
    red, green, blue = (c.astype(np.int16) for c in channels)
    brown = coloured & (red > green + 15) & (green > blue + 10)
    num_coloured = np.count_nonzero(coloured)
    if num_coloured > 100 and np.count_nonzero(brown) > _BROWN_SHARE * num_coloured:
        return ["much of the tissue is brown: IHC? The preset 'ihc' is made for it"]
    if num_coloured < 0.0005 * coloured.size:
        return ["almost nothing is stained: empty glass, or an unstained slide"]
    return []
