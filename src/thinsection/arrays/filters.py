"""Colour and filters on either device, with scikit-image's definitions and borders.

Separable filters are products with a banded matrix, 32 rows at once: on a CPU several times as fast
as filtering px by px, and rows that nobody asked for are not made.
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.arrays.namespace import Array, ArrayNamespace
from thinsection.errors import InvalidInputError

Kernel = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Shape = tuple[int, int]  # (H, W)
_BLOCK_PX = 32  # rows or columns that are made at once
GRAY = (0.2125, 0.7154, 0.0721)  # luma weights of R, G, B
YUV = (  # of Y, U, V
    (0.299, 0.587, 0.114),
    (-0.14714119, -0.28886916, 0.43601035),
    (0.61497538, -0.51496512, -0.10001026),
)
_FLOOR = 1e-6  # transmitted share below which a px counts as black, so that its log is finite
_SETS = ("hed", "hdx", "fgx", "bex", "rbd", "gdx", "hax", "bro", "bpx", "ahx", "hpx")
STAINS = tuple(f"{name}_from_rgb" for name in _SETS)


def gray_from_rgb(
    ns: ArrayNamespace, rgb: Array, weights: Sequence[float] = GRAY
) -> Array:
    """Luma in [0, 1], or another weighted sum, float64 (H, W), of uint8 (H, W, 3)."""
    gray = rgb[..., 0] / 255.0 * weights[0]
    for c in (1, 2):
        gray += rgb[..., c] / 255.0 * weights[c]
    return gray


def gray32_from_rgb(ns: ArrayNamespace, rgb: Array) -> Array:
    """The same in float32, with 8 bytes a px in place of 24: for large strips."""
    gray = rgb[..., 0] * ns.xp.float32(GRAY[0] / 255)
    for c in (1, 2):
        gray += rgb[..., c] * ns.xp.float32(GRAY[c] / 255)
    return gray


def extremes(ns: ArrayNamespace, channels: Sequence[Array]) -> tuple[Array, Array]:
    """Least and greatest of the channels at each px; numpy's own along a short axis is slow."""
    return reduce(ns.xp.minimum, channels), reduce(ns.xp.maximum, channels)


def channel_std(ns: ArrayNamespace, rgb: Array) -> Array:
    """Population standard deviation over R, G, B of each px, 0 to 255, float64 (H, W)."""
    # sums of bytes and of their squares are whole numbers below 2**24: exact in float32
    red, green, blue = (rgb[..., c].astype(ns.xp.float32) for c in range(3))
    total = red + green + blue
    squares = red * red + green * green + blue * blue
    return ns.xp.sqrt((3 * squares - total * total).astype(ns.xp.float64)) / 3.0


@cache
def stain_tables(stain: str) -> tuple[Kernel, Kernel]:
    """Density (share of log(1e-6)) of channel values, (256,); vectors, (3, 3) (Ruifrok 2001)."""
    if stain not in STAINS:
        raise InvalidInputError(
            f"stain must be one of {', '.join(STAINS)}, got {stain!r}"
        )
    from skimage import color

    levels = np.maximum(np.arange(256) / 255.0, _FLOOR)
    return np.log(levels) / math.log(_FLOOR), np.asarray(getattr(color, stain))


def gaussian_kernel(sigma_px: float, *, order: int = 0) -> Kernel:
    """Weights of a Gaussian cut at 4 sigma, of sum 1, or of its first or second derivative."""
    radius, variance = int(4.0 * sigma_px + 0.5), sigma_px**2
    offsets = np.arange(-radius, radius + 1)
    bell = np.exp(-0.5 * (offsets / sigma_px) ** 2)
    factors = (1.0, offsets / variance, (offsets**2 / variance - 1) / variance)
    return np.asarray(bell / bell.sum() * factors[order])


def separable(
    ns: ArrayNamespace,
    image: Array,
    down: Kernel,
    along: Kernel,
    shape: Shape | None = None,
) -> Array:
    """The image, float (H, W), under two kernels of odd length; the border px goes on outside.
    Only the px that a nearest resize to `shape` takes are made, None: all. Memory: O(H * W)."""
    rows, columns = (
        nearest(*edges) for edges in zip(image.shape, shape or image.shape)
    )
    return _convolved(
        ns, _convolved(ns, image, along, columns, axis=1), down, rows, axis=0
    )


def nearest(num_old: int, num_new: int) -> Indices:
    """Index of the old px under the centre of each new one, along one axis, on the host."""
    centers = (np.arange(num_new) + 0.5) * (num_old / num_new)
    return np.asarray(np.clip(np.floor(centers).astype(np.int64), 0, num_old - 1))


def _convolved(
    ns: ArrayNamespace, image: Array, kernel: Kernel, wanted: Indices, *, axis: int
) -> Array:
    """Wanted rows (axis 0) or columns (axis 1) of the image under a kernel along that axis."""
    length, radius = image.shape[axis], len(kernel) // 2
    sizes = (
        (len(wanted), image.shape[1]) if axis == 0 else (image.shape[0], len(wanted))
    )
    out = ns.xp.empty(sizes, dtype=image.dtype)
    for start in range(0, len(wanted), _BLOCK_PX):
        block = wanted[start : start + _BLOCK_PX]
        low, high = int(block[0]) - radius, int(block[-1]) + radius + 1
        near, beyond = (
            (block - block[0]).tobytes(),
            (max(0, -low), max(0, high - length)),
        )
        band = ns.xp.asarray(_band(near, kernel.tobytes(), *beyond), dtype=image.dtype)
        part, reach = (
            slice(start, start + len(block)),
            slice(max(0, low), min(high, length)),
        )
        if axis == 0:
            ns.xp.matmul(band, image[reach], out=out[part])
        else:
            out[:, part] = image[:, reach] @ band.T
    return out


@lru_cache(maxsize=32)  # away from the border all blocks have one
def _band(block: bytes, weights: bytes, before: int, after: int) -> Kernel:
    """Weights (wanted, reach) of px; so many before and after, beyond the image, are its border."""
    wanted, kernel = np.frombuffer(block, np.int64), np.frombuffer(weights)
    radius = len(kernel) // 2
    reached = wanted[:, None] + np.arange(-radius, radius + 1)
    reached = np.clip(reached, before - radius, wanted[-1] + radius - after)
    first = reached[0, 0]
    band = np.zeros((len(wanted), reached[-1, -1] + 1 - first))
    np.add.at(band, (np.arange(len(wanted))[:, None], reached - first), kernel)
    return band


def box_mean(ns: ArrayNamespace, image: Array, edge_px: int) -> Array:
    """Mean over a square, with zeros outside; an even one reaches one px further up and left."""
    return ns.ndimage.uniform_filter(image, size=edge_px, mode="constant", cval=0.0)


def laplacian(ns: ArrayNamespace, image: Array) -> Array:
    """4 times the px minus its four neighbours; the border px goes on outside."""
    out = 4 * image
    for to, of in ((out, image), (out.T, image.T)):
        to[1:] -= of[:-1]
        to[0] -= of[0]
        to[:-1] -= of[1:]
        to[-1] -= of[-1]
    return out


def sobel_energy(ns: ArrayNamespace, image: Array) -> Array:
    """Squared gradient magnitude, mean over both axes, of kernels whose weights sum to 1."""
    padded, energy = ns.xp.pad(image, 1, mode="edge"), ns.xp.empty_like(image)
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
    """Gaussian blur, cut at 4 sigma; the border px goes on outside; `shape` as of `separable`."""
    kernel = gaussian_kernel(sigma_px)
    return separable(ns, image, kernel, kernel, shape)


def box_deviation(ns: ArrayNamespace, image: Array, edge_px: int) -> Array:
    """Standard deviation over a square of odd edge; the border px goes on outside."""
    kernel = np.full(edge_px, 1 / edge_px)
    mean = separable(ns, image, kernel, kernel)
    variance = separable(ns, image * image, kernel, kernel) - mean * mean
    return ns.xp.sqrt(ns.xp.maximum(variance, 0))


def local_minimum(ns: ArrayNamespace, image: Array, footprint: Array) -> Array:
    """Least value under the footprint, of px inside the image only."""
    return ns.ndimage.minimum_filter(
        image, footprint=ns.xp.asarray(footprint), mode="nearest"
    )


def resized_nearest(ns: ArrayNamespace, image: Array, shape: Shape) -> Array:
    """The image at another shape, each px the one under its centre."""
    rows, columns = (
        ns.xp.asarray(nearest(*edges)) for edges in zip(image.shape, shape)
    )
    return image[rows[:, None], columns[None, :]]


def block_means(ns: ArrayNamespace, values: Array, block_px: int) -> Array:
    """Means of square blocks, (ceil(H / block), ceil(W / block)); the last ones may be partial."""
    height, width = values.shape
    rows, columns = math.ceil(height / block_px), math.ceil(width / block_px)
    padded = ns.xp.zeros((rows * block_px, columns * block_px), dtype=values.dtype)
    padded[:height, :width] = values
    down = padded.reshape(rows, block_px, columns * block_px).sum(axis=1)
    sums = sum(down[:, k::block_px] for k in range(block_px))
    edges = [np.minimum(block_px, e - np.arange(0, e, block_px)) for e in values.shape]
    return sums / ns.xp.asarray(np.outer(*edges), dtype=values.dtype)


def ridges(ns: ArrayNamespace, image: Array, sigma_px: float) -> tuple[Array, Array]:
    """Eigenvalues of the Hessian at one scale, times sigma², by size: |low| <= |high|."""
    none, first, second = (gaussian_kernel(sigma_px, order=order) for order in range(3))
    down, along = separable(ns, image, second, none), separable(ns, image, none, second)
    mean, half = (down + along) * (sigma_px**2 / 2), (down - along) * (sigma_px**2 / 2)
    mixed = separable(ns, image, first, first) * sigma_px**2
    spread = ns.xp.copysign(ns.xp.sqrt(half * half + mixed * mixed), mean)
    return mean - spread, mean + spread


def otsu_threshold(ns: ArrayNamespace, image: Array) -> float:
    """The level that best parts the image's histogram of 256 bins; of one value, that value."""
    lowest, highest = float(image.min()), float(image.max())
    if lowest == highest:
        return lowest
    found = ns.xp.histogram(image, bins=256, range=(lowest, highest))
    counts, edges = (ns.download(part, reason="otsu histogram") for part in found)
    return otsu_level(counts.astype(np.float64), (edges[:-1] + edges[1:]) / 2.0)


def otsu_level(counts: npt.NDArray[np.floating], values: npt.NDArray[Any]) -> float:
    """The value that best parts a histogram (Otsu); of a single value, that value; of none, 0.0."""
    values, counts = values[counts > 0], counts[counts > 0]
    if len(values) < 2:
        return float(values.sum())
    below, above = np.cumsum(counts), np.cumsum(counts[::-1])[::-1]
    mean_below = np.cumsum(counts * values) / below
    mean_above = (np.cumsum((counts * values)[::-1]) / above[::-1])[::-1]
    between = below[:-1] * above[1:] * (mean_below[:-1] - mean_above[1:]) ** 2
    return float(values[int(np.argmax(between))])


def local_otsu(ns: ArrayNamespace, image: Array, footprint: Array) -> Array:
    """Otsu's level under the footprint around each px of uint8 (H, W); on the host, as skimage."""
    from skimage.filters import rank

    host = rank.otsu(ns.download(image, reason="local otsu"), footprint)
    return ns.upload(host, reason="local otsu")


def equalised(ns: ArrayNamespace, image: Array) -> Array:
    """Share of px at or below each px's value, float64 (H, W), of uint8 (H, W)."""
    counts = ns.xp.bincount(image.ravel(), minlength=256)
    return (ns.xp.cumsum(counts) / image.size)[image]
