"""Colour and filters on either device, with scikit-image's definitions and borders.

Separable filters are products with a banded matrix, 32 rows at once. On a CPU that is
several times as fast as filtering pixel by pixel, and rows that are not asked for are
not made.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache, reduce
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from thinsection.arrays.namespace import Array, ArrayNamespace
from thinsection.errors import InvalidInputError

Kernel = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Shape = tuple[int, int]  # (H, W)

GRAY = (0.2125, 0.7154, 0.0721)  # luma weights of R, G, B
YUV = (  # of Y, U, V
    (0.299, 0.587, 0.114),
    (-0.14714119, -0.28886916, 0.43601035),
    (0.61497538, -0.51496512, -0.10001026),
)
# A pixel that transmits less counts as black, so that its logarithm is finite.
_MIN_TRANSMITTED = 1e-6
STAINS = (
    "hed_from_rgb",
    "hdx_from_rgb",
    "fgx_from_rgb",
    "bex_from_rgb",
    "rbd_from_rgb",
    "gdx_from_rgb",
    "hax_from_rgb",
    "bro_from_rgb",
    "bpx_from_rgb",
    "ahx_from_rgb",
    "hpx_from_rgb",
)
# Amounts of three stains per density of red, green and blue, (3, 3), for the stains of our own
# pipeline: scikit-image's to the byte, as importing it takes a quarter of a CPU-second.
_UNMIXING = {
    "hed_from_rgb": (
        (1.8779827368521356, -1.0076786862855642, -0.5561158181996246),
        (-0.06590806222356334, 1.1347303724996625, -0.13552179862837116),
        (-0.6019073634392891, -0.4804141884970579, 1.5735880719641926),
    ),
    "hdx_from_rgb": (
        (1.2001370152970128, -0.6897672021124063, 1.05605386664475),
        (0.6852333815986897, 0.023609908678645788, -1.1785755564151525),
        (-0.9178089531067686, 1.5095360337877535, 0.5009866377523758),
    ),
}
# Rows or columns that are made at once.
_BLOCK_PX = 32
# Lines of the largest image for which the matrices of all blocks are kept.
_KEPT_PX = 512
# Lines of a block, the lines of the image that they reach, and their weights there.
_Step = tuple[slice, slice, npt.NDArray[np.floating]]


def gray_from_rgb(
    ns: ArrayNamespace, rgb: Array, weights: Sequence[float] = GRAY
) -> Array:
    """Luma in [0, 1], or another weighted sum, float64 (H, W), of uint8 (H, W, 3)."""
    gray = rgb[..., 0] / 255.0 * weights[0]
    for channel in (1, 2):
        gray += rgb[..., channel] / 255.0 * weights[channel]
    return gray


def gray32_from_rgb(ns: ArrayNamespace, rgb: Array) -> Array:
    """Luma in float32, with 8 bytes a pixel in place of 24: for large strips."""
    gray = rgb[..., 0] * ns.xp.float32(GRAY[0] / 255)
    for channel in (1, 2):
        gray += rgb[..., channel] * ns.xp.float32(GRAY[channel] / 255)
    return gray


def extremes(ns: ArrayNamespace, channels: Sequence[Array]) -> tuple[Array, Array]:
    """Least and greatest of the channels per pixel.

    Pair by pair, because NumPy's reduction along a short axis is slow.
    """
    return reduce(ns.xp.minimum, channels), reduce(ns.xp.maximum, channels)


def channel_mean(ns: ArrayNamespace, image: Array) -> Array:
    """Mean of the three channels of each pixel, (H, W), of float (H, W, 3).

    NumPy's `mean` to the byte, but in a sixth of its time: it is slow along a short axis.
    """
    if ns.xp is not np:
        return image.mean(axis=2)
    total = image[..., 0] + image[..., 1]
    total += image[..., 2]
    total /= total.dtype.type(3)
    return total


def channel_std(ns: ArrayNamespace, rgb: Array) -> Array:
    """Population standard deviation over R, G, B of each pixel, float64 (H, W)."""
    # sums of bytes and of their squares are whole numbers below 2**24: exact in float32
    red, green, blue = (rgb[..., c].astype(ns.xp.float32) for c in range(3))
    total = red + green + blue
    squares = red * red + green * green + blue * blue
    return ns.xp.sqrt((3 * squares - total * total).astype(ns.xp.float64)) / 3.0


@cache
def stain_tables(stain: str) -> tuple[Kernel, Kernel]:
    """Density (share of log(1e-6)) per channel value, (256,), and vectors, (3, 3).

    Source: Ruifrok and Johnston, Quantification of histochemical staining by color
        deconvolution, 2001; the vectors are scikit-image's.
    """
    if stain not in STAINS:
        raise InvalidInputError(
            f"stain must be one of {', '.join(STAINS)}, got {stain!r}"
        )
    transmitted = np.maximum(np.arange(256) / 255.0, _MIN_TRANSMITTED)
    densities = np.log(transmitted) / math.log(_MIN_TRANSMITTED)
    if stain in _UNMIXING:
        return densities, np.array(_UNMIXING[stain])
    from skimage import color

    return densities, np.asarray(getattr(color, stain))


# thousands of squares of a slide have the same few kernels
@lru_cache(maxsize=32)
def gaussian_kernel(sigma_px: float, *, order: int = 0) -> Kernel:
    """Weights of a Gaussian cut at 4 sigma, of sum 1, or of its derivative.

    `order` is that of the derivative: 0, 1 or 2. The array is read-only: all callers share it.
    """
    radius = int(4.0 * sigma_px + 0.5)
    variance = sigma_px**2
    offsets = np.arange(-radius, radius + 1)
    bell = np.exp(-0.5 * (offsets / sigma_px) ** 2)
    kernel = np.asarray(bell / bell.sum())
    if order == 1:
        kernel *= offsets / variance
    if order == 2:
        kernel *= (offsets**2 / variance - 1) / variance
    kernel.flags.writeable = False
    return kernel


def separable(
    ns: ArrayNamespace,
    image: Array,
    down: Kernel,
    along: Kernel,
    shape: Shape | None = None,
) -> Array:
    """Filters an image, float (H, W), by two kernels of odd length.

    Border pixels are repeated outside. Only the pixels that a nearest resize to `shape`
    takes are made; None makes all.

    Memory: O(H * W).
    """
    height, width = shape or image.shape
    filtered = _convolve(ns, image, along, width, axis=1)
    return _convolve(ns, filtered, down, height, axis=0)


def nearest(num_old: int, num_new: int) -> Indices:
    """Index of the old pixel under the centre of each new one, along one axis."""
    centres = (np.arange(num_new) + 0.5) * (num_old / num_new)
    return np.asarray(np.clip(np.floor(centres).astype(np.int64), 0, num_old - 1))


def _convolve(
    ns: ArrayNamespace, image: Array, kernel: Kernel, num_lines: int, *, axis: int
) -> Array:
    """Makes rows (axis 0) or columns (axis 1) of the image under a kernel, as `nearest` chooses."""
    length = image.shape[axis]
    shape = list(image.shape)
    shape[axis] = num_lines
    out = ns.xp.empty(tuple(shape), dtype=image.dtype)
    steps: Iterable[_Step]
    if ns.xp is np and num_lines == length <= _KEPT_PX:
        steps = _kept_steps(length, kernel.tobytes(), image.dtype)
    else:
        steps = _steps(length, kernel, nearest(length, num_lines), image.dtype)
    for made, reached, band in steps:
        band_matrix = ns.xp.asarray(band)
        if axis == 0:
            ns.xp.matmul(band_matrix, image[reached], out=out[made])
        else:
            ns.xp.matmul(image[:, reached], band_matrix.T, out=out[:, made])
    return out


def _steps(
    length: int, kernel: Kernel, lines: Indices, dtype: np.dtype[Any]
) -> Iterator[_Step]:
    """Blocks of lines under a kernel, of an image with so many lines."""
    radius = len(kernel) // 2
    for start in range(0, len(lines), _BLOCK_PX):
        block = lines[start : start + _BLOCK_PX]
        low = int(block[0]) - radius
        high = int(block[-1]) + radius + 1
        band = _band(
            (block - block[0]).tobytes(),
            kernel.tobytes(),
            before=max(0, -low),
            after=max(0, high - length),
        )
        made = slice(start, start + len(block))
        yield made, slice(max(0, low), min(high, length)), band.astype(dtype)


# thousands of squares of a slide have the same few steps
@lru_cache(maxsize=16)
def _kept_steps(length: int, weights: bytes, dtype: np.dtype[Any]) -> tuple[_Step, ...]:
    """Steps that make all lines of a small image."""
    return tuple(_steps(length, np.frombuffer(weights), np.arange(length), dtype))


# all blocks away from the border share one matrix
@lru_cache(maxsize=32)
def _band(block: bytes, weights: bytes, *, before: int, after: int) -> Kernel:
    """Weights (lines, reached lines) of one block.

    `before` and `after` lines lie beyond the image; the border line stands for them.
    """
    lines = np.frombuffer(block, np.int64)
    kernel = np.frombuffer(weights)
    radius = len(kernel) // 2
    reached = lines[:, None] + np.arange(-radius, radius + 1)
    reached = np.clip(reached, before - radius, lines[-1] + radius - after)
    first = reached[0, 0]
    band = np.zeros((len(lines), reached[-1, -1] + 1 - first))
    np.add.at(band, (np.arange(len(lines))[:, None], reached - first), kernel)
    return band


def box_mean(ns: ArrayNamespace, image: Array, edge_px: int) -> Array:
    """Mean over a square, with zeros outside.

    An even square reaches one pixel further up and left. SciPy's `uniform_filter` to the byte,
    without its import.

    Memory: as of `box_mirrored`.
    """
    if ns.xp is not np:
        return ns.ndimage.uniform_filter(image, size=edge_px, mode="constant", cval=0.0)
    down = _means_along_rows(image.T, edge_px, "constant").T
    return _means_along_rows(down, edge_px, "constant")


def box_mirrored(ns: ArrayNamespace, image: Array, edge_px: int) -> Array:
    """Mean over a square of edge >= 2, of an image that is mirrored at its border.

    SciPy's `uniform_filter` to the byte: sums run along each line in float64, and the lines of both
    passes are rounded to the type of the image.

    Memory: twice the image, and 32 bytes for each pixel of `_BLOCK_PX` rows.
    """
    if ns.xp is not np:
        return ns.ndimage.uniform_filter(image, size=edge_px)
    before = edge_px // 2
    sides = (before, edge_px - 1 - before)
    rows = np.pad(np.arange(len(image)), sides, mode="symmetric")
    down = np.empty_like(image)
    # all columns at once, row after row: the fastest way for wide images
    sums = np.zeros(image.shape[1])
    for row in rows[:edge_px]:
        sums += image[row]
    down[0] = sums / edge_px
    for row in range(1, len(image)):
        entering = image[rows[row + edge_px - 1]]
        leaving = image[rows[row - 1]]
        sums += np.subtract(entering, leaving, dtype=np.float64)
        down[row] = sums / edge_px
    return _means_along_rows(down, edge_px, "symmetric")


def _means_along_rows(
    image: npt.NDArray[np.floating],
    edge_px: int,
    outside: Literal["constant", "symmetric"],
) -> npt.NDArray[np.floating]:
    """Means over a stretch of each row on the host; `outside` is a mode of `numpy.pad`."""
    before = edge_px // 2
    sides = (before, edge_px - 1 - before)
    out = np.empty(image.shape, dtype=image.dtype)
    for start in range(0, len(image), _BLOCK_PX):
        block = slice(start, start + _BLOCK_PX)
        padded = np.pad(image[block].astype(np.float64), ((0, 0), sides), mode=outside)
        means = np.empty((len(padded), image.shape[1]))
        means[:, 0] = padded[:, :edge_px].cumsum(axis=1)[:, -1]
        np.subtract(padded[:, edge_px:], padded[:, :-edge_px], out=means[:, 1:])
        means.cumsum(axis=1, out=means)
        means /= edge_px
        out[block] = means
    return out


def opened_by_square(ns: ArrayNamespace, image: Array, edge_px: int) -> Array:
    """The image opened by a square of odd edge; pixels outside count neither up nor down."""
    eroded = _extreme_around(ns, image, edge_px, ns.xp.minimum, math.inf)
    return _extreme_around(ns, eroded, edge_px, ns.xp.maximum, -math.inf)


def _extreme_around(
    ns: ArrayNamespace, image: Array, edge_px: int, choose: Any, outside: float
) -> Array:
    """Least or greatest value of a square around each pixel; the values joined double at a step."""
    reach = edge_px // 2
    padded = ns.xp.pad(image, reach, constant_values=outside)
    joined = 1
    while joined < edge_px:
        step = min(joined, edge_px - joined)
        padded = choose(padded[:-step], padded[step:])
        padded = choose(padded[:, :-step], padded[:, step:])
        joined += step
    return padded


def median_around(ns: ArrayNamespace, image: Array) -> Array:
    """Median of the 3 x 3 pixels around each pixel; border pixels repeat outside.

    SciPy's `median_filter` to the byte, without its import, for an image without NaN.

    Memory: twice the image, and some ten times `_BLOCK_PX` rows.
    """
    padded = ns.xp.pad(image, 1, mode="edge")
    out = ns.xp.empty_like(image)
    for top in range(0, len(image), _BLOCK_PX):
        rows = padded[top : top + _BLOCK_PX + 2]
        # of each column of three pixels; the median of nine lies among these three
        low, middle, high = _in_order(ns, rows[:-2], rows[1:-1], rows[2:])
        candidates = (
            reduce(ns.xp.maximum, _beside(low)),
            _in_order(ns, *_beside(middle))[1],
            reduce(ns.xp.minimum, _beside(high)),
        )
        out[top : top + _BLOCK_PX] = _in_order(ns, *candidates)[1]
    return out


def _in_order(
    ns: ArrayNamespace, first: Array, second: Array, third: Array
) -> tuple[Array, Array, Array]:
    """Least, median and greatest of three images, pixel by pixel."""
    lower = ns.xp.minimum(first, second)
    upper = ns.xp.maximum(first, second)
    median = ns.xp.maximum(lower, ns.xp.minimum(upper, third))
    return ns.xp.minimum(lower, third), median, ns.xp.maximum(upper, third)


def _beside(padded: Array) -> tuple[Array, Array, Array]:
    """The pixels to the left of each, the pixels themselves, and those to the right."""
    return padded[:, :-2], padded[:, 1:-1], padded[:, 2:]


def laplacian(ns: ArrayNamespace, image: Array) -> Array:
    """4 times the pixel minus its four neighbours; border pixels repeat outside."""
    out = 4 * image
    for target, source in ((out, image), (out.T, image.T)):
        target[1:] -= source[:-1]
        target[0] -= source[0]
        target[:-1] -= source[1:]
        target[-1] -= source[-1]
    return out


def sobel_energy(ns: ArrayNamespace, image: Array) -> Array:
    """Squared gradient, mean over both axes, of kernels whose weights sum to 1."""
    padded = ns.xp.pad(image, 1, mode="edge")
    energy = ns.xp.empty_like(image)
    for top in range(0, len(image), _BLOCK_PX):
        band = padded[top : top + _BLOCK_PX + 2]
        down = band[2:] - band[:-2]
        down = (down[:, :-2] + down[:, 2:]) + 2 * down[:, 1:-1]
        along = band[:, 2:] - band[:, :-2]
        along = (along[:-2] + along[2:]) + 2 * along[1:-1]
        energy[top : top + _BLOCK_PX] = (down * down + along * along) / 32.0
    return energy


def gaussian(
    ns: ArrayNamespace, image: Array, sigma_px: float, shape: Shape | None = None
) -> Array:
    """Blurs by a Gaussian that is cut at 4 sigma; border and `shape` as in `separable`."""
    kernel = gaussian_kernel(sigma_px)
    return separable(ns, image, kernel, kernel, shape)


def box_deviation(ns: ArrayNamespace, image: Array, edge_px: int) -> Array:
    """Standard deviation over a square of odd edge; border pixels repeat outside."""
    kernel = np.full(edge_px, 1 / edge_px)
    mean = separable(ns, image, kernel, kernel)
    variance = separable(ns, image * image, kernel, kernel) - mean * mean
    return ns.xp.sqrt(ns.xp.maximum(variance, 0))


def local_minimum(ns: ArrayNamespace, image: Array, footprint: Array) -> Array:
    """Least value under the footprint, of pixels inside the image only."""
    footprint = ns.xp.asarray(footprint)
    return ns.ndimage.minimum_filter(image, footprint=footprint, mode="nearest")


def resized_nearest(ns: ArrayNamespace, image: Array, shape: Shape) -> Array:
    """The image at another shape, each pixel the one under its centre."""
    rows = ns.xp.asarray(nearest(image.shape[0], shape[0]))
    columns = ns.xp.asarray(nearest(image.shape[1], shape[1]))
    return image[rows[:, None], columns[None, :]]


def block_means(ns: ArrayNamespace, values: Array, block_px: int) -> Array:
    """Means of square blocks, (ceil(H / block), ceil(W / block), ...), of float (H, W, ...).

    The last row and column of blocks may be cut by the border.
    """
    height, width, *channels = values.shape
    rows = math.ceil(height / block_px)
    columns = math.ceil(width / block_px)
    shape = (rows * block_px, columns * block_px, *channels)
    padded = values
    if shape != values.shape:
        padded = ns.xp.zeros(shape, dtype=values.dtype)
        padded[:height, :width] = values
    down = padded.reshape(rows, block_px, -1).sum(axis=1)
    down = down.reshape(rows, columns, block_px, *channels)
    # along the first axis NumPy adds whole arrays one after the other, which is fast
    offset_first = (2, 0, 1, *range(3, down.ndim))
    sums = ns.xp.ascontiguousarray(down.transpose(offset_first)).sum(axis=0)
    if shape == values.shape:
        return sums / values.dtype.type(block_px**2)
    heights = np.minimum(block_px, height - np.arange(0, height, block_px))
    widths = np.minimum(block_px, width - np.arange(0, width, block_px))
    num_px = ns.xp.asarray(np.outer(heights, widths), dtype=values.dtype)
    return sums / num_px.reshape(rows, columns, *(1 for _ in channels))


def otsu_threshold(ns: ArrayNamespace, image: Array) -> float:
    """Otsu's level of the image's histogram of 256 bins; of one value, that value."""
    lowest = float(image.min())
    highest = float(image.max())
    if lowest == highest:
        return lowest
    histogram = ns.xp.histogram(image, bins=256, range=(lowest, highest))
    counts, edges = (ns.download(part, reason="otsu histogram") for part in histogram)
    return otsu_level(counts.astype(np.float64), (edges[:-1] + edges[1:]) / 2.0)


def otsu_level(
    counts: npt.NDArray[np.floating],
    values: npt.NDArray[np.floating] | npt.NDArray[np.integer],
) -> float:
    """The value that best parts a histogram into two classes.

    Of a single value that value; of an empty histogram 0.0.

    Source: Otsu, A threshold selection method from gray-level histograms, 1979.
    """
    values = values[counts > 0]
    counts = counts[counts > 0]
    if len(values) < 2:
        return float(values.sum())
    below = np.cumsum(counts)
    above = np.cumsum(counts[::-1])[::-1]
    mean_below = np.cumsum(counts * values) / below
    mean_above = (np.cumsum((counts * values)[::-1]) / above[::-1])[::-1]
    between = below[:-1] * above[1:] * (mean_below[:-1] - mean_above[1:]) ** 2
    return float(values[int(np.argmax(between))])


def local_otsu(ns: ArrayNamespace, image: Array, footprint: Array) -> Array:
    """Otsu's level under the footprint around each pixel of uint8 (H, W).

    On the host, because only scikit-image has it.
    """
    from skimage.filters import rank

    host = rank.otsu(ns.download(image, reason="local otsu"), footprint)
    return ns.upload(host, reason="local otsu")


def equalised(ns: ArrayNamespace, image: Array) -> Array:
    """Share of pixels at or below each pixel's value, float64 (H, W), of uint8 (H, W)."""
    counts = ns.xp.bincount(image.ravel(), minlength=256)
    return (ns.xp.cumsum(counts) / image.size)[image]
