"""Pure geometry of pictures that are stored mirrored or turned, by the number of a file's tag.

Source: TIFF 6.0, tag Orientation (274); Exif 2.32 has the same numbers.
"""

import numpy as np

from thinsection.types import CoordsLv, Mpp, Size

ORIENTATION_TAG = 274
UPRIGHT = 1
# What is done to the stored picture, by the number of the tag. First rows and columns are swapped,
# then the result is mirrored.
_SWAPPED = (5, 6, 7, 8)
_MIRRORED_X = (2, 3, 6, 7)
_MIRRORED_Y = (3, 4, 7, 8)
WORDS = {
    2: "mirrored left to right",
    3: "turned by 180°",
    4: "mirrored top to bottom",
    5: "mirrored along the diagonal from top left",
    6: "turned by 90° clockwise",
    7: "mirrored along the diagonal from top right",
    8: "turned by 90° anticlockwise",
}


def known_orientation(value: object) -> int:
    """Returns the number of a file's orientation tag; 1 (upright) where none is defined."""
    if isinstance(value, int) and value in WORDS:
        return value
    return UPRIGHT


def swaps_axes(orientation: int) -> bool:
    """Tells whether the stored width is the upright height."""
    return orientation in _SWAPPED


def turn_size(size: Size, orientation: int) -> Size:
    """Upright (width, height) from the stored one, and the other way round."""
    return (size[1], size[0]) if swaps_axes(orientation) else size


def turn_mpp(mpp: Mpp | None, orientation: int) -> Mpp | None:
    """Upright (x, y) µm/px from the stored ones, and the other way round."""
    if mpp is None or not swaps_axes(orientation):
        return mpp
    return (mpp[1], mpp[0])


def turn_pixels(stored: np.ndarray, orientation: int) -> np.ndarray:
    """Returns the upright view of stored pixels, (..., H, W, 3); no pixel is copied."""
    upright = stored
    if swaps_axes(orientation):
        upright = upright.swapaxes(-3, -2)
    if orientation in _MIRRORED_X:
        upright = upright[..., ::-1, :]
    if orientation in _MIRRORED_Y:
        upright = upright[..., ::-1, :, :]
    return upright


def stored_view(upright: np.ndarray, orientation: int) -> np.ndarray:
    """Returns the view that fills `upright` (..., H, W, 3) if stored pixels are written to it."""
    stored = upright
    if orientation in _MIRRORED_Y:
        stored = stored[..., ::-1, :, :]
    if orientation in _MIRRORED_X:
        stored = stored[..., ::-1, :]
    if swaps_axes(orientation):
        stored = stored.swapaxes(-3, -2)
    return stored


def turn_origins(
    origins: CoordsLv, size: Size, level_size: Size, orientation: int
) -> CoordsLv:
    """Corners of regions in the stored frame, int64 (N, 2), from those in the upright one.

    Args:
        origins: upright (x, y) of the regions' top-left corners.
        size: upright (width, height) of a region.
        level_size: upright (width, height) of what they are regions of.
        orientation: number of the tag.
    """
    stored = origins.copy()
    if orientation in _MIRRORED_X:
        stored[:, 0] = level_size[0] - size[0] - origins[:, 0]
    if orientation in _MIRRORED_Y:
        stored[:, 1] = level_size[1] - size[1] - origins[:, 1]
    return stored[:, ::-1] if swaps_axes(orientation) else stored
