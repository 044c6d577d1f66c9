"""Transparent pixels show white: the one rule, which every reader applies.

A picture's colours are stored either straight (as if opaque) or premultiplied by their alpha. The
file says which: TIFF's ExtraSamples has 2 for straight and 1 for premultiplied alpha, PNG's are
straight, OpenSlide's library hands out premultiplied ones.
"""

import numpy as np

OPAQUE = 255  # also the white that is seen through


def on_white(pixels: np.ndarray, *, premultiplied: bool = False) -> np.ndarray:
    """Gray or RGB on a white ground, uint8 (H, W, 1 or 3), rounded to the nearest value.

    Args:
        pixels: uint8 (H, W, 1 to 4); of 2 or 4 samples the last is alpha.
        premultiplied: whether colours were multiplied by alpha when they were stored.

    Memory: 2 bytes for each colour of a pixel, where some are transparent.
    """
    num_colours = 3 if pixels.shape[2] >= 3 else 1
    colour = pixels[..., :num_colours]
    alpha = pixels[..., num_colours:]
    if alpha.size == 0 or alpha.min() == OPAQUE:
        return colour
    # at most 255 * 255 + 128, which 16 bits hold
    blended = colour.astype(np.uint16)
    if not premultiplied:
        blended *= alpha
        _divide_by_255(blended)
    blended += (OPAQUE - alpha).astype(np.uint16)
    np.minimum(blended, OPAQUE, out=blended)  # a premultiplied colour may exceed alpha
    return np.asarray(blended.astype(np.uint8))


def premultiply_again(pixels: np.ndarray) -> np.ndarray:
    """RGBA whose colours are multiplied by alpha, from colours that openslide-python divided.

    It divides OpenSlide's colours by alpha and rounds down; for each rounded value there is one
    whole number that it came from.
    """
    if pixels[..., 3].min() == OPAQUE:
        return pixels
    found = pixels.copy()
    colour = pixels[..., :3].astype(np.uint16)
    colour *= pixels[..., 3:]
    colour += OPAQUE - 1  # so that the division rounds up
    colour //= OPAQUE
    found[..., :3] = colour
    return found


def _divide_by_255(values: np.ndarray) -> None:
    """Divides products of two bytes by 255 in place, to the nearest whole number."""
    values += 128
    values += values >> 8
    values >>= 8
