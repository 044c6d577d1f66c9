"""Likeness of pictures: a level or a thumbnail shows the slide, a label or a macro does not."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

from thinsection.types import MIB, RgbArray, Size

_PLACES = 32  # compared along the longer edge, at most
_PLACE_PX = 4  # edge of a place, in pixels of the smaller picture
_ASPECT_TOLERANCE = 0.02
# Measured on real slides (docs/validation/readers.md): thumbnails and levels differ by 0.3 to 1.6
# at the median place, by 14 at most, and have a correlation of .998. Labels and macros differ by 74
# and more, and have a correlation below 0.
_MAX_MEDIAN = 12.0  # grey levels of 255
_MAX_AT_A_PLACE = 48.0
_MAX_SHARE_BEYOND = 0.01  # of places that may differ by more than that
_MIN_CORRELATION = 0.8
_FLAT = 3.0  # standard deviation of grey levels below which a picture shows nothing
# A level that shows more than the slide: its blocks are compared with the range of colours that the
# slide has there and in the blocks around, so that a shift of up to four pixels is no difference.
_BLOCK_PX = 4  # edge of a block, in pixels of the smaller picture
_MAX_BEYOND_RANGE = 24.0  # grey levels of 255
_MAX_BLOCKS_BEYOND = 4  # with at most two blocks between one and the next
_BAND_PX = 256  # rows that are compared at once, about
_CACHE_BYTES = 64 * MIB
_PICTURE_SEGMENTS = 4096  # decoded for a picture of a whole image, at most

Segment = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """One image of a file: a grid of segments, each decoded by itself.

    Memory: 64 MiB of decoded segments, or one.
    """

    name: str
    size: Size
    segment: Size  # (width, height) of a segment
    decode: Callable[[int], Segment | None]  # by row * columns + column; None: empty
    _held: OrderedDict[int, RgbArray] = field(default_factory=OrderedDict)

    @property
    def columns(self) -> int:
        """Segments in a row of the grid."""
        return -(-self.size[0] // self.segment[0])

    @property
    def rows(self) -> int:
        """Rows of the grid."""
        return -(-self.size[1] // self.segment[1])

    def segment_pixels(self, index: int) -> RgbArray:
        """A segment as uint8 (H, W, 3), cut at the border of the image."""
        if index in self._held:
            self._held.move_to_end(index)
            return self._held[index]
        row, column = divmod(index, self.columns)
        width = min(self.segment[0], self.size[0] - column * self.segment[0])
        height = min(self.segment[1], self.size[1] - row * self.segment[1])
        decoded = self.decode(index)
        pixels = np.full((height, width, 3), 255, np.uint8)
        if decoded is not None:
            colours = _as_rgb(decoded)[:height, :width]
            pixels[: colours.shape[0], : colours.shape[1]] = colours
        self._held[index] = pixels
        while len(self._held) > max(1, _CACHE_BYTES // pixels.nbytes):
            self._held.popitem(last=False)
        return pixels

    def mean(
        self, left: float, top: float, right: float, bottom: float
    ) -> npt.NDArray[np.float64]:
        """Mean colour of a box that is given as shares of the image's width and height."""
        x0 = min(int(left * self.size[0]), self.size[0] - 1)
        y0 = min(int(top * self.size[1]), self.size[1] - 1)
        x1 = min(max(x0 + 1, round(right * self.size[0])), self.size[0])
        y1 = min(max(y0 + 1, round(bottom * self.size[1])), self.size[1])
        width, height = self.segment
        total = np.zeros(3)
        for row in range(y0 // height, (y1 - 1) // height + 1):
            for column in range(x0 // width, (x1 - 1) // width + 1):
                pixels = self.segment_pixels(row * self.columns + column)
                left_px = column * width
                top_px = row * height
                part = pixels[
                    max(0, y0 - top_px) : y1 - top_px,
                    max(0, x0 - left_px) : x1 - left_px,
                ]
                total += part.reshape(-1, 3).sum(axis=0, dtype=np.float64)
        return total / ((x1 - x0) * (y1 - y0))

    def picture(self, max_edge_px: int) -> Image.Image:
        """Draws the whole image, small; of one with very many segments every k-th, drawn larger.

        Memory: the picture and one segment.
        """
        scale = min(1.0, max_edge_px / max(self.size))
        every = self.picture_step
        size = [max(1, round(edge * scale)) for edge in self.size]
        shown = Image.new("RGB", (size[0], size[1]), (255, 255, 255))
        width, height = (every * edge for edge in self.segment)
        for row in range(0, self.rows, every):
            for column in range(0, self.columns, every):
                pixels = self.segment_pixels(row * self.columns + column)
                left = round(column * self.segment[0] * scale)
                top = round(row * self.segment[1] * scale)
                right = round(
                    min(column * self.segment[0] + width, self.size[0]) * scale
                )
                bottom = round(
                    min(row * self.segment[1] + height, self.size[1]) * scale
                )
                if right > left and bottom > top:
                    small = Image.fromarray(pixels).resize(
                        (right - left, bottom - top), Image.Resampling.BOX
                    )
                    shown.paste(small, (left, top))
        return shown

    @property
    def picture_step(self) -> int:
        """Step between the segments, across and down, that a picture shows."""
        return int(np.ceil(np.sqrt(self.rows * self.columns / _PICTURE_SEGMENTS)))


def _as_rgb(pixels: Segment) -> RgbArray:
    """Grey, grey with alpha, RGB or RGBA of any depth as uint8 (H, W, 3)."""
    array = np.asarray(pixels)
    array = array.reshape(array.shape[-3:]) if array.ndim > 2 else array[..., None]
    if array.dtype != np.uint8:
        is_whole = array.dtype.kind in "ui"
        top = 2.0 ** (8 * array.dtype.itemsize) - 1 if is_whole else 1.0
        array = np.clip(array.astype(np.float64) * (255 / top), 0, 255).astype(np.uint8)
    if array.shape[2] < 3:
        return np.repeat(array[..., :1], 3, axis=2)
    return np.asarray(array[..., :3])


def find_unlikeness(candidate: StoredImage, slide: StoredImage) -> str:
    """Returns in what an image differs from the slide; '' where it shows the slide.

    Compared are the shape, the mean colours at up to 32 x 32 places, and then every pixel, in
    blocks of 4 x 4: a name that was written on a small level differs in few places.

    Args:
        candidate: the smaller image.
        slide: level 0, or a level that is known to show it.

    Memory: that of the two images, and 100 bytes a block of a band of 256 rows.
    """
    return _find_other_picture(candidate, slide) or _find_addition(candidate, slide)


def _find_addition(candidate: StoredImage, slide: StoredImage) -> str:
    """Returns where an image shows what the slide does not; '' where it does so nowhere."""
    rows = len(_block_edges(candidate.size[1], candidate.size[1])) - 1
    step = _BAND_PX // _BLOCK_PX
    for first in range(0, rows, step):
        # one row of blocks more on either side, so that each has its neighbours
        start = max(0, first - 1)
        stop = min(rows, first + step + 1)
        there = _block_means(candidate, candidate.size, start, stop)
        here = _block_means(slide, candidate.size, start, stop)
        most = ndimage.maximum_filter(here, (3, 3, 1), mode="nearest")
        least = ndimage.minimum_filter(here, (3, 3, 1), mode="nearest")
        beyond = np.maximum(there - most, least - there).max(axis=2) > _MAX_BEYOND_RANGE
        near = ndimage.binary_dilation(beyond, np.ones((3, 3)))
        regions, count = ndimage.label(near, np.ones((3, 3)))
        blocks = np.bincount(regions[beyond], minlength=count + 1)[1:]
        if count and blocks.max() > _MAX_BLOCKS_BEYOND:
            row, column = np.argwhere(regions == 1 + int(blocks.argmax()))[0]
            x = int(column) * _BLOCK_PX
            y = (start + int(row)) * _BLOCK_PX
            return f"it shows something at ({x}, {y}) px that the slide does not show"
    return ""


def _block_means(
    image: StoredImage, size: Size, first_row: int, stop_row: int
) -> npt.NDArray[np.float64]:
    """Mean colours (rows, columns, 3) of blocks of a picture of `size`, of which `image` is one.

    Each segment of the image is decoded once a band.
    """
    lefts = _block_edges(image.size[0], size[0])
    tops = _block_edges(image.size[1], size[1])[first_row : stop_row + 1]
    totals = np.zeros((len(tops) - 1, len(lefts) - 1, 3))
    segment_width, segment_height = image.segment
    for row in range(tops[0] // segment_height, (tops[-1] - 1) // segment_height + 1):
        for column in range(image.columns):
            pixels = image.segment_pixels(row * image.columns + column)
            y_edges, y_block = _edges_inside(
                tops, row * segment_height, pixels.shape[0]
            )
            x_edges, x_block = _edges_inside(
                lefts, column * segment_width, pixels.shape[1]
            )
            inside = pixels[y_edges[0] : y_edges[-1], x_edges[0] : x_edges[-1]]
            sums = np.add.reduceat(
                inside, x_edges[:-1] - x_edges[0], axis=1, dtype=np.float64
            )
            sums = np.add.reduceat(sums, y_edges[:-1] - y_edges[0], axis=0)
            totals[
                y_block : y_block + sums.shape[0], x_block : x_block + sums.shape[1]
            ] += sums
    areas = np.diff(tops)[:, None] * np.diff(lefts)[None, :]
    return np.asarray(totals / areas[..., None])


def _block_edges(length: int, blocks_of: int) -> npt.NDArray[np.int64]:
    """Borders of the blocks along one side, in pixels of an image that is `length` long."""
    # what is left over at the border belongs to the last whole block
    edges = [*range(0, max(1, blocks_of - _BLOCK_PX + 1), _BLOCK_PX), blocks_of]
    return np.rint(np.array(edges) * (length / blocks_of)).astype(np.int64)


def _edges_inside(
    edges: npt.NDArray[np.int64], start: int, length: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Borders of blocks within a segment, in its pixels, and the first block that it touches."""
    clipped = np.clip(edges - start, 0, length)
    block = max(0, int(np.searchsorted(clipped, 0, side="right")) - 1)
    last = int(np.searchsorted(clipped, length, side="left"))
    return clipped[block : last + 1], block


def _find_other_picture(candidate: StoredImage, slide: StoredImage) -> str:
    """Returns in what an image differs as a whole, by its shape and colours at some places."""
    candidate_aspect = candidate.size[0] / candidate.size[1]
    slide_aspect = slide.size[0] / slide.size[1]
    tolerance = _ASPECT_TOLERANCE + 2 / min(candidate.size)
    if abs(candidate_aspect / slide_aspect - 1) > tolerance:
        return "its shape is not the slide's"
    there, here = _place_colours(candidate, slide)
    difference = np.abs(there - here).mean(axis=2)
    median = float(np.median(difference))
    beyond = float((difference > _MAX_AT_A_PLACE).mean())
    if median > _MAX_MEDIAN:
        return (
            f"its colours are not the slide's (median difference {median:.0f} of 255)"
        )
    if beyond > _MAX_SHARE_BEYOND:
        return f"its colours are not the slide's at {100 * beyond:.0f} % of the places"
    grey_there = there.mean(axis=2).ravel()
    grey_here = here.mean(axis=2).ravel()
    if max(grey_there.std(), grey_here.std()) < _FLAT:
        return ""
    if min(grey_there.std(), grey_here.std()) == 0:
        return "it does not show what the slide shows"
    correlation = float(np.corrcoef(grey_there, grey_here)[0, 1])
    if correlation < _MIN_CORRELATION:
        return f"it does not show what the slide shows (correlation {correlation:.2f})"
    return ""


def _place_colours(
    candidate: StoredImage, slide: StoredImage
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean colours (rows, columns, 3) of the same places of both."""
    width, height = candidate.size
    step = max(1.0, max(width, height) / _PLACES)
    columns = max(1, int(width / step))
    rows = max(1, int(height / step))
    there = np.zeros((rows, columns, 3))
    here = np.zeros((rows, columns, 3))
    for row in range(rows):
        for column in range(columns):
            x = int((column + 0.5) * width / columns)
            y = int((row + 0.5) * height / rows)
            left = max(0, x - _PLACE_PX // 2)
            top = max(0, y - _PLACE_PX // 2)
            right = min(width, left + _PLACE_PX)
            bottom = min(height, top + _PLACE_PX)
            box = (left / width, top / height, right / width, bottom / height)
            there[row, column] = candidate.mean(*box)
            here[row, column] = slide.mean(*box)
    return there, here
