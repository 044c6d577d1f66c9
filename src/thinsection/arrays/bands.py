"""Bands of rows: work on a large picture with the memory of a small one."""

from collections.abc import Iterator
from dataclasses import dataclass

# Rows that are worked on at once.
BAND_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Rows of a picture, and the rows around them that a filter needs."""

    inside: slice  # rows of the band
    around: slice  # rows of the band with its surroundings, inside the picture
    own: slice  # position of `inside` in `around`


def row_bands(height: int, reach: int = 0) -> Iterator[Band]:
    """Bands that cover the rows of a picture; a filter reaches `reach` rows up and down."""
    for top in range(0, height, BAND_ROWS):
        bottom = min(height, top + BAND_ROWS)
        first = max(0, top - reach)
        yield Band(
            inside=slice(top, bottom),
            around=slice(first, min(height, bottom + reach)),
            own=slice(top - first, bottom - first),
        )
